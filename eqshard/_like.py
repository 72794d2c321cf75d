"""Plans for what is shaped like parameters: optimizer state, averages, gradients, accumulators."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from ._auto import plan_leaves
from ._errors import MismatchError
from ._plan import LeafPlan, ShardingPlan
from ._spec import canonical
from ._tree import path_name


def plan_like(plan: ShardingPlan, like: Callable[[Any], PyTree[Any]] | PyTree[Any]) -> ShardingPlan:
    """The plan of a tree that holds things shaped like the parameters of `plan`.

    A leaf follows the parameter whose path its own path ends with: Adam's `[0].mu.embed.weight` lies as
    `.embed.weight`. Factored moments follow the dimensions that they keep; stacked ones (a history of gradients) have
    their new dimensions whole. Everything else, counters first of all, is whole on every device.

    ```python
    import equinox as eqx, eqshard, jax, optax
    model = eqx.filter_eval_shape(eqx.nn.Linear, 512, 512, key=jax.random.key(0))
    plan = eqshard.auto_plan(model, eqshard.MeshSpec(fsdp=8))
    state_plan = eqshard.plan_like(plan, optax.adamw(1e-3).init)
    assert state_plan["[0].mu.weight"].spec == plan[".weight"].spec
    ```

    **Arguments:**

    - `like`: a function of the parameters, such as an optimizer's `init`: it is called on shapes, and sees the
        floating-point leaves of the plan in a flat dictionary. Or the tree itself, or its shapes; use this for a
        function that needs the parameters in their own structure (optax's `multi_transform` with a tree of labels).

    **Returns:**

    A plan for the tree, at rest as in use: states are updated where they lie.
    """
    if not callable(like) or isinstance(like, jtu.Partial):
        return _from_tree(plan, like)
    params = {
        leaf.path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for leaf in plan
        if not leaf.dtype.startswith("key<") and jnp.issubdtype(leaf.dtype, jnp.inexact)
    }
    rows = []
    for path, x in jtu.tree_flatten_with_path(jax.eval_shape(like, params))[0]:
        own = [key.key for key in path if isinstance(key, jtu.DictKey) and key.key in params]
        if len(own) > 1:
            raise MismatchError(f"{path_name(path)} belongs to two parameters, {own[0]} and {own[1]}.")
        # In the real tree the parameters' own structure stands where the flat dictionary was.
        name = "".join(key.key if key in map(jtu.DictKey, own) else path_name((key,)) for key in path)
        rows.append(_follow(name, x.shape, str(x.dtype.name), plan[own[0]] if own else None, plan))
    return ShardingPlan(plan.mesh, tuple(rows))


def _from_tree(plan: ShardingPlan, tree: PyTree[Any]) -> ShardingPlan:
    by_path = {leaf.path: leaf for leaf in plan}

    def row(path: str, shape: tuple[int, ...], dtype: str) -> LeafPlan:
        return _follow(path, shape, dtype, _named_after(path, by_path), plan)

    return plan_leaves(tree, plan.mesh, row)


_KEY = re.compile(r"\[(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[^\]'\"]*)\]|\.[^.\[]+")


def _named_after(path: str, by_path: dict[str, LeafPlan]) -> LeafPlan | None:
    """The parameter with the longest path that `path` ends with, at the border of a key."""
    for start in [m.start() for m in _KEY.finditer(path)]:
        if path[start:] in by_path:
            return by_path[path[start:]]
    return by_path.get("")


def _follow(path: str, shape: tuple[int, ...], dtype: str, param: LeafPlan | None, plan: ShardingPlan) -> LeafPlan:
    spec, why = PartitionSpec(), "belongs to no parameter"
    if param is not None:
        dims = _kept_dims(shape, param.shape, keep_last="v_col" in path)
        entries = tuple(param.spec) + (None,) * (len(param.shape) - len(param.spec))
        if dims is None:
            why = f"not shaped like {param.path}"
        else:
            spec = canonical(PartitionSpec(*(None if d is None else entries[d] for d in dims)), plan.mesh.shape)
            why = f"as {param.path}" if shape == param.shape else f"as the dims it keeps of {param.path}"
    kind = None if param is None else param.memory_kind
    return LeafPlan(path, tuple(shape), dtype, spec, spec, kind, why)


def _kept_dims(shape: tuple[int, ...], of: tuple[int, ...], keep_last: bool) -> list[int | None] | None:
    """Which dimension of the parameter each dimension is; None for a new one in front.

    Of several ways to leave dimensions out, the last ones go, or the first ones if `keep_last`: Adafactor's column
    statistics of a square matrix are the rows' twins in shape.
    """
    if shape == of:
        return list(range(len(of)))
    if len(shape) > len(of):
        new = len(shape) - len(of)
        return [None] * new + list(range(len(of))) if of and shape[new:] == of else None
    ways: list[list[int | None]] = [
        [*dims] for dims in itertools.combinations(range(len(of)), len(shape)) if tuple(of[d] for d in dims) == shape
    ]
    if not ways or not shape:
        return None
    return ways[-1] if keep_last else ways[0]
