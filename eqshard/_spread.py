"""Laying mesh axes on dimensions so that all pieces are equal."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from ._errors import DuplicateAxisError
from ._mesh import MeshSpec


Unit = tuple[str, ...]
"""Mesh axes that are used as one."""

Names = Sequence[str | tuple[str, ...]]
"""Which mesh axes to use; a tuple is used as one."""

Places = tuple[int | None, ...]
"""For each unit the dimension that it is on, or None."""


class Units(NamedTuple):
    """The axes to use, and into how many pieces each cuts."""

    axes: tuple[Unit, ...]
    factors: tuple[int, ...]


def units_of(mesh: MeshSpec, names: Names | None) -> Units:
    """The axes in `names` without those of size 1; by default all of the mesh, the largest first."""
    sizes = mesh.shape
    if names is None:
        told: list[Unit] = [(name,) for name in sorted(sizes, key=lambda n: -sizes[n])]
    else:
        names = [names] if isinstance(names, str) else names
        told = [(unit,) if isinstance(unit, str) else tuple(unit) for unit in names]
    flat = [axis for unit in told for axis in unit]
    mesh.size(flat)  # raises for an axis that is not there
    for axis in flat:
        if flat.count(axis) > 1:
            raise DuplicateAxisError(f"`names` uses the mesh axis {axis!r} twice: {list(names or ())}.")
    used = [unit for unit in (tuple(a for a in unit if sizes[a] > 1) for unit in told) if unit]
    return Units(tuple(used), tuple(math.prod(sizes[a] for a in unit) for unit in used))


def spec_of(places: Places, units: Units) -> PartitionSpec:
    """The layout, in canonical form, that has each unit in its place."""
    on: dict[int, list[str]] = {}
    for unit, dim in zip(units.axes, places):
        if dim is not None:
            on.setdefault(dim, []).extend(unit)
    entries: list[Any] = []
    for dim in range(max(on) + 1 if on else 0):
        axes = on.get(dim, [])
        entries.append(None if not axes else axes[0] if len(axes) == 1 else tuple(axes))
    return PartitionSpec(*entries)


def spread(shape: tuple[int, ...], factors: Sequence[int], reverse: bool = False) -> Places:
    """Uses as many pieces as any way can, the largest dimensions first; `shape` has no zeros.

    Greedily, one factor after the other; only if that leaves a factor out that divides some dimension, all ways are
    looked at, and of the best ones the nearest to the greedy one is taken.
    """
    greedy = _greedy(shape, factors, reverse)
    if None not in greedy:
        return greedy
    left = [f for f, dim in zip(factors, greedy) if dim is None]
    if not any(n % f == 0 for f in left for n in shape):
        return greedy
    ways = reachable(shape, factors, lambda i, dim: dim != greedy[i])
    return min(ways.items(), key=lambda way: (math.prod(way[0]), way[1].cost))[1].places


def _greedy(shape: tuple[int, ...], factors: Sequence[int], reverse: bool) -> Places:
    pieces, used = list(shape), [False] * len(shape)
    places: list[int | None] = []
    for factor in factors:
        best: int | None = None
        for dim, n in enumerate(pieces):
            if n % factor:
                continue
            if best is None or ((n < pieces[best]) if reverse else (n > pieces[best])):
                best = dim
            elif n == pieces[best] and used[best] and not used[dim]:
                best = dim
        if best is not None:
            pieces[best] //= factor
            used[best] = True
        places.append(best)
    return tuple(places)


class Way(NamedTuple):
    """How some pieces are reached, and what was counted on the way."""

    cost: int
    places: Places


def reachable(
    shape: tuple[int, ...], factors: Sequence[int], cost: Callable[[int, int | None], int]
) -> dict[tuple[int, ...], Way]:
    """Every shape of equal pieces that the factors can make, with the cheapest way to each.

    **Arguments:**

    - `cost`: of the factor with this number on this dimension, or on none.
    """
    found = {shape: Way(0, ())}
    for i, factor in enumerate(factors):
        further: dict[tuple[int, ...], Way] = {}
        for pieces, (so_far, places) in found.items():
            for dim in (*(d for d, n in enumerate(pieces) if n % factor == 0), None):
                way = Way(so_far + cost(i, dim), (*places, dim))
                smaller = pieces if dim is None else (*pieces[:dim], pieces[dim] // factor, *pieces[dim + 1 :])
                if smaller not in further or way.cost < further[smaller].cost:
                    further[smaller] = way
        found = further
    return found
