"""A large model has many leaves and few kinds of leaves: what is true of one is worked out once for all."""

import math
from collections.abc import Mapping
from typing import Any

from ._leaf import LeafPlan
from ._pieces import dim_axes, factors, piece_shape
from ._plan import ShardingPlan
from ._tree import is_dtype_name, itemsize


class Kind:
    """Leaves of one plan that lie alike: same shape, dtype, layouts and memory. What one is, all are."""

    def __init__(self, leaf: LeafPlan, sizes: Mapping[str, int]):
        self.leaf = leaf
        self.leaves: list[LeafPlan] = []
        self.axes = dim_axes(leaf.shape, leaf.spec, sizes)
        self.use_axes = self.axes if leaf.use is leaf.spec else dim_axes(leaf.shape, leaf.use, sizes)
        self.item = _item_bytes(leaf.dtype)
        self.size = math.prod(leaf.shape)
        self.nbytes = self.size * self.item
        self.piece = piece_shape(leaf.shape, factors(self.axes, sizes))
        self.piece_bytes = math.prod(self.piece) * self.item
        self.use_piece = piece_shape(leaf.shape, factors(self.use_axes, sizes))
        self.use_bytes = math.prod(self.use_piece) * self.item

    def __len__(self) -> int:
        return len(self.leaves)


def _item_bytes(dtype: str) -> int:
    return itemsize(dtype) if is_dtype_name(dtype) else 0


def kinds(plan: ShardingPlan) -> list[Kind]:
    """The rows of a plan by kind, in order of appearance."""
    memo = plan._rows.memo
    if "kinds" not in memo:
        sizes = plan.mesh.shape
        found: dict[Any, Kind] = {}
        for leaf in plan:
            key = leaf.shape, leaf.dtype, leaf.spec, leaf.use, leaf.memory_kind
            kind = found.get(key)
            if kind is None:
                kind = found[key] = Kind(leaf, sizes)
            kind.leaves.append(leaf)
        memo["kinds"] = list(found.values())
    return memo["kinds"]
