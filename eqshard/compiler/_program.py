"""A program to compile: a function with its arguments and plans, lowered here, compiled anywhere."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.tree_util as jtu
from jax import export
from jax.sharding import NamedSharding, use_abstract_mesh

from .._errors import MeshError, ShardingError
from .._mesh import MeshSpec
from .._plan import match, named_shardings, ShardingPlan
from .._spec import canonical
from .._tree import is_array, path_name, struct_of
from ._flops import count_flops, Flops
from ._targets import Target, TargetError
from ._worker import Job


@dataclass(frozen=True)
class Program:
    """A function, its arguments, and how they are laid out.

    ```python
    import eqshard, jax
    from eqshard.compiler import compile_reports, Program
    x = jax.ShapeDtypeStruct((8, 8), "float32")
    programs = [Program(lambda x: x @ x, (x,)), Program(lambda x: x + x, (x,))]
    products, sums = compile_reports(programs)
    assert products.model_flops == 1024 and sums.model_flops == 0
    ```
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    plans: Any = None
    """A `ShardingPlan` for each argument, or None for one that is left as it lies; or a `StepPlan`."""
    donate: "str | Sequence[int]" = "none"
    """`"none"`, `"all"`, or the numbers of the arguments whose buffers the outputs may take."""
    compiler_options: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Flat:
    """A program of flat arrays."""

    fn: Callable[..., Any]
    """From arrays to a tuple of arrays."""
    leaves: tuple[Any, ...]
    layouts: tuple[tuple[Any, str | None] | None, ...]
    names: tuple[str, ...]
    mesh: MeshSpec
    donated: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]
    plans: tuple[ShardingPlan | None, ...]

    def jitted(self) -> Any:
        return jax.jit(self.fn, donate_argnums=self.donated, keep_unused=True)

    def structs(self, mesh: Any) -> list[jax.ShapeDtypeStruct]:
        """The arguments as shapes on `mesh`."""
        out = []
        for leaf, layout in zip(self.leaves, self.layouts):
            where = None if layout is None else NamedSharding(mesh, layout[0], memory_kind=layout[1])
            out.append(struct_of(leaf, where))
        return out


def flatten(program: Program, target: Target | None) -> Flat:
    """The program as a function of its array leaves; everything else is part of the function."""
    plans = _plans(program)
    mesh = _mesh(program, plans, target)
    leaves, treedef = jtu.tree_flatten(program.args)
    paths = [path_name(path) for path, _ in jtu.tree_flatten_with_path(program.args)[0]]
    numbers = [n for n, arg in enumerate(program.args) for _ in jtu.tree_leaves(arg)]
    layouts: list[tuple[Any, str | None] | None] = []
    for arg, plan in zip(program.args, plans):
        layouts += _layouts(arg, plan, mesh)
    dynamic = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
    given = _donated(program)

    def fn(*arrays: Any) -> tuple[Any, ...]:
        filled = list(leaves)
        for i, array in zip(dynamic, arrays):
            filled[i] = array
        out = program.fn(*jtu.tree_unflatten(treedef, filled))
        return tuple(x for x in jtu.tree_leaves(out) if is_array(x))

    fn.__name__ = _name(program.fn)
    return Flat(
        fn,
        tuple(leaves[i] for i in dynamic),
        tuple(layouts[i] for i in dynamic),
        tuple(paths[i] for i in dynamic),
        mesh,
        tuple(k for k, i in enumerate(dynamic) if numbers[i] in given),
        tuple((program.compiler_options or {}).items()),
        plans,
    )


def _name(fn: Any) -> str:
    return re.sub(r"\W", "_", getattr(fn, "__name__", type(fn).__name__))


def _plans(program: Program) -> tuple[ShardingPlan | None, ...]:
    plans = program.plans
    if plans is None:
        return (None,) * len(program.args)
    if isinstance(plans, ShardingPlan):
        plans = (plans,)
    elif not isinstance(plans, (tuple, list)) and isinstance(getattr(plans, "args", None), (tuple, list)):
        plans = plans.args  # a StepPlan
    if not isinstance(plans, (tuple, list)) or not all(p is None or isinstance(p, ShardingPlan) for p in plans):
        raise ShardingError(
            f"`plans` must be a ShardingPlan or None for each argument, or a StepPlan; got a {type(plans).__name__}."
        )
    if len(plans) != len(program.args):
        raise ShardingError(
            f"`plans` has {len(plans)} entries for {len(program.args)} arguments: give one for each, None to leave it."
        )
    return tuple(plans)


