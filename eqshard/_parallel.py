"""A function of a piece of a batch, on every device at once."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from ._axes import PartitionAxis
from ._batch import place_leaves
from ._errors import ShardingError
from ._gather import replicate
from ._mesh import MeshLike
from ._names import Mode
from ._rest import Rest, split, split_leaves
from ._rows import batch_rows, DEFAULT_NAMES, Known, Layout, types_of


def parallel_map(
    fn: Callable[[Any], PyTree[Any]],
    batch: PyTree[Any],
    mesh: MeshLike,
    in_spec: Any,
    out_spec: Any = None,
    *,
    names: PartitionAxis | None = None,
    mode: Mode | str | int | None = None,
) -> PyTree[Any]:
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
    how = Known(mesh), Layout.key(in_spec), DEFAULT_NAMES if names is None else Known(names), mode
    leaves, treedef = jtu.tree_flatten(batch)
    lies = batch_rows(treedef, types_of(leaves, False), *how)
    placed = place_leaves(leaves, lies, False, "batch" if jax.process_count() > 1 else None)
    arrays, rest = split_leaves(placed, [row is not None for row in lies], treedef)
    if not arrays:
        raise ShardingError("`parallel_map` needs an array in the batch: without one there are no pieces.")
    constants, function = split(fn)
    run = _program(function, rest, Known(lies), how[1] if out_spec is None else Layout.key(out_spec), *how[2:])
    if constants:
        constants = replicate(constants, next(row.sharding.mesh for row in lies if row is not None))
    results, returned = run(constants, arrays)
    return returned.join(results)


@functools.lru_cache(maxsize=256)
def _program(
    function: Rest, rest: Rest, lies: Known, out: Any, names: Known, mode: Any
) -> Callable[[list[Any], list[Any]], tuple[list[Any], Rest]]:
    """The compiled map; made once for a function, the types of a batch and its leaves that are no arrays."""
    rows = [row for row in lies.value if row is not None]
    mesh = rows[0].sharding.mesh
    in_specs = PartitionSpec(), [row.spec for row in rows]

    @jax.jit
    def run(constants: list[Any], arrays: list[Any]) -> tuple[list[Any], Rest]:
        seen: list[tuple[Rest, list[Any]]] = []

        # Traced by the first of the two passes below; the second finds it in jit's cache.
        @functools.partial(jax.jit, inline=True)
        def piece(constants: list[Any], arrays: list[Any]) -> list[Any]:
            results, returned = split(function.join(constants)(rest.join(arrays)))
            seen.append((returned, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]))
            return results

        def look(constants: list[Any], arrays: list[Any]) -> tuple[()]:
            piece(constants, arrays)
            return ()

        jax.eval_shape(jax.shard_map(look, mesh=mesh, in_specs=in_specs, out_specs=()), constants, arrays)
        returned, shapes = seen[0]
        leaves, treedef = jtu.tree_flatten(returned.join(shapes))
        lie = batch_rows(treedef, types_of(leaves, False), Known(mesh), out, names, mode, False)
        out_specs = [row.spec for row in lie if row is not None]
        return jax.shard_map(piece, mesh=mesh, in_specs=in_specs, out_specs=out_specs)(constants, arrays), returned

    return run
