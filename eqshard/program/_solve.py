"""Chooses a layout for each cluster and a way to run each operation."""

from dataclasses import dataclass

import numpy as np

from ._choices import Choices, Link
from ._fold import Fold
from ._integer import select
from ._links import Links, work
from ._problem import Layout, Problem


@dataclass
class Choice:
    """What was chosen: a layout for each cluster, the letters that each axis cuts for each operation."""

    layouts: dict[int, Layout]
    ways: list[tuple[int, ...]]
    seconds: float
    gap: float
    variables: int


def solve(
    p: Problem,
    fold: Fold,
    own: dict[int, np.ndarray],
    rows: list[tuple[dict[int, np.ndarray], float]],
    *,
    seconds: float = 30.0,
) -> Choice | None:
    """The cheapest choice under memory rows `(bytes of each cluster and layout, at most)`; None if none fits."""
    costs: list[np.ndarray] = []
    number: dict[int, int] = {}
    for c, values in own.items():
        f = fold.cluster[c]
        if f not in number:
            number[f] = len(costs)
            costs.append(np.zeros(len(p.layouts[f])))
        costs[number[f]] = costs[number[f]] + values
    links, priced, of_op = [], Links(p), {}
    for f, count in fold.ops.items():
        op, of_op[f] = p.graph.ops[f], len(costs)
        costs.append(np.array([count * op.times * work(op, way, p.graph, p.machine) for way in p.ways[f]]))
        for c, table, of_layout, of_way in priced.of_op(f):
            links.append(Link(number[fold.cluster[c]], of_op[f], count * table, of_layout, of_way))
    for f, count in fold.moves.items():
        move = p.graph.moves[f]
        table, of_source, of_target = priced.of_move(move)
        a, b = (number[fold.cluster[p.graph.cluster(v)]] for v in (move.source, move.target))
        links.append(Link(a, b, count * table, of_source, of_target))
    limited = [_row(coefficients, number, fold, costs) for coefficients, _ in rows]
    found = select(Choices(costs, _between_two(links, costs), limited, [limit for _, limit in rows]), seconds)
    if found is None:
        return None
    taken, total, gap, variables = found
    layouts = {c: p.layouts[c][taken[number[fold.cluster[c]]]] for c in p.layouts}
    ways = [p.ways[n][taken[of_op[f]]] for n, f in enumerate(fold.op)]
    return Choice(layouts, ways, total, gap, variables)


def _between_two(links: list[Link], costs: list[np.ndarray]) -> list[Link]:
    """The links between two choices; what ties a choice to itself is its own cost."""
    for link in links:
        if link.first == link.second:
            costs[link.first] = costs[link.first] + link.table[link.first_state, link.second_state]
    return [link for link in links if link.first != link.second]


def _row(
    coefficients: dict[int, np.ndarray], number: dict[int, int], fold: Fold, costs: list[np.ndarray]
) -> dict[int, np.ndarray]:
    found: dict[int, np.ndarray] = {}
    for c, values in coefficients.items():
        k = number[fold.cluster[c]]
        found[k] = found.get(k, np.zeros(len(costs[k]))) + values
    return found
