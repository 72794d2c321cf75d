"""Batches onto devices: from one process or many, whole or in parts."""

from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer

from ._agree import agree, value_digest
from ._apply import constrain_to
from ._axes import PartitionAxis
from ._errors import ShardingError
from ._mesh import MeshLike, MeshSpec
from ._names import Mode
from ._narrow import narrow
from ._pad import padded, rows_sharding
from ._put import can_cut, cut, from_part, is_global, is_here, is_key, put_all
from ._rows import batch_rows, DEFAULT_NAMES, known, Layout, Row, types_of
from ._shard_info import ShardedLeaf, ShardInfo
from ._tree import dtype_name, shown, Tree, type_text


def shard_batch(
    batch: Tree,
    mesh: MeshLike,
    spec_or_axes: Any,
    *,
    names: PartitionAxis | None = None,
    mode: Mode | str | int | None = None,
    local: bool = False,
    pad: Any = None,
    rows: int | None = None,
    info: bool = False,
    check: bool = True,
) -> Any:
    """Lays a batch out over a mesh: numpy or jax arrays of any ranks, in any tree.

    A spec is cut to each leaf's rank, so scalars are whole on every device. Strings, Python numbers, functions and
    other leaves pass through. Integers never change: a 64-bit one that JAX would narrow must fit, or it is an error.
    (Floating-point numbers of 64 bits become 32 bits, as everywhere in JAX.) In a traced function the layout becomes a
    constraint, as by `apply`.

    ```python
    import eqshard, numpy as np
    from jax.sharding import PartitionSpec as P
    batch = {"tokens": np.zeros((16, 128), "int32"), "weight": np.ones(16, "float32"), "split": "train"}
    placed = eqshard.shard_batch(batch, eqshard.MeshSpec(data=4, seq=2), P("data", "seq"))
    assert placed["tokens"].sharding.spec == P("data", "seq") and placed["weight"].sharding.spec == P("data")
    placed = eqshard.shard_batch(batch, eqshard.MeshSpec(dp=4, sp=2), (eqshard.BATCH, eqshard.LENGTH))
    assert placed["tokens"].sharding.spec == P("dp", "sp")
    ```

    **Arguments:**

    - `spec_or_axes`: a PartitionSpec; a tuple or list of logical names; None for whole; a tree of these that is a
        prefix of `batch`, as `{"tokens": P("data", "seq"), "image": ("batch",)}`; or a plan.
    - `names`: what logical names mean; default: `PartitionAxis()`. Its parallelisms that the mesh lacks are left out;
        axes that were named by hand must exist.
    - `mode`: of the logical names, as in `PartitionAxis.resolve_spec`.
    - `local`: whether each process brings its own part, as `process_slice` and most loaders give it, and the whole is
        all parts together; else each process brings the whole batch, and keeps what its devices need.
    - `pad`: what to fill up rows with if they do not divide: a number, or a tree of numbers that is a prefix of
        `batch`.
    - `rows`: with `pad`, how many rows the whole shall have (the same in every batch: no step is compiled twice); by
        default the fewest that divide.
    - `info`: whether to tell what lies where too.
    - `check`: whether, of several processes that each bring the whole batch, to compare digests of it.

    **Returns:**

    The batch; with `pad`, a pair of it and a mask that is True for rows that are not padding; with `info`, also a
    `ShardInfo`, last.

    **Raises:**

    - `IndivisibleError`: rows do not divide, and `pad` is not given.
    - `UnknownAxisError`: no such logical name, or no such mesh axis.
    - `ProcessError`: with `local=False`, the processes brought different batches.
    - `ShardingError`: anything else that does not fit.
    """
    return place_batch(batch, mesh, spec_or_axes, names, mode, local, pad, rows, info, "batch" if check else None)


def place_batch(
    batch: Tree,
    mesh: MeshLike,
    spec_or_axes: Any,
    names: PartitionAxis | None = None,
    mode: Mode | str | int | None = None,
    local: bool = False,
    pad: Any = None,
    rows: int | None = None,
    info: bool = False,
    channel: str | None = None,
) -> Any:
    """`shard_batch`, where processes that each bring the whole batch compare it on a channel of their own, or not."""
    leaves, treedef = jtu.tree_flatten(batch)
    alone = jax.process_count() == 1
    local = local and not alone
    how = known(mesh), Layout.key(spec_or_axes), DEFAULT_NAMES if names is None else known(names), mode
    given = types_of(leaves, local)
    lies = batch_rows(treedef, given, *how, pad is None)
    mask = None
    if pad is not None:
        leaves, mask = padded(leaves, lies, treedef, pad, rows)
        lies = batch_rows(treedef, types_of(leaves, local), *how)
    elif rows is not None:
        raise ShardingError("`rows` says to how many rows to pad: give `pad` too, what to fill them up with.")
    out = place_leaves(leaves, lies, local, None if alone or local else channel)
    placed = jtu.tree_unflatten(treedef, out)
    if mask is None and not info:
        return placed
    masks = () if mask is None else (_placed_mask(mask, lies, local),)
    return placed, *masks, *((_info(out, lies, given),) if info else ())


