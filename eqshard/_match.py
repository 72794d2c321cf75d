"""Which leaf of a tree is which row of a plan, and the shardings of the rows; both computed once."""

from collections.abc import Iterable
from typing import Any

import jax.tree_util as jtu
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ._errors import MismatchError, ShardingError
from ._leaf import LeafPlan
from ._mesh import MeshSpec
from ._spec import canonical, check, cut, entries, UNCONSTRAINED
from ._tree import dtype_name, is_array, manual_axes, named_leaves, shown, some, type_text


class Rows(tuple[LeafPlan, ...]):
    """The rows, with what is dear to compute kept beside them: the hash, the index, the shardings.

    Equal whatever their order: a leaf is known by its path.
    """

    by_path: dict[str, LeafPlan]
    memo: dict[Any, Any]

    def __new__(cls, leaves: Iterable[LeafPlan]) -> "Rows":
        self = super().__new__(cls, leaves)
        self.by_path = {leaf.path: leaf for leaf in self}
        self.memo = {}
        return self

    def __hash__(self) -> int:
        if "hash" not in self.memo:
            self.memo["hash"] = hash(frozenset(self))
        return self.memo["hash"]

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Rows) and hash(self) == hash(other) and self.by_path == other.by_path

    def __ne__(self, other: object) -> bool:  # else that of tuples, which minds the order
        return not self == other

    def __reduce__(self) -> Any:
        return Rows, (tuple(self),)


def match_rows(rows: Rows, mesh: MeshSpec, leaves: list[Any], treedef: Any) -> list[int | None]:
    """For each leaf of a tree the number of its row in the plan; None for leaves that are no arrays.

    **Raises:**

    - `MismatchError`: a leaf is missing, too many, or of another shape or dtype.
    """
    known = rows.memo.get("match")
    arrays = [is_array(x) for x in leaves]
    if known is None or known[0] != treedef or known[1] != arrays:
        order = _match_paths(rows, leaves, treedef)
        types = [(rows[i].shape, rows[i].dtype) for i in order if i is not None]
        known = rows.memo["match"] = treedef, arrays, order, types
    _, _, order, types = known
    found = [(x.shape, dtype_name(x)) for x, array in zip(leaves, arrays) if array]
    if found != types or any(isinstance(x, Tracer) for x in leaves):
        _check_types(rows, mesh, leaves, order)
    return order


def _match_paths(rows: Rows, leaves: list[Any], treedef: Any) -> list[int | None]:
    numbers = {leaf.path: i for i, leaf in enumerate(rows)}
    paths = [path for path, _ in named_leaves(jtu.tree_unflatten(treedef, leaves))]
    found = {path for path, x in zip(paths, leaves) if is_array(x)}
    missing = [shown(path) for path in numbers if path not in found]
    extra = [shown(path) for path in paths if path in found and path not in numbers]
    if missing or extra:
        lines = ["the tree does not match its plan."]
        lines += [f"  in the plan, not in the tree: {some(missing)}"] if missing else []
        lines += [f"  in the tree, not in the plan: {some(extra)}"] if extra else []
        raise MismatchError("\n".join(lines) + "\n  Make a plan from this tree, or `plan.select` the part it is of.")
    return [numbers[path] if is_array(x) else None for path, x in zip(paths, leaves)]


def _check_types(rows: Rows, mesh: MeshSpec, leaves: list[Any], order: list[int | None]) -> None:
    wrong = []
    for x, i in zip(leaves, order):
        if i is None:
            continue
        leaf, shape = rows[i], tuple(x.shape)
        piece = local_shape(leaf, x, mesh)
        if shape != piece or dtype_name(x) != leaf.dtype:
            planned = leaf.type if piece == leaf.shape else f"{leaf.type}, here {type_text(piece, leaf.dtype)} a device"
            wrong.append(f"{shown(leaf.path)} is {type_text(shape, dtype_name(x))}, planned as {planned}")
    if wrong:
        more = f"\n  and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise MismatchError("the tree does not match its plan.\n  " + "\n  ".join(wrong[:5]) + more)


def local_shape(leaf: LeafPlan, x: Any, mesh: MeshSpec) -> tuple[int, ...]:
    """The shape that `x` must have for this row: inside `shard_map`, that of the piece that the manual axes leave."""
    manual = manual_axes(x)
    if not manual:
        return leaf.shape
    check(leaf.spec, leaf.shape, mesh.shape, leaf.path, leaf.dtype)
    return cut(leaf.shape, leaf.spec, {n: s if n in manual else 1 for n, s in mesh.axes})


def row_shardings(rows: Rows, sizes: dict[str, int], mesh: Mesh | AbstractMesh) -> list[NamedSharding]:
    """The sharding of each row on `mesh`, checked, made once for the rows and a mesh."""
    key = "shardings", mesh
    if key not in rows.memo:
        made: dict[Any, NamedSharding] = {}
        for leaf in rows:
            check(leaf.spec, leaf.shape, sizes, leaf.path, leaf.dtype)
            layout = leaf.spec, leaf.memory_kind
            if layout not in made:
                _check_memory(leaf, mesh)
                spec = canonical(leaf.spec, sizes)
                if AxisType.Auto not in mesh.axis_types:  # a NamedSharding without Auto axes takes no UNCONSTRAINED
                    spec = canonical(PartitionSpec(*(None if e is UNCONSTRAINED else e for e in spec)))
                made[layout] = NamedSharding(mesh, spec, memory_kind=leaf.memory_kind)
        rows.memo[key] = [made[leaf.spec, leaf.memory_kind] for leaf in rows]
    return rows.memo[key]


def loose_rows(rows: Rows) -> frozenset[int]:
    """The numbers of the rows with UNCONSTRAINED, whose sharding depends on the array."""
    if "loose" not in rows.memo:
        rows.memo["loose"] = frozenset(i for i, leaf in enumerate(rows) if UNCONSTRAINED in entries(leaf.spec))
    return rows.memo["loose"]


def _check_memory(leaf: LeafPlan, mesh: Mesh | AbstractMesh) -> None:
    if leaf.memory_kind is None or isinstance(mesh, AbstractMesh):
        return
    kinds = [memory.kind for memory in mesh.devices.flat[0].addressable_memories()]
    if leaf.memory_kind not in kinds:
        raise ShardingError(
            f"{shown(leaf.path)} is to be kept in {leaf.memory_kind!r} memory; {mesh.devices.flat[0].platform} devices "
            f"have {', '.join(map(repr, kinds))}."
        )
