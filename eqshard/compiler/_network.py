"""How long a collective takes: bytes over links, as the group lies in the hardware."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from .._chip import Chip
from .._mesh import MeshSpec
from ._groups import group_axes, Groups


@dataclass(frozen=True)
class Lanes:
    """What the members of a group have between them."""

    dims: tuple[tuple[int, float], ...]
    """For each line or ring of chips that the group spans: its length, and bytes a second along it."""
    size: int
    """Members that are joined by links."""
    hosts: int
    """Groups of such members, joined by the network between hosts."""

    @property
    def bandwidth(self) -> float:
        return math.fsum(rate for _, rate in self.dims)

    @property
    def hops(self) -> int:
        return sum(length - 1 for length, _ in self.dims)


@dataclass(frozen=True)
class Network:
    """A mesh laid over chips."""

    chip: Chip
    mesh: MeshSpec
    coordinates: tuple[tuple[int, ...], ...] = ()
    """Where each device is in a torus, in mesh order; empty: each mesh axis is a line of its own."""

    def lanes(self, groups: Groups) -> Lanes:
        """The links between the members of a group (of all groups, those of the first)."""
        axes = group_axes(groups, self.mesh)
        size = max(len(group) for group in groups)
        across = [a for a in axes if a in self.mesh.dcn]
        hosts = min(size, self.mesh.size(across)) if across else 1
        inside = max(1, size // hosts)
        if self.chip.switch:
            return self._switched(groups, inside, hosts)
        dims = self._torus(groups[0], hosts) or tuple(
            (self.mesh.shape[a], self._rate(self.mesh.shape[a], self.mesh.shape[a])) for a in axes if a not in across
        )
        return Lanes(dims or ((inside, self.chip.link_bandwidth),), inside, hosts)

    def _switched(self, groups: Groups, inside: int, hosts: int) -> Lanes:
        if hosts == 1:  # devices are numbered host by host
            hosts = max(len({i // self.chip.switch for i in group}) for group in groups)
            inside = max(1, inside // hosts)
        return Lanes(((inside, self.chip.link_bandwidth),), inside, hosts)

    def _torus(self, group: tuple[int, ...], hosts: int) -> tuple[tuple[int, float], ...]:
        """The lines of a torus that a group spans, if it is a box."""
        if hosts > 1 or len(self.coordinates) < self.mesh.size() or len(self.coordinates[0]) < 2:
            return ()
        places = [self.coordinates[i] for i in group]
        extents = [len(set(along)) for along in zip(*places)]
        if math.prod(extents) != len(group):  # no box: a ring through it, both ways
            return ((len(group), 2 * self.chip.link_bandwidth),)
        sizes = _torus_size(self.coordinates)
        return tuple((n, self._rate(n, whole)) for n, whole in zip(extents, sizes) if n > 1)

    def _rate(self, length: int, whole: int) -> float:
        closed = self.chip.wrap and length == whole and length % self.chip.wrap == 0
        return self.chip.link_bandwidth * (2 if closed else 1)

    def seconds(self, kind: str, taken: int, groups: Groups) -> float:
        """The time of one collective that takes `taken` bytes on each device.

        For an axis of n and V gathered bytes, a gather or a reduce-scatter takes V (n - 1) / n over the bandwidth, an
        all-reduce twice that; none is faster than its hops.
        """
        if not any(len(set(group)) > 1 for group in groups):
            return 0.0
        if kind == "collective-permute":
            return self._permute(taken, groups)
        lanes = self.lanes(groups)
        if kind in ("all-to-all", "ragged-all-to-all"):
            return self._all_to_all(taken, lanes)
        whole = taken * lanes.size * lanes.hosts if kind == "all-gather" else taken
        once = self._gather(whole, lanes)
        return 2 * once if kind == "all-reduce" else once

    def _gather(self, whole: int, lanes: Lanes) -> float:
        """Gathering `whole` bytes inside a host, after gathering each device's share between hosts."""
        chip = self.chip
        inside = whole * (lanes.size - 1) / lanes.size / lanes.bandwidth if lanes.size > 1 else 0.0
        inside = max(inside, lanes.hops * chip.link_latency if not chip.switch else chip.link_latency)
        if lanes.hosts == 1:
            return inside
        share = whole / lanes.size
        between = share * (lanes.hosts - 1) / lanes.hosts / chip.host_bandwidth
        return (inside if lanes.size > 1 else 0.0) + max(between, (lanes.hosts - 1) * chip.host_latency)

    def _all_to_all(self, taken: int, lanes: Lanes) -> float:
        """Half of all data crosses the middle of each line; behind a switch, all but one part leaves its device."""
        chip = self.chip
        if chip.switch:
            inside = taken * (lanes.size - 1) / lanes.size / lanes.bandwidth
        else:
            inside = max(length * taken / (4 * rate) for length, rate in lanes.dims)
        between = taken * (lanes.hosts - 1) / lanes.hosts / chip.host_bandwidth
        slowest = max(inside, between)
        return max(slowest, chip.host_latency if lanes.hosts > 1 else chip.link_latency)

    def _permute(self, taken: int, pairs: Groups) -> float:
        chip = self.chip
        far = any(a in self.mesh.dcn for a in group_axes(pairs, self.mesh))
        far |= bool(chip.switch) and any(len({i // chip.switch for i in pair}) > 1 for pair in pairs)
        if far:
            return max(taken / chip.host_bandwidth, chip.host_latency)
        return max(taken / chip.link_bandwidth, chip.link_latency)


@lru_cache(maxsize=64)
def _torus_size(coordinates: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(len(set(along)) for along in zip(*coordinates))
