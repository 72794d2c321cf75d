"""Trees of other libraries: planned, placed, born, used and stepped by the same functions."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import eqshard


MESH = eqshard.MeshSpec(dp=2, fsdp=4)


def fsdp(tree, mesh):
    return eqshard.fsdp_plan(tree, mesh, min_bytes=0)


@pytest.fixture(autouse=True)
def as_users_have_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        yield


def module(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, exc_type=ImportError)


def follows(plan, placed, plain):
    """A step of gradient descent on the squared sum, laid out and not."""
    loss = lambda t: sum((x**2).sum() for x in jax.tree.leaves(t))
    step = lambda t: jax.tree.map(lambda x, g: x - 0.1 * g, t, jax.grad(lambda t: loss(eqshard.use(plan, t)))(t))
    stepped = eqshard.filter_jit(step, in_plans=plan, out_plans=plan)(placed)
    assert eqshard.plan_of(stepped).specs() == plan.specs()
    for x, y in zip(jax.tree.leaves(stepped), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(x, 0.8 * y, rtol=1e-5)
    return stepped


def test_flax_linen():
    nn = module("flax.linen")
    model = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(8)])
    x = jnp.ones((4, 16))
    params, plan = eqshard.init(model.init, jax.random.key(0), x, mesh=MESH, planner=fsdp)
    assert plan["['params']['layers_0']['kernel']"].spec == P(None, "fsdp")
    plain = model.init(jax.random.key(0), x)
    np.testing.assert_allclose(model.apply(params, x), model.apply(plain, x), rtol=1e-5)
    follows(plan, params, plain)


def test_flax_nnx():
    nnx = module("flax.nnx")
    make = lambda: nnx.state(nnx.Linear(16, 32, rngs=nnx.Rngs(0)), nnx.Param)
    graph, state = nnx.split(nnx.Linear(16, 32, rngs=nnx.Rngs(0)), nnx.Param, ...)[:2]
    plan = fsdp(state, MESH)
    assert sorted(plan.specs().values(), key=str) == [P("fsdp"), P(None, "fsdp")]
    placed = eqshard.apply(plan, state)
    assert eqshard.plan_of(placed).specs() == plan.specs()
    layer = nnx.merge(graph, placed)
    np.testing.assert_allclose(
        layer(jnp.ones((4, 16))), nnx.Linear(16, 32, rngs=nnx.Rngs(0))(jnp.ones((4, 16))), rtol=1e-5
    )
    born = eqshard.init(plan, make)
    assert eqshard.plan_of(born).specs() == plan.specs()
    follows(plan, placed, state)


def test_haliax():
    hax = module("haliax")
    Embed, Mlp = hax.Axis("embed", 16), hax.Axis("mlp", 32)
    make = lambda key: {"w": hax.random.normal(key, (Embed, Mlp)), "b": hax.zeros(Mlp)}
    tree, plan = eqshard.init(make, jax.random.key(0), mesh=MESH, planner=fsdp)
    assert isinstance(tree["w"], hax.NamedArray) and tree["w"].axes == (Embed, Mlp)
    assert plan.select("['w']").leaves[0].spec == P(None, "fsdp") == tree["w"].array.sharding.spec
    plain = make(jax.random.key(0))
    np.testing.assert_array_equal(tree["w"].array, plain["w"].array)
    stepped = follows(plan, tree, plain)
    assert hax.sum(stepped["w"], Embed).axes == (Mlp,)


def test_numpy():
    tree = {"w": np.arange(32, dtype="float32").reshape(4, 8), "name": "numpy"}
    plan = fsdp(tree, MESH)
    step = eqshard.filter_jit(lambda t: t, in_plans=plan, out_plans=plan)
    assert step(tree)["w"].sharding.spec == P(None, "fsdp") and step(tree)["name"] == "numpy"


def test_equinox_enumerations_and_files(tmp_path):
    class Kind(eqx.Enumeration):
        plain = "plain"
        fancy = "fancy"

    make = lambda key: {"layer": eqx.nn.Linear(16, 32, key=key), "kind": Kind.fancy}
    tree, plan = eqshard.init(make, jax.random.key(0), mesh=MESH, planner=fsdp)
    assert tree["kind"] == Kind.fancy
    eqx.tree_serialise_leaves(tmp_path / "tree.eqx", tree)
    like = eqshard.init(plan, make, jax.random.key(1))
    back = eqshard.apply(plan, eqx.tree_deserialise_leaves(tmp_path / "tree.eqx", like))
    assert eqshard.plan_of(back).specs() == plan.specs()
    np.testing.assert_array_equal(back["layer"].weight, tree["layer"].weight)
