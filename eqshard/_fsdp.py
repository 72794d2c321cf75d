"""Fully sharded data parallel: stored in pieces, gathered to be used."""

import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from ._auto import MIN_BYTES, plan_leaves, stays_whole
from ._errors import DuplicateAxisError, MismatchError, ShardingError
from ._mesh import MeshLike, MeshSpec
from ._plan import LeafPlan, ShardingPlan
from ._spec import canonical, check, entry_axes, spec_text, UNCONSTRAINED
from ._spread import Unit, units_of
from ._tree import divisible_shape, shown, Tree, type_text


def fsdp_plan(
    tree: Tree,
    mesh: MeshLike,
    axis: str | Sequence[str] = "fsdp",
    *,
    min_bytes: int = MIN_BYTES,
    base: ShardingPlan | None = None,
) -> ShardingPlan:
    """Fully sharded data parallel: each large leaf stored in pieces over `axis`, and gathered to be used.

    ```python
    import equinox as eqx, eqshard, jax
    from jax.sharding import PartitionSpec as P
    shape = eqx.filter_eval_shape(eqx.nn.Linear, 512, 1024, key=jax.random.key(0))
    leaf = eqshard.fsdp_plan(shape, eqshard.MeshSpec(fsdp=8))[".weight"]
    assert leaf.spec == P("fsdp") and leaf.use == P()
    ```

    **Arguments:**

    - `axis`: the axis, or axes that act as one, to store over; as many of them, from the first, as divide.
    - `min_bytes`: leaves of which a device would hold less than this without `axis` stay as they are.
    - `base`: a plan to go on from (tensor parallel, say): `axis` comes on top of its layouts at rest, on a dimension
        that they leave whole if one divides; the layout in use is that of `base`.

    **Raises:**

    - `UnknownAxisError`: the mesh has no such axis.
    - `DuplicateAxisError`: `base` uses the axis already.
    - `MismatchError`: `base` is a plan of another tree.
    """
    described = MeshSpec.of(mesh)
    axes = units_of(described, [axis if isinstance(axis, str) else tuple(axis)]).axes
    unit = axes[0] if axes else ()
    if base is not None and base.mesh != described:
        raise ShardingError(f"`base` is a plan for {base.mesh}, not for {described}.")
    known: dict[Any, tuple[PartitionSpec, str]] = {}

    def row(path: str, shape: tuple[int, ...], dtype: str) -> LeafPlan:
        under = LeafPlan(path, shape, dtype, PartitionSpec(), PartitionSpec())
        if base is not None:
            under = base[path]
            _check_under(under, shape, dtype, unit, described)
        kind = shape, dtype, under.spec
        if kind not in known:
            known[kind] = _store(shape, dtype, under.spec, unit, described.shape, min_bytes)
        spec, why = known[kind]
        why = f"{why}; in use: {under.why}" if under.why else why
        return LeafPlan(path, shape, dtype, spec, under.use, under.memory_kind, why, under.given_up)

    return plan_leaves(tree, described, row)


def _check_under(under: LeafPlan, shape: tuple[int, ...], dtype: str, unit: Unit, mesh: MeshSpec) -> None:
    if (under.shape, under.dtype) != (shape, dtype):
        raise MismatchError(f"{shown(under.path)} is {type_text(shape, dtype)}, planned by `base` as {under.type}.")
    check(under.spec, shape, mesh.shape, under.path, dtype)
    for said in (under.spec, under.use):
        taken = {a for entry in said for a in entry_axes(entry)} & set(unit)
        if taken:
            raise DuplicateAxisError(
                f"`base` lays {shown(under.path)} over {spec_text(said)}, which uses {sorted(taken)} already."
            )


def _store(
    shape: tuple[int, ...], dtype: str, under: PartitionSpec, unit: Unit, sizes: dict[str, int], min_bytes: int
) -> tuple[PartitionSpec, str]:
    """`under` with `unit` on top: on the largest dimension that is whole so far, else on that of the largest pieces."""
    entries = [*under, *[None] * (len(shape) - len(under))]
    even = divisible_shape(shape, dtype)
    pieces = tuple(n // math.prod(sizes[a] for a in entry_axes(e)) for n, e in zip(even, entries))
    whole = stays_whole(pieces, dtype, min_bytes)
    if whole or not unit:
        return under, whole or "the axis has size 1"
    for count in range(len(unit), 0, -1):
        factor = math.prod(sizes[a] for a in unit[:count])
        fits = [d for d, n in enumerate(pieces) if n % factor == 0 and entries[d] is not UNCONSTRAINED]
        if fits:
            dim = max(fits, key=lambda d: (not entries[d], pieces[d], -d))
            entries[dim] = (*entry_axes(entries[dim]), *unit[:count])
            left = f"; {', '.join(unit[count:])} left out: divides no dim" if count < len(unit) else ""
            return canonical(PartitionSpec(*entries), sizes), f"stored over {', '.join(unit[:count])}{left}"
    return under, f"no dim divides over {', '.join(unit)}"
