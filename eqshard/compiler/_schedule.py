"""The program in time: computation and communication as they are scheduled, side by side."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.tree_util as jtu

from .._chip import Chip
from .._mesh import MeshSpec
from ._collectives import Collective, describe, Found, found_in, holds, runs
from ._groups import replica_groups
from ._hlo import Instruction, Module
from ._moves import Site
from ._network import Network
from ._work import NOTHING, work_of


@jtu.register_static
@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the timeline. One drawn for a loop stands for all its trips."""

    lane: str
    """`"compute"`, `"network"`, or `"wait"`: the computation stands still for the network."""
    begin: float
    end: float
    label: str
    trips: int = 1
    collective: int = -1
    """The number of the collective, for the network and for waits."""


@dataclass
class Schedule:
    """What a walk through a scheduled program adds up to, for one device and one step."""

    seconds: float = 0.0
    products: float = 0.0
    """Seconds of matrix products."""
    memory: float = 0.0
    """Seconds of everything else that computes."""
    exposed: float = 0.0
    segments: list[Segment] = field(default_factory=list)

    def add(self, other: "Schedule", times: int) -> None:
        """Appends what `other` does, `times` times."""
        for s in other.segments:
            begin, end = self.seconds + s.begin * times, self.seconds + s.end * times
            self.segments.append(replace(s, begin=begin, end=end, trips=s.trips * times))
        self.seconds += other.seconds * times
        self.products += other.products * times
        self.memory += other.memory * times
        self.exposed += other.exposed * times

    def compute(self, seconds: float, label: str) -> None:
        last = self.segments[-1] if self.segments else None
        if last is not None and last.lane == "compute" and last.trips == 1 and last.end == self.seconds:
            longest = label if seconds > last.end - last.begin else last.label
            self.segments[-1] = replace(last, end=self.seconds + seconds, label=longest)
        elif seconds > 0:
            self.segments.append(Segment("compute", self.seconds, self.seconds + seconds, label))
        self.seconds += seconds

    def wait(self, until: float, label: str, collective: int) -> float:
        late = max(0.0, until - self.seconds)
        if late > 0:
            self.segments.append(Segment("wait", self.seconds, until, label, collective=collective))
            self.seconds = until
            self.exposed += late
        return late


@dataclass
class _Walk:
    module: Module
    chip: Chip
    mesh: MeshSpec
    network: Network
    arguments: Sequence[str]
    collectives: list[Collective] = field(default_factory=list)


def schedule(
    module: Module, mesh: MeshSpec, chip: Chip, coordinates: tuple[tuple[int, ...], ...], arguments: Sequence[str] = ()
) -> tuple[Schedule, tuple[Collective, ...]]:
    """Runs the program on paper, instruction by instruction in the compiler's order.

    Computation is one stream; a collective that starts and ends apart runs beside it, on links that it may have to
    share, and what is not done when it is asked for is waited for.
    """
    walk = _Walk(module, chip, mesh, Network(chip, mesh, coordinates), arguments)
    total = _run(walk, Site(module.main, None, None), 1, True)
    return total, tuple(walk.collectives)


def _run(walk: _Walk, site: Site, trips: int, known: bool) -> Schedule:
    here = Schedule()
    found = found_in(walk.module, site.computation)
    starts: dict[str, list[Found]] = {}
    ends: dict[str, list[int]] = {}
    finish: dict[int, float] = {}
    links: dict[Hashable, float] = {}
    for f in found:
        starts.setdefault(f.start, []).append(f)
    for at in site.computation.instructions:
        for f in starts.get(at.name, ()):
            number = _begin(walk, here, f, site, (trips, known), links, finish)
            if f.start != f.done:
                ends.setdefault(f.done, []).append(number)
        _compute(walk, here, at, site, bool(starts.get(at.name)))
        for number in ends.get(at.name, ()):
            collective = walk.collectives[number]
            late = here.wait(finish[number], collective.kind, number)
            walk.collectives[number] = replace(collective, exposed_seconds=late)
        _inner(walk, here, at, site, trips, known)
    return here


def _begin(
    walk: _Walk,
    here: Schedule,
    f: Found,
    site: Site,
    runs_as: tuple[int, bool],
    links: dict[Hashable, float],
    finish: dict[int, float],
) -> int:
    """Starts a collective; if nothing can run meanwhile, also waits for it."""
    trips, known = runs_as
    collective = describe(walk.module, f, site, walk.mesh, trips, known, walk.arguments)
    groups = replica_groups(f.instruction, walk.module.partitions) or (tuple(range(walk.module.partitions)),)
    taken = collective.bytes // collective.group_size if f.kind == "all-gather" else collective.bytes
    seconds = walk.network.seconds(f.kind, taken, groups)
    key: Any = collective.axes
    if f.kind == "collective-permute" and groups:
        key = key, groups[0][-1] - groups[0][0]  # the two ways of a ring are two sets of links
    begin = max(here.seconds, links.get(key, 0.0))
    links[key] = begin + seconds
    number = len(walk.collectives)
    walk.collectives.append(replace(collective, seconds=seconds))
    finish[number] = begin + seconds
    if seconds > 0:
        here.segments.append(Segment("network", begin, begin + seconds, f.kind, collective=number))
    if f.start == f.done:
        late = here.wait(begin + seconds, f.kind, number)
        walk.collectives[number] = replace(walk.collectives[number], exposed_seconds=late)
    return number


def _compute(walk: _Walk, here: Schedule, at: Instruction, site: Site, communicates: bool) -> None:
    if at.opcode != "fusion" and communicates:
        return
    if at.opcode.endswith(("-start", "-done", "-update")):
        return
    carries = at.opcode == "fusion" and bool(holds(walk.module, at))
    work = work_of(walk.module, site.computation, at, walk.chip)
    if carries and "estimated_cycles" not in at.config:
        work = NOTHING  # the fusion is the collective itself
    if work.seconds:
        here.compute(work.seconds, at.op_name or at.name)
        if work.products:
            here.products += work.seconds
        else:
            here.memory += work.seconds


def _inner(walk: _Walk, here: Schedule, at: Instruction, site: Site, trips: int, known: bool) -> None:
    """Loops, branches and calls: a loop's body many times, of branches the longest."""
    ran: list[tuple[Schedule, int]] = []
    for inner, times in runs(walk.module, at, site.computation):
        count = 1 if times is None else times
        ran.append((_run(walk, Site(inner, site, at), trips * count, known and times is not None), count))
    if not ran:
        return
    longest = max(ran, key=lambda r: r[0].seconds * r[1])
    here.add(*longest)
