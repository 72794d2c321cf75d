"""Which stored array each leaf of a tree comes from; what is missing, what is left over."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.tree_util as jtu

from .._errors import MismatchError
from .._plan import is_below
from .._tree import dtype_name, is_array, path_name, shown, some, type_text
from ._stored import Contents, keys_of, StoredLeaf


Names = str | Sequence[str]


@dataclass(frozen=True)
class Wanted:
    """An array leaf of the tree to be filled."""

    number: int
    """Its place among the leaves."""
    path: str
    keys: tuple[str, ...]
    leaf: Any


def wanted_leaves(like: Any) -> list[Wanted]:
    """The array leaves of `like`."""
    found = []
    for number, (path, leaf) in enumerate(jtu.tree_flatten_with_path(like)[0]):
        if is_array(leaf):
            found.append(Wanted(number, path_name(path), tuple(map(_key_text, path)), leaf))
    return found


def _key_text(key: Any) -> str:
    for name in ("key", "idx", "name"):
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)


def choose(
    stored: Contents,
    wanted: list[Wanted],
    *,
    only: Names | None,
    rename: Mapping[str, str],
    missing: Names,
    extra: Names,
) -> dict[int, StoredLeaf]:
    """For each wanted leaf, by its number, the stored one; those that may be missing and are, are left out.

    **Raises:**

    - `MismatchError`: leaves are missing, left over, or of another shape; it lists them.
    """
    only, missing, extra = as_names(only), as_names(missing) or (), as_names(extra) or ()
    by_path = {leaf.path: leaf for leaf in stored.leaves}
    by_keys = _unambiguous(stored.leaves)
    asked = wanted if only is None else [w for w in wanted if any(is_below(w.path, p) for p in only)]
    _check_used(stored, wanted, asked, only, rename)
    found: dict[int, StoredLeaf] = {}
    lost: list[str] = []
    for w in asked:
        name = renamed(w.path, rename)
        leaf = by_path.get(name)
        if leaf is None:
            leaf = by_keys.get(w.keys if name == w.path else keys_of(name))
        if leaf is not None:
            found[w.number] = leaf
        elif not any(is_below(w.path, p) for p in missing):
            lost.append(shown(w.path) + (f" (from {shown(name)})" if name != w.path else ""))
    used = {leaf.path for leaf in found.values()}
    left = [leaf for leaf in stored.leaves if leaf.path not in used and not _allowed(leaf, extra)]
    if only is not None:  # what lies outside was not asked for
        parts = [keys_of(renamed(p, rename)) for p in only]
        left = [leaf for leaf in left if any(leaf.keys[: len(keys)] == keys for keys in parts)]
    _check_all(stored, lost, [shown(leaf.path) for leaf in left])
    _check_shapes(stored, asked, found)
    return found


def as_names(names: Names | None) -> tuple[str, ...] | None:
    """One name or several, as several."""
    return None if names is None else (names,) if isinstance(names, str) else tuple(names)


def _unambiguous(leaves: Iterable[StoredLeaf]) -> dict[tuple[str, ...], StoredLeaf]:
    found: dict[tuple[str, ...], StoredLeaf | None] = {}
    for leaf in leaves:
        found[leaf.keys] = None if leaf.keys in found else leaf
    return {keys: leaf for keys, leaf in found.items() if leaf is not None}


def renamed(path: str, rename: Mapping[str, str]) -> str:
    """The stored name of a path: its own entry, or that of the longest part of it that has one."""
    if path in rename:
        return rename[path]
    parts = [p for p in rename if is_below(path, p)]
    if not parts:
        return path
    longest = max(parts, key=len)
    return rename[longest] + path[len(longest) :]


def _allowed(leaf: StoredLeaf, names: Iterable[str]) -> bool:
    return any(is_below(leaf.path, name) or leaf.keys[: len(keys_of(name))] == keys_of(name) for name in names)


def _check_used(
    stored: Contents, wanted: list[Wanted], asked: list[Wanted], only: tuple[str, ...] | None, rename: Mapping[str, str]
) -> None:
    """A name in `only` or `rename` that fits nothing is a typo."""
    paths = [w.path for w in wanted]
    for word, names in (("only", only or ()), ("rename", tuple(rename))):
        for name in names:
            if not any(is_below(path, name) for path in paths):
                raise MismatchError(
                    f"`{word}` names `{name}`, below which the tree has no array; it has {some(paths)}."
                )
    if not asked and wanted:
        raise MismatchError(f"nothing to restore from {stored.where}: `only` is empty.")


def _check_all(stored: Contents, lost: list[str], left: list[str]) -> None:
    if not lost and not left:
        return
    lines = [f"the checkpoint {stored.where} does not hold the tree."]
    if lost:
        lines.append(f"  in the tree, not in the checkpoint: {some(lost, 20)}")
    if left:
        lines.append(f"  in the checkpoint, not in the tree: {some(left, 20)}")
    lines.append(
        "  Ways out: `rename={path in the tree: name in the checkpoint}`; `missing=` names what may keep its value; "
        "`extra=` names what may be left over; `only=` restores a part."
    )
    raise MismatchError("\n".join(lines))


def _check_shapes(stored: Contents, asked: list[Wanted], found: dict[int, StoredLeaf]) -> None:
    wrong = [
        f"  {shown(w.path)} is {type_text(tuple(w.leaf.shape), dtype_name(w.leaf))}, "
        f"stored as {found[w.number].type}"
        + (f" ({shown(found[w.number].path)})" if found[w.number].path != w.path else "")
        for w in asked
        if w.number in found and tuple(w.leaf.shape) != found[w.number].shape
    ]
    if wrong:
        more = [f"  and {len(wrong) - 20} more"] if len(wrong) > 20 else []
        head = f"shapes in the checkpoint {stored.where} are not those of the tree."
        raise MismatchError("\n".join([head, *wrong[:20], *more]))


def check_values(asked: Iterable[Wanted], why: str) -> None:
    """Leaves that keep their value must have one."""
    empty = [shown(w.path) for w in asked if isinstance(w.leaf, jax.ShapeDtypeStruct)]
    if empty:
        raise MismatchError(f"{some(empty)}: {why}, and `like` has only a shape there. Pass a tree with values.")
