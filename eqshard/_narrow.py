"""64-bit numpy arrays, numpy's default, as JAX holds them."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ._errors import MismatchError
from ._tree import narrow_dtype, path_name, shown


def narrow(x: Any, path: str) -> Any:
    """Returns a numpy array or a `jax.ShapeDtypeStruct` in the dtype that JAX holds it in; anything else as it is.

    Unless `jax_enable_x64` is on, 64 bits become 32: floating-point numbers are rounded, as everywhere in JAX;
    integers must fit.

    **Raises:**

    - `MismatchError`: an integer does not fit; names the leaf and the value.
    """
    if not isinstance(x, (np.ndarray, np.generic, jax.ShapeDtypeStruct)):
        return x
    name = narrow_dtype(x.dtype)
    if name is None:
        return x
    target = np.dtype(name)
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(dtype=target)
    if x.dtype.kind in "iu":
        _check_fits(x, target, path)
        return x.astype(target)
    with np.errstate(over="ignore", under="ignore"):
        return x.astype(target)


def narrow_leaves(leaves: list[Any], paths: Callable[[], list[str]]) -> list[Any]:
    """`narrow` for each leaf of a flat tree; `paths` is called only if there is a numpy array among them."""
    host = [i for i, x in enumerate(leaves) if isinstance(x, (np.ndarray, np.generic)) and narrow_dtype(x.dtype)]
    if not host:
        return leaves
    names, out = paths(), list(leaves)
    for i in host:
        out[i] = narrow(leaves[i], names[i])
    return out


def tree_paths(tree: Any) -> list[str]:
    """The names of all leaves of a tree, in the order of `jax.tree.leaves`."""
    return [path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _check_fits(x: Any, target: np.dtype, path: str) -> None:
    if x.size == 0 or 0 <= int(np.bitwise_or.reduce(x, axis=None)) < 2**31:  # one pass, and mostly enough
        return
    limits = np.iinfo(target)
    least, most = int(x.min()), int(x.max())
    if least < limits.min or most > limits.max:
        raise MismatchError(
            f"{shown(path)} is {x.dtype} and holds {most if most > limits.max else least}, which does not fit the "
            f"{target} that JAX would make of it ({limits.min} to {limits.max}). To fix this, call "
            '`jax.config.update("jax_enable_x64", True)`, or map the values to smaller ones.'
        )
