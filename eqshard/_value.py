"""What the nouns share: equal by value, hashable, no array leaves, JSON both ways."""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import equinox as eqx

from ._errors import FormatError


VERSION = 1
V = TypeVar("V", bound="Value")


class Value(eqx.Module):
    """An immutable description: static fields only, so a pytree without leaves.

    Equinox compares and hashes modules by their leaves, of which there are none here; so both go by `_key`.
    """

    def _key(self) -> Any:
        """What equality and hash are of."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """This value as plain dicts, lists, strings and numbers."""
        raise NotImplementedError

    @classmethod
    def from_dict(cls: type[V], data: Mapping[str, Any]) -> V:
        """The value that `to_dict` described.

        **Raises:**

        - `FormatError`: `data` is not such a dictionary.
        """
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self is other or (type(self) is type(other) and self._key() == other._key())  # pyright: ignore[reportAttributeAccessIssue]

    def __hash__(self) -> int:
        return hash(self._key())

    def to_json(self, *, indent: int | None = None) -> str:
        """This value as a JSON text; `from_json` gives an equal one."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls: type[V], text: str) -> V:
        """The value that `to_json` wrote.

        **Raises:**

        - `FormatError`: the text is no JSON, or not of this type or version.
        """
        try:
            data = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_twins)
        except (ValueError, TypeError, RecursionError) as error:
            raise FormatError(f"cannot read a {cls.__name__}: not a JSON text ({error}).") from None
        if not isinstance(data, dict):
            raise FormatError(f"cannot read a {cls.__name__}: expected an object, got {short(data)}.")
        return cls.from_dict(data)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        raise ValueError("an object has a field twice")
    return data


def digest(data: Any) -> str:
    """A hash of plain data that is the same in every process and Python."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class Reader:
    """Reads one dictionary that may be broken or hostile, field by field; every complaint says where."""

    def __init__(self, data: Any, kind: str, where: str = ""):
        self.kind, self.where = kind, where or kind
        if not isinstance(data, Mapping):
            raise FormatError(f"{self.where}: expected an object, got {type(data).__name__}.")
        self.data: Mapping[Any, Any] = data

    def header(self) -> None:
        """Checks that this is a file of our kind and of a version that we know."""
        found = self.data.get("format"), self.data.get("version")
        if not isinstance(found[0], str) or found[0] != f"eqshard.{self.kind}":
            raise FormatError(f"not an eqshard {self.kind}: `format` is {short(found[0])}, not 'eqshard.{self.kind}'.")
        if type(found[1]) is not int or found[1] != VERSION:
            raise FormatError(
                f"eqshard {self.kind} of version {short(found[1])}: this eqshard reads version {VERSION}."
            )

    def only(self, *names: str) -> None:
        """Refuses fields that nobody would read."""
        unknown = [name for name in self.data if name not in names]
        if unknown:
            raise FormatError(f"{self.where}: unknown field {short(unknown[0])}; known are {', '.join(names)}.")

    def get(self, name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """The field `name`, which must be of the given type (a bool is no int)."""
        value = self.data.get(name, default)
        if value is ...:
            raise FormatError(f"{self.where}: field `{name}` is missing.")
        if value is default:
            return value
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            expected = " or ".join(k.__name__ for k in kinds)
            raise FormatError(f"{self.where}: field `{name}` must be {expected}, got {short(value)}.")
        return value

    def strings(self, name: str, default: Any = ...) -> tuple[str, ...]:
        """A field that is a list of strings."""
        value = self.get(name, (list, tuple), default)
        if not all(isinstance(v, str) for v in value):
            raise FormatError(f"{self.where}: field `{name}` must be a list of strings, got {short(value)}.")
        return tuple(value)


def header(kind: str) -> dict[str, Any]:
    """The first fields of everything that `to_dict` writes."""
    return {"format": f"eqshard.{kind}", "version": VERSION}


def finite_number(value: Any, where: str) -> float:
    """`value` as a float, if it is a number that JSON can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise FormatError(f"{where}: expected a number, got {short(value)}.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise FormatError(f"{where}: expected a finite number, got {short(value)}.")
    return number


def whole_number(value: Any, where: str, least: int = 0, most: int = 2**63 - 1) -> int:
    """`value`, if it is an integer that a size can be."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise FormatError(f"{where}: expected a whole number from {least} to {most}, got {short(value)}.")
    return value


def amount(value: int | float, where: str, *, positive: bool = False) -> float:
    """`value`, if it is a number that a speed, a time or an amount can be."""
    if not 0 <= value < 1e300 or (positive and value == 0):  # not so for NaN either
        raise FormatError(f"{where}: expected a {'positive ' * positive}number, got {short(value)}.")
    return float(value)


def short(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of too many digits, a list nested too deep
        return f"a {type(value).__name__} too large to print"
    return text if len(text) <= 60 else text[:57] + "..."
