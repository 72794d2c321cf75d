"""What moving and computing takes, in seconds, on a machine of a few numbers."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from .._chip import Chip, CHIPS
from .._mesh import MeshSpec


State = tuple[int, ...]
"""For each mesh axis the dimension of a value that it cuts, or -1."""

Transfer = tuple[str, tuple[int, ...], float, float]
"""A collective: its kind, the mesh axes, bytes in all along them, seconds."""

HOP = 1e-6
"""Seconds that a collective takes for each neighbour it passes."""
LAUNCH = 5e-6
"""Seconds that a collective takes however little it moves: what a turn of a loop of small kernels takes on a TPU."""
STREAMED = 0.5
"""How much of its memory's bandwidth a chip reaches in elementwise work. Measured with the TPU compiler: 0.3 to 0.6."""
MATMUL = 0.75
"""How much of its peak a chip reaches in matrix products."""


HIDDEN = 0.8
"""How much of a gather or scatter of weights and gradients runs beside other work, as nothing waits for it at once.
Measured with the TPU compiler: of FSDP's transfers 70 to 88 % are hidden, of all-reduces none."""


ROW = 5e-6
"""Seconds of one window of a scatter on a TPU whose windows are parts of the table: the compiler makes a loop of it,
whose turns take 4.9 to 8.7 us on a v5e however wide they are."""


IN_TILES = 6.0
"""How often a value goes through memory that a TPU gathers along two of its dimensions at once, to be put together.
Measured with the TPU compiler: 3 to 12."""
LANES = 128
"""How wide a TPU's unit for products is."""
CLOSE_BY = 128e6
"""Bytes of an operand that a TPU keeps beside its unit for products, and need not read again."""


