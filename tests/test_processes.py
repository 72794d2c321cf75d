"""Real processes: one launch for all checks of a kind; `process_checks.py` has what runs inside."""

import re
import time

import jax
import numpy as np
import process_checks
import pytest
from jax.experimental import multihost_utils
from processes import ProcessesFailed, run_outcomes, run_processes


@pytest.fixture(scope="module")
def alone():
    """Training in this one process, with all 8 devices."""
    return process_checks.losses()


@pytest.mark.parametrize("n", [2, 4])
def test_everything_in_processes(n, alone):
    results = run_processes(process_checks.all_and_train, n, 8 // n, timeout=300)
    losses, params = alone
    assert losses[-1] < losses[0]
    for _, (found, found_params) in results:
        assert found == results[0][1][0]  # to the bit, in all processes
        np.testing.assert_allclose(found, losses, rtol=1e-6)
        for a, b in zip(jax.tree.leaves(found_params), jax.tree.leaves(params)):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("n", [2, 4])
def test_many_leaves_move_between_layouts(n):
    run_processes(process_checks.moving, n, 8 // n, args=(8, 64), timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4])
def test_a_hundred_moves_between_layouts(n):
    run_processes(process_checks.moving, n, 8 // n, args=(100, 128), timeout=600)


@pytest.mark.parametrize(("n", "who", "where"), [(3, 1, "check"), (2, 1, "alone"), (2, 0, "collective")])
def test_a_death_stops_the_others(n, who, where):
    """Within a minute, with an error; the heartbeat is told to `jax.distributed.initialize`."""
    outcomes = run_outcomes(process_checks.dying, n, 2, args=(who, where), timeout=110, heartbeat=10)
    assert outcomes[who].returncode == 7, str(outcomes[who])
    for o in outcomes:
        if o.index != who:
            died = float(re.search(r"died at ([\d.]+)", o.output)[1])
            assert o.returncode not in (0, None), str(o)
            assert o.value is None and o.ended - died < 60, str(o)
            assert ("named the silent process" in o.output) == (where == "check"), str(o)


def one_fails():
    print("I am waiting")
    multihost_utils.sync_global_devices("both are here")
    if jax.process_index() == 1:
        raise KeyError("a reason to fail")
    time.sleep(60)


def test_a_failure_shows_everybodys_output():
    with pytest.raises(ProcessesFailed) as failure:
        run_processes(one_fails, 2, 1, checked=False)
    text = str(failure.value)
    assert "KeyError: 'a reason to fail'" in text and "I am waiting" in text
    assert "process 0: still ran, and was killed" in text and "process 1: exit code 1" in text


def sleeps():
    time.sleep(60)


def test_the_time_limit_holds():
    started = time.monotonic()
    with pytest.raises(ProcessesFailed, match="process 0: still ran, and was killed after 3"):
        run_processes(sleeps, 1, 1, timeout=3, checked=False)
    assert time.monotonic() - started < 10
