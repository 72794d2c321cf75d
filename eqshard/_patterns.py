"""Rules on the leaves' paths: the first that matches decides."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ._errors import MismatchError, ShardingError
from ._tree import some


Rules = Mapping[str, Any] | Iterable[Any]
"""Pairs of a regular expression on the path and what it says; or functions of path and leaf, None for "not mine"."""


class Rule(NamedTuple):
    """A rule by the name that messages give it."""

    name: str
    says: Callable[[str, Any], tuple[Any] | None]
    """What it says of a leaf, in a tuple, since that may be None; or None if it does not know the leaf."""


def read_rules(rules: Rules) -> list[Rule]:
    """Rules ready to be asked.

    **Raises:**

    - `ShardingError`: something that is no rule, or no regular expression, with its number.
    """
    if isinstance(rules, str):
        raise ShardingError(f"rules are a list of pairs, not a text: `parse_rules({rules!r})` reads one.")
    return [_read(i, rule) for i, rule in enumerate(rules.items() if isinstance(rules, Mapping) else rules)]


def _read(number: int, rule: Any) -> Rule:
    if callable(rule):
        name = f"rule {number} ({getattr(rule, '__name__', 'a function')})"
        return Rule(name, lambda path, leaf: None if (said := rule(path, leaf)) is None else (said,))
    if isinstance(rule, str) or not (isinstance(rule, Sequence) and len(rule) == 2 and isinstance(rule[0], str)):
        raise ShardingError(f"rule {number} must be a pair of a pattern and what it says, or a function, got {rule!r}.")
    pattern, said = rule
    try:
        search = re.compile(pattern).search
    except re.error as error:
        raise ShardingError(f"rule {number}: `{pattern}` is no regular expression: {error}.") from None
    return Rule(f"rule {number} (`{pattern}`)", lambda path, leaf: (said,) if search(path) else None)


def first_match(rules: list[Rule], path: str, leaf: Any) -> tuple[int, Any] | None:
    """The number of the first rule that knows the leaf, and what it says."""
    for i, rule in enumerate(rules):
        said = rule.says(path, leaf)
        if said is not None:
            return i, said[0]
    return None


def check_unused(rules: list[Rule], used: set[int], leaves: list[tuple[str, Any]]) -> None:
    """Raises for rules that decided nothing: mostly a misspelt pattern."""
    idle = []
    for i, rule in enumerate(rules):
        if i not in used:
            late = any(rule.says(path, leaf) is not None for path, leaf in leaves)
            idle.append(f"{rule.name} {'comes after rules that took all its leaves' if late else 'matches no leaf'}")
    if idle:
        raise MismatchError(f"{some(idle)}.\n  Correct the pattern, or pass `unused='ignore'`.")


def check_unused_word(unused: str) -> None:
    if unused not in ("error", "ignore"):
        raise ShardingError(f"`unused` is 'error' or 'ignore', not {unused!r}.")
