"""Whole again: trees to the host, or to every device."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer

from ._agree import agree_to_move, PATIENCE
from ._apply import apply
from ._errors import ShardingError
from ._mesh import MeshLike
from ._plan import LeafPlan, replicated_plan, ShardingPlan
from ._put import fetch, is_here, is_key
from ._tree import array_leaves, shown, struct_of, Tree


def replicate(tree: Tree, mesh: MeshLike) -> Tree:
    """Puts every array leaf of `tree` whole on every device of `mesh`, with one `jax.device_put`.

    ```python
    import eqshard, numpy as np
    tree = eqshard.replicate({"a": np.ones(3, "float32"), "name": "b"}, eqshard.MeshSpec(data=8))
    assert tree["a"].is_fully_replicated and len(tree["a"].devices()) == 8
    ```
    """
    return apply(replicated_plan(tree, mesh), tree)


def gather(tree: Tree, *, to: Literal["all"] | int | None = None, timeout: float | int = PATIENCE) -> Tree:
    """Brings every array leaf of `tree` whole to the host, as numpy.

    Typed PRNG keys, which numpy cannot hold, become arrays on one device. `jax.ShapeDtypeStruct`s lose their sharding.
    Arrays of which other processes hold parts are sent only if `to` asks for it, one after the other; all processes
    must then make the call.

    ```python
    import eqshard, numpy as np
    tree = {"x": np.arange(4, dtype="int32"), "name": "x"}
    placed = eqshard.replicate(tree, eqshard.MeshSpec(data=8))
    assert (eqshard.gather(placed)["x"] == tree["x"]).all()
    ```

    **Arguments:**

    - `to`: `"all"`: every process gets every array; or the index of the process that does: on the others each jax
        array becomes a `jax.ShapeDtypeStruct`.
    - `timeout`: with `to`, seconds to wait for the other processes.

    **Raises:**

    - `ProcessError`: the processes do not gather the same arrays, or one does not gather them in time.
    - `ShardingError`: a leaf is traced; or a part of it lies in another process, and `to` is not given.
    """
    leaves, treedef = jtu.tree_flatten(tree)
    if isinstance(to, int) and not 0 <= to < jax.process_count():
        raise ShardingError(f"`to={to}` is no process: there are {jax.process_count()}.")
    for path, x in array_leaves(tree):
        if isinstance(x, Tracer):
            raise ShardingError(f"cannot gather {shown(path)} to the host: it is being traced. Use `replicate` in jit.")
        if isinstance(x, jax.Array) and to is None and not is_here(x):
            raise ShardingError(
                f"cannot gather {shown(path)}: part of it lies in another process. Let every process call "
                '`gather(tree, to="all")` to have it everywhere, or `gather(tree, to=0)` to have it in process 0.'
            )
    if to is not None:
        sent = [(path, x, None) for path, x in array_leaves(tree) if isinstance(x, jax.Array) and not is_here(x)]
        agree_to_move(f"gather(to={to!r})", sent, timeout=timeout)
    keys = {i: jax.random.key_impl(x) for i, x in enumerate(leaves) if is_key(x)}
    data = [jax.random.key_data(x) if i in keys else x for i, x in enumerate(leaves)]
    host: list[Any] = [fetch(x) if isinstance(x, jax.Array) and not is_here(x) else x for x in data]
    if isinstance(to, int) and jax.process_index() != to:
        host = [struct_of(x) if isinstance(x, jax.Array) else x for x in leaves]
        keys = {}
    for i, x in enumerate(host):
        if isinstance(x, jax.Array) and x.size == 0:  # from jit on Explicit axes, its pieces may have wrong shapes
            host[i] = np.zeros(x.shape, x.dtype)
    there = [i for i, x in enumerate(host) if isinstance(x, jax.Array)]
    for i, x in zip(there, jax.device_get([host[i] for i in there])):
        host[i] = x
    for i, x in enumerate(host):
        if isinstance(x, jax.ShapeDtypeStruct):
            host[i] = struct_of(x)
        elif i in keys:
            host[i] = jax.random.wrap_key_data(x, impl=keys[i])
    return jtu.tree_unflatten(treedef, host)


def shard_and_gather_fns(
    plan: ShardingPlan,
) -> tuple[dict[str, Callable[[Any], Any]], dict[str, Callable[[Any], Any]]]:
    """For each leaf a function that lays it out, and one that brings it whole to the host, by path.

    ```python
    import eqshard, numpy as np
    from jax.sharding import PartitionSpec as P
    tree = {"w": np.arange(8.0, dtype="float32")}
    plan = eqshard.replicated_plan(tree, eqshard.MeshSpec(x=4)).at("w").set(P("x"))
    shard, gather = eqshard.shard_and_gather_fns(plan)
    placed = shard["['w']"](tree["w"])
    assert placed.sharding.spec == P("x") and (gather["['w']"](placed) == tree["w"]).all()
    ```
    """

    def shard_fn(leaf: LeafPlan) -> Callable[[Any], Any]:
        one = ShardingPlan(plan.mesh, (replace(leaf, path=""),))
        return lambda x: apply(one, x)

    return {leaf.path: shard_fn(leaf) for leaf in plan}, {leaf.path: gather for leaf in plan}
