"""Replica groups: which devices talk to which, and along which mesh axes that is."""

import math
import re
from functools import lru_cache

import numpy as np

from .._mesh import MeshSpec
from ._hlo import Instruction


Groups = tuple[tuple[int, ...], ...]

_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,\s]*\},?\s*)*)\}")
_MESH = re.compile(r"replica_groups=@?mesh\[([^\]]*)\](?:,\s*device_ids=\(([^{]*)\))?\s*\{([^}]*)\}")
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,\s]+)")
_MESH_AXIS = re.compile(r"'([^']+)'=(\d+)")
_USED_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?\s*)*)\}")


def replica_groups(instruction: Instruction, partitions: int) -> Groups | None:
    """The groups of device numbers that a collective runs in; None if the text says them in no known way.

    For a collective-permute the pairs of source and target.
    """
    return _read_groups(instruction.attributes, partitions)


@lru_cache(maxsize=4096)
def _read_groups(text: str, partitions: int) -> Groups | None:
    if found := _PAIRS.search(text):
        return _lists(found.group(1))
    if found := _IOTA.search(text):
        shape, dims = _ints(found.group(1)), _ints(found.group(2))
        ids = np.arange(math.prod(dims)).reshape(dims)
        if found.group(3):
            ids = ids.transpose(_ints(found.group(3)))
        return _rows(ids.reshape(shape))
    if found := _MESH.search(text):
        return _mesh_groups(found.group(1), found.group(2), found.group(3))
    if found := _LISTED.search(text):
        return _lists(found.group(1)) or (tuple(range(partitions)),)
    return None


def _mesh_groups(axes_text: str, order: str | None, used_text: str) -> Groups | None:
    """`mesh['a'=4,'b'=4] {'b'}`, or a part of an axis, `{'a':(2)2}`: the sizes before it, and its own."""
    axes = [(name, int(size)) for name, size in _MESH_AXIS.findall(axes_text)]
    sizes, names = [s for _, s in axes], [n for n, _ in axes]
    ids = _device_order(order, math.prod(sizes))
    if ids is None:
        return None
    used = _USED_AXIS.findall(used_text)
    split: list[int] = []  # every axis as the parts that the sub-axes cut it into
    moved: dict[int, int] = {}
    for name, size in axes:
        parts = sorted(
            (int(before), int(width), k) for k, (n, before, width) in enumerate(used) if n == name and before
        )
        whole = [k for k, (n, before, _) in enumerate(used) if n == name and not before]
        at = 1
        for before, width, k in parts:
            if before % at or size % (before * width):
                return None
            if before != at:
                split.append(before // at)
            moved[k] = len(split)
            split.append(width)
            at = before * width
        if whole:
            moved[whole[0]] = len(split)
        if size // at > 1 or not parts:
            split.append(size // at)
    if len(moved) != len(used) or any(n not in names for n, _, _ in used):
        return None
    inner = [moved[k] for k in range(len(used))]
    outer = [d for d in range(len(split)) if d not in inner]
    width = math.prod(split[d] for d in inner)
    return _rows(ids.reshape(split).transpose(outer + inner).reshape(-1, width))


def _device_order(text: str | None, size: int) -> np.ndarray | None:
    """`[2,4]T(1,0)`: the numbers counted up in one shape and read in another order; or the numbers themselves."""
    if not text:
        return np.arange(size)
    found = _ORDER.fullmatch(text.strip())
    if found is None:
        return None
    if found.group(3):
        ids = np.array(_ints(found.group(3)))
    else:
        dims = _ints(found.group(1))
        ids = np.arange(math.prod(dims)).reshape(dims)
        ids = ids.transpose(_ints(found.group(2))) if found.group(2) else ids
    return ids.reshape(-1) if ids.size == size else None


def _lists(text: str) -> Groups:
    return tuple(_ints(group) for group in re.findall(r"\{([\d,\s]*)\}", text) if group.strip())


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n.strip())


def _rows(ids: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in ids.tolist())


@lru_cache(maxsize=4096)
def group_axes(groups: Groups, mesh: MeshSpec) -> tuple[str, ...]:
    """The mesh axes along which the members of a group differ, in mesh order.

    Devices are numbered in mesh order. An axis of which a group holds only a part is named too; `group_size` then is
    less than the product of the axes.
    """
    numbers = np.array([i for group in groups for i in group], dtype=np.int64)
    if not numbers.size or numbers.max() >= mesh.size():
        return ()
    places = np.stack(np.unravel_index(numbers, mesh.sizes))
    firsts = np.repeat(np.array([group[0] for group in groups]), [len(group) for group in groups])
    differ = (places != np.stack(np.unravel_index(firsts, mesh.sizes))).any(axis=1)
    return tuple(name for name, d in zip(mesh.names, differ) if d)
