"""Layouts as an expert writes them by hand: mesh axes for the named dims of weights and activations."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
from jax.sharding import PartitionSpec as P

import eqshard
from eqshard._tree import array_leaves, dtype_name, path_name
from eqshard._use import use as eqshard_use

from ._case import Case, Dims, dims_of, Hooks


Axes = tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """A layout of a whole step.

    **Attributes:**

    - `plans`: one for each argument.
    - `step`: the step with the layouts of inner values and of what it returns written in.
    - `options`: for the compiler.
    - `seconds`, `nbytes`: what whoever made the layout predicts of a step, if anything.
    """

    name: str
    plans: tuple[eqshard.ShardingPlan, ...]
    step: Callable[..., Any]
    options: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    nbytes: float = 0.0


@dataclass(frozen=True)
class Recipe:
    """Which mesh axes the named dims lie on.

    **Attributes:**

    - `weights`: of weights in use.
    - `values`: of activations, of the batch, and of caches.
    - `spread`: axes on which weights at rest are spread beside, on their largest dim.
    - `spread_state`: axes on which only the optimizer's state is spread.
    - `pinned`: whether activations are pinned.
    - `used`: whether weights are brought to their layout in use where they are used.
    """

    weights: Mapping[str, Axes] = field(default_factory=dict)
    values: Mapping[str, Axes] = field(default_factory=dict)
    spread: Axes = ()
    spread_state: Axes = ()
    pinned: bool = True
    used: bool = True


def recipes(mesh: eqshard.MeshSpec) -> dict[str, Recipe]:
    """The hand-written layouts for a mesh, whose axis "tp" or else last one is the one for splitting the model."""
    every = mesh.names
    model = "tp" if mesh.has("tp") else every[-1]
    data = tuple(n for n in every if n != model)
    whole = {"batch": every, "expert_batch": every}
    split = dict.fromkeys(("heads", "mlp", "vocab"), (model,))
    tp_values = {"batch": data, "expert_batch": data, **split}
    fsdp = Recipe(values=whole, spread=every)
    made = {
        "dp": Recipe(values=whole),
        "zero1": Recipe(values=whole, spread_state=every),
        "fsdp": fsdp,
        "fsdp_pinned": replace(fsdp, used=False),
        "fsdp_weights": replace(fsdp, used=False, pinned=False),
    }
    if data:
        made["megatron"] = Recipe(weights=split, values=tp_values)
        made["tp_fsdp"] = Recipe(weights=split, values=tp_values, spread=data)
        made["tp_fsdp_weights"] = replace(made["tp_fsdp"], used=False, pinned=False)
        experts = {"batch": every, "expert_batch": data, "expert": (model,)}
        made["ep"] = Recipe(weights={"expert": (model,)}, values=experts, spread=every)
        made |= _along_other_axes(every, data, split)
    return made


def _along_other_axes(every: Axes, data: Axes, split: Mapping[str, Axes]) -> dict[str, Recipe]:
    """The same ideas with fewer axes, or more: nobody's choice on this mesh, but a planner has to know by how much."""
    batch = {"batch": data, "expert_batch": data}
    grid = {"embed": data, **split}
    return {
        "dp_1d": Recipe(values=batch),
        "fsdp_1d": Recipe(values=batch, spread=data),
        "tp_1d": Recipe(weights=dict.fromkeys(split, every), values=dict.fromkeys(split, every)),
        "tp_2d": Recipe(weights=grid, values=grid),
    }


def hand_written(case: Case, mesh: eqshard.MeshSpec) -> dict[str, Layout]:
    """Every recipe that says something of this case; expert parallel only where there are experts."""
    names = {name for dims in case.model.weights.values() for name in dims}
    return {
        name: layout(case, mesh, name, recipe)
        for name, recipe in recipes(mesh).items()
        if (name != "ep" or "expert" in names) and (name != "zero1" or "state" in case.kinds)
    }


def layout(case: Case, mesh: eqshard.MeshSpec, name: str, recipe: Recipe) -> Layout:
    """The plans and the step of a recipe."""
    weights = weight_plan(case, mesh, recipe)
    plans = []
    for kind, arg in zip(case.kinds, case.args):
        if kind == "weights":
            plans.append(weights)
        elif kind == "state":
            stored = replace(recipe, spread=recipe.spread_state) if recipe.spread_state else recipe
            plans.append(eqshard.plan_like(weight_plan(case, mesh, stored), arg))
        else:
            plans.append(value_plan(case, mesh, recipe, arg))
    return with_plans(case, name, tuple(plans), recipe)


