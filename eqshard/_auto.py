"""Plans from shapes alone."""

import math
from collections.abc import Callable
from typing import Any

from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from ._errors import ShardingError
from ._mesh import MeshLike, MeshSpec
from ._plan import LeafPlan, ShardingPlan
from ._spread import Names, Places, spec_of, spread, Units, units_of
from ._tree import divisible_shape, dtype_name, is_array, itemsize, named_leaves, size_text, Tree


MIN_BYTES = 2**16
"""Leaves smaller than this many bytes stay whole: a collective's latency costs more than they do."""

Row = Callable[[str, tuple[int, ...], str], LeafPlan]
"""A row of a plan, from a leaf's path, shape and dtype."""


def auto_spec(
    x: Any,
    mesh: MeshLike,
    *,
    names: Names | None = None,
    min_bytes: int = MIN_BYTES,
    reverse: bool = False,
) -> PartitionSpec:
    """A layout for one array from its shape: as many pieces as the mesh axes can make, the largest dimensions first.

    More than one axis goes on a dimension where its pieces would still be the largest, or where nothing else divides.

    ```python
    import eqshard, jax
    from jax.sharding import PartitionSpec as P
    mesh = eqshard.MeshSpec(dp=2, tp=4)
    assert eqshard.auto_spec(jax.ShapeDtypeStruct((1024, 4096), "float32"), mesh) == P("dp", "tp")
    assert eqshard.auto_spec(jax.ShapeDtypeStruct((7, 4096), "float32"), mesh) == P(None, ("tp", "dp"))
    ```

    **Arguments:**

    - `x`: an array (numpy too), tracer, or `jax.ShapeDtypeStruct`.
    - `names`: the mesh axes to use, the one for the largest dimension first; a tuple is used as one axis. Default: all,
        the largest first. An axis of size 1 is never used.
    - `min_bytes`: arrays smaller than this stay whole.
    - `reverse`: the smallest dimensions first.

    **Raises:**

    - `UnknownAxisError`, `DuplicateAxisError`: `names` are no axes of the mesh, or one is there twice.
    """
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise ShardingError(f"expected an array or a jax.ShapeDtypeStruct, got a {type(x).__name__}.")
    described = MeshSpec.of(mesh)
    return _chooser(units_of(described, names), min_bytes, reverse)(tuple(x.shape), dtype_name(x))[0]


def auto_sharding(
    x: Any,
    mesh: MeshLike,
    *,
    names: Names | None = None,
    min_bytes: int = MIN_BYTES,
    reverse: bool = False,
) -> NamedSharding:
    """`auto_spec` as a `jax.sharding.NamedSharding`, over an abstract mesh if `mesh` is one.

    ```python
    import eqshard, functools, jax.numpy as jnp
    sharding_for = functools.partial(eqshard.auto_sharding, mesh=eqshard.MeshSpec(data=8))
    assert sharding_for(jnp.ones((256, 256))).shard_shape((256, 256)) == (32, 256)
    ```
    """
    where = mesh if isinstance(mesh, AbstractMesh) else MeshSpec.of(mesh).build()
    return NamedSharding(where, auto_spec(x, mesh, names=names, min_bytes=min_bytes, reverse=reverse))


def auto_plan(
    tree: Tree,
    mesh: MeshLike,
    *,
    names: Names | None = None,
    min_bytes: int = MIN_BYTES,
    reverse: bool = False,
) -> ShardingPlan:
    """A plan for a tree from the shapes of its leaves: `auto_spec` for each. PRNG keys stay whole.

    ```python
    import equinox as eqx, eqshard, jax
    shape = eqx.filter_eval_shape(eqx.nn.MLP, 256, 256, 1024, 2, key=jax.random.key(0))
    plan = eqshard.auto_plan(shape, eqshard.MeshSpec(fsdp=4, tp=2))
    print(plan[".layers[0].weight"].spec)
    ```

    **Arguments:** as of `auto_spec`.
    """
    described = MeshSpec.of(mesh)
    choose = _chooser(units_of(described, names), min_bytes, reverse)

    def row(path: str, shape: tuple[int, ...], dtype: str) -> LeafPlan:
        spec, why = choose(shape, dtype)
        return LeafPlan(path, shape, dtype, spec, spec, None, why)

    return plan_leaves(tree, described, row)


def plan_leaves(tree: Tree, mesh: MeshSpec, row: Row) -> ShardingPlan:
    """A plan with a row for each array leaf of `tree`."""
    rows = [row(path, tuple(leaf.shape), dtype_name(leaf)) for path, leaf in named_leaves(tree) if is_array(leaf)]
    return ShardingPlan(mesh, rows)


def stays_whole(shape: tuple[int, ...], dtype: str, min_bytes: int) -> str:
    """Why a leaf should not be sharded, if so."""
    if dtype.startswith("key<"):
        return "a PRNG key: whole on every device"
    if not shape or 0 in shape:
        return "nothing to shard"
    nbytes = math.prod(shape) * itemsize(dtype)
    return f"small: {size_text(nbytes)} < {size_text(min_bytes)}" if nbytes < min_bytes else ""


def _chooser(
    units: Units, min_bytes: int, reverse: bool
) -> Callable[[tuple[int, ...], str], tuple[PartitionSpec, str]]:
    """The spec and the reason for a shape and dtype; each kind of leaf, and each layout, is worked out once."""
    by_dtype: dict[str, dict[tuple[int, ...], tuple[PartitionSpec, str]]] = {}
    layouts: dict[Places, tuple[PartitionSpec, str]] = {}

    def choose(shape: tuple[int, ...], dtype: str) -> tuple[PartitionSpec, str]:
        known = by_dtype.setdefault(dtype, {})
        if shape not in known:
            whole = stays_whole(shape, dtype, min_bytes)
            even = divisible_shape(shape, dtype)
            known[shape] = (PartitionSpec(), whole) if whole else layout(spread(even, units.factors, reverse))
        return known[shape]

    def layout(places: Places) -> tuple[PartitionSpec, str]:
        if places not in layouts:
            layouts[places] = spec_of(places, units), _reason(places, units, reverse)
        return layouts[places]

    return choose


def _reason(places: Places, units: Units, reverse: bool) -> str:
    used = [axis for unit, dim in zip(units.axes, places) if dim is not None for axis in unit]
    left = [axis for unit, dim in zip(units.axes, places) if dim is None for axis in unit]
    if not used:
        return f"no dim divides over {', '.join(left)}" if left else "no mesh axis to use"
    why = f"{'smallest' if reverse else 'largest'} dims over {', '.join(used)}"
    return f"{why}; {', '.join(left)} left out: the pieces do not divide further" if left else why
