"""Logical names: what the dimensions of an array are called, and what the program is doing."""

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx

from ._errors import FormatError, ShardingError
from ._value import header, Reader, short, Value


BATCH = "batch"
LENGTH = "length"
QUERY_LENGTH = "query_length"
KV_LENGTH = "kv_length"
EMBED = "embed"
HEAD = "head"
KV_HEAD = "kv_head"
HEAD_DIM = "head_dim"
KV_HEAD_DIM = "kv_head_dim"
MLP_INTERMEDIATE = "mlp_intermediate"
VOCAB = "vocab"
EXPERT = "expert"
EXPERT_GATE = "expert_gate"
BIAS_HEAD_SEQ = "bias_head_seq"
BIAS_KV_SEQ = "bias_kv_seq"
EMPTY = "_"
DP = "dp"
FSDP = "fsdp"
TP = "tp"
SP = "sp"
EP = "ep"


class Mode(enum.StrEnum):
    """What the program is doing: layouts of activations differ between training and decoding."""

    TRAIN = "train"
    PREFILL = "prefill"
    DECODE = "decode"
    INSERT = "insert"

    @property
    def generates(self) -> bool:
        """Whether the `decode_*` fields apply."""
        return self in (Mode.DECODE, Mode.INSERT)

    @classmethod
    def of(cls, mode: "Mode | str") -> "Mode":
        """A mode by its name; `"__autoregressive__"` and the like are understood.

        ```python
        import eqshard
        assert eqshard.Mode.of("__autoregressive__") is eqshard.Mode.DECODE
        ```
        """
        name = mode.strip("_") if isinstance(mode, str) else mode
        name = "decode" if name == "autoregressive" else name
        if name not in [m.value for m in cls]:
            known = ", ".join(repr(m.value) for m in cls)
            raise ShardingError(f"unknown `mode` {mode!r}: it is one of {known}, or the index of a dimension.")
        return cls(name)


Axis = str | tuple[str, ...] | None
"""Mesh axes of one dimension."""


class LogicalAxes(Value):
    """Logical axis names together with the mode that they are for.

    ```python
    import eqshard
    cache = eqshard.LogicalAxes((eqshard.BATCH, eqshard.KV_LENGTH, eqshard.KV_HEAD), "decode")
    eqshard.PartitionAxis().resolve_spec(cache)
    ```
    """

    axes: tuple[Any, ...] = eqx.field(static=True, converter=lambda axes: tuple(map(as_rule, axes)))
    mode: Mode | int = eqx.field(
        static=True, default=Mode.TRAIN, converter=lambda mode: mode if type(mode) is int else Mode.of(mode)
    )
    """A mode, or the index of the dimension that tells it."""

    def _key(self) -> Any:
        return self.axes, self.mode

    def to_dict(self) -> dict[str, Any]:
        mode = self.mode.value if isinstance(self.mode, Mode) else self.mode
        return header("logical_axes") | {"axes": plain_rule(self.axes), "mode": mode}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "LogicalAxes":
        read = Reader(data, "logical_axes")
        read.header()
        read.only("format", "version", "axes", "mode")
        axes, mode = [read_rule(entry, "axes") for entry in read.get("axes", list)], read.get("mode", (str, int))
        try:
            return cls(tuple(axes), mode)
        except ShardingError as error:
            raise FormatError(f"logical axes: {error}") from None


def flat(rule: Any) -> tuple[str, ...]:
    """A rule or axis as the names in it; None and '_' name nothing."""
    if rule is None or rule == EMPTY:
        return ()
    if isinstance(rule, str) and rule:
        return (rule,)
    if not isinstance(rule, (list, tuple)):
        raise ShardingError(f"expected an axis name, None, or a tuple of names, got {short(rule)}.")
    return tuple(part for r in rule for part in flat(r))


def unwrapped(axes: Sequence[str]) -> Axis:
    return None if not axes else axes[0] if len(axes) == 1 else tuple(axes)


def as_rule(rule: Any) -> Axis:
    """A rule, an axis, or the names of one dimension, in the one way to write it; refuses what is no name."""
    return unwrapped(flat(rule))


def plain_rule(rule: Any) -> Any:
    return [plain_rule(r) for r in rule] if isinstance(rule, tuple) else rule


def read_rule(data: Any, where: str) -> Axis:
    names = data if isinstance(data, list) else [data]
    if all(name is None or (isinstance(name, str) and name) for name in names):
        return as_rule(data)
    raise FormatError(f"axes: {short(where)} must be null, a name or a list of names, got {short(data)}.")
