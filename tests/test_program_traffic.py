"""What goes through memory beside products: as XLA fuses elementwise work, so it is counted."""

import jax
import jax.numpy as jnp
import pytest
from program_checks import shape

from eqshard.program._build import build
from eqshard.program._trace import trace


N = 256
X = shape(N, N)


def passes(fn, *args):
    """How often an array of N x N goes through memory."""
    graph, *_ = build(trace(fn, args), {})
    return sum(graph.values[v].nbytes * times for v, times in graph.traffic) / (4 * N * N)


def adam(p, m, v, g):
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return p - m / (jnp.sqrt(v) + 1e-8), m, v


def loop(x):
    return jax.lax.scan(lambda count, row: (count + 1, row * 2.0), 0, x)


@pytest.mark.parametrize(
    "fn, count, times",
    [
        (lambda x: jnp.exp(jnp.sin(x) * 2.0 + 1.0), 1, 2.0),  # a chain is read and written once
        (lambda x: jax.jit(jnp.exp)(jnp.sin(x)), 1, 2.0),  # also through a call
        (lambda x: jnp.sum(jnp.exp(x)), 1, 1.0),  # a sum reads, and writes nothing of note
        (lambda x: jnp.sum(x) + jnp.max(x), 1, 2.0),  # each reads for itself
        (adam, 4, 7.0),  # four are read, three are written, together
        (lambda x, w: jnp.tanh(x @ w), 2, 1.0),  # a product's result is worked on before it is written
        (lambda x, w: (lambda y: jnp.exp(y - y.max()))(jnp.einsum("ij,jk->ki", x, w)), 2, 2.0),  # here a sum is, too
        (lambda x: jnp.exp(x[: N // 2]), 1, 1.0),  # of a slice only the slice
        (lambda x, y: x + y.T, 2, 3.0),
        (lambda x: jax.lax.optimization_barrier(x.reshape(-1)), 1, 0.0),  # the same under another name
        (lambda x: x.at[0].set(1.0), 1, 0.0),  # next to nothing, in place
        (lambda x: x.at[jnp.arange(8)].add(1.0), 1, 0.0),  # also in many places
        (loop, 1, 2.0 + 2.0 + 2.0),  # taken apart, worked on, put together
    ],
)
def test_what_is_read_and_written(fn, count, times):
    assert passes(fn, *[X] * count) == pytest.approx(times, abs=0.05)
