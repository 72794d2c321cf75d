"""What logical names mean on a mesh, in each mode."""

from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
from jax.sharding import PartitionSpec

from ._errors import DuplicateAxisError, FormatError, RankError, ShardingError, UnknownAxisError
from ._names import (
    as_rule,
    Axis,
    BATCH,
    BIAS_HEAD_SEQ,
    BIAS_KV_SEQ,
    DP,
    EMBED,
    EP,
    EXPERT,
    EXPERT_GATE,
    flat,
    FSDP,
    HEAD,
    HEAD_DIM,
    KV_HEAD,
    KV_HEAD_DIM,
    KV_LENGTH,
    LENGTH,
    LogicalAxes,
    MLP_INTERMEDIATE,
    Mode,
    plain_rule,
    QUERY_LENGTH,
    read_rule,
    SP,
    TP,
    unwrapped,
    VOCAB,
)
from ._spec import canonical
from ._tree import did_you_mean
from ._value import header, Reader, short, Value


# token: (field in train and prefill, field in decode and insert)
_FIELDS = {
    BATCH: ("batch_axis", "decode_batch_axis"),
    LENGTH: ("sequence_axis", "sequence_axis"),
    QUERY_LENGTH: ("query_sequence_axis", "decode_query_sequence_axis"),
    KV_LENGTH: ("key_sequence_axis", "decode_key_sequence_axis"),
    EMBED: ("hidden_state_axis", "hidden_state_axis"),
    HEAD: ("head_axis", "decode_head_axis"),
    KV_HEAD: ("kv_head_axis", "decode_kv_head_axis"),
    HEAD_DIM: ("attention_dim_axis", "decode_attention_dim_axis"),
    KV_HEAD_DIM: ("attention_kv_dim_axis", "decode_attention_kv_dim_axis"),
    MLP_INTERMEDIATE: ("mlp_intermediate_axis", "mlp_intermediate_axis"),
    VOCAB: ("vocab_axis", "vocab_axis"),
    EXPERT: ("expert_axis", "expert_axis"),
    EXPERT_GATE: ("expert_gate_axis", "expert_gate_axis"),
    BIAS_HEAD_SEQ: ("bias_head_sequence_axis", "bias_head_sequence_axis"),
    BIAS_KV_SEQ: ("bias_key_sequence_axis", "bias_key_sequence_axis"),
    DP: ("data_parallel_axis", "data_parallel_axis"),
    FSDP: ("fully_sharded_data_parallel_axis", "fully_sharded_data_parallel_axis"),
    TP: ("tensor_parallel_axis", "tensor_parallel_axis"),
    SP: ("sequence_parallel_axis", "sequence_parallel_axis"),
    EP: ("expert_parallel_axis", "expert_parallel_axis"),
}
_DECODE_FIELD = dict(_FIELDS.values())


class _Derived:
    """The default of a field that follows others."""

    def __init__(self, *sources: str):
        self.sources = sources


def _follows(*sources: str) -> Any:
    return eqx.field(static=True, default=_Derived(*sources))


