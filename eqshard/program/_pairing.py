"""Pairs the results of a step with the arguments that they replace, whatever the structure of either.

Equal subtrees are paired first, the largest ones before the smaller ones, and single leaves last. Of several equal
subtrees, those with the longest common end of their paths belong together; then those of which one is computed from the
other element by element, as an updated weight is from the weight; then those in the same position; then in order.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.tree_util as jtu

from ._lineage import Lineage
from ._trace import Leaf


Keys = tuple[str, ...]


@dataclass(frozen=True)
class _Subtree:
    keys: Keys
    """Its path; that of an argument begins with the name of the parameter."""
    leaves: tuple[int, ...]
    number: int
    """Which argument or result it is part of."""


Pair = tuple[_Subtree, _Subtree]
Updates = Callable[[_Subtree, _Subtree], bool]
"""Whether the values of a result are computed from those of an argument element by element."""
Contents = tuple[tuple[Keys, tuple[int, ...], str], ...]
"""The leaves of a subtree: their paths in it, shapes and dtypes."""


def paired(ins: Sequence[Leaf], outs: Sequence[Leaf], names: Sequence[str], jaxpr: Any) -> dict[int, int]:
    """Returns, for each result leaf that replaces an argument leaf, the number of that argument leaf.

    **Arguments:**

    - `names`: of the parameters, as far as they are known: a result of that name belongs to that argument.
    - `jaxpr`: has a variable for each leaf.
    """
    named = [names[leaf.arg] if leaf.arg < len(names) else f"[{leaf.arg}]" for leaf in ins]
    of_args = _subtrees(ins, [(name, *_words(leaf.keys)) for name, leaf in zip(named, ins)], 1)
    of_results = _subtrees(outs, [_words(leaf.keys) for leaf in outs], 0)
    pairs: dict[int, int] = {}
    taken: set[int] = set()
    sources = functools.cache(Lineage(jaxpr).of_result)
    updates = lambda out, arg: any(i in sources(o) for o, i in zip(out.leaves, arg.leaves))
    for contents in sorted(of_results.keys() & of_args.keys(), key=_order):
        results = [s for s in of_results[contents] if pairs.keys().isdisjoint(s.leaves)]
        args = [s for s in of_args[contents] if taken.isdisjoint(s.leaves)]
        for out, arg in _matched(results, args, any(_is_name(k) for keys, *_ in contents for k in keys), updates):
            pairs.update(zip(out.leaves, arg.leaves))
            taken.update(arg.leaves)
    return pairs


def _words(keys: Sequence[Any]) -> Keys:
    return tuple(map(_word, keys))


def _word(key: Any) -> str:
    """An attribute and an item of a dictionary are one word if they have one name; positions are in brackets."""
    if isinstance(key, jtu.GetAttrKey):
        return key.name
    return key.key if isinstance(key, jtu.DictKey) and isinstance(key.key, str) else str(key)


def _is_name(word: str) -> bool:
    """Whether a key says what it holds. Of nodes that do not name their children, as `eqx.nn.State`, the type does."""
    return not word.startswith("[") or word.startswith("[<")


def _order(contents: Contents) -> tuple[int, int, Contents]:
    """The largest first; of equally large ones, that which is around the other."""
    return -len(contents), -max(len(keys) for keys, *_ in contents), contents


def _subtrees(leaves: Sequence[Leaf], paths: Sequence[Keys], least: int) -> dict[Contents, list[_Subtree]]:
    """The subtrees of a tree by what they contain; `least`: how long the path of a subtree is at least."""
    below: dict[Keys, list[int]] = {}
    for i, path in enumerate(paths):
        for n in range(least, len(path) + 1):
            below.setdefault(path[:n], []).append(i)
    found: dict[Contents, list[_Subtree]] = {}
    for keys, inside in below.items():
        contents = tuple((paths[i][len(keys) :], leaves[i].shape, leaves[i].dtype) for i in inside)
        found.setdefault(contents, []).append(_Subtree(keys, tuple(inside), leaves[inside[0]].arg))
    return found


def _matched(results: list[_Subtree], args: list[_Subtree], named: bool, updates: Updates) -> Iterator[Pair]:
    """Pairs equal subtrees, by the longest common end of their paths first.

    **Arguments:**

    - `named`: whether names in the subtrees say that they belong together; else something outside them must.
    """
    for n in range(max((len(s.keys) for s in results), default=0), -1, -1):
        by_end: dict[Keys, tuple[list[_Subtree], list[_Subtree]]] = {}
        for k, side in enumerate((results, args)):
            for s in side:
                if len(s.keys) >= n:
                    by_end.setdefault(s.keys[len(s.keys) - n :], ([], []))[k].append(s)
        for end, (some_results, some_args) in by_end.items():
            if n and not any(map(_is_name, end)):
                continue
            for out, arg in _one_to_one(some_results, some_args, named or n > 0, updates):
                results.remove(out)
                args.remove(arg)
                yield out, arg


def _one_to_one(results: list[_Subtree], args: list[_Subtree], named: bool, updates: Updates) -> Iterator[Pair]:
    """Pairs subtrees that only their values and places tell apart: those with the fewest possible arguments first."""
    if len(results) == len(args) == 1 and named:
        yield results[0], args[0]
        return
    possible = [[k for k, arg in enumerate(args) if updates(out, arg)] for out in results]
    left, free = list(range(len(results))), dict.fromkeys(range(len(args)))
    while left and free:
        n = min(left, key=lambda n: len(possible[n]) or len(args) + 1)
        left.remove(n)
        out = results[n]
        others = (k for k in free if named or _both_first(out, args[k]))
        k = min(possible[n] or others, key=lambda k: args[k].number != out.number, default=None)
        if k is not None:
            free.pop(k)
            possible = [[m for m in some if m != k] if k in some else some for some in possible]
            yield out, args[k]


def _both_first(out: _Subtree, arg: _Subtree) -> bool:
    """Whether both are all of the first argument and result: there a step has what it changes, not its data."""
    return arg.number == 0 and len(arg.keys) == 1 and out.keys in ((), ("[0]",))
