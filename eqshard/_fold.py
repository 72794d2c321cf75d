"""Repeated layers as one row: `.layers[0].w` … `.layers[79].w` is `.layers[0..79].w`."""

import re
from collections.abc import Hashable, Iterable
from typing import NamedTuple

from ._leaf import LeafPlan


# Places in a sequence, `[7]`; keys that are numbers, `['7']`; numbered names, `['layer_7']` and `.layer_7`.
_NUMBER = re.compile(r"((?<=\[)\d+(?=\])|(?<=\[')\d+(?='\])|(?<=_)\d+(?=['.\[]|$))")


class Fold(NamedTuple):
    """Paths that differ in numbers only."""

    path: str
    """All of them as one: `.layers[0..79].w`."""
    members: list[int]
    """Which of the given paths."""


def fold(paths: Iterable[str], alike: Iterable[Hashable]) -> list[Fold]:
    """Folds paths that differ in numbers only, and are `alike`; in order of first appearance."""
    groups: dict[Hashable, dict[tuple[tuple[int, ...], ...], list[int]]] = {}
    for i, (path, key) in enumerate(zip(paths, alike)):
        parts = _NUMBER.split(path)
        numbers = tuple([(int(n),) for n in parts[1::2]])
        groups.setdefault((tuple(parts[::2]), key), {}).setdefault(numbers, []).append(i)
    folds = [
        Fold(_joined(texts, numbers), sorted(members))  # pyright: ignore[reportArgumentType]
        for (texts, _), rows in groups.items()  # pyright: ignore[reportGeneralTypeIssues]
        for numbers, members in _merged(rows).items()
    ]
    return sorted(folds, key=lambda found: found.members[0])


def fold_leaves(leaves: Iterable[LeafPlan], *, words: bool = False) -> list[tuple[str, list[LeafPlan]]]:
    """The rows of a plan, those that lie alike folded; with `words`, only if the reasons are the same too."""
    rows = list(leaves)
    keys = [(x.shape, x.dtype, x.spec, x.use, x.memory_kind, (x.why, x.given_up) if words else ()) for x in rows]
    return [(found.path, [rows[i] for i in found.members]) for found in fold([x.path for x in rows], keys)]


Numbers = tuple[tuple[int, ...], ...]


def _merged(rows: dict[Numbers, list[int]]) -> dict[Numbers, list[int]]:
    """Joins rows that differ in one place only, place by place."""
    if len(rows) == 1:
        return rows
    for place in range(len(next(iter(rows)))):
        joined: dict[Numbers, tuple[list[int], list[int]]] = {}
        for numbers, members in rows.items():
            others = (*numbers[:place], *numbers[place + 1 :])
            found = joined.setdefault(others, ([], []))
            found[0].extend(numbers[place])
            found[1].extend(members)
        rows = {
            (*others[:place], tuple(sorted(here)), *others[place:]): members
            for others, (here, members) in joined.items()
        }
    return rows


def _joined(texts: tuple[str, ...], numbers: Numbers) -> str:
    return texts[0] + "".join(_ranges(here) + text for here, text in zip(numbers, texts[1:]))


def _ranges(numbers: tuple[int, ...]) -> str:
    """`(0, 1, 2, 5)` as `0..2,5`."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs)