class PartitionAxis(Value):
    """Which mesh axes each logical axis lies over, in training and in decoding.

    A field that is not given follows those it derives from: with `tensor_parallel_axis="model"`, heads, hidden
    state, MLP and vocabulary all lie over `"model"`, and so they do after a `replace`.

    ```python
    import eqshard
    from eqshard import BATCH, EMBED, LENGTH
    from jax.sharding import PartitionSpec as P
    names = eqshard.PartitionAxis(tensor_parallel_axis="model", sequence_axis=None)
    assert names.resolve_spec([BATCH, LENGTH, EMBED]) == P(("fsdp", "dp"), None, "model")
    ```
    """

    data_parallel_axis: Axis = eqx.field(static=True, default="dp")
    fully_sharded_data_parallel_axis: Axis = eqx.field(static=True, default="fsdp")
    tensor_parallel_axis: Axis = eqx.field(static=True, default="tp")
    sequence_parallel_axis: Axis = eqx.field(static=True, default="sp")
    expert_parallel_axis: Axis = eqx.field(static=True, default="ep")
    batch_axis: Axis = _follows("fully_sharded_data_parallel_axis", "data_parallel_axis")
    sequence_axis: Axis = _follows("sequence_parallel_axis")
    query_sequence_axis: Axis = _follows("sequence_axis")
    head_axis: Axis = _follows("tensor_parallel_axis")
    kv_head_axis: Axis = _follows("head_axis")
    key_sequence_axis: Axis = _follows("sequence_axis")
    hidden_state_axis: Axis = _follows("tensor_parallel_axis")
    mlp_intermediate_axis: Axis = _follows("tensor_parallel_axis")
    vocab_axis: Axis = _follows("tensor_parallel_axis")
    expert_axis: Axis = _follows("expert_parallel_axis")
    expert_gate_axis: Axis = eqx.field(static=True, default=None)
    attention_dim_axis: Axis = eqx.field(static=True, default=None)
    attention_kv_dim_axis: Axis = eqx.field(static=True, default=None)
    bias_head_sequence_axis: Axis = eqx.field(static=True, default=None)
    bias_key_sequence_axis: Axis = eqx.field(static=True, default=None)
    decode_batch_axis: Axis = _follows("batch_axis")
    decode_query_sequence_axis: Axis = eqx.field(static=True, default=None)
    decode_head_axis: Axis = _follows("head_axis")
    decode_kv_head_axis: Axis = _follows("kv_head_axis")
    decode_key_sequence_axis: Axis = _follows("key_sequence_axis")
    decode_attention_dim_axis: Axis = eqx.field(static=True, default=None)
    decode_attention_kv_dim_axis: Axis = eqx.field(static=True, default=None)
    custom: tuple[tuple[str, Any, Any], ...] = eqx.field(static=True, default=())
    """Names added by `register`: (name, rule, rule when generating)."""
    given: tuple[str, ...] = eqx.field(static=True, init=False)
    """Fields that were told rather than derived."""

    def __post_init__(self) -> None:
        given = []
        for name in _field_names():  # a source stands before what follows it
            told = getattr(self, name)
            if isinstance(told, _Derived):
                value = unwrapped(tuple(dict.fromkeys(flat([getattr(self, s) for s in told.sources]))))
            elif (value := _axis(told, name)) != _default(name):
                given.append(name)
            setattr(self, name, value)
        self.given = tuple(given)

    def _key(self) -> Any:
        return tuple((n, getattr(self, n)) for n in self.given), self.custom

    def __repr__(self) -> str:
        fields = [f"{n}={getattr(self, n)!r}" for n in self.given]
        fields += [f"custom={self.custom!r}"] if self.custom else []
        return f"PartitionAxis({', '.join(fields)})"

    def _repr_html_(self) -> str:
        from ._report._notebook import axes_html  # noqa: PLC0415  reports read this module: above, it would be a cycle

        return axes_html(self)

    def resolve_axis(self, axes: Sequence[Any], mode: Mode | str = Mode.TRAIN) -> list[Axis]:
        """The mesh axes of each logical axis.

        **Arguments:**

        - `axes`: for each dimension a logical name, a tuple of them, or `None` (or `"_"`) for not sharded.
        - `mode`: `"train"`, `"prefill"`, `"decode"` or `"insert"`.

        **Raises:**

        - `UnknownAxisError`: no such logical name.
        - `DuplicateAxisError`: two of them mean the same mesh axis.
        """
        mode = Mode.of(mode)
        claimed: dict[str, tuple[int, str]] = {}
        resolved: list[Axis] = []
        for dim, entry in enumerate(axes):
            found: list[str] = []
            for token in flat(entry):
                for axis in self._mesh_axes(token, mode):
                    if axis in claimed:
                        other_dim, other = claimed[axis]
                        raise DuplicateAxisError(
                            f"logical axes {other!r} (dim {other_dim}) and {token!r} (dim {dim}) of {list(axes)} both "
                            f"mean the mesh axis {axis!r} in mode {mode.value!r}: an array can use it once."
                        )
                    claimed[axis] = dim, token
                    found.append(axis)
            resolved.append(unwrapped(found))
        return resolved

    def resolve_spec(
        self,
        axes: Sequence[Any] | LogicalAxes,
        mode: Mode | str | int | None = None,
        shape: Sequence[int] | None = None,
    ) -> PartitionSpec:
        """The PartitionSpec of logical axes.

        ```python
        import eqshard
        from eqshard import BATCH, HEAD, QUERY_LENGTH
        from jax.sharding import PartitionSpec as P
        names, axes = eqshard.PartitionAxis(), [BATCH, QUERY_LENGTH, HEAD]
        assert names.resolve_spec(axes, mode=1, shape=(8, 512, 4)) == P(("fsdp", "dp"), "sp", "tp")
        assert names.resolve_spec(axes, mode=1, shape=(8, 1, 4)) == P(("fsdp", "dp"), None, "tp")
        ```

        **Arguments:**

        - `axes`: as in `resolve_axis`, or a `LogicalAxes` that holds the mode too.
        - `mode`: a mode; or the index of a dimension: decode if `shape` has size 1 there, else train. Default: train.
        - `shape`: the array's shape; needed where `mode` is an index.
        """
        if isinstance(axes, LogicalAxes):
            axes, mode = axes.axes, axes.mode if mode is None else mode
        if shape is not None and len(axes) > len(shape):
            raise RankError(f"{len(axes)} logical axes {list(axes)} for an array of {len(shape)} dimensions.")
        if isinstance(mode, int):
            mode = _mode_of_dim(mode, shape)
        return canonical(PartitionSpec(*self.resolve_axis(axes, Mode.TRAIN if mode is None else mode)))

    def _mesh_axes(self, token: str, mode: Mode) -> tuple[str, ...]:
        rules = {name: (train, generate) for name, train, generate in self.custom}
        if token in rules:
            rule = rules[token][mode.generates]
            return tuple(axis for part in flat(rule) for axis in self._rule_axes(part))
        if token not in _FIELDS:
            known = [*_FIELDS, *rules]
            raise UnknownAxisError(
                f"unknown logical axis {token!r}: known are {', '.join(known)}, '_' and None; "
                "`register` returns a PartitionAxis with more." + did_you_mean(token, known)
            )
        return flat(getattr(self, _FIELDS[token][mode.generates]))

    def _rule_axes(self, part: str) -> tuple[str, ...]:
        return flat(getattr(self, part)) if part in _field_names() else (part,)

    @property
    def registered(self) -> dict[str, dict[str, Any]]:
        """The names that `register` added, with their rules."""
        return {name: {"axis_rule": train, "generation_axis_rule": gen} for name, train, gen in self.custom}

    def register(
        self, semantic_axis: str, axis_rule: Any, *, generation_axis_rule: Any = ..., override: bool = False
    ) -> "PartitionAxis":
        """A new PartitionAxis that knows one more logical name.

        ```python
        import eqshard
        from jax.sharding import PartitionSpec as P
        names = eqshard.PartitionAxis().register("latent", ("head_axis", "sp"))
        assert names.resolve_spec(["latent"]) == P(("tp", "sp"))
        ```

        **Arguments:**

        - `semantic_axis`: the name.
        - `axis_rule`: a field of PartitionAxis (`"head_axis"`), a mesh axis (`"tp"`), a tuple of these, or None.
        - `generation_axis_rule`: the rule when decoding. By default the same, with fields replaced by their
            `decode_*` partners where they have one.
        - `override`: whether a known name may be replaced.
        """
        if not isinstance(semantic_axis, str) or semantic_axis.strip("_") == "":
            raise ShardingError(f"a logical axis must be a name, got {semantic_axis!r}.")
        if not override and (semantic_axis in _FIELDS or semantic_axis in self.registered):
            raise ShardingError(f"the logical axis {semantic_axis!r} exists: pass `override=True` to replace it.")
        rule = as_rule(axis_rule)
        generation = _decode_partner(rule) if generation_axis_rule is ... else as_rule(generation_axis_rule)
        kept = tuple(entry for entry in self.custom if entry[0] != semantic_axis)
        return self._with(custom=(*kept, (semantic_axis, rule, generation)))

    def unregister(self, semantic_axis: str, *, missing_ok: bool = True) -> "PartitionAxis":
        """A new PartitionAxis without a name that `register` added."""
        if not missing_ok and semantic_axis not in self.registered:
            known = ", ".join(self.registered) or "none"
            raise UnknownAxisError(f"no logical axis {semantic_axis!r} was registered; there are: {known}.")
        return self._with(custom=tuple(entry for entry in self.custom if entry[0] != semantic_axis))

    def replace(self, **fields: Axis) -> "PartitionAxis":
        """A new PartitionAxis with some fields changed; those that follow them change too.

        ```python
        import eqshard
        assert eqshard.PartitionAxis().replace(tensor_parallel_axis="model").head_axis == "model"
        ```
        """
        for name in fields:
            if name not in _field_names():
                raise ShardingError(f"PartitionAxis has no field {name!r}." + did_you_mean(name, _field_names()))
        return self._with(**fields)

    def _with(self, **changes: Any) -> "PartitionAxis":
        fields: dict[str, Any] = {n: getattr(self, n) for n in self.given} | {"custom": self.custom}
        return PartitionAxis(**(fields | changes))

    def to_dict(self) -> dict[str, Any]:
        data = header("axes") | {"fields": {n: plain_rule(getattr(self, n)) for n in self.given}}
        if self.custom:
            data["custom"] = [[name, plain_rule(train), plain_rule(gen)] for name, train, gen in self.custom]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "PartitionAxis":
        read = Reader(data, "axes")
        read.header()
        read.only("format", "version", "fields", "custom")
        fields = {n: read_rule(v, n) for n, v in read.get("fields", Mapping).items()}
        for name in fields:
            if name not in _field_names():
                raise FormatError(f"axes: PartitionAxis has no field {short(name)}.")
        custom = []
        for entry in read.get("custom", list, []):
            if not (isinstance(entry, list) and len(entry) == 3 and isinstance(entry[0], str)):
                raise FormatError(f"axes: `custom` holds [name, rule, rule] lists, got {short(entry)}.")
            custom.append((entry[0], read_rule(entry[1], entry[0]), read_rule(entry[2], entry[0])))
        if len({name for name, _, _ in custom}) < len(custom):
            raise FormatError("axes: `custom` holds a name twice.")
        try:
            return cls(**fields, custom=tuple(custom))
        except ShardingError as error:
            raise FormatError(f"axes: {error}") from None


def _field_names() -> list[str]:
    return [n for n in PartitionAxis.__dataclass_fields__ if n not in ("custom", "given")]


def _default(name: str) -> Any:
    return PartitionAxis.__dataclass_fields__[name].default


def _axis(told: Any, field: str) -> Axis:
    axis = as_rule(told)
    if isinstance(axis, tuple) and len(set(axis)) < len(axis):
        raise DuplicateAxisError(f"`{field}` names a mesh axis twice: {told!r}.")
    return axis


def _decode_partner(rule: Any) -> Any:
    if isinstance(rule, tuple):
        return tuple(map(_decode_partner, rule))
    return _DECODE_FIELD.get(rule, rule)


def _mode_of_dim(dim: int, shape: Sequence[int] | None) -> Mode:
    if isinstance(dim, bool):
        raise ShardingError(f"`mode` is a mode or the index of a dimension, got {dim}.")
    if shape is None:
        raise ShardingError(f"`mode={dim}` picks the mode by the size of a dimension: pass `shape` too.")
    if not -len(shape) <= dim < len(shape):
        raise ShardingError(f"`mode={dim}` is no dimension of an array of shape {tuple(shape)}.")
    return Mode.DECODE if shape[dim] == 1 else Mode.TRAIN
