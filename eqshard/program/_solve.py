"""Chooses a layout for each cluster and a way to run each operation: an integer program that is mostly a linear one."""

import itertools
import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from .._errors import ShardingError
from ._cost import CLOSE_BY, LANES, Machine, State
from ._fold import Fold
from ._graph import Graph, Letters, Move, Op


Layout = tuple[int, ...]
"""For each mesh axis the name that it cuts, or -1."""


@dataclass
class Choice:
    """What was chosen: a layout for each cluster, the letters that each axis cuts for each operation."""

    layouts: dict[int, Layout]
    ways: list[tuple[int, ...]]
    seconds: float
    gap: float
    variables: int


@dataclass
class Problem:
    """A program on a machine, ready to be solved or priced."""

    graph: Graph
    machine: Machine
    layouts: dict[int, list[Layout]]
    """What each cluster may choose from."""
    ways: list[list[tuple[int, ...]]]
    """What each operation may choose from: for each axis a letter, or -1."""
    free: set[int]
    """Clusters that cost nothing to make in any layout."""


def layouts_of(graph: Graph, machine: Machine, cluster: int, names: list[int], most: int) -> list[Layout]:
    """Every way to lay the machine's axes on a cluster's names."""
    found = []
    for layout in itertools.product([-1, *names[:most]], repeat=len(machine.sizes)):
        cut: dict[int, int] = {}
        for n, name in zip(machine.sizes, layout):
            if name >= 0:
                cut[name] = cut.get(name, 1) * n
        if all(graph.size(name) % n == 0 for name, n in cut.items()):
            found.append(layout)
    return found


def ways_of(op: Op, machine: Machine) -> list[tuple[int, ...]]:
    if op.axes is not None:
        return [tuple(op.axes.index(name) if name in op.axes else -1 for name in machine.names)]
    found = []
    for way in itertools.product(range(-1, len(op.sizes)), repeat=len(machine.sizes)):
        cut: dict[int, int] = {}
        for n, letter in zip(machine.sizes, way):
            if letter >= 0:
                cut[letter] = cut.get(letter, 1) * n
        if all(op.sizes[letter] % n == 0 for letter, n in cut.items()):
            found.append(way)
    return found


def project(layout: Layout, dims: tuple[int, ...]) -> State:
    """What a cluster's layout is for one of its values."""
    return tuple(dims.index(name) if name >= 0 and name in dims else -1 for name in layout)


def require(way: tuple[int, ...], letters: Letters) -> State:
    """What an operation's way is for one of its values."""
    where = {x: d for d, entry in enumerate(letters) for x in (entry if isinstance(entry, tuple) else (entry,))}
    return tuple(where.get(x, -1) if x >= 0 else -1 for x in way)


def partial(way: tuple[int, ...], op: Op) -> tuple[bool, ...]:
    return tuple(x in op.reduced for x in way)


def work(op: Op, way: tuple[int, ...], graph: Graph, machine: Machine) -> float:
    """Seconds of an operation's own work, on one device, once."""
    if op.kind == "opaque":
        return 0.0
    if op.axes is not None:
        return machine.compute(op.flops, 0.0)
    pieces = math.prod(n for n, x in zip(machine.sizes, way) if x >= 0)
    nbytes = sum(graph.values[v].nbytes / machine.factor(require(way, letters)) for v, letters in op.operands + op.outs)
    rows = op.row_count / math.prod(n for n, x in zip(machine.sizes, way) if x in op.rows)
    return machine.compute(op.flops / pieces, nbytes) + rows * machine.row_seconds


def piecewise_seconds(
    op: Op, v: int, letters: Letters, made: State, summed: tuple[bool, ...], want: State, graph: Graph, machine: Machine
) -> float:
    """Seconds that a product loses where its sum comes in pieces: XLA makes it piece by piece, on a TPU.

    For each piece it reads all of the operand that has not the dimension along which the pieces are. And a convolution
    takes as long for a few channels as for all that the unit for products is wide.
    """
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