def _donated(program: Program) -> frozenset[int]:
    donate = program.donate
    if donate in ("none", "all"):
        return frozenset(range(len(program.args)) if donate == "all" else ())
    if isinstance(donate, str) or not all(0 <= n < len(program.args) for n in donate):
        raise ShardingError(
            f'`donate` must be "none", "all", or numbers of the {len(program.args)} arguments; got {donate!r}.'
        )
    return frozenset(donate)


def _mesh(program: Program, plans: tuple[ShardingPlan | None, ...], target: Target | None) -> MeshSpec:
    meshes = [plan.mesh for plan in plans if plan is not None]
    mesh = meshes[0] if meshes else None
    other = next((m for m in meshes if m != mesh), None)
    if other is not None:
        raise MeshError(f"`plans` lie on different meshes: {mesh} and {other}.")
    size = 1 if target is None else target.size
    if mesh is None:
        try:
            mesh = MeshSpec.of(program.args)
        except MeshError:
            mesh = MeshSpec(device=size)
    if target is None:
        return mesh
    mesh = mesh.replace(devices=None).resolve(size)
    if mesh.size() != size:
        raise TargetError(f'{mesh} has {mesh.size()} devices, the target "{target}" has {size}: they must be equal.')
    return mesh


def _layouts(arg: Any, plan: ShardingPlan | None, mesh: MeshSpec) -> list[tuple[Any, str | None] | None]:
    """The spec and memory kind of each leaf; None where there is none to keep."""
    leaves, treedef = jtu.tree_flatten(arg)
    if plan is None:
        return [_lies(leaf, mesh) for leaf in leaves]
    named_shardings(plan, mesh.abstract())  # checks that every row fits the mesh
    rows = [None if i is None else plan.leaves[i] for i in match(plan, leaves, treedef)]
    return [None if row is None else (canonical(row.spec, mesh.shape), row.memory_kind) for row in rows]


def _lies(leaf: Any, mesh: MeshSpec) -> tuple[Any, str | None] | None:
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and dict(sharding.mesh.shape) == mesh.shape:
        return canonical(sharding.spec, mesh.shape), None
    return None


def lower_for(flat: Flat, target: Target) -> tuple[Job, Flops]:
    """Traces and lowers here, for devices that are not here; and counts the FLOPs."""
    abstract = flat.mesh.abstract()
    jitted = flat.jitted()
    structs = flat.structs(abstract)
    with use_abstract_mesh(abstract):
        flops = count_flops(jitted.trace(*structs).jaxpr)
        exported = _export(jitted, structs, target.platform)
    shipped = dataclasses.replace(exported, _get_vjp=None)
    return Job(shipped, flat.mesh.replace(axis_type="auto"), flat.layouts, flat.donated, flat.options), flops


def _export(jitted: Any, structs: list[Any], platform: str) -> export.Exported:
    """Exports, with every custom call that stands in the way allowed: both ends are of one version."""
    allowed: list[Any] = []
    while True:
        try:
            return export.export(jitted, platforms=[platform], disabled_checks=allowed)(*structs)
        except NotImplementedError as error:
            raise TargetError(
                f"this program cannot be compiled elsewhere: {error} Host callbacks belong to their process; leave "
                "`jax.debug.print` and the like out, or use `target=None`."
            ) from error
        except ValueError as error:
            names = re.findall(r"\"?custom_call_target\"? ?= ?\"([^\"]+)\"|@([\w.$]+)\(", str(error))
            new = {a or b for a, b in names} - {check.is_custom_call() for check in allowed}
            if "custom call" not in str(error) or not new:
                raise
            allowed += [export.DisabledSafetyCheck.custom_call(name) for name in sorted(new)]
