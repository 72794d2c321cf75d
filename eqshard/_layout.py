"""Reading layouts off trees: shardings, specs, plans."""

from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ._errors import MeshError, ShardingError
from ._mesh import MeshLike, MeshSpec
from ._plan import LeafPlan, ShardingPlan
from ._spec import canonical, UNCONSTRAINED
from ._tree import array_leaves, dtype_name, map_arrays, Tree


def shardings_of(tree: Tree) -> Tree:
    """The sharding of each array leaf, in a tree like `eqx.filter(tree, eqshard.is_array)`.

    A tracer has the sharding of its type; numpy arrays, and structs without one, have None.

    ```python
    import eqshard, jax.numpy as jnp
    tree = eqshard.replicate({"a": jnp.ones(3), "f": len}, eqshard.MeshSpec(data=8))
    assert eqshard.shardings_of(tree)["a"].is_fully_replicated and eqshard.shardings_of(tree)["f"] is None
    ```
    """
    return map_arrays(_sharding_of, tree)


def _sharding_of(x: Any) -> Any:
    return jax.typeof(x).sharding if isinstance(x, Tracer) else getattr(x, "sharding", None)


def specs_of(tree: Tree) -> Tree:
    """The PartitionSpec of each array leaf, in a tree like `eqx.filter(tree, eqshard.is_array)`.

    Arrays on one device, numpy arrays, and structs without a sharding are whole: `P()`. Of a tracer on Auto axes only
    the compiler will know: `P.UNCONSTRAINED` in each dimension.

    ```python
    import eqshard, jax.numpy as jnp
    from jax.sharding import PartitionSpec as P
    assert eqshard.specs_of({"a": jnp.ones(3)}) == {"a": P()}
    ```
    """
    return map_arrays(spec_of, tree)


def spec_of(x: Any) -> PartitionSpec:
    """The canonical spec of one array, as `specs_of` gives it."""
    sharding = _sharding_of(x)
    if not isinstance(sharding, NamedSharding):
        if sharding is None or sharding.is_fully_replicated:
            return PartitionSpec()
        raise ShardingError(f"no PartitionSpec describes {sharding}: `jax.device_put` the array with a NamedSharding.")
    sizes = dict(sharding.mesh.shape)
    spec = canonical(sharding.spec, sizes)
    if isinstance(x, Tracer) and AxisType.Auto in sharding.mesh.axis_types:
        entries = tuple(spec) + (None,) * (len(x.shape) - len(spec))
        return PartitionSpec(*(UNCONSTRAINED if e is None else e for e in entries))
    return spec


def plan_of(tree: Tree, mesh: MeshLike | None = None) -> ShardingPlan:
    """The plan that `tree` lies by now: `apply(plan_of(tree), tree)` moves nothing.

    ```python
    import eqshard, jax.numpy as jnp
    mesh = eqshard.MeshSpec(data=8)
    tree = eqshard.replicate({"a": jnp.ones(3)}, mesh)
    assert eqshard.plan_of(tree) == eqshard.replicated_plan(tree, mesh)
    ```

    **Arguments:**

    - `mesh`: by default the mesh that the leaves lie on; if none does, one of a single device called `"device"`.

    **Raises:**

    - `MeshError`: leaves lie on different meshes.
    """
    leaves = array_leaves(tree)
    if mesh is None:
        mesh = _mesh_of([x for _, x in leaves])
    rows = []
    for path, x in leaves:
        spec, kind = spec_of(x), _memory_kind(x)
        rows.append(LeafPlan(path, tuple(x.shape), dtype_name(x), spec, spec, kind, "as it lies"))
    return ShardingPlan(MeshSpec.of(mesh), tuple(rows))


def _mesh_of(arrays: list[Any]) -> MeshSpec:
    shardings = [_sharding_of(x) for x in arrays]
    if any(isinstance(s, NamedSharding) and s.mesh.axis_names for s in shardings):
        return MeshSpec.of(arrays)
    concrete = [x for x in arrays if isinstance(x, jax.Array) and not isinstance(x, Tracer)]
    devices = set().union(*(x.devices() for x in concrete if x.committed))
    if len(devices) > 1:
        raise MeshError(
            f"leaves lie on {len(devices)} devices, and no NamedSharding says in what mesh: pass `mesh`, or `apply` a "
            "plan first."
        )
    return MeshSpec(device=1) if not devices else MeshSpec.of(Mesh([*devices], "device", axis_types=(AxisType.Auto,)))


def _memory_kind(x: Any) -> str | None:
    """Where the array is kept, if not where its devices keep arrays by default."""
    sharding = _sharding_of(x)
    kind = getattr(sharding, "memory_kind", None)
    if kind is None or isinstance(getattr(sharding, "mesh", None), AbstractMesh):
        return kind
    return None if kind == min(sharding.device_set, key=lambda d: d.id).default_memory().kind else kind
