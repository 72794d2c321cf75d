"""Writes planned layouts into a program: evaluates its jaxpr, with constraints where the plan has them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.core import Tracer
from jax.extend import core, source_info_util
from jax.sharding import auto_axes, NamedSharding, PartitionSpec

from .._apply import apply
from .._errors import MismatchError
from .._spec import entry_axes
from .._tree import is_array
from ._step import StepPlan
from ._trace import inner_jaxpr, scan_parts, trace, Traced


LOCAL = frozenset("pad concatenate slice rev sort cumsum cumprod cummax cummin cumlogsumexp".split())
"""Along the dimension that they are about they are whole, and along the others each piece is by itself."""


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
        return [self.put(x, (), "result", i) for i, x in enumerate(out)]

    def evaluate(self, jaxpr: Any, consts: Any, args: list[Any], path: tuple[int, ...]) -> list[Any]:
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, args))
        read = lambda v: v.val if isinstance(v, core.Literal) else env[v]
        for i, eqn in enumerate(jaxpr.eqns):
            here = (*path, i)
            ins = [self.put(read(v), here, "in", s) for s, v in enumerate(eqn.invars)]
            ins = [self.put(x, here, "way", s) for s, x in enumerate(ins)]
            local = self.local(eqn, here)
            if local is not None:
                out = self.alone(eqn, ins, local)
            elif self.summed_axes(eqn, here):
                out = [self.scattered(eqn, ins, here)]
            else:
                out = self.equation(eqn, ins, here) if here in self.inside else _bind(eqn, ins, eqn.params)
            env.update((v, self.put(x, here, "out", s)) for s, (v, x) in enumerate(zip(eqn.outvars, out)))
        return [read(v) for v in jaxpr.outvars]

    def local(self, eqn: Any, path: tuple[int, ...]) -> PartitionSpec | None:
        """The layout of all that an equation reads and makes, if each device can run it on its own piece."""
        made = self.points.get((path, "out", 0))
        if eqn.primitive.name not in LOCAL or made is None:
            return None
        read = [self.points.get((path, "in", i), PartitionSpec()) for i, v in enumerate(eqn.invars) if v.aval.shape]
        cut = {d for d, entry in enumerate(made) if entry is not None}
        # A plan that was edited may cut what must be whole: then it is XLA's to bring the pieces together.
        return made if all(spec == made for spec in read) and not cut & _about(eqn) else None

    def alone(self, eqn: Any, ins: list[Any], spec: PartitionSpec) -> list[Any]:
        """Runs an equation on each device's piece: XLA has no say in how to cut it."""
        specs = tuple(spec if jnp.ndim(x) else PartitionSpec() for x in ins)
        run = lambda *xs: tuple(_bind(eqn, list(xs), _params_of_a_piece(eqn, xs[0])))
        every = (spec,) * len(eqn.outvars)
        return list(jax.shard_map(run, mesh=self.mesh, in_specs=specs, out_specs=every, check_vma=False)(*ins))

    def summed_axes(self, eqn: Any, path: tuple[int, ...]) -> tuple[str, ...]:
        """The axes over which a scatter that adds is to share out its rows, if each device can add up its own."""
        if eqn.primitive.name not in ("scatter-add", "scatter_add"):
            return ()
        table, index, update = (self.points.get((path, "way", i)) for i in range(3))
        if table is None or index is None or update is None:
            return ()
        numbers = eqn.params["dimension_numbers"]
        if any(axes_at(table, int(d)) for d in numbers.inserted_window_dims):
            return ()  # a row may belong to another device
        batched = {int(d) for d in numbers.scatter_indices_batching_dims}
        return tuple(a for d in range(len(index)) if d not in batched for a in axes_at(index, d))

    def scattered(self, eqn: Any, ins: list[Any], path: tuple[int, ...]) -> Any:
        """Adds up each device's rows by itself, then over devices: layouts cannot ask XLA for that."""
        specs = tuple(self.points[path, "way", i] for i in range(3))
        left, made = self.summed_axes(eqn, path), list(specs[0])
        made += [None] * (ins[0].ndim - len(made))
        cuts: list[tuple[int, tuple[str, ...]]] = []
        wanted = self.points.get((path, "out", 0), PartitionSpec())
        for d in range(len(wanted)):
            axes = axes_at(wanted, d)
            if axes and made[d] is None and set(axes) <= set(left):  # the sum comes in pieces at once
                cuts.append((d, axes))
                made[d] = axes
                left = tuple(a for a in left if a not in axes)

        def run(table: Any, index: Any, update: Any) -> Any:
            (part,) = _bind(eqn, [jnp.zeros_like(table), index, update], eqn.params)
            for d, axes in cuts:
                part = jax.lax.psum_scatter(part, axes, scatter_dimension=d, tiled=True)
            return jax.lax.psum(part, left) if left else part

        out = PartitionSpec(*made)
        part = jax.shard_map(run, mesh=self.mesh, in_specs=specs, out_specs=out, check_vma=False)(*ins)
        return part + jax.lax.with_sharding_constraint(ins[0], NamedSharding(self.mesh, out))

    def equation(self, eqn: Any, ins: list[Any], path: tuple[int, ...]) -> list[Any]:
        """An equation with constraints in or inside it."""
        name, params = eqn.primitive.name, eqn.params
        if name in ("jit", "pjit", "closed_call", "core_call", "eval_jaxpr"):
            jaxpr, consts = inner_jaxpr(eqn)
            return self.evaluate(jaxpr, consts, ins, path)
        if name in ("remat2", "checkpoint", "remat") and hasattr(params["jaxpr"], "eqns"):
            new = self.rewritten(params["jaxpr"], (), path)
            return _bind(eqn, ins, params | {"jaxpr": new.jaxpr} if not new.consts else params)
        if name == "scan":
            first, carried = scan_parts(params)
            body = self.rewritten(params["jaxpr"].jaxpr, params["jaxpr"].consts, path, range(first, first + carried))
            return _bind(eqn, ins, params | {"jaxpr": body})
        if name == "while":
            body = self.rewritten(params["body_jaxpr"].jaxpr, params["body_jaxpr"].consts, path)
            return _bind(eqn, ins, params | {"body_jaxpr": body})
        if name == "cond":
            branches = tuple(self.rewritten(b.jaxpr, b.consts, (*path, i)) for i, b in enumerate(params["branches"]))
            return _bind(eqn, ins, params | {"branches": branches})
        if (
            "call_jaxpr" in params
        ):  # of custom gradients: the rules stay, and if they are asked they choose for themselves
            body = self.rewritten(params["call_jaxpr"].jaxpr, params["call_jaxpr"].consts, path)
            return _bind(eqn, ins, params | {"call_jaxpr": body})
        return _bind(eqn, ins, params)

    def rewritten(self, jaxpr: Any, consts: Any, path: tuple[int, ...], carries: range = range(0)) -> Any:
        """The jaxpr of a body, with its constraints."""

        def body(*args: Any) -> list[Any]:
            pinned = [self.put(x, path, "carry", i - carries.start) if i in carries else x for i, x in enumerate(args)]
            return self.evaluate(jaxpr, consts, pinned, path)

        return jax.make_jaxpr(body)(*(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.invars))


