"""A program as values that lie together and operations between them.

Values that elementwise operations, transposes, reshapes and the like connect share one layout: a *cluster*. Their
dimensions are unified into *names*; a layout of a cluster is a choice of a name, or none, for each mesh axis. Between
clusters stand the *operations*: matrix products, convolutions, gathers, and whatever is not understood.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


Dims = tuple[int, ...]
"""A name, or -1 (always whole), for each dimension."""
Place = tuple[int, ...]
"""Where an equation stands: its number, then those inside it."""
Letters = tuple[int | tuple[int, ...], ...]
"""A letter of an operation's iteration space for each dimension, several in a fixed layout; -1: must be whole."""
Pairs = Sequence[tuple[int, int]]
"""Dimensions of two values that are the same."""


@dataclass(slots=True)
class ValueNode:
    """One array of the program."""

    shape: tuple[int, ...]
    itemsize: int
    dims: list[int]
    times: float
    """How often it is made: the lengths of the scans around it."""
    hides: tuple[str, ...]
    """Collectives of it that others do not wait for: gathers of weights before any data, and scatters of gradients
    after the last product."""

    @property
    def nbytes(self) -> float:
        return float(math.prod(self.shape) * self.itemsize)

    @property
    def waited(self) -> bool:
        """Whether others wait for it at once."""
        return not self.hides


@dataclass(slots=True)
class Op:
    """An operation as letters, like an einsum: each letter is a dimension of its iteration space."""

    kind: str
    times: float
    sizes: list[int]
    """The size of each letter."""
    operands: list[tuple[int, Letters]]
    outs: list[tuple[int, Letters]]
    reduced: frozenset[int]
    """Letters that are summed over: cut, they leave partial sums."""
    flops: float
    path: Place
    slots: tuple[int, ...]
    """Which operand of the equation each operand is."""
    out_slots: tuple[int, ...]
    axes: tuple[str, ...] | None = None
    """If not None, its layout is given, and these are the mesh axes that its letters stand for."""
    rows: frozenset[int] = frozenset()
    """Letters of what is done row by row, as a scatter is: cut, each device has fewer rows."""
    row_count: float = 0.0
    by_rows: bool = False
    """Whether what it makes is put together from whole rows, as the gradient of an embedding is."""


@dataclass(frozen=True, slots=True)
class Equation:
    """An equation of a jaxpr as rules see it; scalars are no values, but None."""

    eqn: Any
    ins: list[int | None]
    outs: list[int | None]
    times: float
    path: Place

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def params(self) -> Mapping[str, Any]:
        return self.eqn.params


@dataclass(slots=True)
class Move:
    """A value that may lie otherwise for a reader: the same array, in another cluster."""

    source: int
    target: int
    pairs: tuple[tuple[int, int], ...]
    """Dimensions that are the same in both."""
    times: float
    path: Place
    slot: int
    """Which operand of the reader it is; -1 if it stands for no operand."""
    waited: bool = False
    """Whether others wait for it whatever it moves, as a loop does for all that it goes through."""


@dataclass(slots=True)
class Reduction:
    """A sum inside a cluster: cheap unless one of the names it sums over is cut."""

    value: int
    names: tuple[int, ...]
    out: int
    times: float


