"""What a choice costs, item by item."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ._cost import State, Transfer
from ._graph import Move, Op, Place
from ._links import hidden_of, piecewise_seconds, widened_bytes, work
from ._problem import partial, Problem, project, require
from ._solve import Choice


IN_FLIGHT = 3
"""How many operands are on their way at once: one in use, one that comes, one result that leaves."""


@dataclass(frozen=True)
class Moved:
    """A collective of the step, by the planner's count."""

    value: int
    kind: str
    axes: tuple[int, ...]
    nbytes: float
    times: float
    seconds: float
    """All of it, `times` times; `exposed` is what others wait for."""
    exposed: float
    path: Place
    made: bool
    """Whether it brings a result away, not an operand here."""


def state_of(p: Problem, choice: Choice, v: int) -> State:
    """How a value lies; one that no operation reads or makes is not asked about."""
    layout = choice.layouts.get(p.graph.cluster(v))
    return (-1,) * len(p.machine.sizes) if layout is None else project(layout, p.graph.dims(v))


def moved(p: Problem, choice: Choice) -> list[Moved]:
    """Every collective of a choice, the dearest first."""
    return sorted(_moved(p, choice), key=lambda m: -m.exposed)


def _moved(p: Problem, choice: Choice) -> Iterator[Moved]:
    graph, machine = p.graph, p.machine

    def item(
        v: int, transfer: Transfer, times: float, hides: tuple[str, ...], path: Place, made: bool = False
    ) -> Moved:
        kind, axes, nbytes, seconds = transfer
        waited = times * machine.exposed(transfer, hides)
        return Moved(v, kind, axes, nbytes, times, times * seconds, waited, path, made)

    for op, way in zip(graph.ops, choice.ways):
        for v, letters in op.operands:
            if graph.cluster(v) not in p.free:
                for t in machine.moves(graph.values[v].nbytes, state_of(p, choice, v), require(way, letters)):
                    yield item(v, t, op.times, graph.values[v].hides, op.path)
        for v, letters in op.outs:
            if graph.cluster(v) not in p.free:
                want = state_of(p, choice, v)
                for t in machine.sums(graph.values[v].nbytes, require(way, letters), partial(way, op), want):
                    yield item(v, t, op.times, graph.values[v].hides, op.path, made=True)
    for m in graph.moves:
        if graph.cluster(m.source) not in p.free:
            have, want = move_states(p, choice, m)
            for t in machine.moves(graph.values[m.source].nbytes, have, want):
                yield item(m.source, t, m.times, hidden_of(graph, m), m.path)


def move_states(p: Problem, choice: Choice, move: Move) -> tuple[State, State]:
    """How a move's value lies before and after, both by the dimensions of its source."""
    across = {b: a for a, b in move.pairs}
    after = state_of(p, choice, move.target)
    return state_of(p, choice, move.source), tuple(across.get(d, -1) if d >= 0 else -1 for d in after)


def busy_seconds(p: Problem, own: dict[int, np.ndarray], choice: Choice) -> float:
    """The part of a step that is no communication between operations."""
    index = {c: p.layouts[c].index(choice.layouts[c]) for c in p.layouts}
    streams = sum((float(own[c][index[c]]) for c in own), 0.0)
    work_of = (op.times * _busy(p, choice, op, way) for op, way in zip(p.graph.ops, choice.ways))
    return streams + sum(work_of, 0.0)


def _busy(p: Problem, choice: Choice, op: Op, way: tuple[int, ...]) -> float:
    again = 0.0
    for v, letters in op.outs:
        made, want = require(way, letters), state_of(p, choice, v)
        again += piecewise_seconds(op, v, letters, made, partial(way, op), want, p.graph, p.machine)
    return work(op, way, p.graph, p.machine) + again


def in_flight(p: Problem, choice: Choice) -> float:
    """Bytes of operands that were gathered, and of partial sums, beside what the program keeps."""
    graph, machine = p.graph, p.machine
    extra = []
    for op, way in zip(graph.ops, choice.ways):
        for v, letters in (*op.operands, *op.outs):
            if op.axes is None and graph.cluster(v) not in p.free:
                here, there = machine.factor(require(way, letters)), machine.factor(state_of(p, choice, v))
                extra.append(graph.values[v].nbytes * max(0.0, 1 / here - 1 / there))
        extra.append(widened_bytes(op, way, graph, machine))
    return sum(sorted(extra, reverse=True)[:IN_FLIGHT], 0.0)
