"""Plans and layouts from logical axis names."""

import re
from collections.abc import Sequence
from typing import Any

import jax.tree_util as jtu
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ._apply import apply
from ._axes import _field_names, LogicalAxes, Mode, PartitionAxis
from ._errors import MismatchError, RankError, ShardingError
from ._mesh import MeshLike, MeshSpec
from ._plan import leaf_plan, LeafPlan, ShardingPlan
from ._spec import canonical, entry_axes
from ._tree import array_leaves, path_name, shown, some


STANDARD_NAMES = PartitionAxis()
"""The names that are used unless others are given."""


def logical_spec(
    axes: Sequence[Any] | LogicalAxes,
    mesh: MeshLike,
    *,
    names: PartitionAxis = STANDARD_NAMES,
    mode: Mode | str | int | None = None,
    shape: Sequence[int] | None = None,
) -> PartitionSpec:
    """The PartitionSpec of logical axes on a mesh.

    A parallelism that the mesh does not have is not used: with the default names, `BATCH` lies over `fsdp` and `dp` as
    far as the mesh has them. A mesh axis that was named by hand must exist.

    ```python
    import eqshard
    from jax.sharding import PartitionSpec as P
    spec = eqshard.logical_spec([eqshard.BATCH, eqshard.LENGTH, eqshard.EMBED], eqshard.MeshSpec(dp=2, tp=4))
    assert spec == P("dp", None, "tp")
    ```

    **Raises:**

    - `UnknownAxisError`: no such logical name, or it means a mesh axis that the mesh lacks.
    """
    described = MeshSpec.of(mesh)
    spec = names.resolve_spec(axes, mode, shape)
    absent = _defaults(names) - set(described.names)
    kept = [tuple(a for a in entry_axes(e) if a not in absent) for e in spec]
    for entry in kept:
        described.size(entry)
    return canonical(PartitionSpec(*kept), described.shape)


def _defaults(names: PartitionAxis) -> set[str]:
    """Mesh axes that nobody named by hand."""
    told = {a for n in names.given for a in entry_axes(getattr(names, n))}
    told |= {part for _, *rules in names.custom for part in _parts(rules) if part not in _field_names()}
    return {a for n in _field_names()[:5] if n not in names.given for a in entry_axes(getattr(names, n))} - told


def _parts(rule: Any) -> list[str]:
    return [rule] if isinstance(rule, str) else [p for r in rule or () for p in _parts(r)]


def logical_sharding(
    axes: Sequence[Any] | LogicalAxes,
    mesh: MeshLike,
    *,
    names: PartitionAxis = STANDARD_NAMES,
    mode: Mode | str | int | None = None,
    shape: Sequence[int] | None = None,
) -> NamedSharding:
    """`logical_spec` as a `jax.sharding.NamedSharding`.

    ```python
    import eqshard
    sharding = eqshard.logical_sharding([eqshard.BATCH], eqshard.MeshSpec(dp=8))
    assert sharding.shard_shape((16,)) == (2,)
    ```
    """
    where = mesh if isinstance(mesh, AbstractMesh) else MeshSpec.of(mesh).build()
    return NamedSharding(where, logical_spec(axes, mesh, names=names, mode=mode, shape=shape))


def logical_plan(
    tree: PyTree[Any],
    mesh: MeshLike,
    axes: PyTree[Any],
    names: PartitionAxis = STANDARD_NAMES,
    mode: Mode | str | int | None = None,
    *,
    strict: bool = True,
) -> ShardingPlan:
    """A plan from logical axis names.

    ```python
    import eqshard, jax
    from eqshard import EMBED, VOCAB
    from jax.sharding import PartitionSpec as P
    tree = {"embed": jax.ShapeDtypeStruct((32000, 512), "float32"), "scale": jax.ShapeDtypeStruct((512,), "float32")}
    plan = eqshard.logical_plan(tree, eqshard.MeshSpec(tp=8), {"embed": (VOCAB, None), "scale": None})
    assert plan["['embed']"].spec == P("tp")
    ```

    **Arguments:**

    - `axes`: a tree like `tree`, or a prefix of it, whose leaves are tuples of logical names, one for each dimension
        (or a `LogicalAxes`; or None for whole); or a list of rules: (regular expression on the path, names).
    - `names`: what logical names mean.
    - `mode`: `"train"` by default; or an index of a dimension, see `PartitionAxis.resolve_spec`.
    - `strict`: whether a dimension that does not divide is an error; else it gives up axes, and the plan records it.
    """
    described = MeshSpec.of(mesh)
    described.size()
    leaves = array_leaves(tree)
    by_path = _by_rules(leaves, axes) if _are_rules(axes) else _by_prefix(tree, axes)
    missing = [shown(path) for path, _ in leaves if path not in by_path]
    if missing:
        raise MismatchError(f"`axes` says nothing of {some(missing)}: name its axes, or None to keep it whole.")
    rows = [_row(path, x, by_path[path], described, names, mode, strict) for path, x in leaves]
    return ShardingPlan(described, tuple(rows))