@dataclass
class Graph:
    as_written: bool = False
    """Whether the program is priced as it stands, not as `constrain` writes it."""
    fresh: set[int] = field(default_factory=set)
    """Results of products, perhaps turned or in another type, before anything else is done with them."""
    values: list[ValueNode] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    reductions: list[Reduction] = field(default_factory=list)
    traffic: list[tuple[int, float]] = field(default_factory=list)
    """Values that go through memory beside products, and how often."""
    carries: list[tuple[Place, int, int]] = field(default_factory=list)
    """Values that loops carry: the loop's place, which carry, the value inside."""
    again: list[tuple[Place, int, int]] = field(default_factory=list)
    """Weights that blocks read which are computed again: the block's place, which operand, the value."""
    pins: list[tuple[Place, int, int, bool]] = field(default_factory=list)
    """Values that must not be left to the compiler: the equation's place, which operand or result, and whether it is
    a result."""
    splits: list[tuple[Place, int, int]] = field(default_factory=list)
    """Reshapes with results that some mesh axis does not divide: their place, operand and result."""
    spatial: set[int] = field(default_factory=set)
    """Names that convolutions slide along."""
    live: list[dict[int, float]] = field(default_factory=list)
    """Sets of values that must be in memory at one time, where that is most."""
    unknown: dict[str, int] = field(default_factory=dict)
    """Primitives that no rule knows, and how many of each."""
    _cluster: list[int] = field(default_factory=list)
    _name: list[int] = field(default_factory=list)
    _size: list[int] = field(default_factory=list)
    _together: list[set[int]] = field(default_factory=list)
    _settled: list[Dims] = field(default_factory=list)

    def copy(self, v: int, times: float) -> int:
        """A value like another, tied to nothing."""
        node = self.values[v]
        return self.add(node.shape, node.itemsize, times, node.hides)

    def add(self, shape: tuple[int, ...], itemsize: int, times: float, hides: tuple[str, ...] = ()) -> int:
        """A new value, tied to nothing."""
        number = len(self.values)
        dims = [self._new_name(n) if n > 1 else -1 for n in shape]
        for a in dims:
            if a >= 0:
                self._together[a].update(b for b in dims if b >= 0 and b != a)
        self.values.append(ValueNode(tuple(shape), itemsize, dims, times, hides))
        self._cluster.append(number)
        return number

    def _new_name(self, size: int) -> int:
        self._name.append(len(self._name))
        self._size.append(size)
        self._together.append(set())
        return len(self._name) - 1

    def name(self, n: int) -> int:
        """The representative of a name; -1 for a dimension that is always whole."""
        if n < 0:
            return -1
        while self._name[n] != n:
            self._name[n] = self._name[self._name[n]]
            n = self._name[n]
        return n if self._size[n] > 0 else -1

    def _root(self, n: int) -> int:
        while self._name[n] != n:
            self._name[n] = self._name[self._name[n]]
            n = self._name[n]
        return n

    def size(self, n: int) -> int:
        """What a name can be divided by: the greatest common divisor of its dimensions."""
        return self._size[self._root(n)]

    def cluster(self, v: int) -> int:
        while self._cluster[v] != v:
            self._cluster[v] = self._cluster[self._cluster[v]]
            v = self._cluster[v]
        return v

    def dims(self, v: int) -> Dims:
        """The names of a value's dimensions."""
        return self._settled[v] if self._settled else tuple([self.name(n) for n in self.values[v].dims])

    def settle(self) -> None:
        """Ends the reading: nothing more is tied."""
        self._settled = [self.dims(v) for v in range(len(self.values))]
        self._together = []

    def whole(self, v: int, dim: int) -> None:
        """Says that a dimension cannot be cut."""
        n = self.values[v].dims[dim]
        if n >= 0:
            self._size[self._root(n)] = 0

    def slid_along(self, v: int) -> tuple[bool, ...]:
        """For each dimension of a value, whether convolutions slide along it: if it is as they read it."""
        names = {self._root(n) for n in self.spatial}
        slid = tuple(n >= 0 and self._root(n) in names for n in self.values[v].dims)
        return slid if slid.count(False) == 2 else (False,) * len(slid)  # a batch, and features

    def shape(self, v: int) -> tuple[int, ...]:
        return self.values[v].shape

    def tie(self, a: int, b: int, pairs: Pairs) -> bool:
        """Lets two values lie together, dimension by dimension; False if some value would have one name twice."""
        merges: list[tuple[int, int]] = []
        groups: dict[int, int] = {}
        for da, db in pairs:
            na, nb = self.values[a].dims[da], self.values[b].dims[db]
            if na < 0 or nb < 0:
                continue
            ra, rb = self._root(na), self._root(nb)
            if ra == rb:
                continue
            if groups.get(ra, rb) != rb or groups.get(rb, ra) != ra or self._meet(ra, rb):
                return False
            groups[ra], groups[rb] = rb, ra
            merges.append((ra, rb))
        for ra, rb in merges:
            self._merge(ra, rb)
        ca, cb = self.cluster(a), self.cluster(b)
        if ca != cb:
            self._cluster[max(ca, cb)] = min(ca, cb)
        return True

    def _meet(self, ra: int, rb: int) -> bool:
        small, other = (ra, rb) if len(self._together[ra]) <= len(self._together[rb]) else (rb, ra)
        return any(self._root(t) == other for t in self._together[small])

    def _merge(self, ra: int, rb: int) -> None:
        ra, rb = self._root(ra), self._root(rb)
        if ra == rb:
            return
        if len(self._together[ra]) < len(self._together[rb]):
            ra, rb = rb, ra
        self._name[rb] = ra
        self._size[ra] = math.gcd(self._size[ra], self._size[rb]) if self._size[ra] and self._size[rb] else 0
        self._together[ra] |= self._together[rb]
        if len(self._together[ra]) > 64:
            self._together[ra] = {self._root(t) for t in self._together[ra]}
        self._together[rb] = self._together[ra]

    # What rules say.

    def same(self, a: int | None, b: int | None, skip: Sequence[int] = ()) -> bool:
        """Ties equal dimensions of two values of one rank; those in `skip` must be whole. False: they cannot be."""
        if a is None or b is None:
            return True
        for d in skip:
            self.whole(a, int(d))
            self.whole(b, int(d))
        equal = [d for d, (n, m) in enumerate(zip(self.shape(a), self.shape(b))) if n == m and d not in skip]
        return self.tie(a, b, [(d, d) for d in equal])

    def move(
        self, a: int, b: int, pairs: Pairs | None, times: float, path: Place, slot: int = -1, waited: bool = False
    ) -> None:
        """Two values that are one array, or share dimensions, but need not, or cannot, lie together."""
        pairs = [(d, d) for d in range(len(self.shape(a)))] if pairs is None else pairs
        self.moves.append(Move(a, b, tuple(pairs), times, path, slot, waited))

    def tied(self, a: int | None, b: int | None, pairs: Pairs | None, times: float, path: Place) -> None:
        """Lets two values lie together if they can; `pairs` None: all of their dimensions."""
        if a is None or b is None:
            return
        if not (self.same(a, b) if pairs is None else self.tie(a, b, pairs)):
            self.move(a, b, pairs, times, path)
