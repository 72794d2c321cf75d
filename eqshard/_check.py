"""Does a plan work? What is wrong with it is told, not raised."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ._advice import advice, LARGE_BYTES, SMALL_BYTES, strays
from ._errors import (
    DuplicateAxisError,
    IndivisibleError,
    MeshError,
    MismatchError,
    RankError,
    ShardingError,
    UnknownAxisError,
)
from ._issue import Issue
from ._kinds import kinds
from ._leaf import LeafPlan
from ._match import local_shape
from ._mesh import MeshSpec
from ._narrow import narrow
from ._plan import ShardingPlan
from ._spec import check, UNCONSTRAINED
from ._tree import array_leaves, did_you_mean, dtype_name, is_dtype_name, Tree, type_text


def validate(
    plan: ShardingPlan,
    tree: Tree = None,
    *,
    small_bytes: int = SMALL_BYTES,
    large_bytes: int = LARGE_BYTES,
) -> tuple[Issue, ...]:
    """Everything that is wrong or odd about a plan, errors first.

    With no error among the issues, `apply(plan, tree)` works, and so does the layout in use; with one, it raises.

    - **Errors** of a plan: `indivisible`, `unknown_axis`, `duplicate_axis`, `over_rank`, `bad_spec`, `bad_dtype`,
        `bad_memory_kind`. Of a tree: `missing_leaf`, `extra_leaf`, `shape_mismatch`, `dtype_mismatch`,
        `narrowed`, `deleted`, `no_devices`, `manual_axis`.
    - **Warnings**. `large_replicated`: leaves of `large_bytes` or more lie whole on every device, are a tenth or more
        of all that it holds, and could be split; not said of a plan that splits nothing, which is data parallel on
        purpose. `over_memory`: at rest, more bytes than the mesh's chip has. `stray_devices`: a leaf was put on other
        devices than the mesh's; `apply` moves it, but a jitted function that meets it beside others fails.
    - **Infos**. `small_sharded`: a leaf of less than `small_bytes` is split. `unused_axis`: no leaf lies over a mesh
        axis, though one of `large_bytes` or more could.

    ```python
    import eqshard
    from jax.sharding import PartitionSpec as P
    row = eqshard.LeafPlan(".w", (1023, 1024), "float32", spec=P("dp", "tp"), use=P("dp", "tp"))
    plan = eqshard.ShardingPlan(eqshard.MeshSpec(dp=2, tp=4), (row,))
    (issue,) = eqshard.validate(plan)
    assert (issue.severity, issue.code, issue.path) == ("error", "indivisible", ".w")
    ```

    **Arguments:**

    - `tree`: what the plan is for. Without it the plan is checked in itself, and no devices are asked for.
    - `small_bytes`, `large_bytes`: the thresholds above.

    **Returns:**

    A tuple of `Issue`s; empty if there is nothing to say.
    """
    leaves = None if tree is None else array_leaves(tree)
    where, errors = _where(plan, leaves)
    sizes, good = plan.mesh.shape, []
    for kind in kinds(plan):
        fault = _fault(kind.leaf, sizes, where)
        if fault is None:
            good.append(kind)
        else:
            errors += [fault.at(leaf.path) for leaf in kind.leaves]
    found = advice(plan.mesh, good, small_bytes, large_bytes)
    if leaves is None:
        return (*errors, *found)
    return (*errors, *_tree_errors(plan, leaves), *strays(leaves, where), *found)


def _where(plan: ShardingPlan, leaves: list[tuple[str, Any]] | None) -> tuple[Mesh | AbstractMesh, list[Issue]]:
    """The mesh that `apply` would place on: real devices only where real arrays wait for them."""
    mesh = plan.mesh
    if all(isinstance(x, (Tracer, jax.ShapeDtypeStruct)) for _, x in leaves or ()):
        return mesh.abstract(), []
    if "manual" in mesh.axis_types:
        remedy = "Plan for `mesh.replace(axis_type='auto')`: only inside `jax.shard_map` are axes manual."
        return mesh.abstract(), [Issue("error", "manual_axis", "", f"{mesh} has manual axes.", remedy)]
    try:
        return plan.build(), []
    except MeshError as error:
        remedy = "Plan for fewer devices, or run where these are."
        return mesh.abstract(), [Issue("error", "no_devices", "", str(error), remedy)]


class _Fault(NamedTuple):
    code: str
    message: str
    remedy: str

    def at(self, path: str) -> Issue:
        return Issue("error", self.code, path, self.message, self.remedy)


def _fault(leaf: LeafPlan, sizes: Mapping[str, int], where: Mesh | AbstractMesh) -> _Fault | None:
    """The first thing that is wrong with a row in itself."""
    if not is_dtype_name(leaf.dtype):
        return _Fault("bad_dtype", f"no dtype is called {leaf.dtype!r}.", "Use a name such as 'float32'.")
    fault = _spec_fault(leaf, leaf.spec, sizes)
    if fault is None and leaf.use != leaf.spec:
        fault = _spec_fault(leaf, leaf.use, sizes)
        fault = fault and fault._replace(message=f"in use: {fault.message}")
    return fault or _memory_fault(leaf.memory_kind, where)


_CODES: Mapping[type[ShardingError], str] = {
    UnknownAxisError: "unknown_axis",
    DuplicateAxisError: "duplicate_axis",
    RankError: "over_rank",
    IndivisibleError: "indivisible",
}


def _spec_fault(leaf: LeafPlan, spec: PartitionSpec, sizes: Mapping[str, int]) -> _Fault | None:
    if spec.unreduced or spec.reduced:
        remedy = "Leave them out: they are for values inside a step."
        return _Fault("bad_spec", f"{spec} has unreduced or reduced axes; a leaf at rest or in use has none.", remedy)
    if not all(map(_is_entry, spec)):
        remedy = "Entries are None, an axis name, a tuple of names, or UNCONSTRAINED."
        return _Fault("bad_spec", f"{spec} is no PartitionSpec of mesh axes.", remedy)
    try:
        check(spec, leaf.shape, sizes, "?", leaf.dtype)
    except ShardingError as error:
        # The path is a field of the issue: without it, leaves with the same trouble have the same words.
        text = str(error).replace(f"`?` {leaf.type}", leaf.type).replace("`?`", leaf.type)
        message, _, ways = text.partition("\n  Ways out: ")
        message = " ".join(line.strip() for line in message.splitlines())
        return _Fault(
            _CODES.get(type(error), "bad_spec"), message, f"Ways out: {ways}" if ways else _remedy(error, leaf, sizes)
        )
    return None


def _is_entry(entry: Any) -> bool:
    if entry is None or entry is UNCONSTRAINED or isinstance(entry, str):
        return True
    return isinstance(entry, tuple) and all(isinstance(axis, str) for axis in entry)


def _remedy(error: ShardingError, leaf: LeafPlan, sizes: Mapping[str, int]) -> str:
    if isinstance(error, UnknownAxisError):
        return f"Use {', '.join(map(repr, sizes))}, or give the mesh that axis."
    if isinstance(error, DuplicateAxisError):
        return "Use each axis for one dimension; `None` leaves a dimension whole."
    return f"Give at most {len(leaf.shape)} entries, one for each dimension."


def _memory_fault(memory_kind: str | None, where: Mesh | AbstractMesh) -> _Fault | None:
    if memory_kind is None:
        return None
    try:
        NamedSharding(where, PartitionSpec(), memory_kind=memory_kind)
    except ValueError as error:
        message = " ".join(str(error).split())
        return _Fault("bad_memory_kind", message, "Use a memory kind that the devices have, or None.")
    return None


def _tree_errors(plan: ShardingPlan, leaves: list[tuple[str, Any]]) -> Iterator[Issue]:
    there = {path for path, _ in leaves}
    for leaf in plan:
        if leaf.path not in there:
            remedy = "Make the plan from this tree, or `plan.select` the part that it is of."
            yield Issue("error", "missing_leaf", leaf.path, f"planned as {leaf.type}, not in the tree.", remedy)
    rows = plan._rows.by_path
    for path, x in leaves:
        row = rows.get(path)
        if row is None:
            message = f"{type_text(tuple(x.shape), dtype_name(x))} is in the tree, not in the plan."
            close = did_you_mean(path, rows) if len(rows) < 1000 else ""
            remedy = f"Make the plan from this tree, or merge a row for it.{close}"
            yield Issue("error", "extra_leaf", path, message, remedy)
        elif not isinstance(x, jax.ShapeDtypeStruct) or x.shape != row.shape or dtype_name(x) != row.dtype:
            yield from _leaf_errors(row, x, plan.mesh)


def _leaf_errors(leaf: LeafPlan, x: Any, mesh: MeshSpec) -> Iterator[Issue]:
    if x.shape != leaf.shape and tuple(x.shape) != _local_shape(leaf, x, mesh):
        message = f"shape {tuple(x.shape)} in the tree, {leaf.shape} in the plan."
        yield Issue("error", "shape_mismatch", leaf.path, message, "Make the plan from this tree.")
    if dtype_name(x) != leaf.dtype:
        message = f"{dtype_name(x)} in the tree, {leaf.dtype} in the plan."
        yield Issue("error", "dtype_mismatch", leaf.path, message, f"Cast it to {leaf.dtype}, or plan this tree.")
    try:
        narrow(x, leaf.path)
    except MismatchError as error:
        message, _, remedy = str(error).partition(" To fix this, ")
        yield Issue("error", "narrowed", leaf.path, message, remedy[:1].upper() + remedy[1:])
    if isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted():
        remedy = "Use what the function that it was donated to has returned."
        yield Issue("error", "deleted", leaf.path, "the array was deleted or donated.", remedy)


def _local_shape(leaf: LeafPlan, x: Any, mesh: MeshSpec) -> tuple[int, ...]:
    try:
        return local_shape(leaf, x, mesh)
    except ShardingError:  # told of the row already
        return leaf.shape
