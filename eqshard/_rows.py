"""How each leaf of a batch lies, from a spec, logical names, a tree of these or a plan; once for each type of batch."""

import functools
from typing import Any, NamedTuple

import jax.tree_util as jtu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ._axes import PartitionAxis
from ._errors import MeshError, MismatchError, ShardingError
from ._logical import logical_spec
from ._mesh import MeshLike, MeshSpec
from ._names import LogicalAxes, Mode
from ._plan import ShardingPlan
from ._share import mesh_share
from ._spec import canonical, check, entry_axes, misfits, spec_text, UNCONSTRAINED
from ._tree import path_name, shown


DEFAULT_NAMES = PartitionAxis()


class Row(NamedTuple):
    """How one array of a batch lies."""

    path: str
    spec: PartitionSpec
    sharding: NamedSharding
    parts: tuple[int, ...]
    """For each dimension, of how many parts this process holds one."""
    batched: bool
    """Whether the first dimension is one that is split: the one that can be padded."""

    def whole(self, part: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole of which each process holds such a part."""
        return tuple(n * parts for n, parts in zip(part, self.parts))


class Layout(NamedTuple):
    """`spec_or_axes`, in a form that can be a dictionary's key."""

    leaves: tuple[Any, ...]
    treedef: Any
    plan: ShardingPlan | None

    @classmethod
    def of(cls, x: Any) -> "Layout":
        if isinstance(x, ShardingPlan):
            return cls((), None, x)
        leaves, treedef = jtu.tree_flatten(x, is_leaf=_is_layout)
        for leaf in leaves:
            if not _is_layout(leaf):
                raise ShardingError(
                    f"expected a PartitionSpec, logical names, None, a tree of these, or a plan; got {leaf!r}."
                )
        return cls(tuple(_frozen(leaf) for leaf in leaves), treedef, None)


def _is_layout(x: Any) -> bool:
    """Whether `x` lays out one leaf, or all leaves alike."""
    if x is None or isinstance(x, (PartitionSpec, LogicalAxes, ShardingPlan)):
        return True
    return isinstance(x, (tuple, list)) and all(_is_name(e) for e in x)


def _is_name(x: Any) -> bool:
    if isinstance(x, PartitionSpec):
        return False
    return x is None or isinstance(x, str) or (isinstance(x, (tuple, list)) and bool(x) and all(map(_is_name, x)))


def _frozen(x: Any) -> Any:
    if isinstance(x, (PartitionSpec, LogicalAxes)):
        return x
    return tuple(map(_frozen, x)) if isinstance(x, (tuple, list)) else x


def broadcast(prefix_leaves: tuple[Any, ...], prefix: Any, treedef: Any, what: str) -> list[Any]:
    """For each leaf of a tree the leaf of `prefix` that stands above it."""
    numbered = jtu.tree_unflatten(treedef, list(range(treedef.num_leaves)))
    out: list[Any] = [None] * treedef.num_leaves
    try:
        parts = prefix.flatten_up_to(numbered)
    except (ValueError, TypeError) as error:
        raise MismatchError(f"{what} is no prefix of the tree: {error}") from None
    for value, part in zip(prefix_leaves, parts):
        for i in jtu.tree_leaves(part):
            out[i] = value
    return out


@functools.lru_cache(maxsize=1024)
def batch_rows(
    treedef: Any,
    shapes: tuple[tuple[int, ...] | None, ...],
    mesh: MeshLike,
    layout: Layout,
    names: PartitionAxis,
    mode: Mode | str | int | None,
    process: int | None,
) -> tuple[Row | None, ...]:
    """How each leaf of a batch lies; None for leaves that are no arrays. With `process`, `shapes` are of its part."""
    described = MeshSpec.of(mesh)
    numbered = jtu.tree_unflatten(treedef, list(range(treedef.num_leaves)))
    paths = [path_name(path) for path, _ in jtu.tree_flatten_with_path(numbered)[0]]
    if layout.plan is not None:
        if layout.plan.mesh.shape != described.shape:
            raise MeshError(f"the plan is for {layout.plan.mesh}, not for the mesh {described}.")
        said: list[Any] = [_planned(layout.plan, path, shape) for path, shape in zip(paths, shapes)]
        built = layout.plan.build()
    else:
        said = broadcast(layout.leaves, layout.treedef, treedef, "the layout")
        built = mesh if isinstance(mesh, Mesh) else described.build()
        described = MeshSpec.of(built)
    return tuple(
        None if shape is None else _row(path, shape, s, built, described, names, mode, process)
        for path, shape, s in zip(paths, shapes, said)
    )


def _planned(plan: ShardingPlan, path: str, shape: tuple[int, ...] | None) -> Any:
    if shape is None:
        return None
    row = plan[path]
    if len(row.shape) != len(shape):
        raise MismatchError(f"{shown(path)} has {len(shape)} dimensions, planned as {row.type}.")
    return row


def _row(
    path: str,
    shape: tuple[int, ...],
    said: Any,
    built: Mesh,
    mesh: MeshSpec,
    names: PartitionAxis,
    mode: Mode | str | int | None,
    process: int | None,
) -> Row:
    kind = None
    if said is None:
        spec = PartitionSpec()
    elif isinstance(said, PartitionSpec):
        misfits((0,) * len(said), said, mesh.shape, path)  # typos raise, also in what is cut off
        spec = PartitionSpec(*tuple(said)[: len(shape)])
    elif isinstance(said, (LogicalAxes, tuple)):
        spec = _logical(said, shape, mesh, names, mode, path)
    else:
        spec, kind = said.spec, said.memory_kind
    if UNCONSTRAINED in tuple(spec):
        raise ShardingError(f"{spec_text(spec)} for {shown(path)}: the layout of a batch must say all.")
    fitted = canonical(spec, mesh.shape)
    parts = [1] * len(shape)
    for dim, entry in enumerate(fitted):
        if process is not None:
            parts[dim] = mesh_share(built, entry_axes(entry), process, f"{spec_text(spec)} for {shown(path)}").parts
    batched = bool(shape) and len(spec) > 0 and bool(entry_axes(spec[0]))
    return Row(path, fitted, NamedSharding(built, fitted, memory_kind=kind), tuple(parts), batched)


def _logical(
    said: Any, shape: tuple[int, ...], mesh: MeshSpec, names: PartitionAxis, mode: Mode | str | int | None, path: str
) -> PartitionSpec:
    axes = said.axes if isinstance(said, LogicalAxes) else said
    mode = said.mode if isinstance(said, LogicalAxes) and mode is None else mode
    if isinstance(mode, int) and not -len(shape) <= mode < len(shape):
        mode = None  # a leaf without that dimension
    try:
        logical_spec(axes, mesh, names=names, mode="train" if isinstance(mode, int) else mode)  # typos raise
        return logical_spec(axes[: len(shape)], mesh, names=names, mode=mode, shape=shape)
    except ShardingError as error:
        hint = " For mesh axes, use a PartitionSpec." if any(a in mesh.names for a in axes) else ""
        raise type(error)(f"{shown(path)}: {error}{hint}") from None


def check_row(row: Row, whole: tuple[int, ...], dtype: str) -> None:
    """Raises unless the whole array divides."""
    check(row.spec, whole, dict(row.sharding.mesh.shape), row.path, dtype)
