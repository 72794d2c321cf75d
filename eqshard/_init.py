"""Trees that are born in their layout."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, overload

import equinox as eqx
import jax
import jax.tree_util as jtu
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun, Var
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from ._agree import agree_to, argument_facts, PATIENCE
from ._apply import apply
from ._auto import auto_plan
from ._axes import PartitionAxis
from ._errors import ShardingError
from ._logical import logical_spec, STANDARD_NAMES
from ._mesh import MeshLike, MeshSpec
from ._names import LogicalAxes, Mode
from ._narrow import narrow_leaves, tree_paths
from ._plan import leaf_plan, match, named_shardings, ShardingPlan
from ._put import is_tracing
from ._spec import UNCONSTRAINED
from ._stray import check_devices
from ._tree import array_leaves, Tree
from ._value import digest


_LEAST_BYTES = 2**25  # a program that makes less is not worth to be cut

Planner = Callable[[Tree, MeshLike], ShardingPlan]
"""A function of shapes and a mesh: `auto_plan`, `fsdp_plan`, `functools.partial(rule_plan, rules=...)`, ..."""


@overload
def init(plan: ShardingPlan, fn: Callable[..., Any], /, *args: Any, timeout: float | int = PATIENCE) -> Tree: ...


@overload
def init(
    fn: Callable[..., Any],
    /,
    *args: Any,
    mesh: MeshLike,
    planner: Planner = auto_plan,
    timeout: float | int = PATIENCE,
) -> tuple[Tree, ShardingPlan]: ...


def init(
    first: Any,
    /,
    *args: Any,
    mesh: MeshLike | None = None,
    planner: Planner = auto_plan,
    timeout: float | int = PATIENCE,
) -> Any:
    """Calls `fn(*args)` so that the tree it makes is born in its layout: nothing ever holds a whole copy.

    `fn` is compiled with the plan's layouts as those of its results, so each device computes its own pieces. The same
    key gives the same values on every mesh (of JAX's default keys; those of `rbg` depend on the layout by their
    nature). What `fn` returns besides arrays comes through as it is; an array that is there twice is made once.

    ```python
    import equinox as eqx, eqshard, jax
    from jax.sharding import PartitionSpec as P

    def make(key):
        return eqx.nn.MLP(64, 64, 512, 2, key=key)

    model, plan = eqshard.init(make, jax.random.key(0), mesh=eqshard.MeshSpec(fsdp=8), planner=eqshard.fsdp_plan)
    assert model.layers[0].weight.sharding.spec == P("fsdp")
    again = eqshard.init(plan, make, jax.random.key(0))
    ```

    **Arguments:**

    - `plan`: for the tree that `fn` returns, as from `auto_plan(eqx.filter_eval_shape(fn, *args), mesh)`.
    - `fn`: makes the tree: a model's class, a function, an optimizer's `init`.
    - `args`: its arguments, arrays or not. (For keyword arguments use `functools.partial`.)
    - `mesh`, `planner`: without a `plan`, what to make one with, from the shapes.
    - `timeout`: seconds to wait for the other processes, if the mesh has several.

    **Returns:**

    The tree; without a `plan`, the tree and the plan that was made.

    **Raises:**

    - `MismatchError`: the tree is not the one that was planned; says which leaves.
    - `ProcessError`: the processes do not make the same tree from the same arguments, or one does not in time.
    - `ShardingError`: an argument lies on other devices than the plan's; says which.
    """
    if isinstance(first, ShardingPlan):
        if mesh is not None or not args:
            raise ShardingError("`init` takes a plan and a function, `init(plan, fn, *args)`; and then no `mesh`.")
        fn, *rest = args
        if is_tracing():
            return apply(first, fn(*rest))
        return _born(first, _trace(fn, tuple(rest)), tuple(rest), timeout)
    if mesh is None:
        raise ShardingError("`init` needs a plan, `init(plan, fn, *args)`, or a `mesh` to make one for.")
    traced = _trace(first, args)
    plan = planner(traced.shape, mesh)
    return (apply(plan, first(*args)) if is_tracing() else _born(plan, traced, args, timeout)), plan


def init_array(
    fn: Callable[[tuple[int, ...]], Any],
    shape: Sequence[int],
    axes: Sequence[Any] | LogicalAxes | PartitionSpec,
    mesh: MeshLike,
    *,
    names: PartitionAxis = STANDARD_NAMES,
    mode: Mode | str | int | None = None,
    strict: bool = True,
) -> Array:
    """One array, born in the layout that its logical axes mean: `init` for a single parameter.

    ```python
    import eqshard, functools, jax
    from eqshard import EMBED, VOCAB
    from jax.sharding import PartitionSpec as P
    normal = functools.partial(jax.random.normal, jax.random.key(0))
    table = eqshard.init_array(normal, (1024, 64), (VOCAB, None), eqshard.MeshSpec(tp=8))
    assert table.sharding.spec == P("tp")
    ```

    **Arguments:**

    - `fn`: a function of the shape.
    - `axes`: a logical name for each dimension, or a PartitionSpec.
    - `names`, `mode`: what logical names mean, as of `logical_plan`.
    - `strict`: whether a dimension that does not divide is an error; else it gives up axes.
    """
    shape, described = tuple(shape), MeshSpec.of(mesh)
    if isinstance(axes, PartitionSpec):
        spec = axes
    else:
        spec = logical_spec(axes, described, names=names, mode=mode, shape=shape)
    struct = eqx.filter_eval_shape(fn, shape)
    row = leaf_plan("", struct, spec, described, why="init_array", strict=strict)
    return init(ShardingPlan(described, (row,)), fn, shape)


class _Traced(NamedTuple):
    """A function that was traced once: what it computes, and the tree that its results make."""

    program: ClosedJaxpr
    inputs: list[Any]
    shape: Tree
    """With structs for the arrays that the program computes; what is no such array is there as it is."""
    twins: list[int]
    """For each leaf the number of the first leaf that is the same object."""


def _trace(fn: Callable[..., Any], args: tuple[Any, ...]) -> _Traced:
    dynamic, static = eqx.partition((fn, args), eqx.is_array)
    seen: list[Any] = []

    def watched(dynamic: Any) -> list[Any]:
        fn, args = eqx.combine(dynamic, static)
        leaves, treedef = jtu.tree_flatten(fn(*args))
        first: dict[int, int] = {}
        seen[:] = leaves, treedef, [first.setdefault(id(x), i) for i, x in enumerate(leaves)]
        return [x for x in leaves if isinstance(x, jax.Array)]

    paths = lambda: [path.partition("]")[2] for path in tree_paths(dynamic)]  # without the place in `(fn, args)`
    inputs = narrow_leaves(jtu.tree_leaves(dynamic), paths)
    program, shapes = jax.make_jaxpr(watched, return_shape=True)(dynamic)
    leaves, treedef, twins = seen
    structs = iter(shapes)
    shape = jtu.tree_unflatten(treedef, [next(structs) if isinstance(x, jax.Array) else x for x in leaves])
    return _Traced(program, inputs, shape, twins)


def _born(plan: ShardingPlan, traced: _Traced, args: tuple[Any, ...], timeout: float | int) -> Tree:
    leaves, treedef = jtu.tree_flatten(traced.shape)
    order = match(plan, leaves, treedef)
    mesh = plan.build()
    check_devices(array_leaves(args), frozenset(mesh.devices.flat), "the plan's mesh")
    if jax.process_count() > 1:
        program = digest([eqn.primitive.name for eqn in traced.program.jaxpr.eqns])
        facts = {"the plan": plan.fingerprint(), "the program": program, **argument_facts(args)}
        agree_to("init", facts, mesh.devices.flat, timeout=timeout)
    targets = named_shardings(plan, mesh)
    sources = [_source(i, leaves, order, traced.twins, targets) for i in range(len(leaves))]
    results = [i for i, x in enumerate(leaves) if isinstance(x, jax.ShapeDtypeStruct)]
    born: dict[int, Any] = {}
    wanted = {i: plan.leaves[row].nbytes for i, row in enumerate(order) if row is not None and i in sources}
    for group in _groups(wanted):
        program = _only(traced.program, [results.index(i) for i in group])
        layouts = [_settled(targets[row]) for row in (order[i] for i in group) if row is not None]
        made = jax.jit(jaxpr_as_fun(program), out_shardings=layouts)(*traced.inputs)
        born |= zip(group, jax.block_until_ready(made))
    out = [x if i is None else born[i] for x, i in zip(leaves, sources)]
    return apply(plan, jtu.tree_unflatten(treedef, out))  # places what `fn` returned as numpy, and moves nothing else


def _source(
    i: int, leaves: list[Any], order: list[int | None], twins: list[int], targets: list[NamedSharding]
) -> int | None:
    """Which computed array leaf `i` is: its own, or that of a twin that lies alike; None if it is not computed."""
    row, twin = order[i], order[twins[i]]
    if row is None or not isinstance(leaves[i], jax.ShapeDtypeStruct):
        return None
    return twins[i] if twin is not None and targets[twin] == targets[row] else i


def _groups(sizes: dict[int, int]) -> Iterator[list[int]]:
    """Leaves to be made by one program: one that makes them all may hold, for each, what it is computed from.

    Measured on CPUs, where random bits take three times the bytes of what is made of them, and a program that makes
    a hundred weights holds the bits of all. Sixteen programs, of a sixteenth each, compile as fast as one.
    """
    most = max(sum(sizes.values()) / 16, _LEAST_BYTES)
    group: list[int] = []
    for i in sizes:
        if group and sum(sizes[j] for j in group) + sizes[i] > most:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def _only(program: ClosedJaxpr, results: list[int]) -> ClosedJaxpr:
    """The part of a program that some of its results need."""
    jaxpr = program.jaxpr
    outvars = [jaxpr.outvars[i] for i in results]
    needed = {v for v in outvars if isinstance(v, Var)}
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            eqns.append(eqn)
            needed.update(v for v in eqn.invars if isinstance(v, Var))
    info = jaxpr.debug_info._replace(result_paths=None)
    return ClosedJaxpr(jaxpr.replace(eqns=eqns[::-1], outvars=outvars, debug_info=info), program.consts)


def _settled(sharding: NamedSharding) -> NamedSharding | None:
    return None if UNCONSTRAINED in tuple(sharding.spec) else sharding
