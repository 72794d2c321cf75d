"""From one plan to another: which leaves move, how, and what each device sends and receives."""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax.tree_util as jtu
import numpy as np
from jax.sharding import PartitionSpec

from ._apply import _keep
from ._leaf import LeafPlan
from ._mesh import MeshSpec
from ._pieces import Boxes, boxes, device_count, dim_axes, factors
from ._plan import ShardingPlan
from ._spec import spec_text
from ._tree import is_dtype_name, itemsize, size_text
from ._value import header, Value


@jtu.register_static
@dataclass(frozen=True, slots=True)
class Move:
    """A leaf that lies otherwise under another plan."""

    path: str
    type: str
    before: PartitionSpec
    after: PartitionSpec
    how: str
    """The collectives: `"slice"` (no communication), `"all-gather"`, `"all-to-all"`, `"collective-permute"`, two of
    them joined by `" + "`; `"copy"` between different devices or memories."""
    receives: int
    """Bytes that the device which gets the most gets from others."""
    sends: int
    """Bytes that the device which gives the most gives."""


class Diff(Value):
    """How two plans differ; made by `diff`. It has a length: the number of leaves that move."""

    before: MeshSpec = eqx.field(static=True)
    after: MeshSpec = eqx.field(static=True)
    moves: tuple[Move, ...] = eqx.field(static=True)
    """In the order of the first plan."""
    removed: tuple[str, ...] = eqx.field(static=True)
    """Leaves that only the first plan has, or has with another shape or dtype."""
    added: tuple[str, ...] = eqx.field(static=True)
    """Leaves that only the second plan has, or has with another shape or dtype."""
    devices: tuple[int, ...] = eqx.field(static=True)
    """What the numbers below are of: device ids where both plans know theirs, else numbers in mesh order."""
    receives_per_device: tuple[int, ...] = eqx.field(static=True)
    """Bytes that each device needs under the second plan and does not have under the first."""
    sends_per_device: tuple[int, ...] = eqx.field(static=True)
    """Bytes that each device gives to others, if those who hold a byte give it in equal parts."""

    def _key(self) -> Any:
        return self.before, self.after, self.moves, self.removed, self.added, self.receives_per_device

    def __len__(self) -> int:
        return len(self.moves)

    def __repr__(self) -> str:
        most = size_text(max(self.receives_per_device, default=0))
        return f"Diff({len(self.moves)} leaves move, a device receives up to {most})"

    def to_dict(self) -> dict[str, Any]:
        moves = [
            {
                "path": move.path,
                "type": move.type,
                "before": spec_text(move.before),
                "after": spec_text(move.after),
                "how": move.how,
                "receives": move.receives,
                "sends": move.sends,
            }
            for move in self.moves
        ]
        return header("diff") | {
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "moves": moves,
            "removed": list(self.removed),
            "added": list(self.added),
            "devices": list(self.devices),
            "receives_per_device": list(self.receives_per_device),
            "sends_per_device": list(self.sends_per_device),
        }


def diff(a: ShardingPlan, b: ShardingPlan) -> Diff:
    """What must happen to a tree that lies as `a` says, so that it lies as `b` says.

    The bytes are the least that must move: those that a device needs and does not have. An UNCONSTRAINED dimension
    of `b` stays as it is.

    ```python
    import eqshard, jax
    from jax.sharding import PartitionSpec as P
    tree = {"w": jax.ShapeDtypeStruct((1024, 1024), "float32")}
    whole = eqshard.replicated_plan(tree, eqshard.MeshSpec(x=8))
    split = whole.at("w").set(P("x"))
    assert eqshard.diff(whole, split).moves[0].how == "slice"
    gathered = eqshard.diff(split, whole)
    assert gathered.moves[0].how == "all-gather"
    assert gathered.receives_per_device == (7 * 128 * 1024 * 4,) * 8
    ```

    **Arguments:**

    - `a`, `b`: plans of the same leaves, on the same mesh or on others. Meshes that do not know their devices are
        taken to use the same ones in the same order.
    """
    devices, at_a, at_b = _devices(a.mesh, b.mesh)
    receives, sends = np.zeros(len(devices)), np.zeros(len(devices))
    known: dict[Any, tuple[str, np.ndarray, np.ndarray] | None] = {}
    moves, removed = [], []
    for leaf in a:
        if leaf.path not in b or _type(b[leaf.path]) != _type(leaf):
            removed.append(leaf.path)
            continue
        new = b[leaf.path]
        key = leaf.shape, leaf.dtype, leaf.spec, leaf.memory_kind, new.spec, new.memory_kind
        if key not in known:
            known[key] = _move(leaf, new, a.mesh, b.mesh, at_a, at_b, len(devices))
        found = known[key]
        if found is not None:
            how, gets, gives = found
            receives += gets
            sends += gives
            most = int(gets.max(initial=0)), round(gives.max(initial=0))
            moves.append(Move(leaf.path, leaf.type, leaf.spec, new.spec, how, *most))
    gone = set(removed)
    added = [leaf.path for leaf in b if leaf.path not in a or leaf.path in gone]
    return Diff(
        a.mesh,
        b.mesh,
        tuple(moves),
        tuple(removed),
        tuple(added),
        devices,
        tuple(int(n) for n in receives),
        tuple(round(n) for n in sends),
    )


