"""Rows of a plan seen otherwise: one of many stacked layers, a layer stacked, the layout in use."""

from collections.abc import Iterable
from dataclasses import replace

from jax.sharding import PartitionSpec

from ._errors import ShardingError
from ._leaf import LeafPlan
from ._spec import entry_axes, spec_text, UNCONSTRAINED
from ._tree import shown


def layer_row(leaf: LeafPlan) -> LeafPlan:
    """The row of one layer of a leaf that holds many, stacked along its first dimension.

    **Raises:**

    - `ShardingError`: there is no such dimension, or it is cut: then no device has a whole layer of its own.
    """
    if not leaf.shape:
        raise ShardingError(f"{shown(leaf.path)} is a scalar: layers are stacked along a first dimension.")
    for spec, when in ((leaf.spec, "at rest"), (leaf.use, "in use")):
        first = spec[0] if len(spec) else None
        if first is UNCONSTRAINED or entry_axes(first):
            raise ShardingError(
                f"{shown(leaf.path)} {leaf.type} lies over {spec_text(spec)} {when}: its first dimension, along which "
                "the layers are stacked, is cut, so each layer lies on a part of the devices only.\n"
                "  Ways out: plan one layer and `stack` it: `auto_plan(layer, mesh).stack(n)`; or `plan.at(...)."
                f"set(P(None, ...))`."
            )
    return replace(leaf, shape=leaf.shape[1:], spec=_without_first(leaf.spec), use=_without_first(leaf.use))


def stacked_row(leaf: LeafPlan, n: int) -> LeafPlan:
    """The row of `n` such leaves, stacked along a new first dimension that stays whole."""
    return replace(
        leaf, shape=(n, *leaf.shape), spec=PartitionSpec(None, *leaf.spec), use=PartitionSpec(None, *leaf.use)
    )


def used_row(leaf: LeafPlan) -> LeafPlan:
    """The row whose layout at rest is the layout in use; what was offloaded is on the device."""
    return replace(leaf, spec=leaf.use, memory_kind=None if leaf.memory_kind is None else "device")


def check_stacked(leaves: Iterable[LeafPlan]) -> None:
    """Refuses leaves that do not hold the same number of layers."""
    known: dict[int, str] = {leaf.shape[0]: leaf.path for leaf in leaves if leaf.shape}
    if len(known) > 1:
        (n, path), (m, other) = list(known.items())[:2]
        raise ShardingError(f"not one stack of layers: {shown(path)} holds {n}, {shown(other)} holds {m}.")


def _without_first(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*tuple(spec)[1:])
