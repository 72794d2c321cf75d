"""What works and is yet worth a word: large leaves left whole, small ones split, axes that nobody uses, strays."""

from collections.abc import Iterator
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from ._issue import Issue
from ._kinds import Kind
from ._mesh import MeshSpec
from ._stray import is_placed
from ._tree import shown, size_text, some


SMALL_BYTES = 2**10
"""A leaf with fewer bytes gains nothing from being split."""
LARGE_BYTES = 2**20
"""A leaf with fewer bytes is never called large."""
LARGE_SHARE = 0.1
"""Nor are leaves that take a smaller part of what a device holds."""


def advice(mesh: MeshSpec, found: list[Kind], small_bytes: int, large_bytes: int) -> list[Issue]:
    """What to say of leaves that can be laid out; warnings first."""
    if mesh.size() == 1:
        return list(_over_memory(mesh, found))
    return [
        *_over_memory(mesh, found),
        *_large_replicated(mesh, found, large_bytes),
        *_unused_axes(mesh, found, large_bytes),
        *_small_sharded(found, small_bytes),
    ]


def strays(leaves: list[tuple[str, Any]], where: Mesh | AbstractMesh) -> Iterator[Issue]:
    """Leaves that somebody put on other devices than the mesh's; where JAX placed one by default is no matter."""
    if not isinstance(where, Mesh):
        return
    ours = set(where.devices.flat)
    for path, x in leaves:
        if not is_placed(x) or x.is_deleted():
            continue
        theirs = x.sharding.device_set
        if theirs == ours:
            continue
        names = some(sorted((str(d) for d in theirs), key=lambda name: (len(name), name)), 4)
        message = f"lies on {len(theirs)} of {len(ours)} devices: {names}." if theirs < ours else f"lies on {names}."
        yield Issue("warning", "stray_devices", path, message, "`apply(plan, tree)` moves it to the mesh.")


def _on_device(kind: Kind) -> bool:
    return kind.leaf.memory_kind in (None, "device")


def _over_memory(mesh: MeshSpec, found: list[Kind]) -> Iterator[Issue]:
    chip = mesh.chip
    need = sum(kind.piece_bytes * len(kind) for kind in found if _on_device(kind))
    if chip is not None and need > chip.hbm_bytes:
        message = f"at rest a device holds {size_text(need)}; a {chip.name} has {size_text(chip.hbm_bytes)}."
        remedy = "Split more leaves, use more devices, or keep some in 'pinned_host' memory."
        yield Issue("warning", "over_memory", "", message, remedy)


def _large_replicated(mesh: MeshSpec, found: list[Kind], large_bytes: int) -> Iterator[Issue]:
    held = sum(kind.piece_bytes * len(kind) for kind in found if _on_device(kind))
    if not any(kind.piece != kind.leaf.shape for kind in found):
        return
    for kind in found:
        if kind.piece != kind.leaf.shape or kind.nbytes < max(large_bytes, 1) or not _on_device(kind):
            continue
        way = _way_to_split(kind, mesh)
        whole = kind.nbytes * len(kind)
        if way is None or whole < LARGE_SHARE * held:
            continue
        axis, size, dim = way
        like = f", and so do {len(kind) - 1} leaves like it: {size_text(whole)}" if len(kind) > 1 else ""
        message = f"{kind.leaf.type}, {size_text(kind.nbytes)}, lies whole on every device{like}"
        message += f", {whole / held:.0%} of what each holds."
        remedy = f"Split dim {dim} over {axis!r} ({size}): saves {size_text(whole - whole / size)} a device."
        yield Issue("warning", "large_replicated", kind.leaf.path, message, remedy)


def _way_to_split(kind: Kind, mesh: MeshSpec) -> tuple[str, int, int] | None:
    """The largest axis that divides a dimension, and the largest such dimension."""
    ways = [
        (size, n, -dim, axis)
        for axis, size in mesh.axes
        for dim, n in enumerate(kind.leaf.shape)
        if size > 1 and n and n % size == 0
    ]
    if not ways or kind.leaf.dtype.startswith("key<"):
        return None
    size, _, dim, axis = max(ways)
    return axis, size, -dim


def _unused_axes(mesh: MeshSpec, found: list[Kind], large_bytes: int) -> Iterator[Issue]:
    used = {a for kind in found for axes in (*kind.axes, *kind.use_axes) for a in axes}
    for axis, size in mesh.axes:
        if size <= 1 or axis in used:
            continue
        could = [kind for kind in found if kind.nbytes >= large_bytes and any(n and n % size == 0 for n in kind.piece)]
        if could:
            first = max(could, key=lambda kind: kind.piece_bytes)
            message = f"no leaf lies over the mesh axis {axis!r}: everything is there {size} times."
            remedy = f"If it is not for the batch alone, split {shown(first.leaf.path)} over it."
            yield Issue("info", "unused_axis", "", message, remedy)


def _small_sharded(found: list[Kind], small_bytes: int) -> Iterator[Issue]:
    for kind in found:
        if kind.nbytes >= small_bytes or kind.piece == kind.leaf.shape:
            continue
        message = f"{kind.leaf.type} has {size_text(kind.nbytes)}; a device holds {size_text(kind.piece_bytes)} of it."
        for leaf in kind.leaves:
            yield Issue("info", "small_sharded", leaf.path, message, "Leave it whole: P().")
