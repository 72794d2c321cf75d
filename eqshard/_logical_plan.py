"""Plans from logical axis names: a tree of names, a prefix of one, or rules."""

from typing import Any

import jax.tree_util as jtu

from ._axes import PartitionAxis
from ._errors import MismatchError, ShardingError
from ._logical import logical_row, STANDARD_NAMES
from ._mesh import MeshLike, MeshSpec
from ._names import LogicalAxes, Mode
from ._patterns import check_unused, check_unused_word, first_match, read_rules
from ._plan import ShardingPlan
from ._tree import array_leaves, is_array, path_name, shown, some, Tree
from ._value import short


def logical_plan(
    tree: Tree,
    mesh: MeshLike,
    axes: Tree,
    names: PartitionAxis = STANDARD_NAMES,
    mode: Mode | str | int | None = None,
    *,
    strict: bool = True,
    unused: str = "error",
) -> ShardingPlan:
    """A plan from logical axis names.

    ```python
    import eqshard, jax
    from eqshard import EMBED, VOCAB
    from jax.sharding import PartitionSpec as P
    tree = {"embed": jax.ShapeDtypeStruct((32000, 512), "float32"), "scale": jax.ShapeDtypeStruct((512,), "float32")}
    plan = eqshard.logical_plan(tree, eqshard.MeshSpec(tp=8), {"embed": (VOCAB, None), "scale": None})
    assert plan["['embed']"].spec == P("tp")
    plan = eqshard.logical_plan(tree, eqshard.MeshSpec(tp=8), [("scale", (EMBED,)), ("", None)])
    assert plan["['scale']"].spec == P("tp")
    ```

    **Arguments:**

    - `axes`: a tree like `tree`, or a prefix of it, whose leaves are tuples of logical names, one for each dimension
        (or a `LogicalAxes`; or None for whole). Or a list of rules: pairs of a regular expression on the path and such
        a tuple; the first that matches decides.
    - `names`: what logical names mean.
    - `mode`: `"train"` by default; or an index of a dimension, see `PartitionAxis.resolve_spec`.
    - `strict`: whether a dimension that does not divide is an error; else it gives up axes, and the plan records it.
    - `unused`: what to do about rules that decided nothing: `"error"` or `"ignore"`.

    **Raises:**

    - `MismatchError`: leaves that `axes` says nothing of, or `axes` that is no prefix of the tree.
    - `ShardingError`: names that do not fit, with the leaf.
    """
    check_unused_word(unused)
    described = MeshSpec.of(mesh)
    leaves = array_leaves(tree)
    if _are_rules(axes, tree):
        by_path = _by_rules(leaves, axes, unused)
    else:
        by_path = {}
        _by_prefix(axes, tree, "", by_path)
    rows = [logical_row(path, x, by_path[path], described, names, mode, strict) for path, x in leaves]
    return ShardingPlan(described, rows)


def _is_axes(x: Any) -> bool:
    """Whether `x` can be the names of one leaf's axes."""
    if x is None or isinstance(x, LogicalAxes):
        return True
    return isinstance(x, (tuple, list)) and all(_is_entry(e) for e in x)


def _is_entry(x: Any) -> bool:
    return x is None or isinstance(x, str) or (isinstance(x, tuple) and bool(x) and all(map(_is_entry, x)))


def _are_rules(axes: Any, tree: Any) -> bool:
    """Whether `axes` is a list of rules; if the tree is a list as long, such pairs are axes of two dimensions."""
    if not isinstance(axes, list) or not axes or (isinstance(tree, list) and len(tree) == len(axes)):
        return False
    return all(isinstance(r, tuple) and len(r) == 2 and isinstance(r[0], str) and _is_axes(r[1]) for r in axes)


def _by_rules(leaves: list[tuple[str, Any]], axes: list[Any], unused: str) -> dict[str, Any]:
    rules = read_rules(axes)
    found = {path: first_match(rules, path, leaf) for path, leaf in leaves}
    missing = [shown(path) for path, match in found.items() if match is None]
    if missing:
        raise MismatchError(
            f"no rule in `axes` matches {some(missing)}: add one; its axes may be None, to keep a leaf whole."
        )
    if unused == "error":
        check_unused(rules, {match[0] for match in found.values() if match is not None}, leaves)
    return {path: match[1] for path, match in found.items() if match is not None}


def _by_prefix(axes: Any, tree: Any, path: str, found: dict[str, Any]) -> None:
    """Walks both trees down to where `axes` names the axes of everything below."""
    if is_array(tree):
        if not _is_axes(axes):
            raise ShardingError(f"`axes` for {shown(path)} must be a tuple of names or None, got {short(axes)}.")
        found[path] = axes
        return
    parts = _children(tree)
    named = dict(_children(axes)) if not isinstance(axes, LogicalAxes) else {}
    # A tuple of names for a tuple of leaves: the names of each leaf in turn, if they can be that.
    each = type(axes) is type(tree) and [k for k, _ in parts] == list(named) and all(map(_is_axes, named.values()))
    if _is_axes(axes) and not each:
        found.update((path + below, axes) for below, _ in array_leaves(tree))
        return
    for key, part in parts:
        below = path + path_name((key,))
        if key in named:
            _by_prefix(named.pop(key), part, below, found)
        elif array_leaves(part):
            raise MismatchError(f"`axes` says nothing of {shown(below)}: name its axes, or None to keep it whole.")
    if named and parts:
        raise MismatchError(f"`axes` has {shown(path + path_name((next(iter(named)),)))}, the tree has not.")


def _children(node: Any) -> list[tuple[Any, Any]]:
    """The direct children of a node with their keys; none of a leaf."""
    top = jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
    return [(path[0], x) for path, x in top if path]
