"""Why a leaf lies as it does, in words."""

import math
import re
from typing import TYPE_CHECKING

from jax.sharding import PartitionSpec

from ._errors import ShardingError
from ._fold import fold_leaves
from ._leaf import LeafPlan
from ._mesh import MeshSpec
from ._pieces import device_count, dim_axes, factors, piece_shape
from ._plan import ShardingPlan
from ._spec import GivenUp, spec_text
from ._tree import is_dtype_name, itemsize, shown, size_text


if TYPE_CHECKING:
    from .program import StepPlan


def explain(plan: "ShardingPlan | StepPlan", path: str | None = None) -> str:
    """For each leaf: how it lies, what a device holds of it, why, and what was given up at which cost.

    Leaves that differ in the number of a layer only are told of once.

    ```python
    import eqshard, jax
    from jax.sharding import PartitionSpec as P
    tree = {"embed": jax.ShapeDtypeStruct((50257, 768), "float32")}
    plan = eqshard.replicated_plan(tree, eqshard.MeshSpec(fsdp=8, tp=2))
    plan = plan.at("embed").set(P("fsdp", "tp"), strict=False, why="the rule 'embed'")
    text = eqshard.explain(plan)
    assert "the rule 'embed'" in text and "dim 0 (50257) does not divide over fsdp" in text
    print(text)
    ```

    **Arguments:**

    - `plan`: a plan; or a `StepPlan`, of which it is told what products cut, what that costs, and what was not taken.
    - `path`: a leaf's path, or a regular expression that finds some; default: all leaves.

    **Raises:**

    - `MismatchError`: no leaf of that path.
    """
    if not isinstance(plan, ShardingPlan):
        if path is None:
            return plan.explain()
        raise ShardingError("a StepPlan has a plan for each argument: `explain(plan.args[0], path)`.")
    return "\n".join(
        _leaf_text(name, leaves, plan.mesh) for name, leaves in fold_leaves(_asked(plan, path), words=True)
    )


def _asked(plan: ShardingPlan, path: str | None) -> list[LeafPlan]:
    if path is None:
        return list(plan)
    if path in plan:
        return [plan[path]]
    try:
        found = [leaf for leaf in plan if re.search(path, leaf.path)]
    except re.error as error:
        raise ShardingError(f"`{path}` is neither a leaf's path nor a regular expression: {error}.") from None
    return found or [plan[path]]  # which raises, with what there is


def _leaf_text(name: str, leaves: list[LeafPlan], mesh: MeshSpec) -> str:
    leaf = leaves[0]
    many = f" ({len(leaves)} leaves)" if len(leaves) > 1 else ""
    lines = [f"{shown(name)} {leaf.type}, {size_text(_bytes(leaf, leaf.shape))}{many}"]
    lines.append(f"  at rest  {layout_text(leaf, leaf.spec, mesh)}")
    if leaf.use != leaf.spec:
        lines.append(f"  in use   {layout_text(leaf, leaf.use, mesh)}")
    if leaf.memory_kind is not None:
        lines.append(f"  memory   {leaf.memory_kind}")
    if leaf.why:
        lines.append(f"  why      {leaf.why}")
    lines += [f"  gave up  {given_up_text(leaf, lost, mesh)}" for lost in leaf.given_up]
    return "\n".join(lines)


def layout_text(leaf: LeafPlan, spec: PartitionSpec, mesh: MeshSpec) -> str:
    """`P('fsdp', 'tp'): 32 pieces of [1024,2048], 4.2 MB a device, 2 copies of each`."""
    cuts = factors(dim_axes(leaf.shape, spec, mesh.shape), mesh.shape)
    pieces, count = math.prod(cuts), device_count(mesh)
    if pieces == 1:
        return f"{spec_text(spec)}: whole on each of {count} devices, {size_text(_bytes(leaf, leaf.shape))} a device"
    piece = piece_shape(leaf.shape, cuts)
    copies = f", {count // pieces} copies of each" if count > pieces else ""
    shape = ",".join(map(str, piece))
    return f"{spec_text(spec)}: {pieces} pieces of [{shape}], {size_text(_bytes(leaf, piece))} a device{copies}"


def given_up_text(leaf: LeafPlan, lost: GivenUp, mesh: MeshSpec) -> str:
    """What was given up, and what it costs each device."""
    piece = piece_shape(leaf.shape, factors(dim_axes(leaf.shape, leaf.spec, mesh.shape), mesh.shape))
    held, factor = _bytes(leaf, piece), math.prod(max(mesh.shape.get(a, 1), 1) for a in lost.axes)
    return f"{lost}: +{size_text(held - held / factor)} a device"


def _bytes(leaf: LeafPlan, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * (itemsize(leaf.dtype) if is_dtype_name(leaf.dtype) else 0)
