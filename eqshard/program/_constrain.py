"""Writes planned layouts into a program: evaluates its jaxpr, with constraints where the plan has them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.core import Tracer
from jax.extend import core
from jax.sharding import auto_axes, NamedSharding, PartitionSpec

from .._apply import apply
from .._errors import MismatchError
from .._narrow import narrow_leaves, tree_paths
from .._tree import is_array
from ._pieces import apart, bind, LOCAL, run_apart, run_scattered, SCATTER_ADD, summed_axes
from ._step import StepPlan
from ._trace import inner_jaxpr, recomputed, REMAT, scan_parts, trace, Traced


def constrain(plan: StepPlan, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with the layouts of a plan written in: the same signature and values, no edit of the model.

    Inside `scan`, `while`, `cond`, `remat` and nested `jit` too. Call it under `jax.jit` or `eqx.filter_jit`.

    ```python
    import equinox as eqx, eqshard, jax, jax.numpy as jnp

    def step(model, x):
        return jax.vmap(model)(x).sum()

    model, x = eqx.nn.MLP(16, 16, 64, 2, key=jax.random.key(0)), jnp.ones((32, 16))
    plan = eqshard.step_plan(step, model, x, mesh=eqshard.MeshSpec(data=4, tp=2))
    planned = eqx.filter_jit(eqshard.constrain(plan, step))
    model, x = (eqshard.apply(p, a) for p, a in zip(plan.args, (model, x)))
    assert jnp.allclose(planned(model, x), step(model, x), rtol=1e-5)
    ```

    **Raises:**

    - `MismatchError`: `fn`, on these arguments, is not the program that was planned.
    """

    def constrained(*args: Any) -> Any:
        leaves, treedef = jtu.tree_flatten(args)
        args = jtu.tree_unflatten(treedef, narrow_leaves(leaves, lambda: tree_paths(args)))
        traced = trace(fn, args)
        if traced.fingerprint != plan.program:
            raise MismatchError(
                "this is not the program that was planned: another function, other shapes, or other static arguments. "
                "Call `step_plan` with the same function and arguments."
            )
        if "explicit" not in plan.mesh.axis_types:
            arrays = [x for x in jtu.tree_leaves(args) if is_array(x)]
            return traced.rebuild(_Writer(plan, arrays).run(traced.jaxpr, arrays))
        # Inside, layouts are the plan's affair: the axes are made Auto there, and Explicit again for the results.
        placed = [apply(p, arg) for p, arg in zip(plan.args, args)]
        arrays = [x for x in jtu.tree_leaves([*placed, *args[len(placed) :]]) if is_array(x)]
        run = lambda *xs: tuple(_Writer(plan, list(xs)).run(traced.jaxpr, list(xs)))
        where = _mesh(plan, arrays)
        results = tuple(NamedSharding(where, spec) for spec in _results(plan, traced))
        out: Any = auto_axes(run, axes=plan.mesh.names, out_sharding=results)(*arrays)
        return traced.rebuild(list(out))

    constrained.__name__ = getattr(fn, "__name__", "step")
    constrained.__doc__ = getattr(fn, "__doc__", None)
    return constrained


def _results(plan: StepPlan, traced: Traced) -> list[PartitionSpec]:
    """The layouts of the results: those of the arguments whose place they take; else whole."""
    specs = [plan.args[leaf.arg][leaf.path].spec for leaf in traced.ins]
    return [specs[traced.kept[i]] if i in traced.kept else PartitionSpec() for i in range(len(traced.outs))]


def _after(made: list[Any], eqn: Any, ins: list[Any], env: dict[Any, Any]) -> list[Any]:
    """What a block that is computed again reads, once all that the block before it made is there.

    Nothing waits for the gradients of weights, so XLA likes to compute those of all blocks in the end, and keeps what
    they are made of until then: as if nothing were computed again.
    """
    others = [v for v in made if v not in eqn.invars]
    ins, results = jax.lax.optimization_barrier((ins, [env[v] for v in others]))
    env.update(zip(others, results))
    return ins


