"""A function of a piece of a batch, on every device at once."""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
from jax.sharding import PartitionSpec

from ._axes import PartitionAxis
from ._batch import place_leaves
from ._errors import ShardingError
from ._gather import replicate
from ._mesh import MeshLike
from ._names import Mode
from ._rest import Rest, split, split_leaves
from ._rows import batch_rows, DEFAULT_NAMES, Known, known, Layout, types_of
from ._tree import struct_of, Tree


def parallel_map(
    fn: Callable[[Any], Tree],
    batch: Tree,
    mesh: MeshLike,
    in_spec: Any,
    out_spec: Any = None,
    *,
    names: PartitionAxis | None = None,
    mode: Mode | str | int | None = None,
) -> Tree:
    """Calls `fn` with each device's piece of `batch`, and puts the results together: `jax.shard_map` for trees.

    Leaves that are no arrays reach `fn` as they are, and may be returned by it. So may `fn` be a model: its arrays are
    whole on every device. The same `fn`, on batches of the same types and with the same other leaves, is traced once;
    another `lambda` is another function. Inside, `axis_size`, `axis_index` and `jax.lax.psum` work on all mesh axes.

    ```python
    import eqshard, jax, numpy as np
    from jax.sharding import PartitionSpec as P
    mesh = eqshard.MeshSpec(data=8)

    def normalise(batch):
        mean = jax.lax.pmean(batch["x"].mean(), "data")
        return {"x": batch["x"] - mean, "mean": mean, "name": batch["name"]}

    batch = {"x": np.arange(16, dtype="float32"), "name": "a"}
    out = eqshard.parallel_map(normalise, batch, mesh, P("data"))
    assert out["mean"] == 7.5 and out["x"].sharding.spec == P("data") and out["name"] == "a"
    ```

    **Arguments:**

    - `in_spec`: how `batch` lies: all that `shard_batch` takes. What lies elsewhere is moved.
    - `out_spec`: how the results lie, in the same way; default: `in_spec`, which then must fit the results
        too. Cut to the rank of each: a scalar must be the same on all devices. `P()` says so of all results.

    **Raises:**

    - `ShardingError`: `batch` does not fit `in_spec`, or the results do not fit `out_spec`.
    """
    leaves, treedef = jtu.tree_flatten(batch)
    said = in_spec if type(in_spec) is PartitionSpec else Layout.of(in_spec)
    out = None if out_spec is None else Layout.key(out_spec)
    how = known(mesh), said, DEFAULT_NAMES if names is None else known(names), mode
    try:  # the shortest way to a second call: a function, and arrays that have their places
        places = [part for x in leaves for part in (x.sharding, x.shape, x.dtype)]
    except AttributeError:
        places = []
    if places and type(fn) is FunctionType:
        run = _ready(fn, out, *how, treedef, *places)
        if run is not None:
            results = run((), batch)
            return results.rest.join(results.arrays) if type(results) is _Mixed else results
    lies = batch_rows(treedef, types_of(leaves, False), *how)
    placed = place_leaves(leaves, lies, False, "batch" if jax.process_count() > 1 else None)
    arrays, rest = split_leaves(placed, [row is not None for row in lies], treedef)
    if not arrays:
        raise ShardingError("`parallel_map` needs an array in the batch: without one there are no pieces.")
    constants, function = split(fn)
    if constants:
        constants = replicate(constants, next(row.sharding.mesh for row in lies if row is not None))
    run = _program(function, rest, known(lies), said if out is None else out, *how[2:])
    results = run(tuple(constants), rest.join(arrays) if len(arrays) == len(leaves) else arrays)
    return results.rest.join(results.arrays) if type(results) is _Mixed else results


class _Mixed(NamedTuple):
    """Results of which some are no arrays."""

    arrays: list[Any]
    rest: Rest


@functools.lru_cache(maxsize=256)
def _ready(
    fn: FunctionType, out: Any, mesh: Known, said: Any, names: Known, mode: Any, treedef: Any, *places: Any
) -> Callable[..., Any] | None:
    """The compiled map for a batch that is all arrays, if each of them lies where it must."""
    shardings, shapes, dtypes = places[::3], places[1::3], places[2::3]
    lies = batch_rows(treedef, tuple([(n, t, False) for n, t in zip(shapes, dtypes)]), mesh, said, names, mode)
    if any(row is None or row.sharding != sharding for row, sharding in zip(lies, shardings)):
        return None
    rest = split_leaves(list(shapes), [True] * len(shapes), treedef)[1]
    return _program(split(fn)[1], rest, known(lies), said if out is None else out, names, mode)


@functools.lru_cache(maxsize=256)
def _program(function: Rest, rest: Rest, lies: Known, out: Any, names: Known, mode: Any) -> Callable[..., Any]:
    """The compiled map; made once for a function, the types of a batch and its leaves that are no arrays."""
    rows = [row for row in lies() if row is not None]
    mesh = rows[0].sharding.mesh
    in_specs = PartitionSpec(), [row.spec for row in rows]

    @jax.jit
    def run(constants: tuple[Any, ...], batch: Tree) -> Tree:
        seen: list[tuple[Rest, Tree]] = []
        arrays = jtu.tree_leaves(batch)

        # Traced by the first of the two passes below; the second finds it in jit's cache.
        @functools.partial(jax.jit, inline=True)
        def piece(constants: tuple[Any, ...], arrays: list[Any]) -> list[Any]:
            results, returned = split(function.join(list(constants))(rest.join(arrays)))
            shapes = [struct_of(x) for x in results]
            seen.append((returned, returned.join(shapes)))
            return results

        def look(constants: tuple[Any, ...], arrays: list[Any]) -> tuple[()]:
            piece(constants, arrays)
            return ()

        jax.eval_shape(jax.shard_map(look, mesh=mesh, in_specs=in_specs, out_specs=()), constants, arrays)
        returned, shapes = seen[0]
        leaves, treedef = jtu.tree_flatten(shapes)
        lie = batch_rows(treedef, types_of(leaves, False), known(mesh), out, names, mode, False)
        out_specs = [row.spec for row in lie if row is not None]
        results = jax.shard_map(piece, mesh=mesh, in_specs=in_specs, out_specs=out_specs)(constants, arrays)
        return returned.join(results) if len(results) == len(leaves) else _Mixed(results, returned)

    return run