def place_leaves(leaves: list[Any], lies: tuple[Row | None, ...], local: bool, channel: str | None) -> list[Any]:
    """The leaves in their places."""
    out = list(leaves)
    moved: list[tuple[int, Row]] = []
    arrays: list[Any] = []
    at_once = jax.process_count() == 1 and can_cut()
    for i, row in enumerate(lies):
        if row is None:
            continue
        x = leaves[i]
        if isinstance(x, np.ndarray):
            x = narrow(x, row.path) if row.wide else x
            if at_once and type(x) is np.ndarray:
                out[i] = cut(x, row.sharding)
                continue
            arrays.append(x)
        elif isinstance(x, (Tracer, jax.ShapeDtypeStruct)):
            out[i] = _constrained(x, row, local)
            continue
        elif (x.sharding is row.sharding or x.sharding == row.sharding) and x.committed:
            continue
        else:
            arrays.append(x)
        moved.append((i, row))
    if not arrays:
        return out
    if channel is not None:
        _check_same(arrays, moved, channel)
    if local:
        placed = [_from_part(x, row) for x, (_, row) in zip(arrays, moved)]
    else:
        placed = put_all(arrays, [row.sharding for _, row in moved])
    staged = isinstance(placed[0], Tracer)  # constants in a traced function
    for (i, row), x in zip(moved, placed):
        out[i] = constrain_to(x, row.spec, row.sharding.mesh) if staged else x
    return out


def _from_part(x: Any, row: Row) -> Any:
    """A global array from this process's part of it; one that is global already just moves."""
    if is_global(x):
        return put_all([x], [row.sharding])[0]
    if not is_key(x):
        return from_part(np.asarray(x), row.sharding, row.whole)
    data = np.asarray(jax.random.key_data(x))
    made = jax.make_array_from_process_local_data(row.sharding, data, (*row.whole, data.shape[-1]))
    return jax.random.wrap_key_data(made, impl=jax.random.key_impl(x))


def _constrained(x: Any, row: Row, local: bool) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return narrow(x, row.path).update(shape=row.whole, sharding=row.sharding)
    if local:
        raise ShardingError(f"{shown(row.path)} is being traced, so it is global already: leave out `local=True`.")
    return constrain_to(x, row.spec, MeshSpec.of(row.sharding.mesh))


def _check_same(arrays: list[Any], moved: list[tuple[int, Row]], channel: str) -> None:
    facts = {
        f"`{row.path}`": f"{type_text(tuple(x.shape), dtype_name(x))} with the values {value_digest(x)}"
        for x, (_, row) in zip(arrays, moved)
        if is_here(x)
    }
    try:
        agree("batch", facts, channel=channel)
    except ShardingError as error:
        raise type(error)(
            f"{error}\n  With `local=False` every process brings the whole batch. If each brings its own part, say "
            "`local=True`."
        ) from None


def _placed_mask(mask: np.ndarray, lies: tuple[Row | None, ...], local: bool) -> Any:
    row = next(row for row in lies if row is not None and row.batched)
    sharding = rows_sharding(row.sharding)
    if local:
        return jax.make_array_from_process_local_data(sharding, mask, (len(mask) * row.parts[0],))
    return put_all([mask], [sharding])[0]


def _info(out: list[Any], lies: tuple[Row | None, ...], given: tuple[Any, ...]) -> ShardInfo:
    leaves = [
        ShardedLeaf(row.path, dtype_name(x), tuple(before[0]), row.whole, row.sharding.shard_shape(row.whole), row.spec)
        for x, row, before in zip(out, lies, given)
        if row is not None and before is not None
    ]
    meshes = [row.sharding.mesh for row in lies if row is not None]
    devices = tuple(d.id for d in np.asarray(meshes[0].devices).flat) if meshes else ()
    return ShardInfo(tuple(leaves), devices)
