"""Operations that run on each device's own piece, where layouts alone would leave too much to XLA."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.sharding import NamedSharding, PartitionSpec

from .._spec import entry_axes
from ._rows import bind_rows, row_dims, windows


LOCAL = frozenset("pad concatenate slice rev sort cumsum cumprod cummax cummin cumlogsumexp".split())
"""Along the dimension that they are about they are whole, and along the others each piece is by itself."""
SCATTER_ADD = frozenset(("scatter-add", "scatter_add"))


def apart(eqn: Any, read: Sequence[PartitionSpec], made: PartitionSpec) -> bool:
    """Whether each device can run an equation of `LOCAL` on its own piece.

    A plan that was edited may cut what must be whole: then it is XLA's to bring the pieces together.
    """
    cut = {d for d, entry in enumerate(made) if entry is not None}
    return all(spec == made for spec in read) and not cut & _about(eqn)


def run_apart(eqn: Any, ins: Sequence[Any], spec: PartitionSpec, mesh: Any) -> list[Any]:
    """Runs an equation on each device's piece: XLA has no say in how to cut it."""
    specs = tuple(spec if jnp.ndim(x) else PartitionSpec() for x in ins)
    run = lambda *xs: tuple(bind(eqn, xs, _params_of_a_piece(eqn, xs[0])))
    every = (spec,) * len(eqn.outvars)
    return list(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=every, check_vma=False)(*ins))


def _about(eqn: Any) -> set[int]:
    """The dimensions along which an equation of `LOCAL` must be whole."""
    before, after, p = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, eqn.params
    if eqn.primitive.name == "pad":
        return {d for d, config in enumerate(p["padding_config"]) if any(config)}
    if eqn.primitive.name == "slice":
        strides = p["strides"] or (1,) * len(before)
        return {d for d, stride in enumerate(strides) if before[d] != after[d] or stride != 1}
    return {int(d) for d in p.get("dimensions", (p.get("dimension", p.get("axis")),))}


def _params_of_a_piece(eqn: Any, piece: Any) -> Any:
    """An equation's parameters on a piece: a slice that takes all of a dimension takes all of the piece's."""
    if eqn.primitive.name != "slice":
        return eqn.params
    whole, starts, limits = eqn.invars[0].aval.shape, eqn.params["start_indices"], eqn.params["limit_indices"]
    ends = [m if (a, b) == (0, n) else b for a, b, n, m in zip(starts, limits, whole, piece.shape)]
    return eqn.params | {"limit_indices": tuple(ends)}


def summed_axes(eqn: Any, specs: Sequence[PartitionSpec]) -> tuple[str, ...]:
    """The axes over which a scatter that adds is to share out its rows, if each device can add up its own.

    **Arguments:**

    - `specs`: of the table, the index and the updates. Those of a plan that was edited may not belong together.
    """
    table, index, update = specs
    numbers, there = eqn.params["dimension_numbers"], windows(eqn)
    shape, rank = eqn.invars[0].aval.shape, len(eqn.invars[2].aval.shape)
    rows = [d for d in range(rank) if d not in {w for w, _ in there.values()}]
    batched = [int(d) for d in numbers.scatter_indices_batching_dims]
    together = (
        not any(_axes(table, d) for d in row_dims(eqn))  # else a row may belong to another device
        and not _axes(index, len(rows))
        and all(_axes(update, d) == _axes(index, i) for i, d in enumerate(rows))
        and all(_axes(table, int(d)) == _axes(index, i) for d, i in zip(numbers.operand_batching_dims, batched))
        and all(_axes(table, d) == _axes(update, w) for d, (w, _) in there.items())
        and all(size == shape[d] for d, (_, size) in there.items() if _axes(table, d))
    )
    return tuple(a for i in range(len(rows)) if together and i not in batched for a in _axes(index, i))


def run_scattered(
    eqn: Any, ins: Sequence[Any], specs: Sequence[PartitionSpec], axes: tuple[str, ...], made: PartitionSpec, mesh: Any
) -> Any:
    """Adds up each device's rows by itself, then over devices: layouts cannot ask XLA for that.

    **Arguments:**

    - `axes`: over which rows are shared out.
    - `made`: how the result is wanted: along dimensions that those axes cut there, the sum comes in pieces at once.
    """
    left, out = axes, [_axes(specs[0], d) for d in range(ins[0].ndim)]
    cuts: list[tuple[int, tuple[str, ...]]] = []
    for d in range(len(made)):
        wanted = _axes(made, d)
        if wanted and not out[d] and set(wanted) <= set(left):
            cuts.append((d, wanted))
            out[d] = wanted
            left = tuple(a for a in left if a not in wanted)

    def run(table: Any, index: Any, update: Any) -> Any:
        (part,) = bind(eqn, [jnp.zeros_like(table), index, update])
        for d, over in cuts:
            part = jax.lax.psum_scatter(part, over, scatter_dimension=d, tiled=True)
        return jax.lax.psum(part, left) if left else part

    spec = PartitionSpec(*(entry or None for entry in out))
    part = jax.shard_map(run, mesh=mesh, in_specs=tuple(specs), out_specs=spec, check_vma=False)(*ins)
    return part + jax.lax.with_sharding_constraint(ins[0], NamedSharding(mesh, spec))


def _axes(spec: PartitionSpec, dim: int) -> tuple[str, ...]:
    """The axes that cut a dimension."""
    return entry_axes(spec[dim]) if dim < len(spec) else ()


def bind(eqn: Any, ins: Sequence[Any], params: Any = None) -> list[Any]:
    """Runs an equation; its line and its names stay those of the function that was planned."""
    source = eqn.source_info
    names = source_info_util.current_name_stack() + source.name_stack
    with source_info_util.user_context(source.traceback, name_stack=names):
        by_rows = bind_rows(eqn, ins) if eqn.primitive.name.startswith(("gather", "scatter")) else None
        if by_rows is not None:
            return [by_rows]
        params = eqn.params if params is None else params
        out = eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(params))
    return list(out) if eqn.primitive.multiple_results else [out]
