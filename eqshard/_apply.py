"""Placing trees: the same call eagerly, under jit, on any axis type, over shapes."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, reshard
from jaxtyping import Array, Int, PyTree

from ._errors import MeshError, MismatchError, ShardingError, UnknownAxisError
from ._mesh import MeshLike, MeshSpec
from ._plan import LeafPlan, match, named_shardings, replicated_plan, ShardingPlan
from ._put import fetch, is_here, is_key, put
from ._spec import canonical, check, entry_axes, fit_spec, UNCONSTRAINED
from ._tree import array_leaves, dtype_name, map_arrays, shown


def apply(plan: ShardingPlan, tree: PyTree[Any], *, donate: bool = False) -> PyTree[Any]:
    """Lays `tree` out as `plan` says, at rest.

    The same call everywhere. Eagerly, arrays (numpy too) move with one `jax.device_put`, and those that already lie
    right are returned as they are. Under `jax.jit`, a layout becomes a constraint on Auto axes and a `reshard` on
    Explicit ones; inside `jax.shard_map`, manual axes are left out. `jax.ShapeDtypeStruct`s come back with their
    sharding. Leaves that are no arrays pass through. Differentiable, idempotent, and never changes a value.

    ```python
    import equinox as eqx, eqshard, jax
    from jax.sharding import PartitionSpec as P
    model = eqx.nn.Linear(16, 32, key=jax.random.key(0))
    plan = eqshard.replicated_plan(model, eqshard.MeshSpec(tp=8)).at("weight").set(P("tp"))
    model = eqshard.apply(plan, model)
    assert model.weight.addressable_shards[0].data.shape == (4, 16)
    ```

    **Arguments:**

    - `plan`: must match `tree`, leaf by leaf.
    - `donate`: eagerly, give up the buffers of `tree`, so that moving needs no second copy.

    **Returns:**

    A tree like `tree`.

    **Raises:**

    - `MismatchError`: the tree is not the one that was planned.
    - `ShardingError`: a row of the plan does not fit its mesh.
    """
    leaves, treedef = jtu.tree_flatten(tree)
    order = match(plan, leaves, treedef)
    out = list(leaves)
    put: list[int] = []
    for i, (x, row) in enumerate(zip(leaves, order)):
        if row is None:
            continue
        if isinstance(x, Tracer):
            out[i] = _constrain(x, plan.leaves[row], plan)
        elif isinstance(x, jax.ShapeDtypeStruct):
            out[i] = x.update(sharding=_shape_shardings(plan)[row])
        else:
            put.append(i)
    if put:
        _put(plan, leaves, order, put, out, donate)
    return jtu.tree_unflatten(treedef, out)


def _put(
    plan: ShardingPlan, leaves: list[Any], order: list[int | None], put: list[int], out: list[Any], donate: bool
) -> None:
    """Moves the concrete leaves that lie elsewhere, all at once, each shared array once."""
    targets = named_shardings(plan, plan.build())
    where: dict[tuple[int, int], int] = {}
    arrays: list[Any] = []
    shardings: list[NamedSharding] = []
    asked: list[tuple[int, int]] = []
    for i in put:
        x, row = leaves[i], order[i]
        assert row is not None
        target = _settled(targets[row], x)
        if isinstance(x, jax.Array) and x.committed and _lies(x, target):
            continue
        _check_exact(x, plan.leaves[row])
        key = id(x), id(target)
        if key not in where:
            where[key] = len(arrays)
            arrays.append(x)
            shardings.append(target)
        asked.append((i, where[key]))
    if not arrays:
        return
    moved = put(arrays, shardings, donate=donate)
    for i, j in asked:
        row = order[i]
        assert row is not None
        # Under a trace device_put gives a tracer, and on Auto axes forgets the layout.
        out[i] = _constrain(moved[j], plan.leaves[row], plan) if isinstance(moved[j], Tracer) else moved[j]


def _lies(x: jax.Array, target: NamedSharding) -> bool:
    if x.sharding is target or x.sharding == target:
        return True
    return is_key(x) and x.sharding.is_equivalent_to(target, x.ndim)  # keys never have a canonical spec


def _settled(sharding: NamedSharding, x: Any) -> NamedSharding:
    """A sharding without UNCONSTRAINED: there the array keeps the layout it has."""
    if UNCONSTRAINED not in tuple(sharding.spec):
        return sharding
    here = getattr(x, "sharding", None)
    here = here.spec if isinstance(here, NamedSharding) and here.mesh == sharding.mesh else PartitionSpec()
    return NamedSharding(sharding.mesh, _keep(sharding.spec, here), memory_kind=sharding.memory_kind)


def _keep(spec: PartitionSpec, here: PartitionSpec) -> PartitionSpec:
    said = {a for e in spec for a in entry_axes(e)}
    now = tuple(here) + (None,) * len(spec)
    kept = [
        tuple(a for a in entry_axes(now[d]) if a not in said) if e is UNCONSTRAINED else e for d, e in enumerate(spec)
    ]
    return canonical(PartitionSpec(*kept))


def _check_exact(x: Any, leaf: LeafPlan) -> None:
    """Refuses to let JAX narrow a 64-bit numpy array behind the user's back."""
    if isinstance(x, np.ndarray) and jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype:
        raise MismatchError(
            f"{shown(leaf.path)} is {x.dtype}, which JAX would narrow to {jax.dtypes.canonicalize_dtype(x.dtype)}. "
            'Cast it yourself, or call `jax.config.update("jax_enable_x64", True)`.'
        )


