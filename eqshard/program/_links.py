"""What each choice costs by itself, and beside the choices that it is tied to."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ._cost import CLOSE_BY, LANES, Machine, State
from ._graph import Graph, Letters, Move, Op
from ._problem import Layout, partial, Problem, project, require


def work(op: Op, way: tuple[int, ...], graph: Graph, machine: Machine) -> float:
    """Seconds of an operation's own work, on one device, once."""
    if op.kind == "opaque":
        return 0.0
    if op.axes is not None:
        return machine.compute(op.flops, 0.0)
    pieces = math.prod(n for n, x in zip(machine.sizes, way) if x >= 0)
    nbytes = sum(graph.values[v].nbytes / machine.factor(require(way, letters)) for v, letters in op.operands + op.outs)
    nbytes += 2 * widened_bytes(op, way, graph, machine)
    rows = op.row_count / math.prod(n for n, x in zip(machine.sizes, way) if x in op.rows)
    return machine.compute(op.flops / pieces, nbytes) + rows * machine.row_seconds


def widened_bytes(op: Op, way: tuple[int, ...], graph: Graph, machine: Machine) -> float:
    """Bytes on a device of which a result is larger, while it is made, for having rows narrower than a TPU's tiles.

    Rows are put in where each of them lies in a tile of its own; only then is the whole turned as it is to lie.
    """
    if not op.by_rows or not machine.chip.clock:
        return 0.0
    total = 0.0
    for v, letters in op.outs:
        state, shape = require(way, letters), graph.shape(v)
        piece = shape[-1] / math.prod(n for n, d in zip(machine.sizes, state) if d == len(shape) - 1)
        total += graph.values[v].nbytes / machine.factor(state) * (max(LANES, piece) / piece - 1)
    return total


def piecewise_seconds(
    op: Op, v: int, letters: Letters, made: State, summed: tuple[bool, ...], want: State, graph: Graph, machine: Machine
) -> float:
    """Seconds that a product loses where its sum comes in pieces: XLA makes it piece by piece, on a TPU.

    For each piece it reads all of the operand that has not the dimension along which the pieces are. And a convolution
    takes as long for a few channels as for all that the unit for products is wide.
    """
    if op.by_rows:
        return _whole_sum_seconds(v, made, summed, want, graph, machine)
    along = {w for w, s in zip(want, summed) if s and w >= 0}
    if not machine.chip.clock or not op.flops or op.axes is not None or len(along) != 1:
        return 0.0
    dim = along.pop()
    times = math.prod(n for n, s, w in zip(machine.sizes, summed, want) if s and w >= 0)
    total = 0.0
    for operand, has in op.operands:
        cut = (s or (d >= 0 and letters[d] in has) for s, d in zip(summed, made))
        nbytes = graph.values[operand].nbytes / math.prod(n for n, c in zip(machine.sizes, cut) if c)
        if letters[dim] not in has and nbytes > CLOSE_BY:
            total += (times - 1) * nbytes / machine.chip.hbm_bandwidth
    if op.kind == "conv":
        size = graph.shape(v)[dim]
        longer = max(1.0, min(LANES, size) * times / size)
        pieces = machine.factor(made) * math.prod(n for n, s in zip(machine.sizes, summed) if s)
        total += (longer - 1) * machine.compute(op.flops / pieces, 0.0)
    return total


def _whole_sum_seconds(
    v: int, made: State, summed: tuple[bool, ...], want: State, graph: Graph, machine: Machine
) -> float:
    """Seconds by which a sum of scattered rows is dearer than one that comes in pieces, where these are narrower than a
    tile: XLA makes the whole sum, which everyone waits for, and cuts that."""
    last = len(graph.shape(v)) - 1
    pieces = math.prod(n for n, a, w in zip(machine.sizes, made, want) if last in (a, w))
    if not machine.chip.clock or not any(s and w == last for s, w in zip(summed, want)):
        return 0.0
    if graph.shape(v)[last] >= pieces * LANES:
        return 0.0
    nbytes, hides = graph.values[v].nbytes, graph.values[v].hides
    whole = tuple(-1 if s else w for s, w in zip(summed, want))
    return machine.settle(nbytes, made, summed, whole) - machine.settle(nbytes, made, summed, want, hides)


TIE = 1e-7
"""Seconds by which a layout is worse for each place that it cuts later."""


def _lateness(p: Problem, cluster: int, layout: Layout) -> float:
    """The places of what a layout cuts, and a little for cutting the first of them along later axes than need be."""
    dims = p.graph.dims(cluster)
    places = [(a, dims.index(name) if name in dims else len(dims)) for a, name in enumerate(layout) if name >= 0]
    later = sum(a * (len(dims) + 1 - place) for a, place in places)
    return sum(place + 1 for _, place in places) + later / (16 * (len(dims) + 1))


