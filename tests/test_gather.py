"""Whole again: gather, replicate, shard_and_gather_fns."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import eqshard


def test_gather_gives_numpy(m24):
    tree = {"w": jnp.arange(64.0).reshape(8, 8), "b": jnp.ones(8, jnp.bfloat16), "f": len, "none": None, "n": 3}
    plan = eqshard.replicated_plan(tree, m24).at("w").set(P("dp", "tp")).at("b").set(P("tp"))
    host = eqshard.gather(eqshard.apply(plan, tree))
    assert isinstance(host["w"], np.ndarray) and host["b"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(host["w"], tree["w"])
    assert host["f"] is len and host["none"] is None and host["n"] == 3 and isinstance(host["n"], int)


def test_gather_leaves_numpy_and_others_alone():
    class Odd:
        def __array__(self, *args):
            raise AssertionError("nobody asked")

    tree = [np.ones(3), Odd(), np.array(["a"]), jax.ShapeDtypeStruct((3,), jnp.int8)]
    host = eqshard.gather(tree)
    assert host[0] is tree[0] and host[1] is tree[1] and host[2] is tree[2] and host[3] == tree[3]


def test_gather_of_keys(m24):
    for impl in ("threefry2x32", "rbg"):
        keys = jax.random.split(jax.random.key(0, impl=impl), 8)
        plan = eqshard.replicated_plan(keys, m24).at("").set(P("tp"))
        placed = eqshard.apply(plan, keys)
        assert placed.sharding.shard_shape(placed.shape) == (2,)
        whole = eqshard.gather(placed)
        assert whole.dtype == keys.dtype and (jax.random.key_data(whole) == jax.random.key_data(keys)).all()
        assert len(whole.devices()) == 1


def test_gather_of_nothing(m24):
    x = jnp.ones((8, 0), jnp.bfloat16)
    plan = eqshard.replicated_plan(x, m24).at("").set(P(("dp", "tp")))
    for placed in (eqshard.apply(plan, x), jax.jit(lambda x: eqshard.apply(plan, x))(x)):
        host = eqshard.gather(placed)
        assert host.shape == (8, 0) and host.dtype == jnp.bfloat16


def test_gather_of_structs_forgets_the_sharding(m24):
    struct = jax.ShapeDtypeStruct((8,), jnp.float32)
    plan = eqshard.replicated_plan(struct, m24).at("").set(P("tp"))
    assert eqshard.gather(eqshard.apply(plan, struct)) == struct


def test_gather_inside_jit_is_refused():
    with pytest.raises(eqshard.ShardingError, match=r"`\['a'\]`.*being traced.*replicate"):
        jax.jit(lambda x: eqshard.gather({"a": x}))(jnp.ones(3))


def test_gather_to_a_process_that_is_not():
    with pytest.raises(eqshard.ShardingError, match="no process"):
        eqshard.gather(jnp.ones(3), to=7)
    np.testing.assert_array_equal(eqshard.gather(jnp.ones(3), to=0), np.ones(3))


def test_replicate_is_one_device_put(m24, monkeypatch):
    tree = [np.full((3, 5), i, np.float32) for i in range(50)]
    calls, real = [], jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda *args, **kwargs: calls.append(args) or real(*args, **kwargs))
    placed = eqshard.replicate(tree, m24)
    assert len(calls) == 1
    assert all(x.is_fully_replicated and len(x.devices()) == 8 for x in placed)
    inside = eqx.filter_jit(lambda t: eqshard.replicate(t, m24))(placed)
    assert all(x.is_fully_replicated for x in inside)


def test_shard_and_gather_fns(m24):
    tree = {"w": np.arange(64, dtype=np.float32).reshape(8, 8), "b": [np.ones(8, np.int8)]}
    plan = eqshard.replicated_plan(tree, m24).at("w").set(P("dp", "tp")).at("b").set(P("tp"))
    shard, gather = eqshard.shard_and_gather_fns(plan)
    assert set(shard) == set(gather) == {"['w']", "['b'][0]"}
    for path, x in (("['w']", tree["w"]), ("['b'][0]", tree["b"][0])):
        placed = shard[path](x)
        assert placed.sharding.spec == plan[path].spec and placed.dtype == x.dtype
        whole = gather[path](placed)
        assert isinstance(whole, np.ndarray)
        np.testing.assert_array_equal(whole, x)
    assert eqshard.canonical(jax.jit(shard["['w']"])(tree["w"]).sharding.spec) == P("dp", "tp")
    with pytest.raises(eqshard.MismatchError, match=r"float32\[7\], planned as float32\[8,8\]"):
        shard["['w']"](np.ones(7, np.float32))
