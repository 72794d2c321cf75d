"""Reads a jaxpr into a graph, equation by equation."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from .._tree import divisible_shape
from ._flow import flow
from ._graph import Equation, Graph, Place
from ._live import Alive, for_loops, worst_moments
from ._ops import CONSTRAINTS, given, given_specs, opaque, OPERATIONS, OpRules, PRODUCTS, told
from ._together import one_by_one, PINNED, TOGETHER
from ._trace import CALLS, inner_jaxpr, LOOPS, recomputed, scan_parts, Traced
from ._traffic import Readers, Traffic


TURNS = CONSTRAINTS | frozenset("transpose reshape squeeze expand_dims convert_element_type rev".split())
"""After these a product's result is still what it was."""
SLICED = 2.0
"""How often what a loop goes through, or stacks, goes through memory for that: it is read, and written."""
Env = dict[Any, int | None]
"""The value of each variable; None for scalars."""


def build(
    traced: Traced, rules: OpRules, sizes: Sequence[int] = (), as_written: bool = False
) -> tuple[Graph, list[int | None], list[int | None]]:
    """The graph of a program, and the values of its arguments and results (None for scalars).

    **Arguments:**

    - `rules`: letters of operations that are not known here.
    - `sizes`: of the mesh axes.
    - `as_written`: price the program as it stands, not as `constrain` writes it.
    """
    closed, kept = traced.jaxpr, traced.kept
    stays = set(kept.values())
    resident = {0} | traced.replaced
    early = [i in stays or leaf.arg in resident for i, leaf in enumerate(traced.ins)]
    late = [i in kept for i in range(len(traced.outs))]
    builder = _Builder(rules, *flow(closed.jaxpr, early, late), tuple(sizes), Graph(as_written))
    graph, env = builder.graph, {}
    ins = [builder.new(env, v, 1.0) for v in closed.jaxpr.invars]
    for v, leaf in zip(ins, traced.ins):
        if v is not None and divisible_shape(leaf.shape, leaf.dtype) != leaf.shape:
            graph.whole(v, len(leaf.shape) - 1)
    builder.resting = {v for v in ins if v is not None}
    results = [None if isinstance(v, Literal) else v for v in closed.jaxpr.outvars]
    builder.in_place = {v for i, v in enumerate(results) if v is not None and i in kept}
    builder.returned = {v for v in results if v is not None} - builder.in_place
    for v in closed.jaxpr.constvars:
        builder.new(env, v, 1.0)
    graph.live = builder.walk(closed.jaxpr, env, 1.0, ())
    builder.traffic.leave(closed.jaxpr, env, 1.0)
    outs: list[int | None] = []
    for i, var in enumerate(closed.jaxpr.outvars):
        made = read(env, var)
        rest = ins[kept[i]] if i in kept else None
        if made is None or rest is None or made == rest:
            outs.append(made)
            continue
        out = graph.copy(made, 1.0)
        graph.same(rest, out)
        graph.move(made, out, None, 1.0, (), i)
        outs.append(out)
    graph.settle()
    return graph, ins, outs


def read(env: Env, var: Any) -> int | None:
    return None if isinstance(var, Literal) else env.get(var)


