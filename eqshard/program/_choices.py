"""Choices that are tied to each other, of which the cheapest selection is wanted."""

from dataclasses import dataclass

import numpy as np


SWEEPS = 3
"""How often options that are never better than another are looked for: each time there are fewer to compare with."""
SAME = 1e-12
"""Seconds that are none."""


@dataclass(frozen=True)
class Link:
    """What two choices cost together: `table[first_state[i], second_state[j]]` for their options i and j."""

    first: int
    second: int
    table: np.ndarray
    first_state: np.ndarray
    second_state: np.ndarray


@dataclass(frozen=True)
class Choices:
    """What there is to choose: an option of each, none of them alone."""

    costs: list[np.ndarray]
    """For each choice what its options cost by themselves."""
    links: list[Link]
    rows: list[dict[int, np.ndarray]]
    """For each limit what the options of a choice take of it."""
    limits: list[float]


Alive = list[np.ndarray]
"""For each choice which of its options are left, as their numbers."""


def total_of(choices: Choices, taken: list[int]) -> float:
    """What a selection costs."""
    own = sum((float(costs[i]) for costs, i in zip(choices.costs, taken)), 0.0)
    tied = (k.table[k.first_state[taken[k.first]], k.second_state[taken[k.second]]] for k in choices.links)
    return own + sum(map(float, tied), 0.0)


def within_limits(choices: Choices, taken: list[int]) -> bool:
    """Whether a selection keeps to the limits."""
    rows = zip(choices.rows, choices.limits)
    return all(sum((float(takes[taken[k]]) for k, takes in row.items()), 0.0) <= limit for row, limit in rows)


def prune(choices: Choices, alive: Alive) -> Alive:
    """Leaves out options for which another costs no more, and takes no more, whatever is chosen elsewhere."""
    around: list[list[tuple[Link, bool]]] = [[] for _ in choices.costs]
    for link in choices.links:
        around[link.first].append((link, True))
        around[link.second].append((link, False))
    alive = list(alive)
    todo = set(range(len(alive)))
    for _ in range(SWEEPS):
        fewer = {k for k in sorted(todo) if _prune_one(choices, alive, k, around[k])}
        todo = {link.second if first else link.first for k in fewer for link, first in around[k]}
        if not todo:
            break
    return alive


def _prune_one(choices: Choices, alive: Alive, k: int, around: list[tuple[Link, bool]]) -> bool:
    """Whether an option of a choice was left out."""
    left = alive[k]
    if len(left) < 2:
        return False
    own = choices.costs[k][left]
    # worse[i, j]: by how much option j can be worse than i, at most.
    worse = own[None, :] - own[:, None]
    for link, first in around:
        table = link.table if first else link.table.T
        mine, other = (link.first_state, link.second_state) if first else (link.second_state, link.first_state)
        mine, theirs = mine[left], np.unique(other[alive[link.second if first else link.first]])
        states, state = np.unique(mine, return_inverse=True)
        part = table[np.ix_(states, theirs)]
        worse += (part[None, :, :] - part[:, None, :]).max(axis=2)[np.ix_(state, state)]
    better = worse <= SAME
    for row in choices.rows:
        if k in row:
            takes = row[k][left]
            better &= takes[None, :] <= takes[:, None]
    np.fill_diagonal(better, False)
    stays = np.ones(len(left), bool)
    for i in np.argsort(-own, kind="stable"):
        stays[i] = not (better[i] & stays).any()
    alive[k] = left[stays]
    return not stays.all()