def problem(graph: Graph, machine: Machine, args: list[int | None], fixed: dict[int, Layout]) -> Problem:
    """Lists the choices. `fixed` are clusters whose layout is given."""
    members: dict[int, list[int]] = {}
    for v in range(len(graph.values)):
        members.setdefault(graph.cluster(v), []).append(v)
    used = {graph.cluster(v) for op in graph.ops for v, _ in op.operands + op.outs}
    used |= {graph.cluster(v) for m in graph.moves for v in (m.source, m.target)}
    used |= {graph.cluster(v) for v in args if v is not None}
    most = {1: 16, 2: 6, 3: 4}.get(len(machine.sizes), 3)
    layouts = {}
    for cluster in used:
        weight: dict[int, float] = {}
        first: dict[int, tuple[int, int]] = {}
        for rank, v in enumerate(members[cluster]):
            for dim, name in enumerate(graph.dims(v)):
                if name >= 0:
                    weight[name] = weight.get(name, 0.0) + graph.values[v].nbytes * graph.values[v].times
                    first.setdefault(name, (rank, dim))
        names = sorted(weight, key=lambda n: (-weight[n], first[n]))
        layouts[cluster] = [fixed[cluster]] if cluster in fixed else layouts_of(graph, machine, cluster, names, most)
    made = {graph.cluster(v) for op in graph.ops for v, _ in op.outs}
    made |= {graph.cluster(v) for v in args if v is not None} | {graph.cluster(m.target) for m in graph.moves}
    ways = [ways_of(op, machine) for op in graph.ops]
    return Problem(graph, machine, layouts, ways, set(used) - made)


TIE = 1e-7
"""Seconds by which a layout is worse for each place that it cuts later."""


def _lateness(p: Problem, cluster: int, layout: Layout) -> int:
    dims = p.graph.dims(cluster)
    return sum(dims.index(name) + 1 if name in dims else len(dims) + 1 for name in layout if name >= 0)


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


def link_tables(p: Problem, number: int) -> list[tuple[int, np.ndarray, list[int], list[int]]]:
    """For an operation, each link to a cluster: the seconds between the states there and the states here.

    Also, for each layout of the cluster and each way of the operation, which of these states it has.
    """
    op, graph, machine = p.graph.ops[number], p.graph, p.machine
    links = []
    for out, (v, letters) in [(False, x) for x in op.operands] + [(True, x) for x in op.outs]:
        c = graph.cluster(v)
        dims, nbytes = graph.dims(v), graph.values[v].nbytes
        there = [project(lay, dims) for lay in p.layouts[c]]
        here = [(require(w, letters), partial(w, op) if out else ()) for w in p.ways[number]]
        states, wants = list(dict.fromkeys(there)), list(dict.fromkeys(here))
        table = np.zeros((len(states), len(wants)))
        hides = graph.values[v].hides
        if c not in p.free:
            for i, s in enumerate(states):
                for j, (w, summed) in enumerate(wants):
                    table[i, j] = (
                        machine.settle(nbytes, w, summed, s, hides)
                        + piecewise_seconds(op, v, letters, w, summed, s, graph, machine)
                        if out
                        else machine.move(nbytes, s, w, hides)
                    )
        index_s, index_w = {s: i for i, s in enumerate(states)}, {w: j for j, w in enumerate(wants)}
        links.append((c, table * op.times, [index_s[s] for s in there], [index_w[w] for w in here]))
    return links


def hidden_of(graph: Graph, move: Move) -> tuple[str, ...]:
    """The collectives of a move that nobody waits for. What is brought where a result lies comes last of all."""
    if not move.path or move.waited:
        return ()
    return graph.values[move.source].hides + graph.values[move.target].hides


