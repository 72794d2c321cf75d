"""The cheapest selection of options: a linear program, mostly."""

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from .._errors import ShardingError
from ._choices import Alive, Choices, Link, prune, SAME, total_of, within_limits
from ._eliminate import eliminate


CLOSE = 5e-3
"""How near the best a selection must be to be taken without a longer search."""
PATIENCE = 4
"""How many times longer the linear program may take: without its solution there is no choice at all."""
ROUNDS = 12
"""How often the linear program is solved again with more of it settled."""
DEAREST = 1e3
"""What the dearest variable costs in the solver's units: it takes less than 1e-7 of them for nothing."""
WHOLE = 1 - 1e-5
"""The share of an option from which on it is taken as chosen."""


def select(choices: Choices, seconds: float) -> tuple[list[int], float, float, int] | None:
    """The cheapest selection: an option of each choice, what it costs, how far from the best it may be, and the number
    of variables. None if nothing keeps to the limits.

    Options that are never better than another are left out first. Where few are tied to many, the rest is settled one
    by one. Else a linear program is solved; where it comes out fractional, what is nearly whole is settled and the rest
    solved again. Its first solution bounds what any selection can reach, so it is known how far from the best the last
    one is. Only if that is too far, or nothing keeps to the limits with what was settled, the integer program is solved
    as such, of the options that can be part of anything better: it is known by how much each makes the program dearer.
    """
    every = prune(choices, [np.arange(len(costs)) for costs in choices.costs])
    taken = eliminate(choices, every)
    if taken is not None and within_limits(choices, taken):
        return taken, total_of(choices, taken), 0.0, sum(map(len, every))
    alive, least, best, variables = every, 0.0, None, 0
    dearer = [np.zeros(len(left)) for left in every]
    before, tried = every, {}
    for round_ in range(ROUNDS):
        program = _Program(choices, alive)
        variables = variables or program.variables
        status, total, shares, reduced = program.relaxed(PATIENCE * seconds)
        if status == 2 and round_ == 0:
            return None
        if status == 2 and tried:
            # Not this way: what was settled last is left out, and the rest solved again.
            before = alive = [left[left != tried[k]] if k in tried else left for k, left in enumerate(before)]
            tried = {}
            continue
        if shares is None:
            break
        if round_ == 0:
            least, dearer = total, reduced
        tried = _nearest(shares, alive)
        if not tried:
            best = total, [int(left[np.argmax(x)]) for left, x in zip(alive, shares)]
            break
        before = [left[[int(np.argmax(x))]] if x.max() >= WHOLE else left for left, x in zip(alive, shares)]
        alive = prune(choices, [np.array([tried[k]]) if k in tried else left for k, left in enumerate(before)])
    for window in (CLOSE * least, math.inf):
        if best is not None and _gap(best[0], least) <= CLOSE:
            break
        # A selection with an option that makes the linear program dearer by the window is not within the window.
        window = window if best is None else min(window, best[0] - least)
        near = [left[costs <= max(window, costs.min()) + SAME] for left, costs in zip(every, dearer)]
        status, other, bound = _Program(choices, prune(choices, near)).whole(seconds)
        if other is not None and (best is None or other[0] < best[0]):
            best = other
        if window == math.inf or (best is not None and best[0] <= least + window):
            least = max(least, bound)
        if status == 1 and (best is None or _gap(best[0], least) > 0.5):
            raise ShardingError(
                f"the solver found no good choice in {seconds:g} s, for {variables} variables. Give it more "
                "`time_limit`, or a mesh of fewer axes."
            )
    return None if best is None else (best[1], best[0], _gap(best[0], least), variables)


def _gap(total: float, least: float) -> float:
    """How much more a selection costs than the least that is possible."""
    return max(0.0, (total - least) / max(least, SAME)) if total - least > SAME else 0.0


