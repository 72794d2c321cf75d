"""parallel_map: shard_map over trees."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from process_checks import mlp

import eqshard


def test_as_shard_map(m24):
    x = np.arange(64, dtype="float32").reshape(8, 8)
    fn = lambda a: jax.lax.all_gather(a, "tp", axis=1, tiled=True).cumsum(axis=1)[:, :2]
    mapped = jax.shard_map(fn, mesh=m24.build(), in_specs=P("dp", "tp"), out_specs=P("dp", "tp"))
    expected = jax.jit(mapped)(jax.device_put(x, jax.NamedSharding(m24.build(), P("dp", "tp"))))
    found = eqshard.parallel_map(fn, x, m24, P("dp", "tp"))
    assert np.array_equal(found, expected) and eqshard.specs_of(found) == P("dp", "tp")


# `out_spec=P()` is ignored elsewhere.
def test_an_empty_out_spec_is_honoured(m24):
    x = np.arange(16, dtype="float32").reshape(8, 2)
    total = lambda b: jax.lax.psum(b.sum(axis=0), "dp")
    found = eqshard.parallel_map(total, x, m24, P("dp"), P())
    assert found.shape == (2,) and found.is_fully_replicated and np.array_equal(found, x.sum(axis=0))
    with pytest.raises(ValueError, match="out_specs"):
        eqshard.parallel_map(lambda b: b.sum(axis=0), x, m24, P("dp"), P())  # not the same everywhere


# It retraces on every call elsewhere.
def test_traced_once(m24):
    traced = []

    def fn(b):
        traced.append(b["name"])
        return {"x": b["x"] * 2, "name": b["name"]}

    for i in range(4):
        batch = {"x": np.full((8, 2), i, "float32"), "name": "a"}
        found = eqshard.parallel_map(fn, batch, m24, P("dp"))
        assert (np.asarray(found["x"]) == 2 * i).all() and found["name"] == "a"
    assert traced == ["a"]
    eqshard.parallel_map(fn, {"x": np.ones((8, 2), "float32"), "name": "b"}, m24, P("dp"))  # another program
    eqshard.parallel_map(fn, {"x": np.ones((4, 2), "float32"), "name": "b"}, m24, P("dp"))
    assert traced == ["a", "b", "b"]


def test_traced_once_wherever_the_arrays_are(m24):
    """Arrays that have their places take a shorter way: to the same program."""
    traced = []

    def fn(b):
        traced.append(b["x"].shape)
        return {"y": b["x"].sum(axis=1), "n": b["n"] + 1}

    host = {"x": np.arange(16, dtype="float32").reshape(8, 2), "n": np.ones((), "int32")}
    placed = eqshard.shard_batch(host, m24, P("dp"))
    elsewhere = eqshard.shard_batch(host, m24, P(("dp", "tp")))
    for batch in (host, placed, elsewhere, placed):
        found = eqshard.parallel_map(fn, batch, m24, P("dp"))
        assert np.array_equal(found["y"], host["x"].sum(axis=1)) and found["n"] == 2
        assert eqshard.specs_of(found) == {"y": P("dp"), "n": P()}
    assert traced == [(4, 2)]
    whole = eqshard.parallel_map(fn, placed, m24, P("dp"), {"y": P("dp"), "n": None})
    assert eqshard.specs_of(whole)["y"] == P("dp") and len(traced) == 2  # another layout, another program


def test_a_module_as_function_and_in_the_batch(m24):
    model = mlp(4, 2, 8, 1)

    class Model(eqx.Module):
        mlp: eqx.nn.MLP

        def __call__(self, b):
            return jax.vmap(self.mlp)(b["x"]), b["mlp"], b["note"]

    x = np.arange(32, dtype="float32").reshape(8, 4) / 32
    layout = {"x": P("dp"), "mlp": None, "note": None}
    batch = {"x": x, "mlp": model, "note": np.array(["text"])}
    out, same, note = eqshard.parallel_map(Model(model), batch, m24, layout, (P("dp"), P(), None))
    np.testing.assert_allclose(out, jax.vmap(model)(x), rtol=1e-5)
    assert same.activation is not None and np.array_equal(same.layers[0].weight, model.layers[0].weight)
    assert note is batch["note"]
    changed = eqx.tree_at(lambda m: m.layers[-1].bias, model, jnp.full(2, 7.0))
    again, _, _ = eqshard.parallel_map(Model(changed), batch, m24, layout, (P("dp"), P(), None))
    np.testing.assert_allclose(again, jax.vmap(changed)(x), rtol=1e-5)  # arrays are arguments, not constants


def test_in_jit_and_differentiable(m24):
    def loss(x):
        out = eqshard.parallel_map(square, {"x": x}, m24, {"x": P("dp")}, P("dp"))
        return out["x"].sum()

    x = eqshard.shard_batch(np.arange(8, dtype="float32"), m24, P("dp"))
    value, grad = jax.jit(jax.value_and_grad(loss))(x)
    assert value == 140 and np.array_equal(grad, 2 * np.arange(8))


def square(b):
    return {"x": b["x"] ** 2}


def test_logical_names(make_mesh):
    mesh = make_mesh(dp=4, tp=2)
    x = np.arange(32, dtype="float32").reshape(8, 4)
    found = eqshard.parallel_map(lambda a: a + 1, x, mesh, (eqshard.BATCH, eqshard.EMBED))
    assert eqshard.specs_of(found) == P("dp", "tp") and np.array_equal(found, x + 1)


def test_axis_functions(m24):
    fn = lambda a: a * 0 + eqshard.axis_index(("dp", "tp")) + 10 * eqshard.axis_size("tp")
    found = eqshard.parallel_map(fn, np.zeros(8, "int32"), m24, P(("dp", "tp")))
    assert np.array_equal(found, np.arange(8) + 40)


def test_errors(m24):
    with pytest.raises(eqshard.IndivisibleError):
        eqshard.parallel_map(lambda a: a, np.zeros(3, "int32"), m24, P("dp"))
    with pytest.raises(eqshard.UnknownAxisError):
        eqshard.parallel_map(lambda a: a, np.zeros(8, "int32"), m24, P("dp"), P("dpp"))
    with pytest.raises(eqshard.MismatchError, match="no prefix"):
        eqshard.parallel_map(lambda a: a, np.zeros(8, "int32"), m24, P("dp"), {"x": P()})
    with pytest.raises(eqshard.ShardingError, match="needs an array"):
        eqshard.parallel_map(lambda a: a, "text", m24, P("dp"))
