"""Plans for what is shaped like parameters: optimizer state, averages, gradients, accumulators."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import PartitionSpec

from ._auto import plan_leaves
from ._errors import MismatchError
from ._plan import LeafPlan, ShardingPlan
from ._spec import canonical, UNCONSTRAINED
from ._tree import array_leaves, dtype_name, path_name, Tree


def plan_like(plan: ShardingPlan, like: Callable[[Any], Tree] | Tree) -> ShardingPlan:
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
        function that needs the parameters in their own structure (optax's `multi_transform` with a tree of labels),
        as `plan_like(plan, jax.eval_shape(init, params))`.

    **Returns:**

    A plan for the tree, at rest as in use: states are updated where they lie.

    **Raises:**

    - `MismatchError`: the function does not work on a flat dictionary.
    """
    return _from_function(plan, like) if _is_function(like) else _from_tree(plan, like)


def _is_function(like: Any) -> bool:
    """A model can be called too, but has arrays; a method of a module has them, but is a function."""
    return callable(like) and (hasattr(like, "__func__") or not array_leaves(like))


def _from_function(plan: ShardingPlan, init: Callable[[Any], Tree]) -> ShardingPlan:
    params = {
        leaf.path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for leaf in plan
        if not leaf.dtype.startswith("key<") and jnp.issubdtype(leaf.dtype, jnp.inexact)
    }
    try:
        state = jax.eval_shape(init, params)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise MismatchError(
            f"the function does not work on the plan's parameters in a flat dictionary ({type(error).__name__}: "
            f"{error}). If it needs their own structure, call it yourself: "
            "`plan_like(plan, jax.eval_shape(init, params))`."
        ) from error
    rows = []
    for path, x in jtu.tree_flatten_with_path(state)[0]:
        own = [i for i, key in enumerate(path) if isinstance(key, jtu.DictKey) and key.key in params]
        # In the real tree the parameters' own structure stands where the flat dictionary was.
        parts = [path[i].key if i in own[-1:] else path_name((key,)) for i, key in enumerate(path)]
        param = plan[path[own[-1]].key] if own else None
        before = "".join(parts[: own[-1]]) if own else ""
        rows.append(_follow("".join(parts), tuple(x.shape), dtype_name(x), param, before, plan))
    return ShardingPlan(plan.mesh, rows)


def _from_tree(plan: ShardingPlan, tree: Tree) -> ShardingPlan:
    by_path = {leaf.path: leaf for leaf in plan}

    def row(path: str, shape: tuple[int, ...], dtype: str) -> LeafPlan:
        param = _named_after(path, by_path)
        before = path[: len(path) - len(param.path)] if param else ""
        return _follow(path, shape, dtype, param, before, plan)

    return plan_leaves(tree, plan.mesh, row)


_KEY = re.compile(r"\[(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[^\]'\"]*)\]|\.[^.\[]+")


def _named_after(path: str, by_path: dict[str, LeafPlan]) -> LeafPlan | None:
    """The parameter with the longest path that `path` ends with, at the border of a key."""
    for key in _KEY.finditer(path):
        if path[key.start() :] in by_path:
            return by_path[path[key.start() :]]
    return by_path.get("")


def _follow(
    path: str, shape: tuple[int, ...], dtype: str, param: LeafPlan | None, before: str, plan: ShardingPlan
) -> LeafPlan:
    whole = PartitionSpec()
    if param is None or not shape or dtype.startswith("key<"):
        return LeafPlan(path, shape, dtype, whole, whole, None, "belongs to no parameter" if shape else "a scalar")
    dims = _kept_dims(shape, param.shape, before)
    if dims is None:
        return LeafPlan(path, shape, dtype, whole, whole, None, f"not shaped like {param.path}")
    entries = tuple(param.spec) + (None,) * (len(param.shape) - len(param.spec))
    kept = [None if d is None else entries[d] for d in dims]
    spec = canonical(PartitionSpec(*(None if e is UNCONSTRAINED else e for e in kept)), plan.mesh.shape)
    why = f"as {param.path}" if shape == param.shape else f"as the dims it keeps of {param.path}"
    return LeafPlan(path, shape, dtype, spec, spec, param.memory_kind, why)


def _kept_dims(shape: tuple[int, ...], of: tuple[int, ...], before: str) -> list[int | None] | None:
    """Which dimension of the parameter each dimension is; None for a new one in front."""
    if shape == of:
        return list(range(len(of)))
    if len(shape) >= len(of):
        new = len(shape) - len(of)
        return [None] * new + list(range(len(of))) if new and of and shape[new:] == of else None
    if len(shape) == len(of) - 1 and (factored := re.search(r"\.v_(row|col)$", before)):
        # Adafactor factors the two largest dims; of a square matrix both statistics have one shape.
        left_out = int(np.argsort(of)[-1 if factored[1] == "row" else -2])
        kept = [d for d in range(len(of)) if d != left_out]
        if tuple(of[d] for d in kept) == shape:
            return [*kept]
    for dims in itertools.combinations(range(len(of)), len(shape)):
        if tuple(of[d] for d in dims) == shape:
            return [*dims]
    return None
