"""States for each primitive which dimensions may be sharded.

XLA's partitioner is trusted with elementwise operations, broadcasts, transposes, reductions and matmuls, in any layout.
It is not trusted with the operations listed here: it has been seen to return wrong values, or to fail, when a dimension
is sharded along which their elements depend on each other (`docs/xla_faults.md` lists the cases). Each rule names the
dimensions that are independent; `constrain` shards an operation along those only, whoever wrote the plan, and changes
the layout of the result afterwards.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from .._spec import entries, entry_axes
from ._rows import row_dims, windows
from ._together import reshape_dims


DimNames = tuple[str | None, ...]
"""For each dimension of a value: the name of the independent dimension that it is, or None if it must be replicated."""
AxesOf = dict[str, tuple[str, ...]]
"""For each independent dimension the mesh axes that shard it."""


@dataclass(frozen=True)
class PartitionRule:
    """The independent dimensions of an operation."""

    ins: tuple[DimNames, ...]
    outs: tuple[DimNames, ...]
    local: bool = True
    """Each device runs the operation on its own shard, so that XLA has nothing to partition."""
    pinned: bool = True
    """Operands and results without a layout in the plan are replicated."""
    summed: frozenset[str] = frozenset()
    """Dimensions whose shards yield partial sums."""


def partition_rule(eqn: Any) -> PartitionRule | None:
    """Returns the rule of an equation; None if XLA partitions it correctly in any layout."""
    make = RULES.get(eqn.primitive.name)
    return None if make is None else make(eqn)


def restrict(spec: PartitionSpec, names: DimNames) -> PartitionSpec:
    """Replicates the dimensions that are not independent."""
    kept = [entry if name is not None else None for entry, name in zip(entries(spec), names)]
    while kept and kept[-1] is None:
        kept.pop()
    return PartitionSpec(*kept)


def axes_of(rule: PartitionRule, wanted: Iterable[tuple[DimNames, PartitionSpec]]) -> AxesOf:
    """Chooses the mesh axes of each independent dimension: the first layout that shards it decides.

    A mesh axis shards one dimension only. Layouts that disagree are those of an edited plan, or of a plan that changes
    the layout at this operation; operands and results are moved to and from the layout that is chosen here.
    """
    chosen: AxesOf = {}
    for names, spec in wanted:
        for name, entry in zip(names, entries(spec)):
            axes = entry_axes(entry)
            used = {a for found in chosen.values() for a in found}
            if name is not None and axes and name not in chosen and not used & set(axes):
                chosen[name] = axes
    return chosen


def spec_of(names: DimNames, chosen: Mapping[str, tuple[str, ...]]) -> PartitionSpec:
    """Returns the layout of a value, given the mesh axes of each independent dimension."""
    found = [chosen.get(name, ()) if name is not None else () for name in names]
    kept = [axes[0] if len(axes) == 1 else axes or None for axes in found]
    while kept and kept[-1] is None:
        kept.pop()
    return PartitionSpec(*kept)


def _shape(var: Any) -> tuple[int, ...]:
    return tuple(getattr(var.aval, "shape", ()))


def _names(rank: int, dependent: Iterable[int] = ()) -> DimNames:
    dependent = {int(d) % rank for d in dependent} if rank else set()
    return tuple(None if d in dependent else f"d{d}" for d in range(rank))


def _same(eqn: Any, dependent: Iterable[int]) -> PartitionRule:
    """Operands and results of one rank, whose other dimensions correspond one to one; scalars are replicated."""
    rank = max(len(_shape(v)) for v in (*eqn.invars, *eqn.outvars))
    names = _names(rank, dependent)
    of = lambda v: names if len(_shape(v)) == rank else (None,) * len(_shape(v))
    return PartitionRule(tuple(map(of, eqn.invars)), tuple(map(of, eqn.outvars)))


def _resized(eqn: Any) -> set[int]:
    """The dimensions whose sizes differ between the operands and results of one rank."""
    shapes = [_shape(v) for v in (*eqn.invars, *eqn.outvars)]
    rank = max(map(len, shapes))
    return {d for d in range(rank) if len({shape[d] for shape in shapes if len(shape) == rank}) > 1}


def _pad(eqn: Any) -> PartitionRule:
    return _same(eqn, {d for d, config in enumerate(eqn.params["padding_config"]) if any(config)})


def _slice(eqn: Any) -> PartitionRule:
    strides = eqn.params["strides"] or ()
    return _same(eqn, _resized(eqn) | {d for d, stride in enumerate(strides) if stride != 1})


def _dynamic_slice(eqn: Any) -> PartitionRule:
    return _same(eqn, _resized(eqn))


def _dynamic_update_slice(eqn: Any) -> PartitionRule:
    return _same(eqn, _resized(eqn))


def _along(eqn: Any) -> PartitionRule:
    """Elements depend on each other along the dimensions that a parameter names."""
    p = eqn.params
    return _same(eqn, map(int, p.get("dimensions", (p.get("dimension", p.get("axis")),))))


def _top_k(eqn: Any) -> PartitionRule:
    return _same(eqn, (int(eqn.params.get("axis", -1)),))


def _windowed(eqn: Any) -> PartitionRule:
    """Windows of one element, without stride, padding or dilation, leave a dimension independent."""
    p, sizes = eqn.params, eqn.params["window_dimensions"]
    rank = len(sizes)
    one = (1,) * rank
    parts = zip(
        sizes,
        p.get("window_strides") or one,
        p.get("padding") or ((0, 0),) * rank,
        p.get("base_dilation") or one,
        p.get("window_dilation") or one,
    )
    plain = (1, 1, (0, 0), 1, 1)
    return _same(eqn, {d for d, (w, s, pads, b, i) in enumerate(parts) if (w, s, tuple(pads), b, i) != plain})


def _fft(eqn: Any) -> PartitionRule:
    rank = len(_shape(eqn.invars[0]))
    return _same(eqn, range(rank - len(eqn.params["fft_lengths"]), rank))


def _matrices(eqn: Any) -> PartitionRule:
    """Linear algebra of a batch of matrices: all but the last two dimensions are independent."""
    batch = len(_shape(eqn.invars[0])) - 2
    of = lambda v: tuple(f"d{d}" if d < batch else None for d in range(len(_shape(v))))
    return PartitionRule(tuple(map(of, eqn.invars)), tuple(map(of, eqn.outvars)))


def _arg_reduction(eqn: Any) -> PartitionRule:
    """The position of the largest element: the reduced dimensions are replicated."""
    names = _names(len(_shape(eqn.invars[0])), map(int, eqn.params["axes"]))
    return PartitionRule((names,), (tuple(n for n in names if n is not None),), local=False, pinned=False)


def _stack(eqn: Any) -> PartitionRule:
    axis = int(eqn.params["axis"])
    part = _names(len(_shape(eqn.invars[0] if eqn.primitive.name == "stack" else eqn.outvars[0])))
    joined = (*part[:axis], None, *part[axis:])
    if eqn.primitive.name == "stack":
        return PartitionRule((part,) * len(eqn.invars), (joined,))
    return PartitionRule((joined,), (part,) * len(eqn.outvars))


def _replicated(eqn: Any) -> PartitionRule:
    """Nothing is known to be independent."""
    of = lambda v: (None,) * len(_shape(v))
    return PartitionRule(tuple(map(of, eqn.invars)), tuple(map(of, eqn.outvars)))


def _conv(eqn: Any) -> PartitionRule:
    """The batch is independent; without groups the features are too, and those of the input are summed."""
    numbers, p = eqn.params["dimension_numbers"], eqn.params
    sides: list[list[str | None]] = [[None] * len(_shape(v)) for v in (*eqn.invars, *eqn.outvars)]
    grouped = p["feature_group_count"] * p["batch_group_count"] > 1
    if p["batch_group_count"] == 1:
        sides[0][numbers.lhs_spec[0]] = sides[2][numbers.out_spec[0]] = "batch"
    if not grouped:
        sides[0][numbers.lhs_spec[1]] = sides[1][numbers.rhs_spec[1]] = "in"
        sides[1][numbers.rhs_spec[0]] = sides[2][numbers.out_spec[1]] = "out"
    left, right, out = map(tuple, sides)
    return PartitionRule((left, right), (out,), local=grouped, summed=frozenset(("in",)))


def _bitcast(eqn: Any) -> PartitionRule | None:
    before, after = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    if len(before) == len(after):
        return None
    names = tuple(f"d{d}" for d in range(min(len(before), len(after))))
    widens = len(after) > len(before)
    ins, outs = (names, (*names, None)) if widens else ((*names, None), names)
    return PartitionRule((ins,), (outs,), local=False, pinned=False)


def _reshape(eqn: Any) -> PartitionRule:
    """Where dimensions merge or split, the major one is independent."""
    before, after = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    pairs, _, _ = reshape_dims(before, after)
    left, right = {a for a, _ in pairs}, {b for _, b in pairs}
    ins = tuple(f"d{d}" if d in left else None for d in range(len(before)))
    by_out = {b: f"d{a}" for a, b in pairs}
    rest = [(None,) * len(_shape(v)) for v in eqn.invars[1:]]
    outs = tuple(by_out.get(d) if d in right else None for d in range(len(after)))
    return PartitionRule((ins, *rest), (outs,), local=False, pinned=False)


def _gather(eqn: Any) -> PartitionRule:
    numbers = eqn.params["dimension_numbers"]
    table, index, out = _shape(eqn.invars[0]), _shape(eqn.invars[1]), _shape(eqn.outvars[0])
    names_t, names_i, names_o = _blank(table), _blank(index), _blank(out)
    for i, d in enumerate(d for d in range(len(out)) if d not in numbers.offset_dims):
        names_o[d] = names_i[i] = f"i{i}"
    for d, (o, size) in windows(eqn).items():
        if size == table[d]:
            names_t[d] = names_o[o] = f"t{d}"
    for d, i in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims):
        names_t[d] = names_i[i]
    summed: set[str] = set()
    if len(row_dims(eqn)) == 1:
        (d,) = row_dims(eqn)
        names_t[d] = f"v{d}"
        summed.add(f"v{d}")
    ins = (tuple(names_t), tuple(names_i))
    return PartitionRule(ins, (tuple(names_o),), local=False, pinned=False, summed=frozenset(summed))


def _scatter(eqn: Any) -> PartitionRule:
    """Where updates are added, they may be sharded (`i`), and so may rows (`v`): each device skips those of others."""
    numbers = eqn.params["dimension_numbers"]
    table, index, update = (_shape(v) for v in eqn.invars[:3])
    names_t, names_i, names_u = _blank(table), _blank(index), _blank(update)
    adds = eqn.primitive.name in SCATTER_ADD
    batched = {int(i) for i in numbers.scatter_indices_batching_dims}
    for i, d in enumerate(d for d in range(len(update)) if d not in numbers.update_window_dims):
        if adds or i in batched:
            names_u[d] = names_i[i] = f"i{i}"
    for d, (u, size) in windows(eqn).items():
        if size == table[d]:
            names_t[d] = names_u[u] = f"t{d}"
    for d, i in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims):
        names_t[d] = names_i[i]
    for d in row_dims(eqn) if adds else ():
        names_t[d] = f"v{d}"
    summed = frozenset(n for i, n in enumerate(names_i) if n is not None and i not in batched)
    return PartitionRule((tuple(names_t), tuple(names_i), tuple(names_u)), (tuple(names_t),), summed=summed)


def _blank(shape: Sequence[int]) -> list[str | None]:
    return [None] * len(shape)


SCATTER_ADD = frozenset(("scatter-add", "scatter_add"))
SCATTERS = frozenset(("scatter", *(f"scatter{dash}{n}" for dash in "-_" for n in "add sub mul min max".split())))

RULES: dict[str, Callable[[Any], PartitionRule | None]] = {
    "pad": _pad,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    **dict.fromkeys("concatenate rev sort cumsum cumprod cummax cummin cumlogsumexp split".split(), _along),
    "top_k": _top_k,
    **dict.fromkeys(("argmax", "argmin"), _arg_reduction),
    **dict.fromkeys(("stack", "unstack"), _stack),
    **dict.fromkeys((f"reduce_window{n}" for n in ("", "_sum", "_max", "_min")), _windowed),
    **dict.fromkeys("select_and_scatter select_and_scatter_add select_and_gather_add".split(), _windowed),
    "fft": _fft,
    **dict.fromkeys(
        """cholesky cholesky_update eig eigh geqp3 geqrf hessenberg householder_product lu qr schur svd triangular_solve
        tridiagonal""".split(),
        _matrices,
    ),
    **dict.fromkeys(
        """approx_top_k custom_linear_solve lu_pivots_to_permutation ormqr ragged_dot_general rng_bit_generator
        rng_uniform symmetric_product tridiagonal_solve""".split(),
        _replicated,
    ),
    "conv_general_dilated": _conv,
    "bitcast_convert_type": _bitcast,
    "reshape": _reshape,
    "gather": _gather,
    **dict.fromkeys(SCATTERS, _scatter),
}
PINNED_RULES = frozenset(RULES) - frozenset(("reshape", "gather", "bitcast_convert_type", "argmax", "argmin"))
"""Primitives that are pinned also where a plan has no layout for them."""
