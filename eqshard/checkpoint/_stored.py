"""What a checkpoint holds, whoever wrote it: leaves with a name, a shape, a dtype, and where their bytes are."""

import pathlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import jax.tree_util as jtu
from jax.sharding import PartitionSpec

from .._errors import MismatchError
from .._plan import ShardingPlan
from .._tree import did_you_mean, itemsize, some, type_text


@dataclass(frozen=True)
class StoredLeaf:
    """An array that a checkpoint holds: what can be known of it without reading it."""

    path: str
    """Its name, as a plan would call it: `.layers[0].weight`, `['layers'][0]['weight']`."""
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec | None = None
    """The layout it was saved from, where the checkpoint tells."""
    keys: tuple[str, ...] = field(default=(), repr=False)
    """The parts of the name alone: `("layers", "0", "weight")`. Leaves are matched by these."""
    key_impl: str | None = field(default=None, repr=False)
    """How its typed PRNG keys are made; None for other arrays."""
    kept_as: str = field(default="", repr=False)
    """The dtype it has in the store."""
    source: Any = field(default=None, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        n = itemsize(self.dtype)
        for dim in self.shape:
            n *= dim
        return n

    @property
    def type(self) -> str:
        return type_text(self.shape, self.dtype)


@dataclass(frozen=True)
class Contents:
    """All that a checkpoint holds."""

    where: pathlib.Path
    kind: str
    """`"eqshard"`, `"orbax"`, `"eformer"` or `"safetensors"`."""
    leaves: tuple[StoredLeaf, ...]
    plan: ShardingPlan | None = None
    """The plan that was saved with the arrays."""

    def below(self, prefix: str) -> "Contents":
        """The part below a path or dotted name, with that name taken off."""
        keys = keys_of(prefix)
        found = [leaf for leaf in self.leaves if leaf.keys[: len(keys)] == keys]
        if not found:
            names = [leaf.path for leaf in self.leaves]
            raise MismatchError(
                f"{self.where}: no leaf below `{prefix}`; there are {some(names)}." + did_you_mean(prefix, names)
            )
        n = len(keys)
        parts = tuple(replace(leaf, path=_without(leaf.path, n), keys=leaf.keys[n:]) for leaf in found)
        return Contents(self.where, self.kind, parts)


# One key of a path: .name, [0], ['name'], ["it's"], [<flat index 0>]; or a bare name before a dot, as others write.
_KEY = re.compile(
    r"""\.?(?P<name>[^.\[\]/'"<>]+)|\[(?P<index>\d+)\]|\[(?P<quote>['"])(?P<text>(?:[^\\]|\\.)*?)(?P=quote)\]"""
    r"""|\[<flat\ index\ (?P<flat>\d+)>\]|/(?P<folder>[^/]+)""",
    re.VERBOSE,
)


def _tokens(path: str) -> list[tuple[str, str]] | None:
    """(text, key) of each key in a path; None if it is no path."""
    found, at = [], 0
    while at < len(path):
        part = _KEY.match(path, at)
        if part is None:
            return None
        key = next(g for n, g in part.groupdict().items() if g is not None and n != "quote")
        found.append((part.group(), key))
        at = part.end()
    return found


def keys_of(path: str) -> tuple[str, ...]:
    """The keys in a path: `.layers[0]['w']` and `layers.0.w` are both `("layers", "0", "w")`."""
    tokens = _tokens(path)
    return (path,) if tokens is None else tuple(key for _, key in tokens)


def _without(path: str, n: int) -> str:
    tokens = _tokens(path)
    return path if tokens is None else "".join(text for text, _ in tokens[n:])


def dict_path(keys: Iterable[str | int]) -> str:
    """The path of nested dictionaries and, where a key is a number, sequences."""
    return jtu.keystr(tuple(jtu.SequenceKey(k) if isinstance(k, int) else jtu.DictKey(k) for k in keys))