class _Program:
    """The linear program of the options that are left."""

    def __init__(self, choices: Choices, alive: Alive):
        self.choices, self.alive = choices, alive
        self.open = [k for k, left in enumerate(alive) if len(left) > 1]
        self.begin = dict(zip(self.open, np.cumsum([0, *(len(alive[k]) for k in self.open)]).tolist()))
        own = [choices.costs[k][left].copy() for k, left in enumerate(alive)]
        self.columns: list[np.ndarray] = []
        self.pairs: list[tuple[Link, int, np.ndarray, np.ndarray]] = []
        """Links with columns: the first of them, and which state of theirs the options of both choices have."""
        self.entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.integral = sum(len(alive[k]) for k in self.open)
        self.variables, self.height = self.integral, len(self.open)
        for row, k in enumerate(self.open):
            at = np.arange(len(alive[k]))
            self.entries.append((np.full(len(at), row), self.begin[k] + at, np.ones(len(at))))
        self.fixed = 0.0
        for link in choices.links:
            self._link(link, own)
        self.fixed += sum((float(own[k][0]) for k, left in enumerate(alive) if len(left) == 1), 0.0)
        self.costs = np.concatenate([*(own[k] for k in self.open), *self.columns, np.zeros(0)])
        self.rhs = np.zeros(self.height)
        self.rhs[: len(self.open)] = 1.0

    def _link(self, link: Link, own: list[np.ndarray]) -> None:
        """Columns for pairs of states, whose margins are the two choices; states that cost the same are one."""
        a, b = link.first_state[self.alive[link.first]], link.second_state[self.alive[link.second]]
        rows, a = np.unique(a, return_inverse=True)
        columns, b = np.unique(b, return_inverse=True)
        table = link.table[np.ix_(rows, columns)]
        table, alike = np.unique(table, axis=0, return_inverse=True)
        a = alike.ravel()[a]
        turned, alike = np.unique(table.T, axis=0, return_inverse=True)
        table, b = turned.T, alike.ravel()[b]
        n, m = table.shape
        if m == 1:
            own[link.first] += table[a, 0]
        elif n == 1:
            own[link.second] += table[0, b]
        else:
            self.columns.append(table.ravel())
            self.pairs.append((link, self.variables, a, b))
            pairs = self.variables + np.arange(n * m)
            self.entries.append((self.height + np.repeat(np.arange(n), m), pairs, np.ones(n * m)))
            self.entries.append((self.height + n + np.tile(np.arange(m), n), pairs, np.ones(n * m)))
            self.entries.append((self.height + a, self.begin[link.first] + np.arange(len(a)), -np.ones(len(a))))
            self.entries.append((self.height + n + b, self.begin[link.second] + np.arange(len(b)), -np.ones(len(b))))
            self.variables, self.height = self.variables + n * m, self.height + n + m

    def _matrices(self) -> tuple[Any, np.ndarray | None, np.ndarray]:
        """What must be equal; what is limited, and how much of each limit is left."""
        from scipy.sparse import csr_array  # noqa: PLC0415 (dear to import)

        row, column, value = (np.concatenate(part) for part in zip(*self.entries))
        equal = csr_array((value, (row, column)), shape=(self.height, self.variables))
        if not self.choices.rows:
            return equal, None, np.zeros(0)
        most, room = np.zeros((len(self.choices.rows), self.variables)), np.ones(len(self.choices.rows))
        for i, (row_, limit) in enumerate(zip(self.choices.rows, self.choices.limits)):
            for k, takes in row_.items():
                here = takes[self.alive[k]] / max(limit, 1.0)
                if k in self.begin:
                    most[i, self.begin[k] : self.begin[k] + len(here)] = here
                else:
                    room[i] -= here[0]
        return equal, most, room

    def _by_choice(self, x: np.ndarray, settled: np.ndarray) -> list[np.ndarray]:
        return [x[self.begin[k] :][: len(left)] if k in self.begin else settled for k, left in enumerate(self.alive)]

    def _shares(self, x: np.ndarray) -> list[np.ndarray]:
        return self._by_choice(x, np.ones(1))

    def relaxed(self, seconds: float) -> tuple[int, float, list[np.ndarray] | None, list[np.ndarray]]:
        """The linear program: a status, the cost, how much of each option is taken, and by how much at least each would
        make it dearer."""
        none = [np.zeros(len(left)) for left in self.alive]
        if not self.open:
            within = within_limits(self.choices, [int(left[0]) for left in self.alive])
            return (0, self.fixed, self._shares(np.zeros(0)), none) if within else (2, 0.0, None, none)
        from scipy.optimize import linprog  # noqa: PLC0415

        equal, most, room = self._matrices()
        unit = max(float(self.costs.max()), 1e-9) / DEAREST
        result: Any = linprog(
            self.costs / unit,
            A_eq=equal,
            b_eq=self.rhs,
            A_ub=most,
            b_ub=None if most is None else room,
            bounds=(0, None),
            method="highs-ds",  # the dual simplex ends in a corner, which is most often integral, and is the quickest
            # What comes of presolving is not the same each time, if several choices are equally good.
            options={"time_limit": seconds, "presolve": False},
        )
        if result.x is None:
            return int(result.status), 0.0, None, none
        dearer = self._dearer(result.lower.marginals * unit) if result.status == 0 else none
        return int(result.status), float(result.fun * unit) + self.fixed, self._shares(result.x), dearer

    def _dearer(self, reduced: np.ndarray) -> list[np.ndarray]:
        """By how much at least each option makes it dearer: by itself, and by the least of its pairs in each link."""
        found = [costs.copy() for costs in self._by_choice(reduced, np.zeros(1))]
        for link, start, a, b in self.pairs:
            n, m = a.max() + 1, b.max() + 1
            table = reduced[start : start + n * m].reshape(n, m)
            found[link.first] += table.min(axis=1)[a]
            found[link.second] += table.min(axis=0)[b]
        return found

    def whole(self, seconds: float) -> tuple[int, tuple[float, list[int]] | None, float]:
        """The integer program: a status, the cost with the option taken of each choice, and what nothing is below."""
        from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415

        equal, most, room = self._matrices()
        rhs, unit = cast(Any, self.rhs), max(float(self.costs.max()), 1e-9)
        constraints = [LinearConstraint(equal, rhs, rhs)]
        constraints += [LinearConstraint(most, -np.inf, cast(Any, room))] if most is not None else []
        integrality = (np.arange(self.variables) < self.integral).astype(float)
        options = {"time_limit": seconds, "mip_rel_gap": CLOSE}
        objective = self.costs / unit
        result: Any = milp(
            objective, integrality=integrality, constraints=constraints, bounds=Bounds(0, 1), options=options
        )
        if result.x is None:
            return int(result.status), None, 0.0
        taken = [int(left[np.argmax(x)]) for left, x in zip(self.alive, self._shares(result.x))]
        cost = float(result.fun * unit)
        return int(result.status), (cost + self.fixed, taken), cost * (1 - float(result.mip_gap or 0.0)) + self.fixed


def _nearest(shares: Sequence[np.ndarray], alive: Alive) -> dict[int, int]:
    """Of the choices that are not whole, the third that are nearest to it, with the option that each is nearest to."""
    largest = np.array([x.max() for x in shares])
    unsettled = np.nonzero(largest < WHOLE)[0]
    nearest = unsettled[np.argsort(-largest[unsettled], kind="stable")][: max(1, len(unsettled) // 3)]
    return {int(k): int(alive[k][np.argmax(shares[k])]) for k in nearest}
