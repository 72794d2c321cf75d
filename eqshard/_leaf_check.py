"""Compares the results of two runs of a step, leaf by leaf, and tells rounding from a fault."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ._errors import FormatError
from ._put import is_key
from ._tree import dtype_name, is_array, named_leaves
from ._value import header, Reader, Value, whole_number


FACTOR = 4.0
"""A difference of so many times the noise of its element is still rounding."""
ULPS = 8.0
"""So are so many units in the last place of the plain value."""
SHARE = 0.1
"""How many elements may differ that the noise did not reach, as a part of those where it did as much elsewhere."""
SCALE_FACTOR = 32.0
"""The same as `FACTOR` for the scale of a leaf, which varies far less than its elements."""
VERDICTS = ("ok", "fault")


@jtu.register_static
@dataclass(frozen=True, slots=True)
class LeafCheck:
    """How much one leaf of a result differs between a planned step and the plain one."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    """Of a leaf that is not an array, the name of its type."""
    max_abs: float
    """The largest absolute difference; infinite where one value is finite and the other is not."""
    max_rel: float
    """The same divided by the largest absolute value of the leaf."""
    noise: float
    """The noise floor: the largest absolute difference that changed last bits make in the plain step."""
    verdict: str
    """`"ok"` or `"fault"`."""
    why: str
    """What the verdict was read off."""

    @property
    def ok(self) -> bool:
        """Whether the leaf is right, up to rounding."""
        return self.verdict == "ok"


class Verification(Value):
    """How a planned step compares with the plain one; made by `verify`. It iterates over its `LeafCheck`s."""

    leaves: tuple[LeafCheck, ...] = eqx.field(static=True)
    """One for each leaf of the result, in tree order."""
    runs: int = eqx.field(static=True)
    """How many runs of the plain step with changed last bits measured the noise."""

    def _key(self) -> Any:
        return self.leaves, self.runs

    def __iter__(self) -> Iterator[LeafCheck]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)

    def __repr__(self) -> str:
        return f"Verification({len(self.leaves)} leaves, {len(self.faults)} at fault)"

    def __str__(self) -> str:
        from ._report import report  # noqa: PLC0415 (which reads this module)

        return report(self)

    @property
    def ok(self) -> bool:
        """Whether every leaf is right, up to rounding."""
        return not self.faults

    @property
    def faults(self) -> tuple[LeafCheck, ...]:
        """The leaves that differ by more than rounding explains."""
        return tuple(leaf for leaf in self.leaves if not leaf.ok)

    def to_dict(self) -> dict[str, Any]:
        leaves = [
            {name: _number_out(value) for name, value in asdict(leaf).items()} | {"shape": list(leaf.shape)}
            for leaf in self.leaves
        ]
        return header("verification") | {"ok": self.ok, "runs": self.runs, "leaves": leaves}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Verification":
        read = Reader(data, "verification")
        read.header()
        read.only("format", "version", "ok", "runs", "leaves")
        leaves = tuple(_leaf(entry, i) for i, entry in enumerate(read.get("leaves", list)))
        return cls(leaves, whole_number(read.get("runs", int), "verification: runs"))


def _number_out(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value  # JSON has no infinity


def _leaf(entry: Any, number: int) -> LeafCheck:
    read = Reader(entry, "verification", f"verification leaf {number}")
    read.only("path", "shape", "dtype", "max_abs", "max_rel", "noise", "verdict", "why")
    verdict = read.get("verdict", str)
    if verdict not in VERDICTS:
        raise FormatError(f"{read.where}: `verdict` is one of {', '.join(VERDICTS)}, got {verdict!r}.")
    most, rel, noise = (_number_in(read, name) for name in ("max_abs", "max_rel", "noise"))
    shape = tuple(whole_number(n, f"{read.where}: shape") for n in read.get("shape", list))
    path, dtype, why = (read.get(name, str) for name in ("path", "dtype", "why"))
    return LeafCheck(path, shape, dtype, most, rel, noise, verdict, why)


def _number_in(read: Reader, name: str) -> float:
    value = read.get(name, (int, float, str))
    if isinstance(value, str) and value != "inf":
        raise FormatError(f"{read.where}: field `{name}` must be a number or 'inf', got {value!r}.")
    return float(value)


def compare(planned: Any, plain: Any, noisy: Iterable[Any]) -> tuple[LeafCheck, ...]:
    """Compares a planned result with the plain one, leaf by leaf.

    **Arguments:**

    - `noisy`: results of the plain step with other rounding; each is read once, so that one is in memory at a time.
    """
    got, want = dict(named_leaves(planned)), dict(named_leaves(plain))
    spread = {path: _Spread(x) for path, x in want.items() if is_array(x)}
    for result in noisy:
        for path, x in named_leaves(result):
            if path in spread:
                spread[path].see(x)
    return tuple(_check(path, got, want, spread) for path in dict.fromkeys((*want, *got)))


def _check(path: str, got: dict[str, Any], want: dict[str, Any], spread: dict[str, "_Spread"]) -> LeafCheck:
    x = want.get(path, got.get(path))
    shape, dtype = (tuple(x.shape), dtype_name(x)) if is_array(x) else ((), type(x).__name__)
    fault = lambda why: LeafCheck(path, shape, dtype, math.inf, math.inf, 0.0, "fault", why)
    if path not in got or path not in want:
        return fault(f"only the {'planned' if path in got else 'plain'} step returns it")
    y = got[path]
    if is_array(x) != is_array(y):
        return fault(f"the planned step returns a {type(y).__name__}")
    if not is_array(x):
        same = _same(x, y)
        return LeafCheck(path, shape, dtype, 0.0, 0.0, 0.0, "ok", "equal") if same else fault("not an array, not equal")
    if (tuple(y.shape), dtype_name(y)) != (shape, dtype):
        return fault(f"the planned step returns {dtype_name(y)}{list(y.shape)}")
    found = spread[path].judge(y)
    return LeafCheck(path, shape, dtype, *found)


def _same(x: Any, y: Any) -> bool:
    if callable(x) and callable(y):  # a function that the step defines is another object each time
        return getattr(x, "__qualname__", type(x)) == getattr(y, "__qualname__", type(y))
    if isinstance(x, (np.ndarray, np.generic)):  # of a dtype that no device can hold
        return type(x) is type(y) and bool(np.array_equal(x, y))
    return x is y or (type(x) is type(y) and bool(x == y)) or (x != x and y != y)


class _Spread:
    """One leaf of the plain result, and how far noise has moved each of its elements."""

    def __init__(self, plain: Any):
        self.plain = _numbers(plain)
        self.float = jnp.issubdtype(plain.dtype, jnp.inexact) and not is_key(plain)
        self.eps = float(jnp.finfo(plain.dtype).eps) if self.float else 0.0
        self.reach = np.zeros(self.plain.shape)
        """The largest difference that noise made, for each element."""
        self.scale = 0.0
        """The largest change of scale that noise made."""

    def see(self, noisy: Any) -> None:
        found = _numbers(noisy)
        np.maximum(self.reach, _distance(found, self.plain), out=self.reach)
        self.scale = max(self.scale, abs(self._scale(found)))

    def judge(self, planned: Any) -> tuple[float, float, float, str, str]:
        """Largest absolute and relative difference, noise, verdict, and why."""
        found = _numbers(planned)
        off = _distance(found, self.plain)
        size = np.abs(self.plain[np.isfinite(self.plain)]).max(initial=0.0)
        most, noise = float(off.max(initial=0.0)), float(self.reach.max(initial=0.0))
        rel = most / float(size) if size else (math.inf if most else 0.0)
        return (most, rel, noise, *self._verdict(found, off))

    def _verdict(self, found: np.ndarray, off: np.ndarray) -> tuple[str, str]:
        if not off.any():
            finite = self.plain.size == 0 or np.isfinite(self.plain).any()
            return "ok", "equal" if finite else "equal, but nowhere finite"
        magnitude = np.where(np.isfinite(self.plain), np.abs(self.plain), 0.0)
        limit = FACTOR * self.reach + ULPS * self.eps * magnitude
        beyond = off > limit
        count = int(beyond.sum())
        if count:
            # Of elements that flip, few runs of noise miss some: as large a noise elsewhere in the leaf excuses a few.
            alike = int((FACTOR * self.reach >= np.median(off[beyond])).sum())
            if count > SHARE * alike:
                return "fault", f"{count} of {off.size} elements beyond rounding{_times(off[beyond], limit[beyond])}"
        scale = abs(self._scale(found))
        if self.float and scale > SCALE_FACTOR * self.scale + ULPS * self.eps:
            return "fault", f"scaled by {1 + self._scale(found):.6g}"
        return "ok", "rounding" if self.float else "flips of rounding"

    def _scale(self, found: np.ndarray) -> float:
        """By which part of itself the plain value is in the difference: 0.01 if `found` is 1.01 times as large."""
        good = np.isfinite(found) & np.isfinite(self.plain)
        a, b = self.plain[good], found[good]
        size = float(np.abs(a).max(initial=0.0))
        if not self.float or size == 0.0:
            return 0.0
        return float(np.sum((b - a) / size * (a / size)) / np.sum((a / size) ** 2))


def _times(off: np.ndarray, limit: np.ndarray) -> str:
    if not limit.all() or not np.isfinite(off).all():
        return ""
    return f", up to {min(float(np.max(off / np.maximum(limit, off / 1e6))), 1e6):.3g} times what it explains"


def _numbers(x: Any) -> np.ndarray:
    """An array on the host: floats as float64, keys as their words, complex numbers as pairs."""
    x = np.asarray(jax.random.key_data(x) if is_key(x) else x)
    if np.iscomplexobj(x):
        return np.stack([x.real, x.imag]).astype(np.float64)
    if x.dtype.kind in "iub" or dtype_name(x).startswith(("int", "uint")):
        return x.astype(np.uint64 if x.dtype == np.uint64 else np.int64)
    return x.astype(np.float64)


def _distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How far apart the elements are: 0 where equal or both NaN, infinite where only one is finite."""
    if a.dtype.kind in "iu":  # subtracted as floats: large ones wrap otherwise; unequal ones are at least 1 apart
        return np.where(a == b, 0.0, np.maximum(np.abs(a.astype(np.float64) - b.astype(np.float64)), 1.0))
    with np.errstate(invalid="ignore", over="ignore"):
        off = np.abs(a - b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(same, 0.0, np.where(np.isfinite(a) & np.isfinite(b), off, np.inf))
