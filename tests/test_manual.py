"""Inside `jax.shard_map`: axis_size and axis_index."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import eqshard


@pytest.mark.parametrize("names", ["dp", "tp", ("dp", "tp"), ("tp", "dp"), ()])
def test_size_and_index(m24, names):
    mesh = m24.build()

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P(("dp", "tp")), out_specs=P(("dp", "tp")))
    def f(x):
        size = eqshard.axis_size(names)
        assert isinstance(size, int) and size == m24.size(names)
        return x + eqshard.axis_index(names)

    order = np.arange(8).reshape(2, 4)
    expected = {
        "dp": np.repeat([0, 1], 4),
        "tp": np.tile(np.arange(4), 2),
        ("dp", "tp"): order.flatten(),
        ("tp", "dp"): (np.tile(np.arange(4), 2) * 2 + np.repeat([0, 1], 4)),
        (): np.zeros(8),
    }[names]
    x = eqshard.constrain_to(jnp.zeros(8, jnp.int32), P(("dp", "tp")), m24)
    np.testing.assert_array_equal(f(x), expected)


@pytest.mark.parametrize("fn", [eqshard.axis_size, eqshard.axis_index])
def test_elsewhere_is_a_clear_error(fn):
    with pytest.raises(eqshard.UnknownAxisError, match=r"'dp' is not manual here.*shard_map.*MeshSpec.size"):
        fn("dp")
    with pytest.raises(eqshard.UnknownAxisError, match="'dp'"):
        jax.jit(lambda x: x + fn(("dp", "tp")))(jnp.ones(3))


def test_an_axis_that_is_not_manual_there(m24):
    @jax.jit
    @jax.shard_map(mesh=m24.build(), in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"})
    def f(x):
        with pytest.raises(eqshard.UnknownAxisError, match="'tp'"):
            eqshard.axis_size("tp")
        with pytest.raises(eqshard.UnknownAxisError, match="'tp'"):
            eqshard.axis_index("tp")
        return x * eqshard.axis_size("dp")

    x = eqshard.constrain_to(jnp.ones(8), P("dp"), m24)
    np.testing.assert_array_equal(f(x), np.full(8, 2.0))
