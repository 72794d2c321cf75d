"""Layouts from logical axis names, for one array."""

from collections.abc import Sequence
from typing import Any

from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from ._apply import apply
from ._axes import _field_names, PartitionAxis
from ._errors import RankError, ShardingError
from ._mesh import MeshLike, MeshSpec
from ._names import flat, LogicalAxes, Mode
from ._plan import leaf_plan, LeafPlan, ShardingPlan
from ._spec import canonical, entry_axes
from ._tree import array_leaves, manual_axes, shown, Tree


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

    **Arguments:**

    - `axes`, `mode`, `shape`: as of `PartitionAxis.resolve_spec`.
    - `names`: what logical names mean.

    **Raises:**

    - `UnknownAxisError`: no such logical name, or it means a mesh axis that the mesh lacks.
    """
    if isinstance(axes, str):
        raise ShardingError(f"`axes` holds a name for each dimension: write `({axes!r},)`, not {axes!r}.")
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
    told |= {part for _, *rules in names.custom for part in flat(rules) if part not in _field_names()}
    return {a for n in _field_names()[:5] if n not in names.given for a in entry_axes(getattr(names, n))} - told


def logical_sharding(
    axes: Sequence[Any] | LogicalAxes,
    mesh: MeshLike,
    *,
    names: PartitionAxis = STANDARD_NAMES,
    mode: Mode | str | int | None = None,
    shape: Sequence[int] | None = None,
) -> NamedSharding:
    """`logical_spec` as a `jax.sharding.NamedSharding`, over an abstract mesh if `mesh` is one.

    ```python
    import eqshard
    sharding = eqshard.logical_sharding([eqshard.BATCH], eqshard.MeshSpec(dp=8))
    assert sharding.shard_shape((16,)) == (2,)
    ```
    """
    where = mesh if isinstance(mesh, AbstractMesh) else MeshSpec.of(mesh).build()
    return NamedSharding(where, logical_spec(axes, mesh, names=names, mode=mode, shape=shape))


def shard(
    x: Tree,
    axes: Sequence[Any] | LogicalAxes,
    mesh: MeshLike,
    names: PartitionAxis = STANDARD_NAMES,
    mode: Mode | str | int | None = None,
    *,
    strict: bool = True,
) -> Tree:
    """Lays an array, or every array of a tree, out by logical axis names: for activations inside a step.

    ```python
    import equinox as eqx, eqshard, jax.numpy as jnp
    from eqshard import BATCH, EMBED
    from jax.sharding import PartitionSpec as P
    mesh = eqshard.MeshSpec(dp=2, tp=4)
    y = eqx.filter_jit(lambda x: eqshard.shard(x * 2, (BATCH, EMBED), mesh))(jnp.ones((4, 8)))
    assert y.sharding.spec == P("dp", "tp")
    ```

    **Arguments:**

    - `axes`: the logical names, one for each dimension, of every array in `x`.
    - `names`, `mode`, `strict`: as of `logical_plan`.

    **Raises:**

    - `ShardingError`: an unknown name; too many names; or, if `strict`, a dimension that does not divide.
    """
    described = MeshSpec.of(mesh)
    rows = [logical_row(path, leaf, axes, described, names, mode, strict) for path, leaf in array_leaves(x)]
    return apply(ShardingPlan(described, rows), x)


def logical_row(
    path: str,
    x: Any,
    axes: Any,
    mesh: MeshSpec,
    names: PartitionAxis,
    mode: Mode | str | int | None,
    strict: bool,
) -> LeafPlan:
    """The row of a plan for a leaf with these logical axes; None for whole."""
    axes = () if axes is None else axes
    said = axes.axes if isinstance(axes, LogicalAxes) else axes
    if len(said) > len(x.shape) and not isinstance(said, str):
        raise RankError(f"{shown(path)} has {len(x.shape)} dimensions, but {len(said)} logical axes: {tuple(said)}.")
    try:
        spec = logical_spec(axes, mesh, names=names, mode=mode, shape=x.shape)
    except ShardingError as error:
        raise type(error)(f"{shown(path)}: {error}") from None
    manual = manual_axes(x)  # inside a shard_map `x` is a piece already
    if manual:
        spec = PartitionSpec(*(tuple(a for a in entry_axes(e) if a not in manual) for e in spec))
    why = f"logical axes {tuple(said)}" if len(said) else "no logical axes"
    return leaf_plan(path, x, spec, mesh, why=why, strict=strict)
