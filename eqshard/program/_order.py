"""In which order the axes are named that cut one dimension.

A dimension that is cut along `tp` where it is used, and along `data` too where it is stored, is stored as
`("tp", "data")`: then what a device uses is a row of stored pieces. In the other order it is not, and XLA moves the
whole, or sums it.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

from jax.sharding import PartitionSpec

from .._spec import canonical, entry_axes
from ._cost import State
from ._graph import Graph, Op
from ._price import move_states, state_of
from ._problem import partial, Problem, require
from ._solve import Choice


GIVEN = 1e18
"""The bytes that speak for an order that was given."""
LITTLE = 1e-3
"""How much of its bytes speaks for an order that only matters among equals."""
Votes = dict[tuple[int, int], float]
"""For two axes the bytes that speak for naming the first before the second."""


def joined(graph: Graph) -> Callable[[int], int]:
    """Names that meet in an operation, as one."""
    parent: dict[int, int] = {}

    def find(n: int) -> int:
        while parent.setdefault(n, n) != n:
            parent[n] = parent[parent[n]]
            n = parent[n]
        return n

    for op in graph.ops:
        first: dict[int, int] = {}
        for v, letters in (*op.operands, *op.outs) if op.axes is None else ():
            for letter, name in zip(letters, graph.dims(v)):
                if isinstance(letter, int) and letter >= 0 and name >= 0:
                    parent[find(name)] = find(first.setdefault(letter, name))
    for m in graph.moves:
        a, b = graph.dims(m.source), graph.dims(m.target)
        for x, y in m.pairs:
            if a[x] >= 0 and b[y] >= 0:
                parent[find(a[x])] = find(b[y])
    return find


class Orders:
    """Writes states as specs, with the axes of each dimension in the order that most of what is moved wants."""

    def __init__(self, p: Problem, choice: Choice, given: Mapping[int, PartitionSpec]) -> None:
        """`given`: of some values the spec that is not to be changed."""
        self.graph, self.machine = p.graph, p.machine
        self.one = joined(p.graph)
        self.votes: dict[int, Votes] = {}
        self.order: dict[int, tuple[int, ...]] = {}
        """For each name its axes in order, where that matters."""
        axis = {name: a for a, name in enumerate(p.machine.names)}
        for v, spec in given.items():
            self._said(v, [[axis[a] for a in entry_axes(entry)] for entry in spec])
        for m in p.graph.moves:
            self._moved(m.source, *move_states(p, choice, m), m.times)
        for op, way in zip(p.graph.ops, choice.ways):
            for v, letters in (*op.operands, *op.outs):
                self._moved(v, state_of(p, choice, v), require(way, letters), op.times)
                if op.axes is not None:
                    self._said(v, [[axis[op.axes[x]] for x in e] if isinstance(e, tuple) else [] for e in letters])
        self._count()
        for op, way in zip(p.graph.ops, choice.ways):
            for v, _ in op.outs:
                self._summed(op, way, v, state_of(p, choice, v))
        self._count()

    def spec(self, v: int, state: State) -> PartitionSpec:
        """The spec of a state of a value."""
        entries: list[tuple[str, ...] | None] = []
        for d, name in enumerate(self.graph.dims(v)):
            entries.append(tuple(self.machine.names[a] for a in self._order(name) if state[a] == d) or None)
        return canonical(PartitionSpec(*entries))

    def _order(self, name: int) -> Sequence[int]:
        every = range(len(self.machine.names))
        return self.order.get(self.one(name), every) if name >= 0 else every

    def _vote(self, name: int, pairs: Iterable[tuple[int, int]], weight: float) -> None:
        of_name = self.votes.setdefault(self.one(name), {})
        for pair in pairs:
            of_name[pair] = of_name.get(pair, 0.0) + weight

    def _count(self) -> None:
        """Of equal orders, that which is the most like the mesh's."""
        for name, of_name in self.votes.items():
            says = lambda order, votes=of_name: sum(votes.get(p, 0.0) for p in itertools.combinations(order, 2))
            self.order[name] = max(itertools.permutations(range(len(self.machine.names))), key=says)

    def _said(self, v: int, cuts: Sequence[Sequence[int]]) -> None:
        for name, axes in zip(self.graph.dims(v), cuts):
            if name >= 0 and len(axes) > 1:
                self._vote(name, itertools.combinations(axes, 2), GIVEN)

    def _moved(self, v: int, have: State, want: State, times: float) -> None:
        """What is cut along some axes here, and along more there, is cut along those first."""
        for d, name in enumerate(self.graph.dims(v)) if have != want else ():
            here, there = ({a for a, dim in enumerate(state) if dim == d} for state in (have, want))
            if name >= 0 and here and there and (here < there or there < here):
                pairs = itertools.product(here & there, here ^ there)
                self._vote(name, pairs, times * self.graph.values[v].nbytes)

    def _summed(self, op: Op, way: tuple[int, ...], v: int, want: State) -> None:
        """A sum comes in pieces in the order in which devices have what they sum, if nothing else speaks for one."""
        summed = partial(way, op)
        for d, name in enumerate(self.graph.dims(v)):
            axes = [a for a, s in enumerate(summed) if s and want[a] == d]
            over = {letter_name(self.graph, op, way[a]) for a in axes}
            if name >= 0 and len(axes) > 1 and len(over) == 1:
                pairs = itertools.combinations([a for a in self._order(over.pop()) if a in axes], 2)
                self._vote(name, pairs, LITTLE * op.times * self.graph.values[v].nbytes)


def letter_name(graph: Graph, op: Op, letter: int) -> int:
    """The name that a letter of an operation stands for; -1 if for none."""
    for v, letters in (*op.operands, *op.outs):
        if letter in letters:
            return graph.dims(v)[letters.index(letter)]
    return -1
