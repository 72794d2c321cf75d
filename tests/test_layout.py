"""Reading layouts: shardings_of, specs_of, plan_of."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P

import eqshard


def tree_of_all():
    return {
        "a": jnp.ones((8, 4)),
        "none": None,
        "n": np.ones(3),
        "s": jax.ShapeDtypeStruct((2,), jnp.int8),
        "f": len,
        "text": "x",
        "key": jax.random.key(0),
    }


def test_every_leaf_has_an_answer_and_the_structure_stays():
    tree = tree_of_all()
    specs, shardings = eqshard.specs_of(tree), eqshard.shardings_of(tree)
    assert specs == {"a": P(), "none": None, "n": P(), "s": P(), "f": None, "text": None, "key": P()}
    assert specs.keys() == shardings.keys() == tree.keys()
    assert shardings["a"] == tree["a"].sharding and shardings["n"] is None and shardings["s"] is None


def test_modules_keep_their_structure(m24):
    model = eqshard.replicate(eqx.nn.MLP(8, 8, 8, 1, key=jax.random.key(0)), m24)
    shardings = eqshard.shardings_of(model)
    assert jax.tree.structure(shardings) == jax.tree.structure(eqx.filter(model, eqx.is_array))
    assert shardings.layers[0].weight.is_fully_replicated


def test_placed_arrays(m24):
    x = jax.device_put(jnp.ones((8, 4)), NamedSharding(m24.build(), P(("dp",), None)))
    assert tuple(eqshard.specs_of(x)) == ("dp",)


def test_tracers(m24):
    seen = {}

    @jax.jit
    def f(x):
        seen["specs"] = eqshard.specs_of({"x": x})
        seen["sharding"] = eqshard.shardings_of({"x": x})["x"]
        seen["plan"] = eqshard.plan_of({"x": x})
        return x

    f(eqshard.constrain_to(jnp.ones((8, 4)), P("dp"), m24))
    explicit = m24.axis_types[0] == "explicit"
    anything = P(P.UNCONSTRAINED, P.UNCONSTRAINED)  # of Auto axes only the compiler will know
    assert seen["specs"]["x"] == (P("dp") if explicit else anything)
    assert seen["plan"].mesh == m24 and seen["plan"]["['x']"].spec == seen["specs"]["x"]


def test_tracers_without_a_mesh():
    seen = {}

    @jax.jit
    def f(x):
        seen["spec"], seen["plan"] = eqshard.specs_of(x), eqshard.plan_of(x)
        return x

    f(jnp.ones(8))
    assert seen["spec"] == P() and seen["plan"].mesh == eqshard.MeshSpec(device=1)


def test_tracers_on_auto_axes_of_a_known_mesh_are_unconstrained():
    mesh = eqshard.MeshSpec(dp=2, tp=4, axis_type={"dp": "explicit"})
    seen = {}

    @jax.jit
    def f(x):
        seen["spec"] = eqshard.specs_of(x)
        return x

    f(eqshard.constrain_to(jnp.ones((8, 4)), P("dp", "tp"), mesh))
    assert seen["spec"] == P("dp", P.UNCONSTRAINED)


def test_plan_of_is_the_plan_that_was_applied(m24):
    tree = {"w": jnp.ones((8, 8)), "b": np.ones(8, np.float32), "f": len, "none": None, "k": jax.random.key(0)}
    plan = eqshard.replicated_plan(tree, m24).at("w").set(P("tp", "dp")).at("b").set(P("tp"))
    plan = plan.at("b").set(memory_kind="pinned_host")
    placed = eqshard.apply(plan, tree)
    found = eqshard.plan_of(placed)
    assert found == plan and hash(found) == hash(plan)
    again = eqshard.apply(found, placed)
    assert all(again[k] is placed[k] for k in tree)
    assert eqshard.plan_of(eqshard.apply(plan, eqx.filter_eval_shape(lambda: tree))) == plan


def test_plan_of_a_mesh_larger_than_the_machine():
    tree = {"w": jax.ShapeDtypeStruct((64, 8), jnp.float32)}
    plan = eqshard.replicated_plan(tree, eqshard.MeshSpec(dp=64)).at("w").set(P("dp"), memory_kind="pinned_host")
    assert eqshard.plan_of(eqshard.apply(plan, tree)) == plan


def test_plan_of_permuted_devices_knows_them(m24):
    mesh = Mesh(np.array(jax.devices())[::-1].reshape(2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    x = jax.device_put(jnp.ones(8), NamedSharding(mesh, P("tp")))
    plan = eqshard.plan_of(x)
    assert plan.build() == mesh and eqshard.apply(plan, x) is x


@pytest.mark.parametrize("index", [0, 3])
def test_plan_of_arrays_on_one_device_stays_there(index):
    x = jax.device_put(jnp.ones(8), jax.devices()[index])
    plan = eqshard.plan_of({"x": x, "n": np.ones(3, np.float32)})
    assert plan.mesh.shape == {"device": 1}
    assert eqshard.apply(plan, {"x": x, "n": np.ones(3, np.float32)})["x"].devices() == {jax.devices()[index]}


def test_plan_of_uncommitted_and_numpy():
    plan = eqshard.plan_of(tree_of_all())
    assert plan.mesh == eqshard.MeshSpec(device=1)
    assert [leaf.path for leaf in plan] == ["['a']", "['key']", "['n']", "['s']"]
    assert all(leaf.spec == P() and leaf.why == "as it lies" for leaf in plan)


def test_plan_of_leaves_on_different_meshes_or_devices():
    a = eqshard.replicate(jnp.ones(8), eqshard.MeshSpec(x=8))
    b = eqshard.replicate(jnp.ones(8), eqshard.MeshSpec(y=8))
    with pytest.raises(eqshard.MeshError, match=r"different meshes: .*x=8.*y=8"):
        eqshard.plan_of({"a": a, "b": b})
    on = [jax.device_put(jnp.ones(8), device) for device in jax.devices()[:2]]
    with pytest.raises(eqshard.MeshError, match="2 devices"):
        eqshard.plan_of(on)


def test_plan_of_takes_a_mesh():
    plan = eqshard.plan_of({"n": np.ones(8)}, eqshard.MeshSpec(x=8))
    assert plan.mesh == eqshard.MeshSpec(x=8) and plan["['n']"].spec == P()


def test_structs_on_an_abstract_mesh():
    mesh = AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,))
    struct = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    assert eqshard.specs_of(struct) == P("x") and eqshard.plan_of(struct).mesh == eqshard.MeshSpec(x=4)


def test_a_sharding_that_no_spec_describes(monkeypatch):
    x = eqshard.constrain_to(jnp.ones(8), P("x"), eqshard.MeshSpec(x=8))

    class Odd:
        is_fully_replicated = False

    monkeypatch.setattr(eqshard._layout, "_sharding_of", lambda x: Odd())
    with pytest.raises(eqshard.ShardingError, match="no PartitionSpec describes"):
        eqshard.specs_of(x)
