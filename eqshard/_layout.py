"""Reading layouts off trees: shardings, specs, plans."""

from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ._mesh import MeshLike, MeshSpec
from ._plan import LeafPlan, ShardingPlan
from ._spec import canonical, UNCONSTRAINED
from ._tree import array_leaves, dtype_name, map_arrays


def shardings_of(tree: PyTree[Any]) -> PyTree[Any]:
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


def specs_of(tree: PyTree[Any]) -> PyTree[Any]:
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
        return PartitionSpec()
    sizes = dict(sharding.mesh.shape)
    spec = canonical(sharding.spec, sizes)
    if isinstance(x, Tracer) and AxisType.Auto in sharding.mesh.axis_types:
        entries = tuple(spec) + (None,) * (len(x.shape) - len(spec))
        return PartitionSpec(*(UNCONSTRAINED if e is None else e for e in entries))
    return spec


def plan_of(tree: PyTree[Any], mesh: MeshLike | None = None) -> ShardingPlan:
    """The plan that `tree` lies by now: `apply(plan_of(tree), tree)` moves nothing.

    ```python
    import eqshard, jax.numpy as jnp
    tree = eqshard.replicate({"a": jnp.ones(3)}, eqshard.MeshSpec(data=8))
    plan = eqshard.plan_of(tree)
    assert plan.mesh.shape == {"data": 8} and len(plan) == 1
    ```

    **Arguments:**

    - `mesh`: by default the mesh that the leaves lie on; if none does, one of a single device called `"device"`.

    **Raises:**

    - `MeshError`: leaves lie on different meshes.
    """
    rows = []
    leaves = array_leaves(tree)
    if mesh is None:
        placed = any(isinstance(_sharding_of(x), NamedSharding) and _sharding_of(x).mesh.axis_names for _, x in leaves)
        mesh = MeshSpec.of([x for _, x in leaves]) if placed else MeshSpec(device=1)
    for path, x in leaves:
        spec = spec_of(x)
        sharding = _sharding_of(x)
        kind = getattr(sharding, "memory_kind", None)
        if kind is not None and not isinstance(x, Tracer) and kind == _default_kind(sharding):
            kind = None
        rows.append(LeafPlan(path, tuple(x.shape), dtype_name(x), spec, spec, kind, "as it lies"))
    return ShardingPlan(MeshSpec.of(mesh), tuple(rows))


def _default_kind(sharding: Any) -> str | None:
    devices = getattr(sharding, "_device_assignment", None) or tuple(sharding.device_set)
    return devices[0].default_memory().kind if devices else None