class _Writer:
    def __init__(self, plan: StepPlan, arrays: list[Any]):
        self.points: dict[tuple[tuple[int, ...], str, int], PartitionSpec] = {
            (path, side, slot): spec for path, side, slot, spec in plan.inner
        }
        self.inside = {path[:n] for path, *_ in plan.inner for n in range(1, len(path) + 1)}
        self.mesh = _mesh(plan, arrays)

    def put(self, x: Any, path: tuple[int, ...], side: str, slot: int) -> Any:
        spec = self.points.get((path, side, slot))
        if spec is None or len(spec) > jnp.ndim(x):
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def run(self, closed: Any, args: list[Any]) -> list[Any]:
        args = [self.put(x, (), "arg", i) for i, x in enumerate(args)]
        out = self.evaluate(closed.jaxpr, closed.consts, args, ())
        out = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in out]  # a result may be a number
        return [self.put(x, (), "result", i) for i, x in enumerate(out)]

    def evaluate(self, jaxpr: Any, consts: Any, args: list[Any], path: tuple[int, ...]) -> list[Any]:
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, args))
        read = lambda v: v.val if isinstance(v, core.Literal) else env[v]
        sides = (*(e.invars for e in jaxpr.eqns), jaxpr.outvars)
        wanted = {v for side in sides for v in side if not isinstance(v, core.Literal)}
        before: Any = None
        for i, eqn in enumerate(jaxpr.eqns):
            here = (*path, i)
            ins = [self.put(read(v), here, "in", s) for s, v in enumerate(eqn.invars)]
            if any((here, "again", s) in self.points for s in range(len(ins))):
                ins = list(jax.lax.optimization_barrier(tuple(ins)))  # else XLA keeps what it gathered before
            ins = [self.put(x, here, "way", s) for s, x in enumerate(ins)]
            if recomputed(eqn):
                if before is not None:
                    ins = _after([v for v in before.outvars if v in wanted], eqn, ins, env)
                before = eqn
            out = self.in_pieces(eqn, ins, here)
            if out is None:
                out = self.equation(eqn, ins, here) if here in self.inside else bind(eqn, ins)
            env.update((v, self.put(x, here, "out", s)) for s, (v, x) in enumerate(zip(eqn.outvars, out)))
        return [read(v) for v in jaxpr.outvars]

    def in_pieces(self, eqn: Any, ins: list[Any], path: tuple[int, ...]) -> list[Any] | None:
        """Runs an equation on each device's piece, if the plan has it so; None if it is XLA's to cut."""
        made = self.points.get((path, "out", 0), PartitionSpec())
        if eqn.primitive.name in LOCAL and (path, "out", 0) in self.points:
            read = [self.points.get((path, "in", i), PartitionSpec()) for i, v in enumerate(eqn.invars) if v.aval.shape]
            if apart(eqn, read, made):
                return run_apart(eqn, ins, made, self.mesh)
        if eqn.primitive.name in SCATTER_ADD and all((path, "way", i) in self.points for i in range(3)):
            specs = [self.points[path, "way", i] for i in range(3)]
            if axes := summed_axes(eqn, specs):
                return [run_scattered(eqn, ins, specs, axes, made, self.mesh)]
        return None

    def equation(self, eqn: Any, ins: list[Any], path: tuple[int, ...]) -> list[Any]:
        """An equation with constraints in or inside it."""
        name, params = eqn.primitive.name, eqn.params
        if name in ("jit", "pjit", "closed_call", "core_call", "eval_jaxpr"):
            jaxpr, consts = inner_jaxpr(eqn)
            return self.evaluate(jaxpr, consts, ins, path)
        if name in REMAT and hasattr(params["jaxpr"], "eqns"):
            new = self.rewritten(params["jaxpr"], (), path, range(len(eqn.invars)))
            return bind(eqn, ins, params | {"jaxpr": new.jaxpr} if not new.consts else params)
        if name == "scan":
            first, carried = scan_parts(params)
            body = self.rewritten(params["jaxpr"].jaxpr, params["jaxpr"].consts, path, range(first, first + carried))
            return bind(eqn, ins, params | {"jaxpr": body})
        if name == "while":
            body = self.rewritten(params["body_jaxpr"].jaxpr, params["body_jaxpr"].consts, path)
            return bind(eqn, ins, params | {"body_jaxpr": body})
        if name == "cond":
            branches = tuple(self.rewritten(b.jaxpr, b.consts, (*path, i)) for i, b in enumerate(params["branches"]))
            return bind(eqn, ins, params | {"branches": branches})
        # Of custom gradients: the rules stay, and if they are asked they choose for themselves.
        if "call_jaxpr" in params:
            jaxpr, consts = inner_jaxpr(eqn)
            return bind(eqn, ins, params | {"call_jaxpr": self.rewritten(jaxpr, consts, path)})
        return bind(eqn, ins)

    def rewritten(self, jaxpr: Any, consts: Any, path: tuple[int, ...], carries: range = range(0)) -> Any:
        """The jaxpr of a body, with its constraints."""

        def body(*args: Any) -> list[Any]:
            pinned = [self.put(x, path, "carry", i - carries.start) if i in carries else x for i, x in enumerate(args)]
            return self.evaluate(jaxpr, consts, pinned, path)

        return jax.make_jaxpr(body)(*(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.invars))


def _mesh(plan: StepPlan, arrays: list[Any]) -> Any:
    """The mesh that the arguments are traced on, if it is the plan's; else the plan's own."""
    for x in arrays:
        if isinstance(x, Tracer):
            mesh = jax.typeof(x).sharding.mesh
            if not mesh.empty and (mesh.axis_names, mesh.axis_sizes) == (plan.mesh.names, plan.mesh.sizes):
                return mesh
    return plan.mesh.build()