def _type(leaf: LeafPlan) -> tuple[tuple[int, ...], str]:
    return leaf.shape, leaf.dtype


def _devices(a: MeshSpec, b: MeshSpec) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
    """All devices of both meshes, and where in that list each device of a mesh stands."""
    ids_a, ids_b = tuple(range(device_count(a))), tuple(range(device_count(b)))
    if a.placement is not None and b.placement is not None:
        ids_a, ids_b = a.placement.ids, b.placement.ids
    devices = tuple(dict.fromkeys((*ids_a, *ids_b)))
    number = {device: i for i, device in enumerate(devices)}
    return devices, np.array([number[i] for i in ids_a]), np.array([number[i] for i in ids_b])


def _move(
    leaf: LeafPlan, new: LeafPlan, a: MeshSpec, b: MeshSpec, at_a: np.ndarray, at_b: np.ndarray, count: int
) -> tuple[str, np.ndarray, np.ndarray] | None:
    """How a leaf moves, and what each device receives and sends; None if it stays."""
    spec = _keep(new.spec, leaf.spec) if a.axes == b.axes else new.spec
    shape = leaf.shape or (1,)  # a scalar that a device lacks must have an extent that is 0
    axes_a, axes_b = dim_axes(shape, leaf.spec, a.shape), dim_axes(shape, spec, b.shape)
    has = _everywhere(boxes(shape, axes_a, a), at_a, count)
    needs = _everywhere(boxes(shape, axes_b, b), at_b, count)
    item = itemsize(leaf.dtype) if is_dtype_name(leaf.dtype) else 0
    overlap = has.overlap(needs)
    gets = (needs.sizes() - overlap) * item
    same = len(at_a) == len(at_b) == count and bool((has.start == needs.start).all() and (has.stop == needs.stop).all())
    if same and leaf.memory_kind == new.memory_kind:
        return None
    gives = _gives(has, needs, overlap, at_a) * item
    if leaf.memory_kind != new.memory_kind or len(at_a) != count or len(at_b) != count:
        return "copy", gets, gives
    cuts = factors(axes_a, a.shape), factors(axes_b, b.shape)
    return _how(has, needs, overlap, cuts, axes_a, axes_b), gets, gives


def _everywhere(pieces: Boxes, at: np.ndarray, count: int) -> Boxes:
    """Pieces by device of either mesh; a device that is not in this one holds nothing."""
    start = np.zeros((count, pieces.start.shape[1]), np.int64)
    stop = np.zeros_like(start)
    start[at], stop[at] = pieces.start, pieces.stop
    return Boxes(start, stop)


def _gives(has: Boxes, needs: Boxes, overlap: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Elements that each device gives. Those who hold the same piece share in what the others want of it."""
    gives = np.zeros(len(overlap))
    pieces, member, copies = np.unique(has.start[at], axis=0, return_inverse=True, return_counts=True)
    member = member.reshape(-1)  # which piece each device holds
    for number in range(len(pieces)):
        holders = at[member == number]
        one = Boxes(has.start[holders[:1]], has.stop[holders[:1]])
        wanted = one.overlap(needs).sum() - overlap[holders].sum()
        gives[holders] = wanted / copies[number]
    return gives


def _how(
    has: Boxes,
    needs: Boxes,
    overlap: np.ndarray,
    cuts: tuple[tuple[int, ...], tuple[int, ...]],
    axes_a: tuple[tuple[str, ...], ...],
    axes_b: tuple[tuple[str, ...], ...],
) -> str:
    """The collectives that XLA has for it, on one set of devices."""
    if (overlap == needs.sizes()).all():
        return "slice"
    if (overlap == has.sizes()).all():
        return "all-gather"
    if cuts[0] == cuts[1]:
        return "collective-permute"
    used_a, used_b = ({axis for axes in every for axis in axes} for every in (axes_a, axes_b))
    if used_a == used_b:
        return "all-to-all"
    if used_a < used_b:
        return "slice + all-to-all"
    if used_b < used_a:
        return "all-to-all + all-gather"
    return "all-gather + slice"
