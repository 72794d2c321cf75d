"""The words that every kind of report uses."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from .._explain import layout_text as layout_text
from .._fold import fold, fold_leaves
from .._issue import Issue
from .._kinds import Kind
from .._leaf import LeafPlan
from .._mesh import MeshSpec
from .._pieces import device_count
from .._plan import ShardingPlan
from .._spec import entries, entry_axes, UNCONSTRAINED


_SHORT = {"bool": "bool", "bfloat16": "bf16", "complex64": "c64", "complex128": "c128"}


def short_type(leaf: LeafPlan) -> str:
    """`bf16[8192,1024]`."""
    dtype = leaf.dtype
    for long, short in (("float", "f"), ("uint", "u"), ("int", "i")):
        if dtype.startswith(long):
            dtype = short + dtype[len(long) :]
    return f"{_SHORT.get(leaf.dtype, dtype)}[{','.join(map(str, leaf.shape))}]"


def spec_words(spec: PartitionSpec) -> str:
    """A layout dimension by dimension: `fsdp, -, tp+data`; `-` is not split, `?` is left to the compiler."""
    words = ["?" if e is UNCONSTRAINED else "+".join(entry_axes(e)) or "-" for e in entries(spec)]
    return ", ".join(words) if words else "whole"


def count_text(n: int | float) -> str:
    """A number for people: `70.6 B`."""
    for unit in ("", " k", " M", " B", " T"):
        if abs(n) < 1000 or unit == " T":
            return f"{n:.0f}" if unit == "" else f"{n:.1f}{unit}"
        n /= 1000
    raise AssertionError("unreachable")


def mesh_text(mesh: MeshSpec) -> str:
    """`data 2 x fsdp 8 x tp 4 = 64 devices`."""
    axes = " x ".join(f"{name} {'?' if size < 0 else size}" for name, size in mesh.axes)
    count = device_count(mesh)
    return f"{axes} = {count} devices" if len(mesh.axes) > 1 else f"{axes} device{'s' * (count != 1)}"


@dataclass(frozen=True)
class Row:
    """Leaves that lie alike, as one row."""

    path: str
    leaf: LeafPlan
    count: int
    kind: Kind

    @property
    def bytes_per_device(self) -> int:
        """Of all of them together."""
        return self.kind.piece_bytes * self.count


def rows_of(plan: ShardingPlan) -> list[Row]:
    """The rows of a plan, repeated layers as one."""
    sizes = plan.mesh.shape
    return [Row(path, leaves[0], len(leaves), Kind(leaves[0], sizes)) for path, leaves in fold_leaves(plan)]


def fold_issues(issues: Sequence[Issue]) -> list[tuple[Issue, str, int]]:
    """Issues with the same words once: the issue, its paths as one, and how often."""
    keys = [(x.severity, x.code, x.message, x.remedy) for x in issues]
    return [(issues[f.members[0]], f.path, len(f.members)) for f in fold([x.path for x in issues], keys)]


def counts(issues: Iterable[Issue]) -> str:
    """`1 error, 2 warnings`."""
    found = [x.severity for x in issues]
    names = [(found.count(name), name) for name in ("error", "warning", "info")]
    return ", ".join(f"{n} {name}{'s' * (n != 1)}" for n, name in names if n) or "no issues"


def largest(rows: Sequence[Row], most: int) -> tuple[list[Row], list[Row]]:
    """The `most` rows that take the most of a device, in their order, and the rest."""
    if len(rows) <= most:
        return list(rows), []
    kept = set(sorted(range(len(rows)), key=lambda i: -rows[i].bytes_per_device)[:most])
    return [rows[i] for i in sorted(kept)], [row for i, row in enumerate(rows) if i not in kept]


def ratio_text(x: int | float) -> str:
    """`1`, `1.25`, `64`."""
    return f"{x:.3g}" if not math.isclose(x, round(x), rel_tol=1e-3) else str(round(x))
