"""What of a tree is no array, as a value that a compiled program is known by."""

from typing import Any

import jax.tree_util as jtu
from jaxtyping import PyTree

from ._tree import is_array


_HOLE = object()


@jtu.register_static
class Rest:
    """A tree with holes where its arrays were. Equal if a program compiled for one is right for the other."""

    def __init__(self, leaves: tuple[Any, ...], treedef: Any):
        self._leaves, self._treedef = leaves, treedef
        self._key = treedef, tuple((type(x), x if _is_hashable(x) else id(x)) for x in leaves)

    def join(self, arrays: list[Any]) -> PyTree[Any]:
        """The tree with `arrays` in the holes."""
        fill = iter(arrays)
        return jtu.tree_unflatten(self._treedef, [next(fill) if x is _HOLE else x for x in self._leaves])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rest) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def split(tree: PyTree[Any]) -> tuple[list[Any], Rest]:
    """The arrays of a tree, and the rest of it."""
    leaves, treedef = jtu.tree_flatten(tree)
    return [x for x in leaves if is_array(x)], Rest(tuple(_HOLE if is_array(x) else x for x in leaves), treedef)


def _is_hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True