def _shape_shardings(plan: ShardingPlan) -> list[NamedSharding]:
    """Shardings for structs: on the mesh's devices where they are, else on the abstract mesh."""
    try:
        mesh = plan.build()
    except MeshError:
        return named_shardings(plan, plan.mesh.abstract())
    return named_shardings(plan, mesh)


def _constrain(x: Any, leaf: LeafPlan, plan: ShardingPlan) -> Any:
    check(leaf.spec, leaf.shape, plan.mesh.shape, leaf.path, leaf.dtype)
    x = constrain_traced(x, leaf.spec, plan.mesh, plan.build)
    if leaf.memory_kind is None:
        return x
    mesh = plan.build()
    return jax.device_put(x, NamedSharding(mesh, canonical(leaf.spec, plan.mesh.shape), memory_kind=leaf.memory_kind))


def constrain_traced(x: Any, spec: PartitionSpec, mesh: MeshSpec, build: Callable[[], Mesh]) -> Any:
    """Constrains a tracer to `spec`, on the mesh that it is traced on, or else on the one that `build` gives.

    Auto axes take `with_sharding_constraint`, Explicit ones `reshard`; each refuses the other's. Manual axes are
    those of an enclosing `shard_map`: there `x` is a piece already.
    """
    here = jax.typeof(x).sharding
    traced_on = here.mesh
    if not traced_on.empty and (traced_on.axis_names, traced_on.axis_sizes) == (mesh.names, mesh.sizes):
        target: Any = traced_on
    else:
        target = build()
    types = dict(zip(target.axis_names, target.axis_types))
    auto = _only(spec, {a for a, t in types.items() if t == AxisType.Auto}, mesh)
    explicit = _only(spec, {a for a, t in types.items() if t == AxisType.Explicit}, mesh)
    if AxisType.Explicit in types.values():
        if traced_on.empty:
            # A value that does not know the mesh yet: bring it there whole. (P() is right under vmap too.)
            x = jax.device_put(x, NamedSharding(target, PartitionSpec()))
            here = jax.typeof(x).sharding
        x = reshard(x, NamedSharding(target, _keep(explicit, here.spec)))
    if AxisType.Auto in types.values():
        x = jax.lax.with_sharding_constraint(x, NamedSharding(target, auto))
    return x


def _only(spec: PartitionSpec, axes: set[str], mesh: MeshSpec) -> PartitionSpec:
    kept = [e if e is UNCONSTRAINED else tuple(a for a in entry_axes(e) if a in axes) for e in spec]
    return canonical(PartitionSpec(*kept), mesh.shape)


def constrain_to(x: Any, spec: PartitionSpec, mesh: MeshLike, *, strict: bool = True) -> Any:
    """Lays one array out, eagerly or traced: `apply` for an array and a spec.

    ```python
    import eqshard, equinox as eqx, jax.numpy as jnp
    from jax.sharding import PartitionSpec as P
    mesh = eqshard.MeshSpec(dp=2, tp=4)

    @eqx.filter_jit
    def f(x):
        return eqshard.constrain_to(x * 2, P("dp", "tp"), mesh)

    assert f(jnp.ones((4, 8))).sharding.spec == P("dp", "tp")
    ```

    **Arguments:**

    - `strict`: whether a dimension that does not divide is an error; else the longest prefix of axes that fits.
    """
    described = MeshSpec.of(mesh)
    if not strict:
        spec = fit_spec(spec, x.shape, described).spec
    spec = canonical(spec, described.shape)
    leaf = LeafPlan("", tuple(x.shape), dtype_name(x), spec, spec)
    return apply(ShardingPlan(described, (leaf,)), x)


def replicate(tree: PyTree[Any], mesh: MeshLike) -> PyTree[Any]:
    """Puts every array leaf of `tree` whole on every device of `mesh`, with one `jax.device_put`.

    ```python
    import eqshard, numpy as np
    tree = eqshard.replicate({"a": np.ones(3, "float32"), "name": "b"}, eqshard.MeshSpec(data=8))
    assert tree["a"].is_fully_replicated and len(tree["a"].devices()) == 8
    ```
    """
    return apply(replicated_plan(tree, mesh), tree)