@dataclass(frozen=True)
class Machine:
    """The mesh as costs see it: the axes larger than 1, with their bandwidths."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    bandwidths: tuple[float, ...]
    """Bytes a second that a device sends along each axis."""
    chip: Chip
    hidden: float = HIDDEN

    @classmethod
    def of(cls, mesh: MeshSpec) -> "Machine":
        chip = mesh.chip or CHIPS["v5e"]
        axes = [(n, s) for n, s in mesh.axes if s > 1]
        across = tuple(_bandwidth(chip, s, n in mesh.dcn) for n, s in axes)
        return cls(tuple(n for n, _ in axes), tuple(s for _, s in axes), across, chip)

    @property
    def row_seconds(self) -> float:
        """Seconds of a row of a scatter beyond those of its bytes."""
        return ROW if self.chip.clock else 0.0

    def factor(self, state: State) -> int:
        """Into how many pieces a state cuts a value."""
        return math.prod(n for n, d in zip(self.sizes, state) if d >= 0)

    def start(self, axes: tuple[int, ...]) -> float:
        """Seconds until the first byte of a collective has gone round."""
        return LAUNCH + sum(self.sizes[a] - 1 for a in axes) * HOP

    def gather(self, axes: tuple[int, ...], gathered: float) -> float:
        """An all-gather, or a reduce-scatter, of so many bytes in all along axes; it uses the links of all of them."""
        n = math.prod(self.sizes[a] for a in axes)
        return self.start(axes) + gathered * (n - 1) / n / sum(self.bandwidths[a] for a in axes)

    def by_whole_sums(self, axes: tuple[int, ...]) -> bool:
        """Whether XLA gathers and scatters along these axes by sums of the whole: on a TPU, along three at once."""
        return len(axes) > 2 and bool(self.chip.clock)

    def exchange(self, axis: int, total: float) -> float:
        """An all-to-all of so many bytes in all along an axis."""
        return self.start((axis,)) + total / 4 / self.bandwidths[axis]

    def moves(self, nbytes: float, have: State, want: State) -> Iterator[Transfer]:
        """What brings a value from one state to another."""
        local = nbytes / self.factor(have)
        for n, h, w in zip(self.sizes, have, want):  # cutting is free, and makes the rest cheaper
            if h < 0 <= w:
                local /= n
        whole: dict[int, tuple[int, ...]] = {}
        for axis, (n, h, w) in enumerate(zip(self.sizes, have, want)):
            if h >= 0 and w >= 0 and h != w:
                yield "all-to-all", (axis,), local * n, self.exchange(axis, local * n)
            elif w < 0 <= h:
                whole[h] = (*whole.get(h, ()), axis)
        if len(whole) > 1 and self.chip.clock:  # XLA gathers along all of them at once, and turns what came: all wait
            axes = tuple(sorted(itertools.chain(*whole.values())))
            local *= math.prod(self.sizes[a] for a in axes)
            times = 2.0 if self.by_whole_sums(axes) else 1.0
            turning = IN_TILES * local / self.chip.hbm_bandwidth
            yield "gather of tiles", axes, local, times * self.gather(axes, local) + turning
            return
        for axes in whole.values():  # one for each dimension
            local *= math.prod(self.sizes[a] for a in axes)
            if self.by_whole_sums(axes):
                yield "all-reduce", axes, local, 2 * self.gather(axes, local) - LAUNCH
            else:
                yield "all-gather", axes, local, self.gather(axes, local)

    def sums(self, nbytes: float, made: State, partial: tuple[bool, ...], want: State) -> Iterator[Transfer]:
        """What sums partial results and brings them where they are wanted."""
        local, state = nbytes / self.factor(made), list(made)
        summed = tuple(a for a, s in enumerate(partial) if s)
        scattered = tuple(a for a in summed if want[a] >= 0)
        # XLA scatters a sum along one dimension; for several it makes the whole sum, and cuts that.
        if len({want[a] for a in scattered}) > 1 or self.by_whole_sums(scattered):
            scattered = ()
        rest = tuple(a for a in summed if a not in scattered)
        if scattered:
            yield "reduce-scatter", scattered, local, self.gather(scattered, local)
            local /= math.prod(self.sizes[a] for a in scattered)
            for a in scattered:
                state[a] = want[a]
        if rest:
            yield "all-reduce", rest, local, 2 * self.gather(rest, local) - LAUNCH
        yield from self.moves(nbytes, tuple(state), want)

    def move(self, nbytes: float, have: State, want: State, hides: tuple[str, ...] = ()) -> float:
        """Seconds to bring a value from one state to another, without what is hidden if nobody waits for it."""
        return 0.0 if have == want else sum((self.exposed(t, hides) for t in self.moves(nbytes, have, want)), 0.0)

    def settle(
        self, nbytes: float, made: State, partial: tuple[bool, ...], want: State, hides: tuple[str, ...] = ()
    ) -> float:
        """Seconds to sum partial results and bring them where they are wanted."""
        return sum((self.exposed(t, hides) for t in self.sums(nbytes, made, partial, want)), 0.0)

    def exposed(self, transfer: Transfer, hides: tuple[str, ...]) -> float:
        """The seconds of a transfer that others wait for: of many small ones at least what each takes to begin."""
        kind, axes, _, seconds = transfer
        if kind not in hides:
            return seconds
        start = self.start(axes)
        return start + (seconds - start) * (1 - self.hidden)

    def padding(self, shape: tuple[int, ...], slid_along: tuple[bool, ...]) -> float:
        """How much more memory an array takes than its elements do: a TPU stores tiles of 8 rows of 128.

        Any two dimensions may be those of the tiles, but for what convolutions read: they slide along no tile.
        """
        sizes = [n for n, slid in zip(shape, slid_along) if not slid and n > 1]
        if not self.chip.clock or len(sizes) < 2:
            return 1.0
        filled = lambda n, tile: -(-n // tile) * tile / n
        pairs = ((filled(a, LANES) * filled(b, 8)) for a, b in itertools.permutations(sizes, 2))
        return min(pairs)

    def compute(self, flops: float, nbytes: float) -> float:
        """Seconds of work on one device, whichever of arithmetic and memory is slower."""
        return max(flops / (self.chip.flops * MATMUL), nbytes / self.chip.hbm_bandwidth)

    def stream(self, nbytes: float) -> float:
        """Seconds in which so many bytes go through the memory of one device."""
        return nbytes / (self.chip.hbm_bandwidth * STREAMED)


def _bandwidth(chip: Chip, size: int, across_hosts: bool) -> float:
    if across_hosts:
        return float(getattr(chip, "host_bandwidth", 0.0) or chip.link_bandwidth / 8)
    wraps = size % 16 == 0 if chip.name in ("v5e", "v6e") else size % 4 == 0
    return chip.link_bandwidth * (2 if wraps else 1)
