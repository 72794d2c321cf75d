"""Trip counts: on loops whose length Python knows."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, strategies as st
from jax.sharding import PartitionSpec as P

import eqshard
from eqshard.compiler._hlo import read_module
from eqshard.compiler._loops import trip_count


def trips(fn, *args, forget=False):
    text = jax.jit(fn).lower(*args).compile().as_text()
    if forget:  # CPUs write the count down; without it, it must be read from the condition and the body
        text = text.replace("known_trip_count", "forgotten")
    module = read_module(text)
    return [
        trip_count(module, i, c) for c in module.computations.values() for i in c.instructions if i.opcode == "while"
    ]


@pytest.mark.parametrize("forget", [False, True])
def test_nested_scans(forget):
    def outer(x, _):
        return jax.lax.scan(lambda x, _: (jnp.sin(x) * 2, None), x, None, length=5)[0] + 1, None

    found = trips(lambda x: jax.lax.scan(outer, x, None, length=3)[0], jnp.ones(64), forget=forget)
    assert sorted(found) == [3, 5]


@given(st.integers(-5, 5), st.integers(2, 40), st.integers(1, 7), st.booleans())
def test_counted_loops(start, length, step, down):
    """Counting up and down by any step, from anywhere, without the compiler's own note."""
    sign = -1 if down else 1
    stop = start + sign * length

    def condition(carry):
        return carry[0] > stop if down else carry[0] < stop

    def body(carry):
        return carry[0] + sign * step, jnp.sin(carry[1])

    def fn(x):
        return jax.lax.while_loop(condition, body, (jnp.int32(start), x))[1]

    expected = len(range(start, stop, sign * step))
    found = trips(fn, jnp.ones(64), forget=True)
    assert found == ([expected] if found else [])  # a short loop may have been unrolled
    assert found or expected <= 8


def test_loops_that_depend_on_data_are_unknown():
    def fn(x):
        return jax.lax.while_loop(lambda x: x.sum() < 10, lambda x: x * 2, x)

    assert trips(fn, jnp.ones(4)) == [None]


def test_collectives_in_such_loops_say_so():
    mesh = eqshard.MeshSpec(x=8)

    def fn(x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 10.0, lambda x: x + jnp.max(x), x)

    x = jax.ShapeDtypeStruct((64,), jnp.float32)
    report = eqshard.compile_report(fn, x, plans=eqshard.replicated_plan(x, mesh).at("").set(P("x")))
    assert [c.trips_known for c in report.collectives if c.op.endswith("reduce_max")] == [False]
    assert "unknown_trips" in [hint.code for hint in report.hints]
