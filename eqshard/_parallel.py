"""A function of a piece of a batch, on every device at once."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import PyTree

from ._axes import PartitionAxis
from ._batch import shard_batch
from ._errors import ShardingError
from ._gather import replicate
from ._mesh import MeshLike
from ._names import Mode
from ._rest import Rest, split
from ._rows import batch_rows, DEFAULT_NAMES, Layout
from ._tree import is_array


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
    names = DEFAULT_NAMES if names is None else names
    placed = shard_batch(batch, mesh, in_spec, names=names, mode=mode)
    leaves, treedef = jtu.tree_flatten(placed)
    shapes = tuple(x.shape if is_array(x) else None for x in leaves)
    lies = [row for row in batch_rows(treedef, shapes, mesh, Layout.of(in_spec), names, mode, None) if row is not None]
    arrays, rest = split(placed)
    constants, function = split(fn)
    if not arrays:
        raise ShardingError("`parallel_map` needs an array in the batch: without one there are no pieces.")
    built = lies[0].sharding.mesh
    out = _Out(Layout.of(in_spec if out_spec is None else out_spec), names, mode)
    specs = tuple(row.spec for row in lies)
    constants = replicate(constants, built) if constants else constants
    results, returned = _run(function, rest, built, specs, out, constants, arrays)
    return returned.join(results)


class _Out(NamedTuple):
    """How the results shall lie."""

    layout: Layout
    names: PartitionAxis
    mode: Mode | str | int | None

    def specs(self, rest: Rest, shapes: list[tuple[int, ...]], mesh: Mesh) -> list[PartitionSpec]:
        leaves, treedef = jtu.tree_flatten(rest.join([jax.ShapeDtypeStruct(s, "bool") for s in shapes]))
        known = tuple(x.shape if is_array(x) else None for x in leaves)
        lies = batch_rows(treedef, known, mesh, self.layout, self.names, self.mode, None)
        return [row.spec for row in lies if row is not None]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _run(
    function: Rest,
    rest: Rest,
    mesh: Mesh,
    specs: tuple[PartitionSpec, ...],
    out: _Out,
    constants: list[Any],
    arrays: list[Any],
) -> tuple[list[Any], Rest]:
    seen: list[tuple[Rest, list[tuple[int, ...]]]] = []

    # Traced by the first of the two passes below; the second finds it in jit's cache.
    @functools.partial(jax.jit, inline=True)
    def piece(constants: list[Any], arrays: list[Any]) -> list[Any]:
        results, returned = split(function.join(constants)(rest.join(arrays)))
        seen.append((returned, [tuple(x.shape) for x in results]))
        return results

    def look(constants: list[Any], arrays: list[Any]) -> tuple[()]:
        piece(constants, arrays)
        return ()

    in_specs = PartitionSpec(), list(specs)
    jax.eval_shape(jax.shard_map(look, mesh=mesh, in_specs=in_specs, out_specs=()), constants, arrays)
    returned, shapes = seen[0]
    out_specs = out.specs(returned, shapes, mesh)
    mapped = jax.shard_map(piece, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    return mapped(constants, arrays), returned
