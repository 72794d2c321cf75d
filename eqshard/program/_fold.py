"""Repeated layers are solved once: clusters, operations and moves that look alike share one choice."""

from dataclasses import dataclass
from typing import Any

from ._graph import Graph


ROUNDS = 3
"""How far two parts of a program must look alike: a layer apart from its neighbours, but not from the whole."""


@dataclass
class Fold:
    """Who decides for whom."""

    cluster: dict[int, int]
    op: list[int]
    ops: dict[int, int]
    """Operations that decide, and how many each decides for."""
    moves: dict[int, int]


def fold_alike(graph: Graph, layouts: dict[int, list[tuple[int, ...]]], anchored: dict[int, Any]) -> Fold:
    """Colours clusters and operations by what they are and by what is around them, and folds equal colours.

    **Arguments:**

    - `anchored`: clusters that must be told apart, such as arguments with a fixed layout.
    """
    names = {c: {n: i for i, n in enumerate(dict.fromkeys(n for lay in ls for n in lay))} for c, ls in layouts.items()}
    shapes: dict[int, list[Any]] = {c: [] for c in layouts}
    for v, node in enumerate(graph.values):
        c = graph.cluster(v)
        if c in shapes:
            shapes[c].append((node.shape, node.itemsize, node.times, _local(graph, v, names[c])))
    color: dict[int, int] = {
        c: hash((len(layouts[c]), tuple(sorted(s)), anchored.get(c), _pattern(layouts[c], names[c])))
        for c, s in shapes.items()
    }
    for _ in range(ROUNDS):
        around: dict[int, list[int]] = {c: [] for c in layouts}
        for op, seen in zip(graph.ops, _op_colors(graph, color, names)):
            for i, (v, _) in enumerate(op.operands + op.outs):
                around[graph.cluster(v)].append(hash((seen, i)))
        for m, seen in zip(graph.moves, _move_colors(graph, color, names)):
            around[graph.cluster(m.source)].append(hash((seen, "from")))
            around[graph.cluster(m.target)].append(hash((seen, "to")))
        color = {c: hash((color[c], tuple(sorted(set(around[c]))))) for c in layouts}
    # Operations and moves by the colours that clusters have in the end, so that those of one colour cost the same.
    return _fold(layouts, color, _op_colors(graph, color, names), _move_colors(graph, color, names))


def _op_colors(graph: Graph, color: dict[int, int], names: dict[int, dict[int, int]]) -> list[int]:
    found = []
    for op in graph.ops:
        ends = [(graph.cluster(v), letters, v) for v, letters in op.operands + op.outs]
        seen = tuple((color[c], letters, _local(graph, v, names[c]), graph.values[v].hides) for c, letters, v in ends)
        found.append(hash((op.kind, op.times, tuple(op.sizes), op.reduced, op.axes, len(op.operands), seen)))
    return found


def _move_colors(graph: Graph, color: dict[int, int], names: dict[int, dict[int, int]]) -> list[int]:
    found = []
    for m in graph.moves:
        a, b = graph.cluster(m.source), graph.cluster(m.target)
        local = _local(graph, m.source, names[a]), _local(graph, m.target, names[b])
        waited = graph.values[m.source].hides, graph.values[m.target].hides, m.waited
        found.append(hash((m.times, m.pairs, color[a], color[b], local, waited)))
    return found


def _fold(layouts: dict[int, Any], color: dict[int, int], op_color: list[int], move_color: list[int]) -> Fold:
    first: dict[int, int] = {}
    cluster = {c: first.setdefault(color[c], c) for c in layouts}
    lead: dict[int, int] = {}
    op = [lead.setdefault(k, i) for i, k in enumerate(op_color)]
    ops: dict[int, int] = {}
    for f in op:
        ops[f] = ops.get(f, 0) + 1
    head: dict[int, int] = {}
    moves: dict[int, int] = {}
    for i, k in enumerate(move_color):
        f = head.setdefault(k, i)
        moves[f] = moves.get(f, 0) + 1
    return Fold(cluster, op, ops, moves)


def _local(graph: Graph, v: int, names: dict[int, int]) -> tuple[int, ...]:
    return tuple(names.get(n, -1) for n in graph.dims(v))


def _pattern(layouts: list[tuple[int, ...]], names: dict[int, int]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(names[n] for n in lay) for lay in layouts)
