"""Plans carried over to another mesh."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jax.sharding import PartitionSpec

from ._errors import RankError, ShardingError, UnknownAxisError
from ._mesh import MeshLike, MeshSpec
from ._plan import LeafPlan, ShardingPlan
from ._spec import entry_axes, Fit, fit_spec, GivenUp, shard_factor, spec_text, UNCONSTRAINED
from ._spread import reachable, spec_of, units_of
from ._tree import did_you_mean, divisible_shape, shown


STRATEGIES = ("preserve_layout", "preserve_balance")


def convert_plan(
    plan: ShardingPlan,
    mesh: MeshLike,
    *,
    strategy: str = "preserve_layout",
    rename: Mapping[str, str] | None = None,
) -> ShardingPlan:
    """The plan for another mesh: other sizes, other axes, other names; each leaf by its own shape.

    ```python
    import eqshard, jax
    from jax.sharding import PartitionSpec as P
    tree = jax.ShapeDtypeStruct((512, 512), "float32")
    plan = eqshard.auto_plan(tree, eqshard.MeshSpec(dp=2, tp=4))
    other = eqshard.convert_plan(plan, eqshard.MeshSpec(dp=4, model=2), rename={"tp": "model"})
    assert plan[""].spec == P("tp", "dp") and other[""].spec == P("model", "dp")
    ```

    **Arguments:**

    - `strategy`: `"preserve_layout"` keeps each axis on the dimension that it is on, as far as the new mesh has it and
        it divides; `"preserve_balance"` keeps the number of pieces of each leaf, as near as the new mesh can, with
        whatever axes that takes, on the same dimensions if possible.
    - `rename`: old axis names to new ones.

    **Returns:**

    A plan in which every leaf fits; what had to be given up is recorded. For the same mesh, the same plan.

    **Raises:**

    - `ShardingError`: no such strategy; or a renaming after which a leaf would use an axis twice.
    - `UnknownAxisError`: `rename` names an axis that the old or the new mesh lacks.
    """
    if strategy not in STRATEGIES:
        raise ShardingError(f"unknown `strategy` {strategy!r}: it is one of {', '.join(map(repr, STRATEGIES))}.")
    new, names = MeshSpec.of(mesh), dict(rename or {})
    for old_name, new_name in names.items():
        plan.mesh.size(old_name)
        if not new.has(new_name):
            raise UnknownAxisError(
                f"`rename` maps {old_name!r} to {new_name!r}; the mesh has {', '.join(map(repr, new.names))}."
                + did_you_mean(new_name, new.names)
            )
    if new == plan.mesh and all(old == now for old, now in names.items()):
        return plan
    carry = _Carrier(plan.mesh, new, names, strategy == "preserve_balance")
    return ShardingPlan(new, map(carry.row, plan))


class _Carrier:
    """Carries rows over; each kind of leaf is worked out once."""

    def __init__(self, old: MeshSpec, new: MeshSpec, names: dict[str, str], balance: bool):
        self.old, self.new, self.names, self.balance = old, new, names, balance
        self.known: dict[Any, Fit] = {}

    def row(self, leaf: LeafPlan) -> LeafPlan:
        try:
            rest, use = self.fit(leaf.spec, leaf), self.fit(leaf.use, leaf)
        except ShardingError as error:
            raise type(error)(f"{shown(leaf.path)}: {error}") from None
        lost = rest.given_up + tuple(g for g in use.given_up if g not in rest.given_up)
        why = leaf.why if rest.spec == leaf.spec else self.reason(leaf.spec, rest.spec)
        return replace(leaf, spec=rest.spec, use=use.spec, why=why, given_up=lost)

    def reason(self, before: PartitionSpec, now: PartitionSpec) -> str:
        pieces = shard_factor(before, self.old), shard_factor(now, self.new)
        change = f", {pieces[0]} pieces" + (f" and now {pieces[1]}" if pieces[0] != pieces[1] else "")
        return f"from {spec_text(before)} on {self.old}{change}"

    def fit(self, spec: PartitionSpec, leaf: LeafPlan) -> Fit:
        if len(spec) > len(leaf.shape):
            raise RankError(
                f"{spec_text(spec)} has {len(spec)} entries, but the leaf has {len(leaf.shape)} dimensions."
            )
        key = spec, leaf.shape, leaf.dtype
        if key not in self.known:
            fit = self.same_layout(spec, leaf.shape)
            if self.balance and UNCONSTRAINED not in tuple(spec):
                fit = self.same_balance(spec, fit, divisible_shape(leaf.shape, leaf.dtype))
            self.known[key] = fit
        return self.known[key]

    def same_layout(self, spec: PartitionSpec, shape: tuple[int, ...]) -> Fit:
        entries, absent = [], []
        for dim, entry in enumerate(spec):
            axes = tuple(self.names.get(a, a) for a in entry_axes(entry))
            lost = tuple(a for a in axes if not self.new.has(a))
            if lost:
                absent.append(GivenUp(dim, shape[dim], lost))
            entries.append(entry if entry is UNCONSTRAINED else tuple(a for a in axes if self.new.has(a)))
        fit = fit_spec(PartitionSpec(*entries), shape, self.new)
        return Fit(fit.spec, (*absent, *fit.given_up))

    def same_balance(self, old: PartitionSpec, fit: Fit, shape: tuple[int, ...]) -> Fit:
        """Of all ways to lay mesh axes on dimensions, the nearest to as many pieces; then to the old dimensions."""
        pieces = shard_factor(old, self.old)
        if shard_factor(fit.spec, self.new) == pieces:
            return fit
        units = units_of(self.new, list(self.new.names))
        kept = [entry_axes(e) for e in fit.spec] + [()] * (len(shape) - len(fit.spec))
        before = {dim for dim, entry in enumerate(old) if entry_axes(entry)}

        def cost(i: int, dim: int | None) -> int:  # few axes, and those where they were before
            return 0 if dim is None else 1000 - (units.axes[i][0] in kept[dim])

        def score(small: tuple[int, ...], way: int) -> Any:
            used = {dim for dim, (n, m) in enumerate(zip(shape, small)) if n != m}
            now = math.prod(n // m for n, m in zip(shape, small))
            return abs(math.log(now / pieces)), len(used ^ before), way, small

        ways = reachable(shape, units.factors, cost)
        best = min(ways, key=lambda small: score(small, ways[small].cost))
        return Fit(spec_of(ways[best].places, units), ())
