"""Layouts that the caller of `step_plan` gives: by argument, by path, by plan, by logical names."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from .._axes import PartitionAxis
from .._errors import MismatchError
from .._logical import logical_spec
from .._mesh import MeshSpec
from .._plan import ShardingPlan
from .._spec import canonical, check
from .._tree import did_you_mean, shown, some
from ._trace import Leaf, parameters, Traced


Fixed = PartitionSpec | ShardingPlan | Sequence[str | None]
"""A layout, a plan of some leaves, or logical names."""


def fixed_specs(
    fn: Callable[..., Any],
    traced: Traced,
    fixed: Mapping[str, Fixed] | Sequence[ShardingPlan | None],
    mesh: MeshSpec,
    names: PartitionAxis,
) -> dict[int, PartitionSpec]:
    """The layouts that were given, by the number of the argument's leaf; of two for one leaf, the first."""
    arguments = parameters(fn)
    found: dict[int, PartitionSpec] = {}
    if not isinstance(fixed, Mapping):
        for number, plan in enumerate(fixed):
            if plan is not None:
                _by_plan(plan, [(i, x) for i, x in enumerate(traced.ins) if x.arg == number], number, mesh, found)
        return found
    for key, value in fixed.items():
        hits = [(i, leaf) for i, leaf in enumerate(traced.ins) if _means(key, leaf, arguments)]
        if not hits:
            known = [*arguments, *(leaf.path for leaf in traced.ins)]
            raise MismatchError(f"`fixed` names {key!r}, which is no argument and no leaf." + did_you_mean(key, known))
        if isinstance(value, ShardingPlan):
            _by_plan(value, hits, key, mesh, found)
            continue
        for i, leaf in hits:
            spec = value if isinstance(value, PartitionSpec) else _logical(value, leaf, mesh, names)
            cut = canonical(PartitionSpec(*tuple(spec)[: len(leaf.shape)]), mesh.shape)
            check(cut, leaf.shape, mesh.shape, leaf.path, leaf.dtype)
            found.setdefault(i, cut)
    return found


def _means(key: str, leaf: Leaf, arguments: list[str]) -> bool:
    if key in arguments:
        return leaf.arg < len(arguments) and arguments[leaf.arg] == key
    return re.search(key, leaf.path) is not None


def _logical(axes: Sequence[str | None], leaf: Leaf, mesh: MeshSpec, names: PartitionAxis) -> PartitionSpec:
    rank = len(leaf.shape)
    return logical_spec(tuple(axes)[:rank], mesh, names=names, shape=leaf.shape)


def _by_plan(
    plan: ShardingPlan, leaves: list[tuple[int, Leaf]], where: object, mesh: MeshSpec, found: dict[int, PartitionSpec]
) -> None:
    if plan.mesh.shape != mesh.shape:
        raise MismatchError(f"`fixed` has a plan for {where!r} on {plan.mesh}, but the step is planned on {mesh}.")
    unknown = set(plan.specs()) - {leaf.path for _, leaf in leaves}
    if unknown:
        raise MismatchError(
            f"`fixed` has a plan for {where!r} with leaves that it has not: {some(map(shown, unknown))}."
        )
    for i, leaf in leaves:
        if leaf.path in plan:
            found.setdefault(i, plan[leaf.path].spec)
