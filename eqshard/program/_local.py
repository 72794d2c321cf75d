"""Runs operations on each device's own shard, so that XLA has nothing to partition."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend import source_info_util
from jax.lax import GatherScatterMode
from jax.sharding import NamedSharding, PartitionSpec

from .._spec import entries, entry_axes
from ._partition_rules import AxesOf, PartitionRule, SCATTERS, spec_of
from ._rows import bind_rows, row_dims


def run_local(
    eqn: Any, ins: Sequence[Any], rule: PartitionRule, chosen: AxesOf, wanted: PartitionSpec, mesh: Any
) -> Any:
    """Runs an equation on each device's shard.

    **Arguments:**

    - `chosen`: the mesh axes of each independent dimension.
    - `wanted`: the layout in which the plan wants the first result.
    """
    if eqn.primitive.name in SCATTERS:
        return [_run_scatter(eqn, ins, rule, chosen, wanted, mesh)]
    specs = tuple(spec_of(names, chosen) for names in rule.ins)
    outs = tuple(spec_of(names, chosen) for names in rule.outs)
    run = lambda *xs: tuple(bind(eqn, xs, _shard_params(eqn, xs[0].shape)))
    return list(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=outs, check_vma=False)(*ins))


def _shard_params(eqn: Any, shard: tuple[int, ...]) -> Any:
    """Returns an equation's parameters on a shard: a slice that takes all of a dimension takes all of the shard's."""
    shape, p = eqn.invars[0].aval.shape, eqn.params
    if eqn.primitive.name == "slice":
        starts, limits = p["start_indices"], p["limit_indices"]
        ends = [m if (a, b) == (0, n) else b for a, b, n, m in zip(starts, limits, shape, shard)]
        return p | {"limit_indices": tuple(ends)}
    if eqn.primitive.name == "dynamic_slice":
        sizes = [m if size == n else size for size, n, m in zip(p["slice_sizes"], shape, shard)]
        return p | {"slice_sizes": tuple(sizes)}
    return p


def _run_scatter(
    eqn: Any, ins: Sequence[Any], rule: PartitionRule, chosen: AxesOf, wanted: PartitionSpec, mesh: Any
) -> Any:
    """Scatters into each device's rows; where updates are sharded, adds them up over the devices.

    The sum comes scattered along the dimensions that `wanted` shards by the same mesh axes.
    """
    over = tuple(a for name in sorted(rule.summed) for a in chosen.get(name, ()))
    table = spec_of(rule.ins[0], chosen)
    left, out = over, [_axes(table, d) for d in range(ins[0].ndim)]
    scattered: list[tuple[int, tuple[str, ...]]] = []
    for d in range(len(entries(wanted))):
        axes = _axes(wanted, d)
        if axes and not out[d] and set(axes) <= set(left) and _divides(eqn, d, axes, mesh):
            scattered.append((d, axes))
            out[d] = axes
            left = tuple(a for a in left if a not in axes)

    def run(x: Any, index: Any, update: Any) -> Any:
        index, params = _own_rows(eqn, index, rows, x.shape)
        if not by_parts:
            return bind(eqn, [x, index, update], params)[0]
        (part,) = bind(eqn, [jnp.zeros_like(x), index, update], params)
        for d, axes in scattered:
            part = jax.lax.psum_scatter(part, axes, scatter_dimension=d, tiled=True)
        return jax.lax.psum(part, left) if left else part

    rows = {d: axes for d in row_dims(eqn) if (axes := _axes(table, d))}
    by_parts = bool(over or rows)  # skipped rows are read from zeros: see `clamped_starts`
    specs = tuple(spec_of(names, chosen) for names in rule.ins)
    spec = PartitionSpec(*(entry or None for entry in out))
    made = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False)(*ins)
    if not by_parts:
        return made
    return made + jax.lax.with_sharding_constraint(ins[0], NamedSharding(mesh, spec))


def clamped_starts(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    """Clamps the starts of a dynamic slice or update, as JAX defines them, instead of leaving that to XLA.

    XLA merges a slice of a slice into one whose start is the sum of both. It forgets that the inner start was clamped,
    so a slice that starts out of bounds reads other rows once its result, or its operand, is sharded.
    """
    first = 1 if eqn.primitive.name == "dynamic_slice" else 2
    sizes = eqn.params["slice_sizes"] if first == 1 else eqn.invars[1].aval.shape
    starts = []
    for start, size, dim in zip(ins[first:], sizes, eqn.invars[0].aval.shape):
        dtype = jnp.result_type(start)
        starts.append(jax.lax.clamp(dtype.type(0), start, dtype.type(min(dim - size, jnp.iinfo(dtype).max))))
    return [*ins[:first], *starts]


def _own_rows(eqn: Any, index: Any, rows: Mapping[int, tuple[str, ...]], shard: tuple[int, ...]) -> tuple[Any, Any]:
    """Counts indices from the first row of this device, so that rows of other devices are out of bounds and skipped."""
    if not rows:
        return index, eqn.params
    of, shape = eqn.params["dimension_numbers"].scatter_dims_to_operand_dims, eqn.invars[0].aval.shape
    index = index.astype(jnp.promote_types(index.dtype, jnp.int32)) if index.dtype.itemsize < 4 else index
    columns = [jax.lax.index_in_dim(index, k, index.ndim - 1) for k in range(index.shape[-1])]
    for k, d in enumerate(of):
        if d in rows:
            if eqn.params["mode"] == GatherScatterMode.CLIP:
                columns[k] = jnp.clip(columns[k], 0, shape[d] - 1)
            first = jax.lax.axis_index(rows[d]) * shard[d]
            columns[k] = columns[k] - first.astype(index.dtype)
    index = jax.lax.concatenate(columns, index.ndim - 1)
    return index, eqn.params | {"mode": GatherScatterMode.FILL_OR_DROP}


def _axes(spec: PartitionSpec, dim: int) -> tuple[str, ...]:
    """The axes that shard a dimension."""
    return entry_axes(spec[dim]) if dim < len(entries(spec)) else ()


def _divides(eqn: Any, dim: int, axes: tuple[str, ...], mesh: Any) -> bool:
    parts = 1
    for axis in axes:
        parts *= mesh.shape[axis]
    return eqn.outvars[0].aval.shape[dim] % parts == 0


def bind(eqn: Any, ins: Sequence[Any], params: Any = None) -> list[Any]:
    """Runs an equation; its line and its names stay those of the function that was planned."""
    source = eqn.source_info
    names = source_info_util.current_name_stack() + source.name_stack
    params = eqn.params if params is None else params
    with source_info_util.user_context(source.traceback, name_stack=names):
        if eqn.primitive.name == "gather" or eqn.primitive.name in SCATTERS:
            by_rows = bind_rows(eqn.replace(params=params), ins)
            if by_rows is not None:
                return [by_rows]
        if eqn.primitive.name == "fft":
            # XLA's FFT on CPUs takes row-major arrays only, and layout assignment does not know it.
            row_major = lambda x: with_layout_constraint(x, Layout(tuple(range(x.ndim))))
            return [row_major(eqn.primitive.bind(*map(row_major, ins), **params))]
        out = eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(params))
    return list(out) if eqn.primitive.multiple_results else [out]
