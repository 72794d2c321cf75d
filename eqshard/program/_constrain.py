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
from .._spec import canonical, check
from .._tree import is_array, struct_of
from ._local import bind, clamped_starts, run_local
from ._outline import refusal
from ._partition_rules import axes_of, DimNames, partition_rule, PartitionRule, PINNED_RULES, restrict
from ._places import Places
from ._step import StepPlan
from ._trace import inner_jaxpr, jaxprs_in, recomputed, REMAT, scan_parts, trace, Traced


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
            raise MismatchError(refusal(plan.args, plan.outline, dict(plan.versions), traced))
        if "explicit" not in plan.mesh.axis_types:
            arrays = [x for x in jtu.tree_leaves(args) if is_array(x)]
            return traced.rebuild(_Writer(plan, traced, arrays).run(traced.jaxpr, arrays))
        # Inside, layouts are the plan's affair: the axes are made Auto there, and Explicit again for the results.
        placed = [apply(p, arg) for p, arg in zip(plan.args, args)]
        arrays = [x for x in jtu.tree_leaves([*placed, *args[len(placed) :]]) if is_array(x)]
        run = lambda *xs: tuple(_Writer(plan, traced, list(xs)).run(traced.jaxpr, list(xs)))
        where = _mesh(plan, arrays)
        results = tuple(NamedSharding(where, spec) for spec in _results(plan, traced))
        out: Any = auto_axes(run, axes=plan.mesh.names, out_sharding=results)(*arrays)
        return traced.rebuild(list(out))

    constrained.__name__ = getattr(fn, "__name__", "step")
    constrained.__doc__ = getattr(fn, "__doc__", None)
    return constrained


def _results(plan: StepPlan, traced: Traced) -> list[PartitionSpec]:
    """The layouts of the results: those that were planned, which are replicated for results of one element."""
    planned = {slot: spec for path, side, slot, spec in plan.inner if not path and side == "result"}
    return [planned.get(i, PartitionSpec()) for i in range(len(traced.outs))]


def _needs_pins(eqn: Any) -> bool:
    """Returns whether an equation holds operations that are pinned even where the plan has no layouts."""
    if eqn.primitive.name == "shard_map":
        return False
    inner = [j for param in eqn.params.values() for j in jaxprs_in(param)]
    return any(e.primitive.name in PINNED_RULES or _needs_pins(e) for j in inner for e in j.eqns)


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
    def __init__(self, plan: StepPlan, traced: Traced, arrays: list[Any]):
        places = Places(traced.jaxpr.jaxpr)
        inner = [(places.actual(path), side, slot, spec) for path, side, slot, spec in plan.inner]
        self.points: dict[tuple[tuple[int, ...], str, int], PartitionSpec] = {
            (path, side, slot): canonical(spec) for path, side, slot, spec in inner if path is not None
        }
        self.inside = {path[:n] for path, *_ in self.points for n in range(1, len(path) + 1)}
        self.mesh = _mesh(plan, arrays)
        self.sizes = dict(plan.mesh.shape)

    def put(self, x: Any, path: tuple[int, ...], side: str, slot: int) -> Any:
        spec = self.point(jnp.shape(x), path, side, slot)
        return x if spec is None else self.pin(x, spec)

    def point(self, shape: tuple[int, ...], path: tuple[int, ...], side: str, slot: int) -> PartitionSpec | None:
        """Returns the layout that the plan has for a value of this shape; None if it has none."""
        spec = self.points.get((path, side, slot))
        if spec is not None:
            place = f"layout {side} {slot} of equation {'.'.join(map(str, path))}" if path else f"{side} {slot}"
            check(spec, shape, self.sizes, place)
        return spec

    def run(self, closed: Any, args: list[Any]) -> list[Any]:
        args = [self.put(x, (), "arg", i) for i, x in enumerate(args)]
        out = self.evaluate(closed.jaxpr, closed.consts, args, ())
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
            rule = partition_rule(eqn)
            if rule is not None:
                out = self.partitioned(eqn, ins, here, rule)
            elif here in self.inside or _needs_pins(eqn):
                out = self.equation(eqn, ins, here)
            else:
                out = bind(eqn, ins)
            env.update((v, self.put(x, here, "out", s)) for s, (v, x) in enumerate(zip(eqn.outvars, out)))
        return [_typed(read(v), v.aval) for v in jaxpr.outvars]

    def partitioned(self, eqn: Any, ins: list[Any], path: tuple[int, ...], rule: PartitionRule) -> list[Any]:
        """Runs an equation that has a partition rule, sharded along independent dimensions only."""
        if eqn.primitive.name in ("dynamic_slice", "dynamic_update_slice"):
            ins = clamped_starts(eqn, ins)
        outs = [self.point(v.aval.shape, path, "out", i) for i, v in enumerate(eqn.outvars)]
        operands = [self.points.get((path, "way", i), self.points.get((path, "in", i))) for i in range(len(eqn.invars))]
        if not rule.local:
            ins = [self.restricted(x, spec, names, rule) for x, spec, names in zip(ins, operands, rule.ins)]
            made = bind(eqn, ins)
            return [self.restricted(x, spec, names, rule) for x, spec, names in zip(made, outs, rule.outs)]
        wanted = [*zip(rule.ins, operands), *zip(rule.outs, outs)]
        chosen = axes_of(rule, [(names, spec) for names, spec in wanted if spec is not None])
        if chosen:
            return run_local(eqn, ins, rule, chosen, outs[0] or PartitionSpec(), self.mesh)
        made = bind(eqn, [self.pin(x, PartitionSpec()) for x in ins])
        return [self.pin(x, PartitionSpec()) for x in made]

    def restricted(self, x: Any, spec: PartitionSpec | None, names: DimNames, rule: PartitionRule) -> Any:
        """Pins a value to its layout in the plan, less the dimensions that the operation cannot have sharded."""
        if spec is None:
            return self.pin(x, PartitionSpec()) if rule.pinned else x
        allowed = restrict(spec, names)
        return x if allowed == spec and not rule.pinned else self.pin(x, allowed)

    def pin(self, x: Any, spec: PartitionSpec) -> Any:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec)) if jnp.ndim(x) else x

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
            cond = self.rewritten(params["cond_jaxpr"].jaxpr, params["cond_jaxpr"].consts, (*path, -1))
            return bind(eqn, ins, params | {"body_jaxpr": body, "cond_jaxpr": cond})
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

        return jax.make_jaxpr(body)(*(struct_of(v.aval) for v in jaxpr.invars))


def _typed(x: Any, aval: Any) -> Any:
    """A result as an array of the dtype and weak type that the program gives it: it may be a number, and what is
    written instead of an equation may be strict where the equation is weak."""
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    weak = bool(getattr(aval, "weak_type", False))
    if (x.dtype, bool(getattr(x, "weak_type", False))) == (aval.dtype, weak):
        return x
    return core.primitives.convert_element_type_p.bind(x, new_dtype=aval.dtype, weak_type=weak, sharding=None)


def _mesh(plan: StepPlan, arrays: list[Any]) -> Any:
    """The mesh that the arguments are traced on, if it is the plan's; else the plan's own."""
    for x in arrays:
        if isinstance(x, Tracer):
            mesh = jax.typeof(x).sharding.mesh
            if not mesh.empty and (mesh.axis_names, mesh.axis_sizes) == (plan.mesh.names, plan.mesh.sizes):
                return mesh
    return plan.mesh.build()