def own_seconds(p: Problem) -> dict[int, np.ndarray]:
    """For each cluster and layout: elementwise work, and sums over names that are cut."""
    graph, machine = p.graph, p.machine
    # Of equal layouts, the one that cuts the first dimensions: batch before sequence before what heads are made of.
    costs = {c: np.array([TIE * _lateness(p, c, lay) for lay in ls]) for c, ls in p.layouts.items()}
    streams: dict[tuple[int, tuple[int, ...]], float] = {}
    for v, times in graph.traffic:
        c = graph.cluster(v)
        if c in costs:
            key = c, graph.dims(v)
            streams[key] = streams.get(key, 0.0) + graph.values[v].nbytes * times
    for (c, dims), nbytes in streams.items():
        costs[c] += [machine.stream(nbytes / machine.factor(project(lay, dims))) for lay in p.layouts[c]]
    sums: dict[tuple[int, tuple[int, ...], tuple[int, ...], float], float] = {}
    for r in graph.reductions:
        c = graph.cluster(r.value)
        if c in costs:
            names = tuple(sorted({graph.name(n) for n in r.names} - {-1}))
            dims = graph.dims(r.out) if r.out >= 0 else ()
            key = c, names, dims, graph.values[r.out].nbytes if r.out >= 0 else 4.0
            sums[key] = sums.get(key, 0.0) + r.times
    for (c, names, dims, nbytes), times in sums.items():
        for i, lay in enumerate(p.layouts[c]):
            cut = tuple(name in names for name in lay)
            if any(cut):
                state = project(lay, dims)
                costs[c][i] += times * machine.settle(nbytes, state, cut, state)
    return costs


def hidden_of(graph: Graph, move: Move) -> tuple[str, ...]:
    """The collectives of a move that nobody waits for. What is brought where a result lies comes last of all."""
    if not move.path or move.waited:
        return ()
    return graph.values[move.source].hides + graph.values[move.target].hides


Want = tuple[State, tuple[bool, ...]]
"""How an operation has a value, and over which axes it is still to be summed."""
_LARGE = 1e9


@dataclass
class Links:
    """The seconds between the states of a value where it lies and where it is made or read."""

    p: Problem
    known: dict[Any, tuple[float, float]] = field(default_factory=dict)
    """For two states the seconds of a transfer of nothing, and of each byte."""
    tables: dict[Any, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    """The same for all pairs of some states."""

    def of_op(self, number: int) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
        """For each link of an operation its cluster, the seconds between the states there and the states here.

        Also, for each layout of the cluster and each way of the operation, which of these states it has.
        """
        p, graph, op = self.p, self.p.graph, self.p.graph.ops[number]
        for out, (v, letters) in [(False, x) for x in op.operands] + [(True, x) for x in op.outs]:
            c, nbytes, hides = graph.cluster(v), graph.values[v].nbytes, graph.values[v].hides
            states, there = _numbered([project(lay, graph.dims(v)) for lay in p.layouts[c]])
            wants, here = _numbered([(require(w, letters), partial(w, op) if out else ()) for w in p.ways[number]])
            table = np.zeros((len(states), len(wants)))
            if c not in p.free:
                table += self._seconds(nbytes, states, wants, hides, out)
            if c not in p.free and out and (op.flops or op.by_rows):
                of_sums = [(j, w) for j, w in enumerate(wants) if any(w[1])]
                for j, (w, summed) in of_sums:
                    table[:, j] += [piecewise_seconds(op, v, letters, w, summed, s, graph, p.machine) for s in states]
            yield c, table * op.times, there, here

    def of_move(self, move: Move) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The seconds between the states of a move's two values, and which state each layout of their clusters is."""
        p, graph = self.p, self.p.graph
        source, target = graph.cluster(move.source), graph.cluster(move.target)
        across = {b: a for a, b in move.pairs}
        states, there = _numbered([project(lay, graph.dims(move.source)) for lay in p.layouts[source]])
        after = (project(lay, graph.dims(move.target)) for lay in p.layouts[target])
        wants, here = _numbered([(tuple(across.get(d, -1) if d >= 0 else -1 for d in state), ()) for state in after])
        table = np.zeros((len(states), len(wants)))
        if source not in p.free:
            table += self._seconds(graph.values[move.source].nbytes, states, wants, hidden_of(graph, move), False)
        return table * move.times, there, here

    def _seconds(
        self, nbytes: float, states: list[State], wants: list[Want], hides: tuple[str, ...], made: bool
    ) -> np.ndarray:
        """Transfers take a time of their own and one for each byte, so that each is asked for once for all sizes."""
        key = hides, made, tuple(states), tuple(wants)
        if (found := self.tables.get(key)) is None:
            pairs = np.array([self._pair(s, w, hides, made) for s in states for w in wants])
            begin, each = pairs.reshape(len(states), len(wants), 2).transpose(2, 0, 1)
            found = self.tables[key] = begin, each
        begin, each = found
        return begin + nbytes * each

    def _pair(self, state: State, want: Want, hides: tuple[str, ...], made: bool) -> tuple[float, float]:
        key = hides, made, state, want
        if (found := self.known.get(key)) is None:
            at, summed = want
            ask = lambda n: (
                self.p.machine.settle(n, at, summed, state, hides) if made else self.p.machine.move(n, state, at, hides)
            )
            none = ask(0.0)
            found = self.known[key] = none, (ask(_LARGE) - none) / _LARGE
        return found


def _numbered(states: Sequence[Any]) -> tuple[list[Any], np.ndarray]:
    """The different ones of some states, and for each which of them it is."""
    index = {s: i for i, s in enumerate(dict.fromkeys(states))}
    return list(index), np.array([index[s] for s in states], dtype=int)
