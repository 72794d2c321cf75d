"""How each leaf of a batch lies, from a spec, logical names, a tree of these or a plan; once for each type of batch."""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ._axes import PartitionAxis
from ._errors import MeshError, MismatchError, ShardingError
from ._logical import logical_spec
from ._mesh import MeshSpec
from ._names import LogicalAxes, Mode
from ._plan import LeafPlan, ShardingPlan
from ._put import is_global
from ._share import mesh_share
from ._spec import canonical, check, entry_axes, misfits, spec_text, UNCONSTRAINED
from ._tree import is_array, path_name, shown, type_text


Known = Callable[[], Any]


def known(value: Any) -> Known:
    """A value that never changes, known by identity: dear to hash, and mostly the same object each time.

    A bound method: made, hashed and compared by what it is bound to, all without a line of Python. Call it for the
    value.
    """
    return MethodType(_itself, value)


def _itself(value: Any) -> Any:
    return value


DEFAULT_NAMES = known(PartitionAxis())


class Type(NamedTuple):
    """What of an array decides how it lies."""

    shape: tuple[int, ...]
    dtype: Any
    spread: bool
    """Whether it is a process's part of a larger one."""


def types_of(leaves: list[Any], local: bool) -> tuple[tuple[Any, ...] | None, ...]:
    """The types of the leaves of a batch, as bare tuples; None for leaves that are no arrays."""
    return tuple([_type_of(x, local) for x in leaves])


def _type_of(x: Any, local: bool) -> tuple[Any, ...] | None:
    if type(x) is np.ndarray and x.dtype.kind in "iufb":  # most leaves; the rest is for the general test
        return x.shape, x.dtype, local
    return (x.shape, x.dtype, local and not is_global(x)) if is_array(x) else None


class Row(NamedTuple):
    """How one array of a batch lies."""

    path: str
    spec: PartitionSpec
    sharding: NamedSharding
    parts: tuple[int, ...]
    """For each dimension, of how many parts this process holds one."""
    whole: tuple[int, ...]
    """The shape of all parts together."""
    batched: bool
    """Whether the first dimension is one that is split: the one that can be padded."""
    wide: bool
    """Whether it is of 64 bits, so that JAX may narrow it."""


class Layout(NamedTuple):
    """`spec_or_axes`, in a form that can be a dictionary's key."""

    leaves: tuple[Any, ...]
    treedef: Any
    plan: Known | None

    @classmethod
    def key(cls, x: Any) -> Any:
        """`x` as `batch_rows` takes it."""
        return x if isinstance(x, PartitionSpec) else cls.of(x)

    @classmethod
    def of(cls, x: Any) -> "Layout":
        if isinstance(x, PartitionSpec):
            return cls((x,), _LEAF, None)
        if isinstance(x, ShardingPlan):
            return cls((), None, known(x))
        leaves, treedef = jtu.tree_flatten(x, is_leaf=_is_layout)
        for leaf in leaves:
            if not _is_layout(leaf):
                raise ShardingError(
                    f"expected a PartitionSpec, logical names, None, a tree of these, or a plan; got {leaf!r}."
                )
        return cls(tuple(_frozen(leaf) for leaf in leaves), treedef, None)


_LEAF = jtu.tree_structure(0)


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
    bare_types: tuple[tuple[Any, ...] | None, ...],
    mesh: Known,
    said_of_all: Any,
    names: Known,
    mode: Mode | str | int | None,
    fits: bool = True,
) -> tuple[Row | None, ...]:
    """How each leaf of a batch lies, on a mesh and by names that are `known`; checked, if `fits`, that it divides.

    `said_of_all` is a PartitionSpec, or else a `Layout`.
    """
    layout = Layout.of(said_of_all) if isinstance(said_of_all, PartitionSpec) else said_of_all
    types = [None if t is None else Type(*t) for t in bare_types]
    described = MeshSpec.of(mesh())
    numbered = jtu.tree_unflatten(treedef, list(range(treedef.num_leaves)))
    paths = [path_name(path) for path, _ in jtu.tree_flatten_with_path(numbered)[0]]
    plan = layout.plan() if layout.plan is not None else None
    if plan is not None:
        if plan.mesh.shape != described.shape:
            raise MeshError(f"the plan is for {plan.mesh}, not for the mesh {described}.")
        said: list[Any] = [None if t is None else plan[path] for path, t in zip(paths, types)]
        built = plan.build()
    else:
        said = broadcast(layout.leaves, layout.treedef, treedef, "the layout")
        built = mesh() if isinstance(mesh(), Mesh) else described.build()
        described = MeshSpec.of(built)
    rows = [
        None if t is None else _row(path, t, s, built, described, names(), mode)
        for path, t, s in zip(paths, types, said)
    ]
    for row, t, s in zip(rows, types, said):
        if fits and row is not None and t is not None:
            _check_whole(row, t, s if plan is not None else None)
    return tuple(rows)


def _row(
    path: str,
    type: Type,
    said: Any,
    built: Mesh,
    mesh: MeshSpec,
    names: PartitionAxis,
    mode: Mode | str | int | None,
) -> Row:
    kind = None
    shape = type.shape
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
    parts = [1] * max(len(shape), len(fitted))
    for dim, entry in enumerate(fitted):
        if type.spread:
            what = f"{spec_text(spec)} for {shown(path)}"
            parts[dim] = mesh_share(built, entry_axes(entry), jax.process_index(), what).parts
    whole = tuple(n * p for n, p in zip(shape, parts))
    batched = bool(shape) and len(spec) > 0 and bool(entry_axes(spec[0]))
    wide = type.dtype.kind in "iufc" and type.dtype.itemsize >= 8 if isinstance(type.dtype, np.dtype) else False
    return Row(path, fitted, NamedSharding(built, fitted, memory_kind=kind), tuple(parts), whole, batched, wide)


def _check_whole(row: Row, type: Type, planned: LeafPlan | None) -> None:
    dtype = str(type.dtype.name)
    if planned is not None and (row.whole != planned.shape):
        parts = f", of which each process brings {list(type.shape)}" if type.spread else ""
        raise MismatchError(f"{shown(row.path)} is {type_text(row.whole, dtype)}{parts}, planned as {planned.type}.")
    check(row.spec, row.whole, dict(row.sharding.mesh.shape), row.path, dtype)


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
