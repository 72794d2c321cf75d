"""Layouts that know the shapes of weights alone, as several libraries make them: nothing is said of activations."""

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import eqshard
from eqshard._tree import array_leaves, dtype_name

from ._case import Case
from ._layouts import Layout, Recipe, value_plan, with_plans


def from_weights(case: Case, mesh: eqshard.MeshSpec) -> dict[str, Layout]:
    """The layouts by name; eformer's if it is installed, and there are devices for the mesh, which it asks for."""
    made = {
        "auto_plan": eqshard.auto_plan(case.args[0], mesh),
        "scalax_fsdp": _plan(case, mesh, lambda shape: largest_divisible(shape, mesh)),
    }
    if importlib.util.find_spec("eformer") is not None and jax.device_count() >= mesh.size():
        made["eformer"] = _eformer_plan(case, mesh)
    return {name: _layout(case, name, weights) for name, weights in made.items()}


def largest_divisible(shape: tuple[int, ...], mesh: eqshard.MeshSpec, least: int = 2**20) -> P:
    """scalax's rule for FSDP: an array of at least so many elements is cut along its largest dim that divides."""
    dims = [d for d in range(len(shape)) if shape[d] % mesh.size() == 0]
    if not dims or math.prod(shape) < least:
        return P()
    best = max(dims, key=lambda d: shape[d])
    return P(*(mesh.names if d == best else None for d in range(len(shape))))


def _eformer_plan(case: Case, mesh: eqshard.MeshSpec) -> eqshard.ShardingPlan:
    from eformer.escale import auto_partition_spec

    built = mesh.build()
    # It wants a real array; this one has one element, seen many times.
    return _plan(case, mesh, lambda shape: auto_partition_spec(np.broadcast_to(np.float32(0), shape), built))


def _plan(case: Case, mesh: eqshard.MeshSpec, rule: Callable[[tuple[int, ...]], P]) -> eqshard.ShardingPlan:
    rows = []
    for path, leaf in array_leaves(case.args[0]):
        shape = tuple(leaf.shape)
        spec = rule(shape)
        rows.append(eqshard.LeafPlan(path, shape, dtype_name(leaf), spec, spec))
    return eqshard.ShardingPlan(mesh, rows)


def _layout(case: Case, name: str, weights: eqshard.ShardingPlan) -> Layout:
    """The state as the weights, and the batch over all axes."""
    every = weights.mesh.names
    recipe = Recipe(values={"batch": every}, pinned=False, used=False)
    plans: list[Any] = []
    for kind, arg in zip(case.kinds, case.args):
        if kind == "weights":
            plans.append(weights)
        elif kind == "state":
            plans.append(eqshard.plan_like(weights, arg))
        else:
            plans.append(value_plan(case, weights.mesh, recipe, arg))
    return with_plans(case, name, tuple(plans), recipe)