def move_table(p: Problem, move: Move) -> tuple[np.ndarray, list[int], list[int]]:
    """The seconds between the states of a move's two values, and which state each layout of their clusters is."""
    graph = p.graph
    source, target = graph.cluster(move.source), graph.cluster(move.target)
    across = {b: a for a, b in move.pairs}
    there = [project(lay, graph.dims(move.source)) for lay in p.layouts[source]]
    here = [
        tuple(across.get(d, -1) if d >= 0 else -1 for d in project(lay, graph.dims(move.target)))
        for lay in p.layouts[target]
    ]
    states, wants = list(dict.fromkeys(there)), list(dict.fromkeys(here))
    table = np.zeros((len(states), len(wants)))
    if source not in p.free:
        nbytes = graph.values[move.source].nbytes
        table[:] = [[p.machine.move(nbytes, s, w, hidden_of(graph, move)) for w in wants] for s in states]
    index_s, index_w = {s: i for i, s in enumerate(states)}, {w: j for j, w in enumerate(wants)}
    return table * move.times, [index_s[s] for s in there], [index_w[w] for w in here]


class _Lines:
    """The rows and columns of a linear program as they come."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.owners: list[int] = []
        """Which choice each of the first columns belongs to."""
        self.entries: list[tuple[int, int, float]] = []
        self.rhs: list[float] = []

    def choose_one(self, costs: list[float]) -> int:
        """Columns of which one is taken; returns the first."""
        start, row = len(self.costs), len(self.rhs)
        self.costs += costs
        self.owners += [row] * len(costs)
        self.entries += [(row, start + i, 1.0) for i in range(len(costs))]
        self.rhs.append(1.0)
        return start

    def link(self, table: np.ndarray, left: int, of_left: list[int], right: int, of_right: list[int]) -> None:
        """Continuous columns for pairs of states, whose margins are the two choices."""
        n, m = table.shape
        base, row = len(self.costs), len(self.rhs)
        self.costs += list(table.ravel())
        self.rhs += [0.0] * (n + m)
        self.entries += [(row + i, base + i * m + j, 1.0) for i in range(n) for j in range(m)]
        self.entries += [(row + n + j, base + i * m + j, 1.0) for i in range(n) for j in range(m)]
        self.entries += [(row + s, left + i, -1.0) for i, s in enumerate(of_left)]
        self.entries += [(row + n + w, right + i, -1.0) for i, w in enumerate(of_right)]


def solve(
    p: Problem,
    fold: Fold,
    own: dict[int, np.ndarray],
    rows: list[tuple[dict[int, np.ndarray], float]],
    *,
    seconds: float = 30.0,
) -> Choice | None:
    """The cheapest choice under memory rows `(bytes of each cluster and layout, at most)`; None if none fits."""
    lines = _Lines()
    start: dict[int, int] = {}
    for c in p.layouts:
        f = fold.cluster[c]
        if f not in start:
            start[f] = lines.choose_one([0.0] * len(p.layouts[f]))
        for i, s in enumerate(own[c]):
            lines.costs[start[f] + i] += float(s)
    begin: dict[int, int] = {}
    for f, count in fold.ops.items():
        op = p.graph.ops[f]
        begin[f] = lines.choose_one([count * op.times * work(op, w, p.graph, p.machine) for w in p.ways[f]])
    integral = len(lines.costs)
    for f, count in fold.ops.items():
        for c, table, of_layout, of_way in link_tables(p, f):
            lines.link(count * table, start[fold.cluster[c]], of_layout, begin[f], of_way)
    for f, count in fold.moves.items():
        move = p.graph.moves[f]
        table, of_source, of_target = move_table(p, move)
        a, b = (start[fold.cluster[p.graph.cluster(v)]] for v in (move.source, move.target))
        lines.link(count * table, a, of_source, b, of_target)
    found = _run(lines, [_row(coefficients, start, fold, len(lines.costs)) for coefficients, _ in rows],
                 [limit for _, limit in rows], integral, seconds)  # fmt: skip
    if found is None:
        return None
    x, total, gap = found
    pick = lambda s, n: int(np.argmax(x[s : s + n]))
    chosen = {f: pick(s, len(p.layouts[f])) for f, s in start.items()}
    layouts = {c: p.layouts[c][chosen[fold.cluster[c]]] for c in p.layouts}
    ways = [p.ways[n][pick(begin[f], len(p.ways[f]))] for n, f in enumerate(fold.op)]
    return Choice(layouts, ways, total, gap, len(lines.costs))


def _row(coefficients: dict[int, np.ndarray], start: dict[int, int], fold: Fold, n: int) -> np.ndarray:
    line = np.zeros(n)
    for c, values in coefficients.items():
        s = start[fold.cluster[c]]
        line[s : s + len(values)] += values
    return line


CLOSE = 5e-3
"""How near the best a choice must be to be taken without a longer search."""
PATIENCE = 4
"""How many times longer the linear program may take: without its solution there is no choice at all."""
ROUNDS = 12
"""How often the linear program is solved again with more of it settled."""


def _run(
    lines: _Lines, rows: list[np.ndarray], limits: list[float], integral: int, seconds: float
) -> tuple[np.ndarray, float, float] | None:
    """Solves the linear program; where that comes out fractional, settles what is nearly whole and solves the rest.

    The first solution bounds what any choice can reach, so it is known how far from the best the last one is. Only if
    that is too far, or nothing fits what was settled, the integer program is solved as such.
    """
    from scipy.optimize import Bounds, LinearConstraint, linprog, milp  # noqa: PLC0415 (dear to import, seldom needed)
    from scipy.sparse import csr_array  # noqa: PLC0415

    r, c, v = zip(*lines.entries)
    n, unit = len(lines.costs), max(*lines.costs, 1e-9)
    objective, rhs = np.array(lines.costs) / unit, np.array(lines.rhs)
    equal: Any = csr_array((v, (r, c)), shape=(len(rhs), n))
    most: Any = np.array([row / max(limit, 1.0) for row, limit in zip(rows, limits)]) if rows else None
    least, best, upper = 0.0, None, np.ones(n)
    for round_ in range(ROUNDS):
        result: Any = linprog(
            objective,
            A_eq=equal,
            b_eq=rhs,
            A_ub=most,
            b_ub=None if most is None else np.ones(len(rows)),
            bounds=np.stack([np.zeros(n), upper], axis=1),
            method="highs-ds",  # the dual simplex ends in a corner, which is most often integral, and is the quickest
            options={"time_limit": PATIENCE * seconds},
        )
        if result.status == 2 and round_ == 0:
            return None
        if result.x is None:
            break
        least = result.fun if round_ == 0 else least
        upper = _settled(result.x[:integral], lines.owners, upper)
        if upper is None:
            best = result
            break
    gap = 0.0 if best is None else max(0.0, float(best.fun / max(least, 1e-12)) - 1)
    if best is None or gap > CLOSE:
        whole = np.zeros(n)
        whole[:integral] = 1
        constraints = [LinearConstraint(equal, cast(Any, rhs), cast(Any, rhs))]
        constraints += [LinearConstraint(most, -np.inf, 1.0)] if most is not None else []
        options = {"time_limit": seconds, "mip_rel_gap": CLOSE}
        other: Any = milp(objective, integrality=whole, constraints=constraints, bounds=Bounds(0, 1), options=options)
        if other.x is not None and (best is None or other.fun < best.fun):
            best, gap = other, float(other.mip_gap or 0.0)
        if gap > 0.5 or (best is None and other.status == 1):
            raise ShardingError(
                f"the solver found no good choice in {seconds:g} s, for {n} variables. Give it more `time_limit`, or a "
                "mesh of fewer axes."
            )
    return None if best is None else (best.x, float(best.fun * unit), gap)


def _settled(x: np.ndarray, owners: list[int], upper: np.ndarray) -> np.ndarray | None:
    """Bounds that settle the choices that are whole, and of the others the third that are nearest; None if all are."""
    of = np.array(owners)
    order = np.lexsort((x, of))
    last = np.append(np.nonzero(np.diff(of[order]))[0], len(of) - 1)
    winners = order[last]  # for each choice its largest column
    open_ = winners[x[winners] < 1 - 1e-5]
    if not len(open_):
        return None
    nearest = open_[np.argsort(-x[open_], kind="stable")][: max(1, len(open_) // 3)]
    take = np.concatenate([winners[x[winners] >= 1 - 1e-5], nearest])
    settled = upper.copy()
    settled[: len(of)][np.isin(of, of[take])] = 0.0
    settled[take] = 1.0
    return settled
