"""What goes through memory beside products, as XLA fuses it.

Elementwise work is done where its results are read, so that only what it is made of is read, and only what is kept is
written. A product's result is worked on before it is written at all.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import Literal

from ._graph import Graph
from ._live import fused, kept_apart, products_of, readers_of, takes_long
from ._ops import CONSTRAINTS, OPERATIONS, PRODUCTS
from ._together import SPREAD
from ._trace import LOOPS


Values = frozenset[int]
NONE: Values = frozenset()
# These touch as much as they take out or put in, whatever that is a part of.
_TAKES = frozenset(("slice", "dynamic_slice", "gather"))
_SAME = CONSTRAINTS | {"optimization_barrier", "reshape", "squeeze", "expand_dims"}
"""Other names for what is in memory."""
_PUTS = {"dynamic_update_slice": 1, **{name: 2 for name in OPERATIONS if name.startswith("scatter")}}
"""Which operand is put in."""


class Traffic:
    """Follows a program, and notes in its graph which values go through memory."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.of: dict[Any, Values] = {}
        """For each variable the values in memory that it is made of where it is read; an argument comes in here when it
        is first read."""
        self.dear: set[Any] = set()
        self.at_hand: set[int] = set()
        """What was read or made since the last operation that is no elementwise work: it need not be read again."""

    def enter(self, jaxpr: Any, env: Mapping[Any, int | None]) -> None:
        """Begins the body of a loop or a branch: its arguments are in memory."""
        self.of.update((v, _one(env.get(v))) for v in jaxpr.invars)

    def leave(self, jaxpr: Any, env: Mapping[Any, int | None], times: float) -> None:
        """Ends one, or the program: its results are written."""
        for v in jaxpr.outvars:
            if not isinstance(v, Literal) and v in self.of:
                self.written(env.get(v), self.of[v], times)

    def call(self, eqn: Any, jaxpr: Any) -> None:
        """Goes on inside a jaxpr that is only called."""
        for v, outer in zip(jaxpr.invars, eqn.invars[len(eqn.invars) - len(jaxpr.invars) :]):
            self.of.pop(v, None)
            if isinstance(outer, Literal) or outer in self.of:
                self.of[v] = NONE if isinstance(outer, Literal) else self.of[outer]

    def back(self, eqn: Any, jaxpr: Any, env: Mapping[Any, int | None], readers: "Readers") -> None:
        """Comes back from there: what was for one reader there may be for several here."""
        for v, inner in zip(eqn.outvars, jaxpr.outvars):
            self.of[v] = NONE if isinstance(inner, Literal) else self.of.get(inner, _one(env[v]))
            if not self.of[v] and readers.count(v) > 1:
                self.of[v] = _one(env[v])
                self.at_hand |= self.of[v]

    def reads(self, eqn: Any, ins: Sequence[int | None]) -> list[Values]:
        """For each operand of an equation what is read for it."""
        for v, i in zip(eqn.invars, ins):
            if not isinstance(v, Literal):
                self.of.setdefault(v, _one(i))
        return [NONE if isinstance(v, Literal) else self.of[v] for v in eqn.invars]

    def equation(
        self, eqn: Any, ins: Sequence[int | None], outs: Sequence[int | None], times: float, readers: "Readers"
    ) -> None:
        name, reads = eqn.primitive.name, self.reads(eqn, ins)
        if name in LOOPS or name == "cond":  # bodies are gone through by themselves
            for v, of in zip(ins, reads):
                self.written(v, of, times)
            self.of.update((v, _one(out)) for v, out in zip(eqn.outvars, outs))
            self.at_hand = set()
        elif name in PRODUCTS:  # they read and write while they multiply
            self.of.update((v, _one(out) if readers.count(v) > 1 else NONE) for v, out in zip(eqn.outvars, outs))
            self.at_hand = {v for v in outs if v is not None}
        elif name in _SAME:
            for v, out, i, of in zip(eqn.outvars, outs, ins, reads):
                self.of[v] = _one(out) if of == _one(i) else of
                self.at_hand |= _one(out) if i in self.at_hand else NONE
        elif name in _TAKES:
            self.of[eqn.outvars[0]] = _one(outs[0])
            if not fused(eqn):
                self.note(outs[0], 2 * times)
        elif name in _PUTS:
            self.read(reads[_PUTS[name]], 2 * times)
            self.of[eqn.outvars[0]] = _one(outs[0])
        else:
            self.fuse(eqn, NONE.union(*reads), outs, times, readers)

    def fuse(self, eqn: Any, of: Values, outs: Sequence[int | None], times: float, readers: "Readers") -> None:
        """Elementwise work and the like: done again by each reader, unless that is dear; sums and others: done once."""
        long, again = takes_long(eqn, self.dear), fused(eqn)
        nbytes = lambda v: self.graph.values[v].nbytes
        largest = max((nbytes(v) for v in (*of, *outs) if v is not None), default=0.0)
        of = frozenset(v for v in of if SPREAD * nbytes(v) > largest)  # what is spread over much more is little to read
        self.dear.update(eqn.outvars if long else ())
        for v, out in zip(eqn.outvars, outs):
            count = readers.count(v), readers.products.get(v, 0)
            if again and (out is None or not kept_apart(self.graph, of, out, long, *count)):
                self.of[v] = of
                continue
            self.read(of, times)
            self.of[v] = _one(out)
            if out is not None:
                self.touch(out, times)
        if not again:
            self.at_hand = {v for v in outs if v is not None}

    def written(self, v: int | None, of: Values, times: float) -> None:
        """A value that is not there yet is made of others."""
        if v is not None and of != _one(v):
            self.read(of, times)
            self.touch(v, times)

    def read(self, values: Values, times: float) -> None:
        for v in values - self.at_hand:
            self.touch(v, times)

    def touch(self, v: int, times: float) -> None:
        """Reads or writes a value that is not at hand."""
        self.at_hand.add(v)
        self.note(v, times)

    def note(self, v: int | None, times: float) -> None:
        if v is not None:
            self.graph.traffic.append((v, times))


class Readers:
    """How many equations read each variable of a jaxpr, and how many products do."""

    def __init__(self, jaxpr: Any) -> None:
        self.all, self.products = readers_of(jaxpr), products_of(jaxpr)

    def count(self, v: Any) -> int:
        return self.all.get(v, 0)


def _one(v: int | None) -> Values:
    return NONE if v is None else frozenset((v,))