class _Builder:
    def __init__(
        self, rules: OpRules, early: dict[Any, bool], late: dict[Any, bool], sizes: tuple[int, ...], graph: Graph
    ) -> None:
        self.graph = graph
        self.traffic = Traffic(self.graph)
        self.rules = rules
        self.early, self.late = early, late
        self.sizes = sizes
        self.resting: set[int] = set()
        """Arguments: every reader has a copy that may lie otherwise."""
        self.in_place: set[Any] = set()
        """Results that take the memory of arguments."""
        self.returned: set[Any] = set()
        """Results that need memory of their own."""
        self.shared: Env = {}
        """Variables that several products read: they share one copy."""
        self.for_loops: set[Any] = set()
        """Variables that loops wait for."""
        self.at_loops: dict[Place, list[tuple[int, int]]] = {}
        """Arguments that loops go through, and the copies that these have."""

    def new(self, env: Env, var: Any, times: float) -> int | None:
        shape = getattr(var.aval, "shape", ())
        whole = not shape or math.prod(shape) <= 1
        hides = ("all-gather",) if self.early.get(var, False) else ()
        hides += ("reduce-scatter",) if self.late.get(var, False) else ()
        env[var] = None if whole else self.graph.add(tuple(shape), _itemsize(var.aval), times, hides)
        return env[var]

    def walk(self, jaxpr: Any, env: Env, times: float, path: Place) -> list[Alive]:
        """Reads a jaxpr's equations; returns the worst moments of its memory."""
        outer, self.shared = self.shared, _read_often(jaxpr)
        self.for_loops |= for_loops(jaxpr)
        readers = Readers(jaxpr)
        inside = [
            self.with_copies(self.equation(e, env, times, (*path, i), readers), (*path, i))
            for i, e in enumerate(jaxpr.eqns)
        ]
        copies = {v: copy for v, copy in self.shared.items() if copy is not None and self.early.get(v, False)}
        self.shared = outer
        in_place, returned = ((), ()) if path else (self.in_place, self.returned)
        return worst_moments(self.graph, jaxpr, env, inside, self.late, in_place, copies, returned)

    def equation(self, eqn: Any, env: Env, times: float, path: Place, readers: Readers) -> list[Alive]:
        name = eqn.primitive.name
        if name in CALLS and (inner := inner_jaxpr(eqn)) is not None:
            return self.inline(eqn, inner[0], env, times, path, readers)
        ins = self.operands(eqn, env, times, path)
        if name in ("scan", "while", "cond"):
            moments = getattr(self, name + "_")(eqn, ins, env, times, path)
            self.traffic.equation(eqn, ins, [env[v] for v in eqn.outvars], times, readers)
            return moments
        at = Equation(eqn, ins, [self.new(env, v, times) for v in eqn.outvars], times, path)
        self.traffic.equation(eqn, ins, at.outs, times, readers)
        if name in PRODUCTS or (name in TURNS and at.ins[0] in self.graph.fresh):
            self.graph.fresh |= {v for v in at.outs if v is not None}
        pinned = name in PINNED or name == "conv_general_dilated"
        for i, v in enumerate(at.ins if pinned else ()):
            self.graph.pins += [(path, i, v, False)] if v is not None else []
        for i, v in enumerate(at.outs):
            self.graph.pins += [(path, i, v, True)] if v is not None and pinned else []
        if name == "reshape" and at.ins[0] is not None and at.outs[0] is not None and self.uneven(at.outs[0]):
            self.graph.splits.append((path, at.ins[0], at.outs[0]))
        if name in TOGETHER:
            TOGETHER[name](self.graph, at)
        elif (specs := given_specs(eqn)) is not None:
            given(self.graph, at, *specs)
        elif name in CONSTRAINTS:
            one_by_one(self.graph, at)
        elif not told(self.graph, at, self.rules):
            OPERATIONS.get(name, opaque)(self.graph, at)
        return []

    def with_copies(self, moments: list[Alive], path: Place) -> list[Alive]:
        """A loop's copy of an argument takes its memory beside the argument's, unless it is the argument itself."""
        pairs = self.at_loops.get(path, ())
        extra = {v: n for source, copy in pairs for v, n in ((copy, 1.0), (source, -1.0))}
        return [moment | extra for moment in moments or [{}]] if extra else moments

    def uneven(self, v: int) -> bool:
        """Whether some mesh axis does not divide some dimension: XLA would fill it up, and is not always right then."""
        return any(d > 1 and d % n for d in self.graph.shape(v) for n in self.sizes)

    def operands(self, eqn: Any, env: Env, times: float, path: Place) -> list[int | None]:
        """The values that an equation reads: of arguments and of what several products read, copies."""
        found: list[int | None] = []
        for slot, var in enumerate(eqn.invars):
            v = read(env, var)
            product = eqn.primitive.name in PRODUCTS
            if v is None or not (v in self.resting or (product and var in self.shared)):
                found.append(v)
                continue
            known = self.shared.get(var) if product else None
            if known is None:
                known = self.graph.copy(v, times)
                loop = eqn.primitive.name in LOOPS
                for_loop = loop or (bool(eqn.outvars) and all(out in self.for_loops for out in eqn.outvars))
                self.graph.move(v, known, None, times, path, slot, waited=for_loop)
                if loop:
                    self.at_loops.setdefault(path, []).append((v, known))
                if product and var in self.shared:
                    self.shared[var] = known
            else:
                self.graph.pins.append((path, slot, known, False))
            found.append(known)
        return found

    def inline(self, eqn: Any, jaxpr: Any, env: Env, times: float, path: Place, readers: Readers) -> list[Alive]:
        local: Env = {}
        for v in jaxpr.constvars:
            self.new(local, v, times)
        for i, (v, outer) in enumerate(zip(jaxpr.invars, eqn.invars[len(eqn.invars) - len(jaxpr.invars) :])):
            known = local[v] = read(env, outer)
            if known is None and math.prod(getattr(v.aval, "shape", ())) > 1:
                self.new(local, v, times)
            elif known is not None and times == 1 and recomputed(eqn) and self.early.get(v, False):
                self.graph.again.append((path, i, known))
        self.traffic.call(eqn, jaxpr)
        inside = self.walk(jaxpr, local, times, path)
        for v, outer in zip(eqn.outvars, jaxpr.outvars):
            env[v] = read(local, outer)
            if env[v] is None:
                self.new(env, v, times)
        self.traffic.back(eqn, jaxpr, env, readers)
        return inside

    def body(self, jaxpr: Any, env: Env, times: float, path: Place) -> list[Alive]:
        """Reads a jaxpr whose arguments and results are in memory."""
        self.traffic.enter(jaxpr, env)
        inside = self.walk(jaxpr, env, times, path)
        self.traffic.leave(jaxpr, env, times)
        return inside

    # Control flow: a body is read once, and what it carries lies before, inside and after in one way.

    def scan_(self, eqn: Any, ins: list[int | None], env: Env, times: float, path: Place) -> list[Alive]:
        p = eqn.params
        body, (n_consts, n_carry) = p["jaxpr"].jaxpr, scan_parts(p)
        inner = times * p["length"]
        outs = [self.new(env, v, times) for v in eqn.outvars]
        local: Env = {}
        for v in body.constvars:
            self.new(local, v, inner)
        for i, v in enumerate(body.invars):
            made = self.new(local, v, inner)
            if n_consts <= i < n_consts + n_carry and made is not None:
                self.graph.carries.append((path, i - n_consts, made))
            if i < n_consts + n_carry:
                self.graph.tied(ins[i], made, None, times, path)
            else:
                self.stacked(ins[i], made, inner, path)
        for i in range(n_carry):
            self.graph.tied(local[body.invars[n_consts + i]], outs[i], None, times, path)
        inside = self.body(body, local, inner, path)
        for i, v in enumerate(body.outvars):
            if i < n_carry:
                self.graph.tied(read(local, v), local[body.invars[n_consts + i]], None, inner, path)
            else:
                self.stacked(outs[i], read(local, v), inner, path)
        return inside

    def stacked(self, outer: int | None, inner: int | None, times: float, path: Place) -> None:
        """A value and one of its slices along the first dimension, which is whole."""
        if outer is None:
            return
        self.graph.whole(outer, 0)
        if inner is not None:
            pairs = [(d + 1, d) for d in range(len(self.graph.shape(inner)))]
            self.graph.tied(outer, inner, pairs, times, path)
            self.traffic.note(inner, SLICED * times)

    def while_(self, eqn: Any, ins: list[int | None], env: Env, times: float, path: Place) -> list[Alive]:
        p = eqn.params
        body, n_consts = p["body_jaxpr"].jaxpr, p["body_nconsts"]
        outs = [self.new(env, v, times) for v in eqn.outvars]
        local: Env = {}
        for v in body.constvars:
            self.new(local, v, times)
        for v, outer in zip(body.invars, ins[p["cond_nconsts"] :]):
            self.graph.tied(outer, self.new(local, v, times), None, times, path)
        carries = body.invars[n_consts:]
        for v, out in zip(carries, outs):
            self.graph.tied(local[v], out, None, times, path)
        inside = self.body(body, local, times, path)
        for v, carry in zip(body.outvars, carries):
            self.graph.tied(read(local, v), local[carry], None, times, path)
        return inside

    def cond_(self, eqn: Any, ins: list[int | None], env: Env, times: float, path: Place) -> list[Alive]:
        branches = eqn.params["branches"]
        inside: list[Alive] = []
        outs = [self.new(env, v, times) for v in eqn.outvars]
        for b, branch in enumerate(branches):
            local: Env = dict(zip(branch.jaxpr.invars, ins[1:]))
            for v in branch.jaxpr.constvars:
                self.new(local, v, times)
            inside += self.body(branch.jaxpr, local, times / len(branches), (*path, b))
            for v, out in zip(branch.jaxpr.outvars, outs):
                self.graph.tied(read(local, v), out, None, times, path)
        return inside


def _read_often(jaxpr: Any) -> Env:
    counts: dict[Any, int] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in PRODUCTS:
            for v in eqn.invars:
                if not isinstance(v, Literal):
                    counts[v] = counts.get(v, 0) + 1
    return {v: None for v, n in counts.items() if n > 1}


def _itemsize(aval: Any) -> int:
    dtype = aval.dtype
    return int(getattr(dtype, "itemsize", None) or np.dtype(dtype).itemsize)