def shard(
    x: PyTree[Any],
    axes: Sequence[Any] | LogicalAxes,
    mesh: MeshLike,
    names: PartitionAxis = STANDARD_NAMES,
    mode: Mode | str | int | None = None,
    *,
    strict: bool = True,
) -> PyTree[Any]:
    """Lays an array, or every array of a tree, out by logical axis names: for activations inside a step.

    ```python
    import equinox as eqx, eqshard, jax.numpy as jnp
    from eqshard import BATCH, EMBED
    from jax.sharding import PartitionSpec as P
    mesh = eqshard.MeshSpec(dp=2, tp=4)
    y = eqx.filter_jit(lambda x: eqshard.shard(x * 2, (BATCH, EMBED), mesh))(jnp.ones((4, 8)))
    assert y.sharding.spec == P("dp", "tp")
    ```

    **Arguments:** as of `logical_plan`.
    """
    described = MeshSpec.of(mesh)
    rows = [_row(path, leaf, axes, described, names, mode, strict) for path, leaf in array_leaves(x)]
    return apply(ShardingPlan(described, tuple(rows)), x)


def _row(
    path: str,
    x: Any,
    axes: Any,
    mesh: MeshSpec,
    names: PartitionAxis,
    mode: Mode | str | int | None,
    strict: bool,
) -> LeafPlan:
    axes = () if axes is None else axes
    said = axes.axes if isinstance(axes, LogicalAxes) else tuple(axes)
    if len(said) > len(x.shape):
        raise RankError(f"{shown(path)} has {len(x.shape)} dimensions, but {len(said)} logical axes: {said}.")
    try:
        spec = logical_spec(axes, mesh, names=names, mode=mode, shape=x.shape)
    except ShardingError as error:
        raise type(error)(f"{shown(path)}: {error}") from None
    return leaf_plan(path, x, spec, mesh, why=f"logical axes {said}" if said else "no logical axes", strict=strict)


def _is_axes(x: Any) -> bool:
    """Whether `x` names the axes of one leaf (and is not a tree of such)."""
    if x is None or isinstance(x, LogicalAxes):
        return True
    return isinstance(x, (tuple, list)) and all(_is_entry(e) for e in x)


def _is_entry(x: Any) -> bool:
    return x is None or isinstance(x, str) or (isinstance(x, tuple) and bool(x) and all(map(_is_entry, x)))


def _are_rules(axes: Any) -> bool:
    return (
        isinstance(axes, list)
        and bool(axes)
        and all(isinstance(r, tuple) and len(r) == 2 and isinstance(r[0], str) and _is_axes(r[1]) for r in axes)
    )


def _by_rules(leaves: list[tuple[str, Any]], rules: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, _ in leaves:
        for pattern, axes in rules:
            if re.search(pattern, path):
                found[path] = axes
                break
    return found


def _by_prefix(tree: PyTree[Any], axes: PyTree[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def below(prefix: Any, said: Any, part: Any) -> None:
        for path, _ in array_leaves(part):
            found[path_name(prefix) + path] = said

    try:
        jtu.tree_map_with_path(below, axes, tree, is_leaf=_is_axes)
    except ValueError as error:
        raise MismatchError(f"`axes` is no prefix of the tree: {error}") from None
    return found
