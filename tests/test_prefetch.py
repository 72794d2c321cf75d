"""prefetch: order, ends, errors, overlap."""

import threading
import time
import traceback

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import eqshard


def numbered(n):
    for i in range(n):
        yield {"x": np.full((8, 2), i, "float32"), "i": i}


def placing(mesh):
    return lambda b: eqshard.shard_batch(b, mesh, P("dp"))


def threads():
    return [t for t in threading.enumerate() if "eqshard-prefetch" in t.name]


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("n", [0, 1, 4])
def test_all_in_order(m24, n, size):
    found = list(eqshard.prefetch(numbered(n), placing(m24), size))
    assert [b["i"] for b in found] == list(range(n))
    assert all((np.asarray(b["x"]) == b["i"]).all() and b["x"].sharding.spec == P("dp") for b in found)
    assert threads() == []


def test_with_a_plan(m24):
    like = next(numbered(1))
    plan = eqshard.replicated_plan(like, m24).at("x").set(P("dp"))
    for local in (False, True):
        found = list(eqshard.prefetch(list(numbered(3)), plan, local=local))
        assert [b["x"].sharding.spec for b in found] == [P("dp")] * 3
    wrong = eqshard.prefetch([like, {"x": np.ones((4, 2), "float32"), "i": 0}], plan)
    next(wrong)
    with pytest.raises(eqshard.MismatchError, match="planned as"):
        next(wrong)


def test_what_the_iterator_raises(m24):
    asked = []

    def broken():
        for b in numbered(2):
            asked.append(b["i"])
            yield b
        raise KeyError("the file is gone")

    found = []
    with pytest.raises(KeyError, match="the file is gone") as error:
        for b in eqshard.prefetch(broken(), placing(m24), 5):
            found.append(b["i"])
    assert found == [0, 1] == asked  # what came before is not lost
    assert "broken" in [frame.name for frame in traceback.extract_tb(error.tb)]  # and where it was raised can be seen
    assert threads() == []


def test_what_has_raised_is_not_asked_again(m24):
    class Source:
        calls = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.calls += 1
            raise RuntimeError("no")

    source = Source()
    with pytest.raises(RuntimeError, match="no"):
        list(eqshard.prefetch(source, placing(m24), 4))
    assert source.calls == 1


def test_stopping_early(m24):
    closed = []

    def source():
        try:
            yield from numbered(100)
        finally:
            closed.append(True)

    batches = source()
    for b in eqshard.prefetch(batches, placing(m24), 2):
        if b["i"] == 3:
            break
    del b
    time.sleep(0.05)
    assert threads() == []
    assert next(batches)["i"] <= 7  # at most `size` were read ahead, and nobody uses it now
    batches.close()
    assert closed == [True]


def test_never_more_than_size_ahead(m24):
    read = []

    def source():
        for b in numbered(10):
            read.append(b["i"])
            yield b

    for b in eqshard.prefetch(source(), placing(m24), 3):
        time.sleep(0.02)
        assert max(read) <= b["i"] + 3
    with pytest.raises(eqshard.ShardingError, match="size=0"):
        eqshard.prefetch(source(), placing(m24), 0)


def test_reading_goes_on_while_the_step_runs(m24):
    """A loader that waits as long as the step does: together they take the time of one."""
    pause, n = 0.05, 10

    def slow():
        for b in numbered(n):
            time.sleep(pause)
            yield b

    started = time.perf_counter()
    for _ in eqshard.prefetch(slow(), placing(m24), 2):
        time.sleep(pause)
    assert time.perf_counter() - started < 1.7 * n * pause


def test_settings_of_the_caller_hold_in_the_thread(m24):
    with jax.enable_x64(True):
        [found] = eqshard.prefetch([np.array([2**40, 1])], placing(m24))
        assert found.dtype == "int64" and found.tolist() == [2**40, 1]
