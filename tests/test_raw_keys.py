"""Raw PRNG keys, `uint32` arrays whose last dimension is one key, stay usable whatever plans them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from program_checks import mesh_of

import eqshard


MAKERS = {
    "auto_plan": lambda tree, mesh: eqshard.auto_plan(tree, mesh, min_bytes=0),
    "auto_plan reversed": lambda tree, mesh: eqshard.auto_plan(tree, mesh, min_bytes=0, reverse=True),
    "fsdp_plan": lambda tree, mesh: eqshard.fsdp_plan(tree, mesh, "data", min_bytes=0),
    "memory_plan": lambda tree, mesh: eqshard.memory_plan(tree, mesh, max_bytes=0.6 * tree["keys"].size * 4),
    "convert_plan": lambda tree, mesh: eqshard.convert_plan(
        eqshard.replicated_plan(tree, eqshard.MeshSpec(x=8)).at("keys").set(P("x")), mesh, strategy="preserve_balance"
    ),
}


@pytest.mark.parametrize("words", [2, 4])
@pytest.mark.parametrize("count", [100_001, 100_002, 2**17])
@pytest.mark.parametrize("maker", MAKERS)
def test_keys_are_not_split(make_mesh, maker, count, words):
    if (maker == "convert_plan" and count % 8) or (maker == "memory_plan" and count % 2):
        pytest.skip("no layout divides")
    plan = MAKERS[maker]({"keys": jax.ShapeDtypeStruct((count, words), "uint32")}, make_mesh(data=2, tp=2))
    (leaf,) = plan
    assert len(leaf.spec) < 2
    assert (leaf.spec == P()) == bool(count % 2)


def test_other_arrays_of_that_size_are_sharded(make_mesh):
    plan = eqshard.auto_plan({"x": jax.ShapeDtypeStruct((3, 4), "float32")}, make_mesh(data=2, tp=2), min_bytes=0)
    assert plan["['x']"].spec == P(None, ("data", "tp"))


@pytest.mark.parametrize("sizes", [{"data": 2, "tp": 4}, {"data": 2}, {"data": 8}], ids=str)
def test_a_key_that_a_step_takes_and_returns_can_be_split(sizes, axis_type):
    def step(key, x):
        key, now = jax.random.split(key)
        return key, x + jax.random.normal(now, x.shape)

    args = jax.random.PRNGKey(0), jnp.zeros((16, 16))
    plan = eqshard.step_plan(step, *args, mesh=mesh_of(axis_type, **sizes))
    assert [leaf.spec for leaf in plan.args[0]] == [P()]
    planned = jax.jit(eqshard.constrain(plan, step))
    key, x = planned(*(eqshard.apply(p, a) for p, a in zip(plan.args, args)))
    want_key, want = step(*args)
    np.testing.assert_array_equal(jax.random.split(eqshard.gather(key)), jax.random.split(want_key))
    assert jax.random.split(key).shape == (2, 2)
    np.testing.assert_allclose(np.asarray(x), np.asarray(want), rtol=1e-6)
