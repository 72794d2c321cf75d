"""What of a tree is no array, as a value that a compiled program is known by."""

import functools
from types import FunctionType
from typing import Any

import jax.tree_util as jtu

from ._tree import is_array, Tree


_HOLE = object()
_LEAF = jtu.tree_structure(0)


@jtu.register_static
class Rest:
    """A tree with holes where its arrays were. Equal if a program compiled for one is right for the other."""

    def __init__(self, leaves: tuple[Any, ...], treedef: Any):
        self._leaves, self._treedef = leaves, treedef
        self._key = treedef, tuple([_HOLE if x is _HOLE else _known_by(x) for x in leaves])
        self._hash = hash(self._key)

    def join(self, arrays: list[Any]) -> Tree:
        """The tree with `arrays` in the holes."""
        if len(arrays) == len(self._leaves):
            return jtu.tree_unflatten(self._treedef, arrays)
        fill = iter(arrays)
        return jtu.tree_unflatten(self._treedef, [next(fill) if x is _HOLE else x for x in self._leaves])

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Rest) and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash


def split(tree: Tree) -> tuple[list[Any], Rest]:
    """The arrays of a tree, and the rest of it."""
    if type(tree) is FunctionType:
        return [], _function(tree)
    leaves, treedef = jtu.tree_flatten(tree)
    return split_leaves(leaves, [is_array(x) for x in leaves], treedef)


def split_leaves(leaves: list[Any], arrays: list[bool], treedef: Any) -> tuple[list[Any], Rest]:
    """`split` of a tree that is flat already."""
    if all(arrays):
        return leaves, _only_holes(treedef)
    rest = tuple([_HOLE if is_one else x for x, is_one in zip(leaves, arrays)])
    return [x for x, is_one in zip(leaves, arrays) if is_one], Rest(rest, treedef)


@functools.lru_cache(maxsize=256)
def _function(fn: FunctionType) -> Rest:
    return Rest((fn,), _LEAF)


@functools.lru_cache(maxsize=256)
def _only_holes(treedef: Any) -> Rest:
    return Rest((_HOLE,) * treedef.num_leaves, treedef)


def _known_by(x: Any) -> tuple[type, Any]:
    try:
        hash(x)
    except TypeError:
        return type(x), id(x)
    return type(x), x  # 1, 1.0 and True are equal
