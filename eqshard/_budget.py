"""Choosing what to cut: the least that makes a number of bytes go."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np


_CLOSE = 1.02
"""Of choices this near to the best, the one with the fewest leaves is taken: each costs a collective of its own."""
_FINE = 0.03
"""Leaves that can save this part of the need or less are not searched over but used to fill up."""
_PATIENCE = 256
"""So many leaves are searched over for something better than a choice that is close."""

Cut = tuple[int, int]
"""The number of a kind, and the number of a way to cut it."""


class Kind(NamedTuple):
    """Equal leaves: how many, and the bytes that each way to cut one of them saves, rising."""

    number: int
    saved: tuple[int, ...]


class _Choice(NamedTuple):
    """Some cuts, by their sum."""

    total: int
    leaves: int
    cuts: tuple[Cut, ...] = ()
    found: tuple[int, int] = (0, 0)
    """The stage of the search and the number there, to find its cuts by."""
    full: int = 0
    """So many of the small leaves are cut too."""


class _Stage(NamedTuple):
    """One large leaf considered: all sums without it, then all with its first way to be cut, and so on."""

    kind: int
    ways: list[int]
    width: int
    kept: Any
    """The sums that go on to the next stage."""


def least_cuts(kinds: Sequence[Kind], need: int) -> list[Cut]:
    """Cuts, each of one leaf, that save at least `need` bytes and as little more as can be found.

    Subset sums. The few leaves that matter are searched over, exactly while the sums are few, and else with sums that
    are nearly equal taken for equal; the many small ones fill the rest. All leaves together must save enough.
    """
    by_size = sorted((k for k in range(len(kinds)) if kinds[k].saved), key=lambda k: (-kinds[k].saved[-1], k))
    large = [k for k in by_size if kinds[k].saved[-1] > _FINE * need]
    small = [k for k in by_size if kinds[k].saved[-1] <= _FINE * need for _ in range(kinds[k].number)]
    done = [_Choice(s, 1, ((k, way),)) for k in large for way, s in enumerate(kinds[k].saved) if s >= need]
    stages: list[_Stage] = []
    unfinished = _search(kinds, large, need, stages, done)
    done += _filled(kinds, small, need, unfinished)
    best = min(choice.total for choice in done)
    chosen = min((c for c in done if c.total <= _CLOSE * best), key=lambda c: (c.leaves, c.total))
    finest = [(k, len(kinds[k].saved) - 1) for k in small[: chosen.full]]
    return [*chosen.cuts, *_cuts_of(stages, *chosen.found), *finest]


def _search(
    kinds: Sequence[Kind], large: list[int], need: int, stages: list[_Stage], done: list[_Choice]
) -> list[_Choice]:
    """Goes through the large leaves; adds to `done` the sums that are enough, and returns those that are not."""
    sums, leaves = np.zeros(1, np.int64), np.zeros(1, np.int64)
    step = max(1.0, need * _FINE**2 / 2)
    close_enough = min((choice.total for choice in done), default=need * 2) <= _CLOSE * need
    for k in () if close_enough else _worth_trying(kinds, large, need, step):
        ways = [way for way, s in enumerate(kinds[k].saved) if s < need]
        totals = np.concatenate([sums, *(sums + kinds[k].saved[way] for way in ways)])
        counts = np.concatenate([leaves, *(leaves + 1 for _ in ways)])
        kept = _apart(totals, counts, np.flatnonzero(totals < need), step)
        stages.append(_Stage(k, ways, len(sums), kept))
        enough = np.flatnonzero(totals >= need)
        if len(enough):
            close = enough[totals[enough] <= _CLOSE * need]
            best = [enough[np.argmin(totals[enough])], *(close[[np.argmin(counts[close])]] if len(close) else ())]
            done += [_Choice(int(totals[i]), int(counts[i]), (), (len(stages), int(i))) for i in best]
            close_enough = close_enough or len(close) > 0
        sums, leaves = totals[kept], counts[kept]
        if close_enough and len(stages) > _PATIENCE:
            break
    ends = stages[-1].kept if stages else [0]
    return [_Choice(int(s), int(n), (), (len(stages), int(i))) for s, n, i in zip(sums, leaves, ends)]


def _worth_trying(kinds: Sequence[Kind], large: list[int], need: int, step: float) -> Iterator[int]:
    """The large leaves, one by one; of nearly equal ones no more than could ever be cut together."""
    tried: dict[Any, int] = {}
    for k in large:
        least = kinds[k].saved[0]
        if least >= need:
            continue
        alike = tuple(round(s / step) for s in kinds[k].saved)
        for _ in range(kinds[k].number):
            if tried.get(alike, 0) * least >= need:
                break
            tried[alike] = tried.get(alike, 0) + 1
            yield k


def _apart(totals: Any, counts: Any, among: Any, step: float) -> Any:
    """Of equal sums the one with the fewest leaves; and if there are very many, one for each `step`: the largest."""
    order = among[np.lexsort((-counts[among], totals[among]))]
    order = order[np.append(np.flatnonzero(np.diff(totals[order])), len(order) - 1)]
    if len(order) <= 2 / _FINE**2:
        return order
    bucket = np.floor(totals[order] / step)
    return order[np.append(np.flatnonzero(np.diff(bucket)), len(order) - 1)]


def _cuts_of(stages: list[_Stage], stage: int, number: int) -> Iterator[Cut]:
    """The cuts of the sum with this number at the end of this stage."""
    for kind, ways, width, _ in reversed(stages[:stage]):
        way, before = divmod(number, width)
        if way:
            yield kind, ways[way - 1]
        stage -= 1
        number = int(stages[stage - 1].kept[before]) if stage else 0


def _filled(kinds: Sequence[Kind], small: list[int], need: int, unfinished: list[_Choice]) -> list[_Choice]:
    """The sums that the small leaves bring to `need`: the largest first, as finely as can be, and one as is needed."""
    reach = np.cumsum([0, *(kinds[k].saved[-1] for k in small)])
    filled: list[_Choice] = []
    for choice in unfinished:
        rest = need - choice.total
        if reach[-1] < rest:
            continue
        full = int(np.searchsorted(reach, rest)) - 1  # so many are not enough, and with one more they are
        rest -= int(reach[full])
        k = small[full]
        way, saved = next((way, s) for way, s in enumerate(kinds[k].saved) if s >= rest)
        total = choice.total + int(reach[full]) + saved
        filled.append(_Choice(total, choice.leaves + full + 1, ((k, way),), choice.found, full))
    return filled
