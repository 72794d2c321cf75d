"""The cheapest selection of options that are tied: against every selection there is."""

import itertools

import numpy as np
import pytest
from hypothesis import given, HealthCheck, settings, strategies as st

from eqshard.program import _eliminate
from eqshard.program._choices import Choices, Link, prune
from eqshard.program._integer import _Program, CLOSE, select


drawn = given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 4), min_size=1, max_size=5), st.booleans())


def some_choices(seed, sizes, limited):
    """A few choices, links between some of them, and perhaps a limit."""
    rng = np.random.default_rng(seed)
    links = []
    for a, b in itertools.combinations(range(len(sizes)), 2):
        if rng.integers(2):
            shape = int(rng.integers(1, sizes[a] + 1)), int(rng.integers(1, sizes[b] + 1))
            table = rng.integers(0, 4, shape).astype(float)
            links.append(Link(a, b, table, rng.integers(0, shape[0], sizes[a]), rng.integers(0, shape[1], sizes[b])))
    costs = [rng.integers(0, 6, n).astype(float) for n in sizes]
    takes = {k: rng.integers(0, 5, n).astype(float) for k, n in enumerate(sizes)}
    limit = float(rng.integers(1, 4 * len(sizes)))
    return Choices(costs, links, [takes] if limited else [], [limit] if limited else [])


def cost(choices, taken):
    own = sum(costs[i] for costs, i in zip(choices.costs, taken))
    return own + sum(k.table[k.first_state[taken[k.first]], k.second_state[taken[k.second]]] for k in choices.links)


def keeps_to_limits(choices, taken):
    rows = zip(choices.rows, choices.limits)
    return all(sum(takes[taken[k]] for k, takes in row.items()) <= limit + 1e-9 for row, limit in rows)


def every(options):
    return itertools.product(*options)


@pytest.mark.parametrize("most", [0, 4, _eliminate.MOST])
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@drawn
def test_the_cheapest_that_keeps_to_the_limits(monkeypatch, most, seed, sizes, limited):
    monkeypatch.setattr(_eliminate, "MOST", most)
    choices = some_choices(seed, sizes, limited)
    fitting = [t for t in every(range(len(c)) for c in choices.costs) if keeps_to_limits(choices, t)]
    found = select(choices, 10.0)
    if not fitting:
        assert found is None
        return
    assert found is not None
    taken, total, gap, _ = found
    best = min(cost(choices, t) for t in fitting)
    assert keeps_to_limits(choices, taken)
    assert total == pytest.approx(cost(choices, taken), abs=1e-6)
    assert total <= best * (1 + CLOSE) + 1e-6
    assert gap <= CLOSE + 1e-9


@settings(max_examples=150, deadline=None)
@drawn
def test_what_is_left_out_is_never_needed(seed, sizes, limited):
    choices = some_choices(seed, sizes, limited)
    left = prune(choices, [np.arange(len(c)) for c in choices.costs])
    assert all(len(options) for options in left)
    fitting = [t for t in every(range(len(c)) for c in choices.costs) if keeps_to_limits(choices, t)]
    still = [t for t in every(left) if keeps_to_limits(choices, t)]
    assert bool(still) == bool(fitting)
    if fitting:
        assert min(cost(choices, t) for t in still) == pytest.approx(min(cost(choices, t) for t in fitting))


@settings(max_examples=150, deadline=None)
@drawn
def test_what_makes_the_linear_program_dearer_makes_every_selection_dearer(seed, sizes, limited):
    choices = some_choices(seed, sizes, limited)
    program = _Program(choices, [np.arange(len(c)) for c in choices.costs])
    status, total, _, dearer = program.relaxed(10.0)
    fitting = [t for t in every(range(len(c)) for c in choices.costs) if keeps_to_limits(choices, t)]
    assert not fitting or status == 0
    for taken in fitting:
        for k, option in enumerate(taken):
            assert cost(choices, taken) >= total + dearer[k][option] - 1e-6


def test_a_limit_that_the_nearest_option_breaks():
    """Of two equal shares, the one that is tried first does not keep to the limit: the other is taken."""
    takes = np.array([3.0, 1.0])
    choices = Choices([np.array([0.0, 1.0])] * 3, [], [dict.fromkeys(range(3), takes)], [6.0])
    found = select(choices, 10.0)
    assert found is not None and found[1] == pytest.approx(2.0)
