"""A program as values that lie together and operations between them.

Values that elementwise operations, transposes, reshapes and the like connect share one layout: a *cluster*. Their
dimensions are unified into *names*; a layout of a cluster is a choice of a name, or none, for each mesh axis. Between
clusters stand the *operations*: matrix products, convolutions, gathers, and whatever is not understood.
"""

import math
from dataclasses import dataclass, field


Dims = tuple[int, ...]
"""A name, or -1 (always whole), for each dimension."""


@dataclass(slots=True)
class ValueNode:
    """One array of the program."""

    shape: tuple[int, ...]
    itemsize: int
    dims: list[int]
    times: float
    """How often it is made: the lengths of the scans around it."""

    @property
    def nbytes(self) -> float:
        return float(math.prod(self.shape) * self.itemsize)


@dataclass(slots=True)
class Op:
    """An operation as letters, like an einsum: each letter is a dimension of its iteration space."""

    kind: str
    times: float
    sizes: list[int]
    """The size of each letter."""
    operands: list[tuple[int, tuple[int, ...]]]
    """Value and its letters; -1 where a dimension must be whole."""
    outs: list[tuple[int, tuple[int, ...]]]
    reduced: frozenset[int]
    """Letters that are summed over: cut, they leave partial sums."""
    flops: float
    path: tuple[int, ...]
    """Where the equation stands: its number, then those inside it."""
    slots: tuple[int, ...]
    """Which operand of the equation each operand is."""
    out_slots: tuple[int, ...]


@dataclass(slots=True)
class Move:
    """A value that may lie otherwise for a reader: the same array, in another cluster."""

    source: int
    target: int
    pairs: tuple[tuple[int, int], ...]
    """Dimensions that are the same in both."""
    times: float
    path: tuple[int, ...]
    slot: int
    """Which operand of the reader it is; -1 if it stands for no operand."""


@dataclass(slots=True)
class Reduction:
    """A sum inside a cluster: cheap unless one of the names it sums over is cut."""

    value: int
    names: tuple[int, ...]
    out: int
    times: float


@dataclass
class Graph:
    values: list[ValueNode] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    reductions: list[Reduction] = field(default_factory=list)
    traffic: list[tuple[int, float]] = field(default_factory=list)
    """Values made by elementwise work, and how often."""
    carries: list[tuple[tuple[int, ...], int, int]] = field(default_factory=list)
    """Values that loops carry: the loop's place, which carry, the value inside."""
    live: list[dict[int, float]] = field(default_factory=list)
    """Sets of values that must be in memory at one time, where that is most."""
    unknown: dict[str, int] = field(default_factory=dict)
    """Primitives that no rule knows, and how many of each."""
    _cluster: list[int] = field(default_factory=list)
    _name: list[int] = field(default_factory=list)
    _size: list[int] = field(default_factory=list)
    _together: list[set[int]] = field(default_factory=list)

    def add(self, shape: tuple[int, ...], itemsize: int, times: float) -> int:
        """A new value, tied to nothing."""
        number = len(self.values)
        dims = [self._new_name(n) if n > 1 else -1 for n in shape]
        for a in dims:
            if a >= 0:
                self._together[a].update(b for b in dims if b >= 0 and b != a)
        self.values.append(ValueNode(tuple(shape), itemsize, dims, times))
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
        return tuple(self.name(n) for n in self.values[v].dims)

    def whole(self, v: int, dim: int) -> None:
        """Says that a dimension cannot be cut."""
        n = self.values[v].dims[dim]
        if n >= 0:
            self._size[self._root(n)] = 0

    def tie(self, a: int, b: int, pairs: list[tuple[int, int]]) -> bool:
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