def axes_at(spec: PartitionSpec, dim: int) -> tuple[str, ...]:
    """The axes that cut a dimension."""
    return entry_axes(spec[dim]) if dim < len(spec) else ()


def _about(eqn: Any) -> set[int]:
    """The dimensions along which an equation of `LOCAL` must be whole."""
    before, after, p = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, eqn.params
    if eqn.primitive.name == "pad":
        return {d for d, config in enumerate(p["padding_config"]) if any(config)}
    if eqn.primitive.name == "slice":
        strides = p["strides"] or (1,) * len(before)
        return {d for d, stride in enumerate(strides) if before[d] != after[d] or stride != 1}
    return {int(d) for d in p.get("dimensions", (p.get("dimension", p.get("axis")),))}


def _params_of_a_piece(eqn: Any, piece: Any) -> Any:
    """An equation's parameters on a piece: a slice that takes all of a dimension takes all of the piece's."""
    if eqn.primitive.name != "slice":
        return eqn.params
    whole, starts, limits = eqn.invars[0].aval.shape, eqn.params["start_indices"], eqn.params["limit_indices"]
    ends = [m if (a, b) == (0, n) else b for a, b, n, m in zip(starts, limits, whole, piece.shape)]
    return eqn.params | {"limit_indices": tuple(ends)}


def _bind(eqn: Any, ins: list[Any], params: Any) -> list[Any]:
    """Runs an equation; its line and its names stay those of the function that was planned."""
    source = eqn.source_info
    names = source_info_util.current_name_stack() + source.name_stack
    with source_info_util.user_context(source.traceback, name_stack=names):
        out = eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(params))
    return list(out) if eqn.primitive.multiple_results else [out]


def _mesh(plan: StepPlan, arrays: list[Any]) -> Any:
    """The mesh that the arguments are traced on, if it is the plan's; else the plan's own."""
    for x in arrays:
        if isinstance(x, Tracer):
            mesh = jax.typeof(x).sharding.mesh
            if not mesh.empty and (mesh.axis_names, mesh.axis_sizes) == (plan.mesh.names, plan.mesh.sizes):
                return mesh
    return plan.mesh.build()
