"""The cheapest selection without limits, where choices are tied to few others: one after the other is settled for all
that the others may be."""

import math

import numpy as np

from ._choices import Alive, Choices


MOST = 500_000
"""How many numbers a table may have before this is given up."""

Scope = tuple[int, ...]


def eliminate(choices: Choices, alive: Alive) -> list[int] | None:
    """An option of each choice, the cheapest together; None if some of them are tied to too many others."""
    own = [costs[left] for costs, left in zip(choices.costs, alive)]
    tables = _Tables(choices, alive, own)
    settled: list[tuple[int, Scope, np.ndarray]] = []
    while tables.size:
        k = min(tables.size, key=lambda k: (tables.size[k], k))
        if tables.size[k] > MOST:
            return None
        others, together = tables.take(k, own[k])
        settled.append((k, others, together.argmin(axis=-1)))
        if len(others) == 1:
            own[others[0]] = own[others[0]] + together.min(axis=-1)
        elif others:
            tables.add(others, together.min(axis=-1))
        tables.measure(others)
    pick = [0] * len(alive)
    for k, others, best in reversed(settled):
        pick[k] = int(best[tuple(pick[o] for o in others)])
    return [int(left[i]) for left, i in zip(alive, pick)]


class _Tables:
    """What some choices cost together, by who they are."""

    def __init__(self, choices: Choices, alive: Alive, own: list[np.ndarray]):
        self.lengths = [len(left) for left in alive]
        self.tables: dict[int, tuple[Scope, np.ndarray]] = {}
        self.of: list[set[int]] = [set() for _ in alive]
        self.made = 0
        for link in choices.links:
            a, b = link.first, link.second
            table = link.table[np.ix_(link.first_state[alive[a]], link.second_state[alive[b]])]
            if self.lengths[a] == 1:
                own[b] = own[b] + table[0]
            elif self.lengths[b] == 1:
                own[a] = own[a] + table[:, 0]
            else:
                self.add((a, b) if a < b else (b, a), table if a < b else table.T)
        self.size: dict[int, int] = {}
        """For each choice that is open how large the table of it and all that it is tied to would be."""
        self.measure(tuple(k for k, n in enumerate(self.lengths) if n > 1))

    def add(self, scope: Scope, table: np.ndarray) -> None:
        self.tables[self.made] = scope, table
        for k in scope:
            self.of[k].add(self.made)
        self.made += 1

    def measure(self, changed: Scope) -> None:
        for k in changed:
            self.size[k] = self.lengths[k] * math.prod(self.lengths[o] for o in self._others(k))

    def take(self, k: int, own: np.ndarray) -> tuple[Scope, np.ndarray]:
        """Takes a choice out: who it is tied to, and what they cost together, itself last."""
        others = self._others(k)
        scope = (*others, k)
        together = np.zeros([self.lengths[s] for s in scope]) + own
        for number in sorted(self.of[k]):
            of, table = self.tables.pop(number)
            by_place = sorted(range(len(of)), key=lambda i: scope.index(of[i]))
            shape = [self.lengths[s] if s in of else 1 for s in scope]
            together += table.transpose(by_place).reshape(shape)
            for s in set(of) - {k}:
                self.of[s].discard(number)
        del self.size[k]
        return others, together

    def _others(self, k: int) -> Scope:
        return tuple(sorted({s for number in self.of[k] for s in self.tables[number][0]} - {k}))
