"""Placing trees: the same call eagerly, under jit, on any axis type, over shapes."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, reshard

from ._agree import agree_to_move, PATIENCE
from ._errors import MeshError, ShardingError
from ._match import loose_rows
from ._mesh import MeshLike, MeshSpec
from ._narrow import narrow
from ._plan import LeafPlan, match, named_shardings, ShardingPlan
from ._put import is_key, move_all, put_all
from ._spec import canonical, check, entries, entry_axes, fit_spec, spec_text, UNCONSTRAINED
from ._tree import dtype_name, manual_axes, Tree


def apply(plan: ShardingPlan, tree: Tree, *, donate: bool = False, timeout: float | int = PATIENCE) -> Tree:
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
    - `donate`: eagerly, lets go of each array of `tree` once it has moved, so that moving needs the memory of the tree
        and of one group of arrays (64 MiB, or one larger array), not of two trees. An array is freed when nobody else
        holds it, so the caller must not hold the tree either: pass the result of a call, as in
        `apply(plan, step(...), donate=True)`, or take it out of a container, as in
        `apply(plan, trees.pop(), donate=True)`. Arrays that are still held stay valid, and keep their memory.
    - `timeout`: seconds to wait for the other processes, where arrays over several processes move.

    **Returns:**

    A tree like `tree`.

    **Raises:**

    - `MismatchError`: the tree is not the one that was planned; or an integer of a 64-bit numpy array does not fit
        into the 32 bits that JAX holds.
    - `ProcessError`: the processes do not move the same arrays in the same way, or one does not move them in time.
    - `ShardingError`: a row of the plan does not fit its mesh.
    """
    leaves, treedef = jtu.tree_flatten(tree)
    order, rows = match(plan, leaves, treedef), plan.leaves
    out = list(leaves)
    put: list[tuple[int, int]] = []
    structs: list[NamedSharding] | None = None
    concrete: set[type] = set()  # types seen to be neither; isinstance is slow on JAX's
    for i, (x, row) in enumerate(zip(leaves, order)):
        if row is None:
            continue
        if type(x) in concrete:
            put.append((i, row))
        elif isinstance(x, Tracer):
            out[i] = _constrain(x, rows[row], plan)
        elif isinstance(x, jax.ShapeDtypeStruct):
            structs = _struct_shardings(plan) if structs is None else structs
            x = narrow(x, rows[row].path)
            out[i] = x if x.sharding == structs[row] else x.update(sharding=structs[row])
        else:
            concrete.add(type(x))
            put.append((i, row))
    if put:
        tree = leaves = x = None  # what moves is held by `out` alone
        _put(plan, put, out, donate, timeout)
    return jtu.tree_unflatten(treedef, out)


def _put(plan: ShardingPlan, put: list[tuple[int, int]], out: list[Any], donate: bool, timeout: float | int) -> None:
    """Moves the concrete leaves that lie elsewhere, all at once, each shared array once.

    `put` has their places in `out` and their rows.
    """
    rows, targets = plan.leaves, named_shardings(plan, plan.build())
    where: dict[tuple[int, int], int] = {}
    arrays: list[Any] = []
    shardings: list[NamedSharding] = []
    asked: list[tuple[int, int, int]] = []
    loose = loose_rows(plan._rows)
    for i, row in put:
        x, target = out[i], targets[row]
        if row in loose:
            target = _settled(rows[row], plan.build(), x)
        if not isinstance(x, np.ndarray) and x.committed and _lies(x, target):
            continue
        key = id(x), id(target)
        if key not in where:
            where[key] = len(arrays)
            arrays.append(narrow(x, rows[row].path))
            shardings.append(target)
        asked.append((i, row, where[key]))
    if not arrays:
        return
    if jax.process_count() > 1:
        paths = {j: rows[row].path for _, row, j in reversed(asked)}
        moves = [(paths[j], x, s) for j, (x, s) in enumerate(zip(arrays, shardings))]
        agree_to_move("apply", moves, timeout=timeout)
        moves = []
    x = None
    if donate:
        for i, *_ in asked:
            out[i] = None  # held by `arrays` alone
    moved = move_all(arrays, shardings) if donate else put_all(arrays, shardings)
    traced = isinstance(moved[0], Tracer)  # then device_put forgets the layout on Auto axes
    for i, row, j in asked:
        out[i] = _constrain(moved[j], rows[row], plan) if traced else moved[j]


def _lies(x: jax.Array, target: NamedSharding) -> bool:
    if x.sharding is target or x.sharding == target:
        return True
    if isinstance(x.dtype, np.dtype):
        return False
    return is_key(x) and x.sharding.is_equivalent_to(target, x.ndim)  # keys never have a canonical spec


def _settled(leaf: LeafPlan, mesh: Mesh, x: Any) -> NamedSharding:
    """The sharding of a row with UNCONSTRAINED: there the array keeps the layout it has."""
    here = getattr(x, "sharding", None)
    here = here.spec if isinstance(here, NamedSharding) and here.mesh == mesh else PartitionSpec()
    return NamedSharding(mesh, _keep(leaf.spec, here), memory_kind=leaf.memory_kind)


def _keep(spec: PartitionSpec, here: PartitionSpec) -> PartitionSpec:
    said = {a for e in spec for a in entry_axes(e)}
    now = tuple(here) + (None,) * len(spec)
    kept = [
        tuple(a for a in entry_axes(now[d]) if a not in said) if e is UNCONSTRAINED else e for d, e in enumerate(spec)
    ]
    return canonical(PartitionSpec(*kept))


def _struct_shardings(plan: ShardingPlan) -> list[NamedSharding]:
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
    _check_order(canonical(spec, mesh.shape), types)
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


def _check_order(spec: PartitionSpec, types: dict[str, AxisType]) -> None:
    """Refuses what a traced value may not get: of two kinds of axes on one dimension, JAX reorders or drops one."""
    for dim, entry in enumerate(entries(spec)):
        kinds = {types.get(a) for a in entry_axes(entry)}
        if {AxisType.Auto, AxisType.Explicit} <= kinds:
            raise ShardingError(
                f"{spec_text(spec)} has an Auto and an Explicit axis in dim {dim}: inside jit, JAX does not keep such "
                "a layout. Lay them on different dimensions, or give the axes of one dimension one type."
            )


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
    manual = manual_axes(x)
    # Inside a shard_map `x` is a piece: the whole is larger along the manual axes.
    whole = [
        dim * math.prod(described.size(a) for a in entry_axes(e) if a in manual and described.has(a))
        for dim, e in zip(x.shape, spec)
    ]
    shape = (*whole, *x.shape[len(whole) :])
    if not strict:
        spec = fit_spec(spec, shape, described).spec
    leaf = LeafPlan("", shape, dtype_name(x), spec, spec)
    return apply(ShardingPlan(described, (leaf,)), x)