def gather(tree: PyTree[Any], *, to: Literal["all"] | int | None = None) -> PyTree[Any]:
    """Brings every array leaf of `tree` whole to the host, as numpy.

    Typed PRNG keys, which numpy cannot hold, become arrays on one device. `jax.ShapeDtypeStruct`s lose their sharding.
    Arrays of which other processes hold parts are sent only if `to` asks for it, one after the other; all processes
    must then make the call.

    ```python
    import eqshard, numpy as np
    tree = {"x": np.arange(4, dtype="int32"), "name": "x"}
    placed = eqshard.replicate(tree, eqshard.MeshSpec(data=8))
    assert (eqshard.gather(placed)["x"] == tree["x"]).all()
    ```

    **Arguments:**

    - `to`: `"all"`: every process gets every array; or the index of the process that does: on the others each jax
        array becomes a `jax.ShapeDtypeStruct`.

    **Raises:**

    - `ShardingError`: a leaf is traced; or a part of it lies in another process, and `to` is not given.
    """
    leaves, treedef = jtu.tree_flatten(tree)
    if isinstance(to, int) and not 0 <= to < jax.process_count():
        raise ShardingError(f"`to={to}` is no process: there are {jax.process_count()}.")
    for path, x in array_leaves(tree):
        if isinstance(x, Tracer):
            raise ShardingError(f"cannot gather {shown(path)} to the host: it is being traced. Use `replicate` in jit.")
        if isinstance(x, jax.Array) and to is None and not is_here(x):
            raise ShardingError(
                f"cannot gather {shown(path)}: part of it lies in another process. Let every process call "
                '`gather(tree, to="all")` to have it everywhere, or `gather(tree, to=0)` to have it in process 0.'
            )
    keys = {i: jax.random.key_impl(x) for i, x in enumerate(leaves) if is_key(x)}
    data = [jax.random.key_data(x) if i in keys else x for i, x in enumerate(leaves)]
    host: list[Any] = [fetch(x) if isinstance(x, jax.Array) and not is_here(x) else x for x in data]
    if isinstance(to, int) and jax.process_index() != to:
        leaves = [jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x for x in leaves]
        host = leaves
    host = jax.device_get(host)
    for i, x in enumerate(leaves):
        if isinstance(x, jax.ShapeDtypeStruct):
            host[i] = jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type)
        elif i in keys:
            host[i] = jax.random.wrap_key_data(host[i], impl=keys[i])
        elif not isinstance(x, jax.Array):
            host[i] = x
    return jtu.tree_unflatten(treedef, host)


def shard_and_gather_fns(
    plan: ShardingPlan,
) -> tuple[dict[str, Callable[[Any], Any]], dict[str, Callable[[Any], Any]]]:
    """For each leaf a function that lays it out, and one that brings it whole to the host, by path.

    ```python
    import eqshard, numpy as np
    from jax.sharding import PartitionSpec as P
    tree = {"w": np.arange(8.0, dtype="float32")}
    plan = eqshard.replicated_plan(tree, eqshard.MeshSpec(x=4)).at("w").set(P("x"))
    shard, gather = eqshard.shard_and_gather_fns(plan)
    placed = shard["['w']"](tree["w"])
    assert placed.sharding.spec == P("x") and (gather["['w']"](placed) == tree["w"]).all()
    ```
    """

    def shard_fn(leaf: LeafPlan) -> Callable[[Any], Any]:
        one = plan.select(leaf.path)
        return lambda x: apply(one, x)

    return {leaf.path: shard_fn(leaf) for leaf in plan}, {leaf.path: gather for leaf in plan}


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


def axis_size(names: str | Sequence[str]) -> int:
    """Inside `jax.shard_map`: the number of devices along the named mesh axes.

    ```python
    import eqshard, jax, jax.numpy as jnp
    from jax.sharding import PartitionSpec as P
    mesh = eqshard.MeshSpec(x=8).build()
    f = jax.shard_map(lambda a: a * eqshard.axis_size("x"), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    assert (jax.jit(f)(jnp.ones(8)) == 8).all()
    ```

    **Raises:**

    - `UnknownAxisError`: not inside a `shard_map` over these axes.
    """
    size = 1
    for name in (names,) if isinstance(names, str) else names:
        size *= _inside(jax.lax.axis_size, name)
    return size


def axis_index(names: str | Sequence[str]) -> Int[Array, ""] | int:
    """Inside `jax.shard_map`: this device's index along the named mesh axes, the first name major.

    ```python
    import eqshard, jax, jax.numpy as jnp
    from jax.sharding import PartitionSpec as P
    mesh = eqshard.MeshSpec(x=8).build()
    f = jax.shard_map(lambda a: a + eqshard.axis_index("x"), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    assert (jax.jit(f)(jnp.zeros(8, int)) == jnp.arange(8)).all()
    ```

    **Raises:**

    - `UnknownAxisError`: not inside a `shard_map` over these axes.
    """
    index: Any = 0
    for name in (names,) if isinstance(names, str) else names:
        index = index * _inside(jax.lax.axis_size, name) + _inside(jax.lax.axis_index, name)
    return index


def _inside(fn: Callable[[str], Any], name: str) -> Any:
    try:
        return fn(name)
    except NameError:
        raise UnknownAxisError(
            f"the mesh axis {name!r} is not manual here: `axis_size` and `axis_index` work inside a `jax.shard_map` "
            "over that axis. Elsewhere, `MeshSpec.size` tells an axis's size."
        ) from None
