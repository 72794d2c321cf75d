"""A program on a machine, ready to be solved again and again: with other overlap, other room, other fixed layouts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from jax.sharding import PartitionSpec

from .._memory import BudgetError
from .._mesh import MeshSpec
from .._spec import canonical, entry_axes
from .._tree import size_text
from ._build import build
from ._cost import Machine, State
from ._fold import fold_alike
from ._graph import Graph
from ._links import own_seconds
from ._ops import OpRules
from ._price import in_flight
from ._problem import Layout, Problem, problem, project, without_mirrors
from ._solve import Choice, solve
from ._trace import Traced


HOST_BANDWIDTH = 10e9
"""Bytes a second from the host to a device."""
AT_REST = 0.1
"""How often what stays on the devices goes through memory for lying there: little, so that it decides what is equal."""
TRIES = 4
"""How often a choice that does not fit with what is in flight is made again with less room."""
BYTES_FIRST = 1e-9
"""Seconds that a byte counts as where memory is what matters: not more, for bytes are not known to a thousandth."""

Bytes = dict[int, np.ndarray]
"""For each cluster the bytes on a device in each of its layouts."""


@dataclass(frozen=True)
class Study:
    """All that is known of a step before anything is chosen."""

    traced: Traced
    mesh: MeshSpec
    graph: Graph
    ins: list[int | None]
    """The values of the arguments; None for scalars."""
    outs: list[int | None]
    """The values of the results; None for scalars."""
    limit: float | None
    seconds: float
    """What the solver may take."""
    objective: str

    def choose(self, said: Mapping[int, PartitionSpec], hidden: float | None = None) -> "Chosen":
        """The cheapest choice that fits.

        **Arguments:**

        - `said`: layouts of arguments that are given.
        - `hidden`: how much of the transfers that nobody waits for costs nothing; default: as measured.

        **Raises:**

        - `BudgetError`: nothing fits.
        """
        machine = Machine.of(self.mesh)
        machine = machine if hidden is None else replace(machine, hidden=hidden)
        anchored = {
            self.graph.cluster(v): as_layout(said[i], self.graph.dims(v), machine)
            for i, v in enumerate(self.ins)
            if v is not None and i in said
        }
        p = problem(self.graph, machine, self.ins, anchored, self.outs)
        own = own_seconds(p)
        _add_arguments(p, own, self.ins, arriving(self.traced))
        rows = _memory_rows(p, self.ins)
        aim = own if self.objective == "time" else _bytes_first(own, rows)
        fold = fold_alike(self.graph, p.layouts, anchored)
        p = without_mirrors(p, fold, anchored.values())
        room, least = self.limit, math.inf
        for _ in range(TRIES):
            choice = solve(p, fold, aim, [] if room is None else [(row, room) for row in rows], seconds=self.seconds)
            if choice is None:
                break
            held = held_bytes(p, rows, choice)
            if self.limit is None or room is None or held <= self.limit:
                priced = replace(p, machine=Machine.of(self.mesh))
                return Chosen(priced, own, rows, choice, held, {i: canonical(spec) for i, spec in said.items()})
            least = min(least, held)
            room = min(room, held - in_flight(p, choice)) - (held - self.limit)
        assert self.limit is not None
        raise BudgetError(_infeasible(rows, self.limit, least))


@dataclass(frozen=True)
class Chosen:
    """A choice, with what it was made from."""

    p: Problem
    own: dict[int, np.ndarray]
    rows: list[Bytes]
    choice: Choice
    held: float
    """Bytes on a device at the worst moment."""
    given: dict[int, PartitionSpec]
    """Layouts of arguments that were given, by the number of the leaf."""


def study(
    traced: Traced,
    mesh: MeshSpec,
    rules: OpRules,
    limit: float | None,
    seconds: float,
    objective: str = "time",
    as_written: bool = False,
) -> Study:
    """Reads a program; `as_written`: to price it as it stands, not as `constrain` writes it."""
    graph, ins, outs = build(traced, rules, Machine.of(mesh).sizes, as_written)
    return Study(traced, mesh, graph, ins, outs, limit, seconds, objective)


def held_bytes(p: Problem, rows: list[Bytes], choice: Choice) -> float:
    """Bytes on a device at the worst moment."""
    index = {c: p.layouts[c].index(choice.layouts[c]) for c in p.layouts}
    kept = max((sum((float(values[index[c]]) for c, values in row.items()), 0.0) for row in rows), default=0.0)
    return kept + in_flight(p, choice)


def as_layout(spec: PartitionSpec, dims: tuple[int, ...], machine: Machine) -> Layout:
    where = {axis: dims[d] for d, entry in enumerate(spec) for axis in entry_axes(entry)}
    return tuple(where.get(axis, -1) for axis in machine.names)


def _add_arguments(p: Problem, own: dict[int, np.ndarray], ins: list[int | None], arriving: set[int]) -> None:
    """Batches come from the host; and whoever reads a piece of what lies whole must cut it out."""
    for i, v in enumerate(ins):
        if v is not None:
            c, dims, nbytes = p.graph.cluster(v), p.graph.dims(v), p.graph.values[v].nbytes
            seconds = nbytes / HOST_BANDWIDTH if i in arriving else AT_REST * p.machine.stream(nbytes)
            own[c] = own[c] + [seconds / p.machine.factor(project(lay, dims)) for lay in p.layouts[c]]


def arriving(traced: Traced) -> set[int]:
    """The leaves of arguments that come anew with each step, as batches do.

    What a result takes the place of stays on the devices; so does a model that is only read, in serving or under
    adapters: it comes first, or is most of what there is and not all that is left.
    """
    sizes: dict[int, float] = {}
    for leaf in traced.ins:
        sizes[leaf.arg] = sizes.get(leaf.arg, 0.0) + leaf.nbytes
    stays = {0} | traced.replaced
    left = sizes.keys() - stays
    if len(left) > 1:
        stays |= {arg for arg in left if 2 * sizes[arg] > sum(sizes.values())}
    kept = set(traced.kept.values())
    return {i for i, leaf in enumerate(traced.ins) if leaf.arg not in stays and i not in kept}


def _memory_rows(p: Problem, ins: list[int | None]) -> list[Bytes]:
    """Bytes on a device for each cluster and layout: the arguments, and what is alive at the worst times."""
    rest = _bytes_of(p, {v: 1.0 for v in ins if v is not None})
    args = {v for v in ins if v is not None}
    rows = []
    for live in p.graph.live[:2] or [{}]:
        here = _bytes_of(p, {v: n for v, n in live.items() if v not in args or n < 0})
        rows.append({c: rest.get(c, 0.0) + here.get(c, 0.0) for c in rest.keys() | here.keys()})
    return rows


def _bytes_of(p: Problem, values: dict[int, float]) -> Bytes:
    found: Bytes = {}
    for v, n in values.items():
        c = p.graph.cluster(v)
        if c in p.layouts:
            dims, slid = p.graph.dims(v), p.graph.slid_along(v)
            states = [project(lay, dims) for lay in p.layouts[c]]
            here = np.array([_stored(p, v, state, slid) for state in states])
            found[c] = found.get(c, 0.0) + n * here
    return found


def _stored(p: Problem, v: int, state: State, slid_along: tuple[bool, ...]) -> float:
    """Bytes that a device stores of a value."""
    sizes, shape = p.machine.sizes, p.graph.shape(v)
    cut = [math.prod(n for n, d in zip(sizes, state) if d == dim) for dim in range(len(shape))]
    piece = tuple(-(-n // parts) for n, parts in zip(shape, cut))
    return p.graph.values[v].nbytes / math.prod(cut) * p.machine.padding(piece, slid_along)


def _infeasible(rows: list[Bytes], limit: float, found: float) -> str:
    """`found`: what the smallest plan takes that was too large for what is on its way, if there was one."""
    least = max(sum(float(values.min()) for values in row.values()) for row in rows)
    count = (
        f"at least {size_text(least)} is needed"
        if math.isinf(found)
        else f"the least that was found takes {size_text(found)}, with what is on its way between devices"
    )
    return (
        f"no layout of this step fits {size_text(limit)} a device: by the planner's count {count}.\n"
        "  Ways out: a larger mesh, remat, a smaller batch, or optimizer state on the host."
    )


def _bytes_first(own: dict[int, np.ndarray], rows: list[Bytes]) -> dict[int, np.ndarray]:
    return {c: costs + BYTES_FIRST * rows[0].get(c, 0.0) for c, costs in own.items()}
