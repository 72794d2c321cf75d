"""What a plan costs in memory: bytes for each device, and who they belong to."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from ._apply import _keep
from ._kinds import Kind, kinds
from ._leaf import LeafPlan
from ._mesh import MeshSpec
from ._pieces import boxes, device_count, factors
from ._plan import ShardingPlan
from ._spec import entries, spec_text, UNCONSTRAINED
from ._tree import array_leaves, size_text, Tree
from ._value import header, Value


LARGEST = 10
"""As many of the largest leaves are listed."""


@jtu.register_static
@dataclass(frozen=True, slots=True)
class AxisUse:
    """What a plan does with one mesh axis."""

    name: str
    size: int
    leaves: int
    """Leaves that are split over it at rest."""
    nbytes: int
    """Bytes of these leaves, each counted whole."""
    share: float
    """`nbytes` as a part of the bytes of all leaves."""


@jtu.register_static
@dataclass(frozen=True, slots=True)
class LeafBytes:
    """One leaf, as what it takes of a device."""

    path: str
    type: str
    spec: PartitionSpec
    nbytes: int
    """Of the whole leaf."""
    bytes_per_device: int
    """Of the largest piece."""


class Analysis(Value):
    """What a plan takes of each device; made by `analyze`.

    Devices stand in mesh order: the last mesh axis runs fastest, as in `mesh.build().devices.flat`.
    """

    mesh: MeshSpec = eqx.field(static=True)
    leaves: int = eqx.field(static=True)
    params: int = eqx.field(static=True)
    """Elements of all leaves."""
    sharded_params: int = eqx.field(static=True)
    """Elements of the leaves that are split at rest."""
    nbytes: int = eqx.field(static=True)
    """Bytes of all leaves, each counted whole and once."""
    sharded_bytes: int = eqx.field(static=True)
    """Bytes of the leaves that are split at rest."""
    bytes_per_device: tuple[int, ...] = eqx.field(static=True)
    """Bytes that each device holds at rest, in whatever memory."""
    use_bytes_per_device: tuple[int, ...] = eqx.field(static=True)
    """The same, were all leaves in their layout in use at once: what a step that gathers one by one stays below."""
    gathered_bytes: int = eqx.field(static=True)
    """The largest piece of a single leaf in use that is larger than at rest: what gathering one by one needs on top."""
    memory_kinds: tuple[tuple[str, int], ...] = eqx.field(static=True)
    """By memory kind, the bytes at rest of the device that holds the most; `"default"` where the plan names none."""
    axes: tuple[AxisUse, ...] = eqx.field(static=True)
    largest: tuple[LeafBytes, ...] = eqx.field(static=True)
    """The leaves that take the most of a device at rest, the largest first."""

    def _key(self) -> Any:
        return (self.mesh, self.leaves, self.params, self.sharded_params, self.nbytes, self.sharded_bytes) + (
            self.bytes_per_device,
            self.use_bytes_per_device,
            self.memory_kinds,
            self.largest,
        )

    @property
    def replicated_params(self) -> int:
        """Elements of the leaves that lie whole on every device."""
        return self.params - self.sharded_params

    @property
    def replicated_bytes(self) -> int:
        """Bytes of the leaves that lie whole on every device, each counted once."""
        return self.nbytes - self.sharded_bytes

    @property
    def balance(self) -> float:
        """What a device holds on average, as a part of what the fullest one holds: 1 is even."""
        most = max(self.bytes_per_device, default=0)
        return sum(self.bytes_per_device) / len(self.bytes_per_device) / most if most else 1.0

    @property
    def replication(self) -> float:
        """How many copies there are of a byte, on average: 1 is none to spare, the number of devices is all whole."""
        return sum(self.bytes_per_device) / self.nbytes if self.nbytes else 1.0

    def __repr__(self) -> str:
        most = size_text(max(self.bytes_per_device, default=0))
        return f"Analysis({self.leaves} leaves, {size_text(self.nbytes)}, {most} a device on {self.mesh})"

    def _repr_html_(self) -> str:
        from ._report._notebook import analysis_html  # noqa: PLC0415  reports read this module: above, it would be a cycle

        return analysis_html(self)

    def to_dict(self) -> dict[str, Any]:
        plain = ("leaves", "params", "sharded_params", "nbytes", "sharded_bytes", "gathered_bytes")
        return header("analysis") | {
            "mesh": self.mesh.to_dict(),
            **{name: getattr(self, name) for name in plain},
            "bytes_per_device": list(self.bytes_per_device),
            "use_bytes_per_device": list(self.use_bytes_per_device),
            "memory_kinds": dict(self.memory_kinds),
            "balance": self.balance,
            "replication": self.replication,
            "axes": [asdict(axis) for axis in self.axes],
            "largest": [asdict(leaf) | {"spec": spec_text(leaf.spec)} for leaf in self.largest],
        }


def analyze(plan: ShardingPlan, tree: Tree = None) -> Analysis:
    """The bytes that each device holds under a plan, and what they are.

    The numbers are those of `array.addressable_shards` after `apply`. A dimension that is UNCONSTRAINED counts whole.
    A plan that does not work is counted as far as it can be: what does not divide leaves the last devices less, and a
    wrong axis splits nothing; see `validate`.

    ```python
    import eqshard, jax
    from jax.sharding import PartitionSpec as P
    tree = {"w": jax.ShapeDtypeStruct((1024, 1024), "float32"), "b": jax.ShapeDtypeStruct((1024,), "float32")}
    plan = eqshard.replicated_plan(tree, eqshard.MeshSpec(dp=2, tp=4)).at("w").set(P(None, "tp"))
    analysis = eqshard.analyze(plan)
    assert analysis.bytes_per_device == (1024 * 1024 + 4096,) * 8
    assert analysis.sharded_params == 1024 * 1024 and analysis.balance == 1
    ```

    **Arguments:**

    - `tree`: what the plan is for. With it, an array that is there twice (tied weights) counts once, and an
        UNCONSTRAINED dimension counts as the array lies now.
    """
    found = kinds(plan) if tree is None else kinds(_settled(plan, tree))
    mesh, total = plan.mesh, sum(kind.nbytes * len(kind) for kind in found)
    split = [kind for kind in found if kind.piece != kind.leaf.shape]
    return Analysis(
        mesh=mesh,
        leaves=sum(map(len, found)),
        params=sum(kind.size * len(kind) for kind in found),
        sharded_params=sum(kind.size * len(kind) for kind in split),
        nbytes=total,
        sharded_bytes=sum(kind.nbytes * len(kind) for kind in split),
        bytes_per_device=_each_device(found, mesh, in_use=False),
        use_bytes_per_device=_each_device(found, mesh, in_use=True),
        gathered_bytes=max((kind.use_bytes for kind in found if kind.use_bytes > kind.piece_bytes), default=0),
        memory_kinds=_memory_kinds(found, mesh),
        axes=tuple(_axis_use(name, size, found, total) for name, size in mesh.axes),
        largest=_largest(found),
    )


def _settled(plan: ShardingPlan, tree: Tree) -> ShardingPlan:
    """The rows that `apply` would give memory of their own, with layouts as they would come out."""
    seen: set[tuple[int, Any]] = set()
    rows: list[LeafPlan] = []
    by_path = plan._rows.by_path
    for path, x in array_leaves(tree):
        row = by_path.get(path)
        if row is None:
            continue
        if not isinstance(x, (Tracer, jax.ShapeDtypeStruct)):
            one = id(x), (row.spec, row.memory_kind)
            if one in seen:
                continue
            seen.add(one)
        rows.append(_as_it_lies(row, x, plan.mesh) if UNCONSTRAINED in entries(row.spec) else row)
    return ShardingPlan(plan.mesh, rows)


def _as_it_lies(row: LeafPlan, x: Any, mesh: MeshSpec) -> LeafPlan:
    sharding = None if isinstance(x, Tracer) else getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or MeshSpec.of(sharding.mesh).axes != mesh.axes:
        return row
    spec = _keep(row.spec, sharding.spec)
    return replace(row, spec=spec, use=spec if row.use == row.spec else row.use)


def _each_device(found: list[Kind], mesh: MeshSpec, *, in_use: bool) -> tuple[int, ...]:
    even, uneven = 0, np.zeros(device_count(mesh), np.int64)
    for kind in found:
        axes = kind.use_axes if in_use else kind.axes
        if all(n % cut == 0 for n, cut in zip(kind.leaf.shape, factors(axes, mesh.shape))):
            even += (kind.use_bytes if in_use else kind.piece_bytes) * len(kind)
        else:
            uneven += boxes(kind.leaf.shape, axes, mesh).sizes() * (kind.item * len(kind))
    return tuple([even + more for more in uneven.tolist()])


def _memory_kinds(found: list[Kind], mesh: MeshSpec) -> tuple[tuple[str, int], ...]:
    by_kind: dict[str, list[Kind]] = {}
    for kind in found:
        by_kind.setdefault(kind.leaf.memory_kind or "default", []).append(kind)
    return tuple((name, max(_each_device(some, mesh, in_use=False))) for name, some in by_kind.items())


def _axis_use(name: str, size: int, found: list[Kind], total: int) -> AxisUse:
    over = [kind for kind in found if any(name in axes for axes in kind.axes)]
    nbytes = sum(kind.nbytes * len(kind) for kind in over)
    return AxisUse(name, size, sum(map(len, over)), nbytes, nbytes / total if total else 0.0)


def _largest(found: list[Kind]) -> tuple[LeafBytes, ...]:
    leaves: list[LeafBytes] = []
    for kind in sorted(found, key=lambda kind: -kind.piece_bytes):
        if len(leaves) >= LARGEST:
            break
        for leaf in kind.leaves[: LARGEST - len(leaves)]:
            leaves.append(LeafBytes(leaf.path, leaf.type, leaf.spec, kind.nbytes, kind.piece_bytes))
    return tuple(leaves)