def with_plans(case: Case, name: str, plans: tuple[eqshard.ShardingPlan, ...], recipe: Recipe) -> Layout:
    """A layout of plans that were found somehow; what the step returns lies as what it was given."""
    inner = case.build(_hooks(case, plans, recipe))

    def step(*args: Any) -> Any:
        out = list(inner(*args))
        for i in case.donate:  # a step returns what it consumes first, in the same order
            at = case.donate.index(i)
            out[at] = eqshard.apply(plans[i], out[at])
        return tuple(out)

    return Layout(name, plans, step)


def weight_plan(case: Case, mesh: eqshard.MeshSpec, recipe: Recipe) -> eqshard.ShardingPlan:
    """In use as the recipe says; at rest spread further."""
    rows = []
    for path, leaf in array_leaves(case.args[0]):
        dims = dims_of(path, len(leaf.shape), case.model.weights)
        use = eqshard.fit_spec(spec_of(dims, recipe.weights), leaf.shape, mesh).spec
        rest = spread(use, tuple(leaf.shape), dims, recipe.spread, mesh)
        rows.append(eqshard.LeafPlan(path, tuple(leaf.shape), dtype_name(leaf), rest, use, why="by hand"))
    return eqshard.ShardingPlan(mesh, rows)


def value_plan(case: Case, mesh: eqshard.MeshSpec, recipe: Recipe, tree: Any) -> eqshard.ShardingPlan:
    """The layouts of what a step reads beside weights."""
    rows = []
    for path, leaf in array_leaves(tree):
        spec = spec_of(dims_of(path, len(leaf.shape), case.model.values), recipe.values)
        fitted = eqshard.fit_spec(spec, leaf.shape, mesh).spec
        rows.append(eqshard.LeafPlan(path, tuple(leaf.shape), dtype_name(leaf), fitted, fitted, why="by hand"))
    return eqshard.ShardingPlan(mesh, rows)


def spec_of(dims: Dims, axes: Mapping[str, Axes]) -> P:
    return P(*((axes.get(d) or None) if d is not None else None for d in dims))


def spread(spec: P, shape: tuple[int, ...], dims: Dims, axes: Axes, mesh: eqshard.MeshSpec) -> P:
    """`spec` with those of `axes` that it does not use on one more dim, the largest that they divide."""
    entries = list(spec) + [None] * (len(shape) - len(spec))
    used = {a for e in entries if e is not None for a in ((e,) if isinstance(e, str) else e)}
    free = tuple(a for a in axes if a not in used)
    if not free or sum(n > 1 and d != "layers" for n, d in zip(shape, dims)) < 2:  # norms and biases stay whole
        return spec
    for d in sorted(range(len(shape)), key=lambda d: -shape[d]):
        if entries[d] is None and dims[d] != "layers" and shape[d] % mesh.size(free) == 0:
            entries[d] = free
            return P(*entries)
    return spec


def _hooks(case: Case, plans: tuple[eqshard.ShardingPlan, ...], recipe: Recipe) -> Hooks:
    weights = plans[case.kinds.index("weights")]
    mesh = weights.mesh

    def pin(x: Any, name: str) -> Any:
        spec = spec_of(dims_of(name, x.ndim, case.model.values), recipe.values)
        return eqshard.constrain_to(x, spec, mesh, strict=False)

    def use(tree: Any, at: str) -> Any:
        return eqshard_use(_part(weights, tree, at), tree)

    def use_with_state(tree: Any, at: str) -> Any:  # the weights are whole at rest, so there is nothing else to do
        return _gradient_as(_part(plans[case.kinds.index("state")].select("[0].mu"), tree, at), tree)

    plain = Hooks()
    used = use_with_state if recipe.spread_state else use
    return Hooks(pin if recipe.pinned else plain.pin, used if recipe.used else plain.use)


def _gradient_as(plan: eqshard.ShardingPlan, tree: Any) -> Any:
    """`tree` itself, whose gradient is laid out as `plan` while it is still in the dtype of computation."""
    arrays, rest = eqx.partition(tree, eqx.is_inexact_array)
    same = jax.custom_vjp(lambda x: x)
    same.defvjp(lambda x: (x, None), lambda _, gradient: (eqshard.apply(plan, gradient),))
    return eqx.combine(same(arrays), rest)


def _part(plan: eqshard.ShardingPlan, tree: Any, at: str) -> eqshard.ShardingPlan:
    """The plan for a part of a tree as it is now: cast perhaps, and perhaps one of the layers stacked in `plan`."""
    rows = []
    for path, x in jtu.tree_flatten_with_path(tree)[0]:
        if not eqshard.is_array(x):
            continue
        row = plan[at + path_name(path)]
        gone = len(row.shape) - x.ndim
        rows.append(
            replace(
                row,
                path=path_name(path),
                shape=tuple(x.shape),
                dtype=dtype_name(x),
                spec=P(*tuple(row.spec)[gone:]),
                use=P(*tuple(row.use)[gone:]),
            )
        )
    return eqshard.ShardingPlan(plan.mesh, rows)
