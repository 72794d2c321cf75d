"""What may be chosen: a layout for each cluster, a way to run each operation."""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ._cost import Machine, State
from ._fold import Fold
from ._graph import Graph, Letters, Op


Layout = tuple[int, ...]
"""For each mesh axis the name that it cuts, or -1."""


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


def problem(
    graph: Graph,
    machine: Machine,
    args: list[int | None],
    fixed: dict[int, Layout],
    results: Iterable[int | None] = (),
) -> Problem:
    """Lists the choices. `fixed` are clusters whose layout is given."""
    members: dict[int, list[int]] = {}
    for v in range(len(graph.values)):
        members.setdefault(graph.cluster(v), []).append(v)
    used = {graph.cluster(v) for op in graph.ops for v, _ in op.operands + op.outs}
    used |= {graph.cluster(v) for m in graph.moves for v in (m.source, m.target)}
    used |= {graph.cluster(v) for v in (*args, *results) if v is not None}
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


def without_mirrors(p: Problem, fold: Fold, given: Iterable[Layout]) -> Problem:
    """Leaves out ways of the heaviest operation that are others with equal axes exchanged: so would be all the rest.

    Those are kept whose first axes cut what only data has, as the batch: `data` comes before `tp` in most meshes.

    **Arguments:**

    - `given`: layouts that are fixed, and may tell axes apart.
    """
    ops, machine = p.graph.ops, p.machine
    told = [*given, *(ways[0] for op, ways in zip(ops, p.ways) if op.axes is not None)]
    of_axis = list(zip(machine.sizes, machine.bandwidths, *told))
    alike = [(a, b) for a, b in itertools.combinations(range(len(of_axis)), 2) if of_axis[a] == of_axis[b]]
    free = [f for f in fold.ops if ops[f].axes is None]
    if not alike or not free:
        return p
    heaviest = max(free, key=lambda f: fold.ops[f] * ops[f].times * ops[f].flops)
    ends = ops[heaviest].operands + ops[heaviest].outs
    ours = {letter for v, letters in ends if p.graph.values[v].hides for letter in letters}
    rank = lambda letter: (letter in ours, letter) if letter >= 0 else (True, math.inf)
    ways = [way for way in p.ways[heaviest] if all(rank(way[a]) <= rank(way[b]) for a, b in alike)]
    return replace(p, ways=[ways if f == heaviest else mine for f, mine in zip(fold.op, p.ways)])
