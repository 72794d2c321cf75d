"""Which piece of an array each device holds: plain arithmetic, for many devices at once, also where a spec is wrong."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jax.sharding import PartitionSpec

from ._errors import MeshError
from ._mesh import MeshSpec
from ._spec import entries, entry_axes


MOST_DEVICES = 2**20


def dim_axes(shape: tuple[int, ...], spec: PartitionSpec, sizes: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
    """For each dimension the mesh axes that split it, major first.

    What cannot split anything is passed over: an axis that the mesh lacks, has with size 1, or that was used before;
    entries beyond the rank. So a wrong spec has pieces too; `validate` is there to say that it is wrong.
    """
    seen: set[str] = set()
    found = []
    for entry in entries(spec)[: len(shape)]:
        names = entry_axes(entry) if entry is None or isinstance(entry, (str, tuple, list)) else ()
        axes = []
        for axis in names:
            if isinstance(axis, str) and sizes.get(axis, 0) > 1 and axis not in seen:
                seen.add(axis)
                axes.append(axis)
        found.append(tuple(axes))
    return (*found, *(((),) * (len(shape) - len(found))))


def factors(axes: tuple[tuple[str, ...], ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Into how many pieces each dimension is cut."""
    return tuple([math.prod([sizes[a] for a in names]) if names else 1 for names in axes])


def piece_shape(shape: tuple[int, ...], cuts: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the largest piece."""
    return tuple([-(-n // cut) for n, cut in zip(shape, cuts)])


class Boxes(NamedTuple):
    """The piece of each device, in mesh order: `array[start[0]:stop[0], start[1]:stop[1], …]`."""

    start: np.ndarray
    stop: np.ndarray

    def sizes(self) -> np.ndarray:
        """Elements of each piece."""
        return np.prod(self.stop - self.start, axis=1, dtype=np.int64)

    def overlap(self, other: "Boxes") -> np.ndarray:
        """Elements that each device holds in both."""
        common = np.minimum(self.stop, other.stop) - np.maximum(self.start, other.start)
        return np.prod(np.maximum(common, 0), axis=1, dtype=np.int64)


def boxes(shape: tuple[int, ...], axes: tuple[tuple[str, ...], ...], mesh: MeshSpec) -> Boxes:
    """The piece of each device. Where a dimension does not divide, the last pieces are smaller."""
    start = np.zeros((device_count(mesh), len(shape)), np.int64)
    stop = np.zeros_like(start)
    for dim, (n, names) in enumerate(zip(shape, axes)):
        number, cut = piece_numbers(names, mesh), math.prod(mesh.shape[a] for a in names)
        piece = -(-n // cut)
        start[:, dim] = np.minimum(number * piece, n)
        stop[:, dim] = np.minimum((number + 1) * piece, n)
    return Boxes(start, stop)


def piece_numbers(names: tuple[str, ...], mesh: MeshSpec) -> np.ndarray:
    """The number of each device's piece along a dimension that the axes `names` split."""
    sizes = [max(s, 1) for s in mesh.sizes]
    coordinates = np.indices(sizes).reshape(len(sizes), -1)
    number = np.zeros(coordinates.shape[1], np.int64)
    for name in names:
        number = number * mesh.shape[name] + coordinates[mesh.names.index(name)]
    return number


def device_count(mesh: MeshSpec) -> int:
    """Returns the number of devices of a mesh, to hold a number for each; an axis that is still open counts as one.

    **Raises:**

    - `MeshError`: there are more than 2**20: what is held for each device would not fit the memory.
    """
    count = math.prod(max(size, 1) for size in mesh.sizes)
    if count > MOST_DEVICES:
        raise MeshError(f"{mesh} has {count} devices; a report on each device can be made of at most {MOST_DEVICES}.")
    return count
