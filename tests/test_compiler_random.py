"""Random programs, compiled: every collective that a plain count of opcodes finds is accounted for."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import eqshard


OPCODE = re.compile(
    r"^\s+(?:ROOT )?%?[\w.\-]+ = .*? "
    r"(all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast)"
    r"(?:-start)?\(",
    re.MULTILINE,
)
N = 16  # every dimension: each mesh axis divides it


def random_program(seed):
    """A few random operations on squares, with random layouts pinned here and there, and loops around some."""
    rng = np.random.default_rng(seed)
    names = ("a", "b", "c")
    mesh = eqshard.MeshSpec(dict(zip(names, [2, 2, 2])) if rng.random() < 0.7 else {"a": 2, "b": 4})

    def spec(rank=2):
        axes = [str(name) for name in rng.permutation(mesh.names)]
        entries = [axes.pop() if axes and rng.random() < 0.6 else None for _ in range(rank)]
        if axes and rng.random() < 0.3:
            entries[0] = (axes.pop(),) if entries[0] is None else (entries[0], axes.pop())
        return P(*entries)

    operations = [
        lambda x, y: x @ y,
        lambda x, y: jnp.tanh(x) + y.T,
        lambda x, y: x * (jnp.sum(y, axis=0, keepdims=True).T @ jnp.ones((1, N))),
        lambda x, y: jnp.sort(x, axis=1) + y,
        lambda x, y: jnp.concatenate([x[N // 2 :], y[: N // 2]]),
        lambda x, y: jnp.roll(x, 3, axis=0) - y,
        lambda x, y: x.reshape(4, 4, N).transpose(1, 0, 2).reshape(N, N) * y,
        lambda x, y: jnp.cumsum(x, axis=0) / (1 + jnp.abs(y)),
    ]
    steps = [
        (operations[rng.integers(len(operations))], spec() if rng.random() < 0.6 else None, int(rng.integers(0, 4)))
        for _ in range(rng.integers(2, 6))
    ]
    backward = rng.random() < 0.4

    def once(x, y, operation, pin):
        x = operation(x, y)
        return x if pin is None else eqshard.constrain_to(x, pin, mesh)

    def fn(x, y):
        for operation, pin, loop in steps:
            if loop > 1:
                x = jax.lax.scan(lambda x, _, o=operation, p=pin: (once(x, y, o, p), None), x, None, length=loop)[0]
            else:
                x = once(x, y, operation, pin)
        return x

    def scalar(x, y):
        return jnp.sum(fn(x, y) ** 2)

    struct = jax.ShapeDtypeStruct((N, N), jnp.float32)
    plans = tuple(eqshard.replicated_plan(struct, mesh).at("").set(spec()) for _ in range(2))
    return (jax.grad(scalar) if backward else fn), (struct, struct), plans


@pytest.mark.parametrize("block", [pytest.param(0, id="16"), pytest.param(1, marks=pytest.mark.slow, id="200")])
def test_every_collective_is_accounted_for(block):
    seeds = range(16) if block == 0 else range(16, 216)
    total = 0
    for seed in seeds:
        fn, args, plans = random_program(seed)
        report = eqshard.compile_report(fn, *args, plans=plans)
        plain = OPCODE.findall(report.hlo)
        assert sum(c.appearances for c in report.collectives) == len(plain), seed
        assert sorted(c.kind for c in report.collectives for _ in range(c.appearances)) == sorted(plain), seed
        assert not report.unread and all(c.trips_known and c.axes for c in report.collectives if c.wire_bytes), seed
        total += len(plain)
    assert total > 4 * len(seeds)
