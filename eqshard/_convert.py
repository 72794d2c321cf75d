"""Plans carried over to another mesh."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

from jax.sharding import PartitionSpec

from ._errors import ShardingError, UnknownAxisError
from ._mesh import MeshLike, MeshSpec
from ._plan import LeafPlan, ShardingPlan
from ._spec import canonical, entry_axes, Fit, fit_spec, GivenUp, shard_factor, spec_text, UNCONSTRAINED


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
    """
    if strategy not in STRATEGIES:
        raise ShardingError(f"unknown `strategy` {strategy!r}: it is one of {', '.join(map(repr, STRATEGIES))}.")
    new = MeshSpec.of(mesh)
    new.size()
    for old_name, new_name in (rename or {}).items():
        plan.mesh.size(old_name)
        if not new.has(new_name):
            raise UnknownAxisError(f"`rename` maps {old_name!r} to {new_name!r}; the mesh has {', '.join(new.names)}.")
    if new == plan.mesh and not rename:
        return plan
    known: dict[tuple[tuple[int, ...], PartitionSpec], Fit] = {}

    def carried(shape: tuple[int, ...], spec: PartitionSpec) -> Fit:
        if (shape, spec) not in known:
            fit = _keep_layout(spec, shape, new, rename or {})
            if strategy == "preserve_balance":
                fit = _keep_balance(spec, fit, shape, shard_factor(spec, plan.mesh), new)
            known[shape, spec] = fit
        return known[shape, spec]

    def row(leaf: LeafPlan) -> LeafPlan:
        rest, use = carried(leaf.shape, leaf.spec), carried(leaf.shape, leaf.use)
        why = leaf.why if rest.spec == leaf.spec else f"from {spec_text(leaf.spec)} on the mesh before"
        lost = rest.given_up + tuple(g for g in use.given_up if g not in rest.given_up)
        return replace(leaf, spec=rest.spec, use=use.spec, why=why, given_up=lost)

    return ShardingPlan(new, tuple(map(row, plan)))


def _keep_layout(spec: PartitionSpec, shape: tuple[int, ...], mesh: MeshSpec, rename: Mapping[str, str]) -> Fit:
    entries, absent = [], []
    for dim, entry in enumerate(spec):
        axes = tuple(rename.get(a, a) for a in entry_axes(entry))
        lost = tuple(a for a in axes if not mesh.has(a))
        if lost:
            absent.append(GivenUp(dim, shape[dim], lost))
        entries.append(entry if entry is UNCONSTRAINED else tuple(a for a in axes if mesh.has(a)))
    fit = fit_spec(PartitionSpec(*entries), shape, mesh)
    return Fit(fit.spec, (*absent, *fit.given_up))


def _keep_balance(old: PartitionSpec, fit: Fit, shape: tuple[int, ...], pieces: int, mesh: MeshSpec) -> Fit:
    """Of all ways to lay mesh axes on dimensions, the nearest to `pieces` pieces; then to the old dimensions."""
    if shard_factor(fit.spec, mesh) == pieces or UNCONSTRAINED in tuple(old):
        return fit
    axes = [a for a, n in mesh.axes if n > 1]
    before = {d for d, e in enumerate(old) if entry_axes(e)}
    best: tuple[tuple[float, int, int, int], PartitionSpec] | None = None
    for places in itertools.product([None, *range(len(shape))], repeat=len(axes)):
        split = [math.prod(mesh.size(a) for a, p in zip(axes, places) if p == d) for d in range(len(shape))]
        if any(n % s for n, s in zip(shape, split)):
            continue
        used = {p for p in places if p is not None}
        spec = PartitionSpec(*(tuple(a for a, p in zip(axes, places) if p == d) for d in range(len(shape))))
        kept = sum(p is not None and a in entry_axes(fit.spec[p] if p < len(fit.spec) else None)
                   for a, p in zip(axes, places))  # fmt: skip
        score = (
            abs(math.log(math.prod(split) / pieces)),
            len(used ^ before),
            sum(p is not None for p in places),
            -kept,
        )
        if best is None or score < best[0]:
            best = score, spec
    assert best is not None
    return Fit(canonical(best[1], mesh.shape), ())
