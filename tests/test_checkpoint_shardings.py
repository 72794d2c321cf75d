"""Trees of shardings: laid over arrays, and compared with them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding

import eqshard
from eqshard.checkpoint import apply_shardings, same_structure


def arrays():
    return {"a": np.ones((8, 4), "f4"), "b": [jnp.zeros(8), "text", None], "k": jax.random.key(0)}


def test_every_kind_of_leaf(m24):
    sharding = NamedSharding(m24.build(), P("tp"))
    tree = {"a": lambda x: P("dp") if x.ndim == 2 else P(), "b": [sharding, None, None], "k": None}
    placed = apply_shardings(arrays(), tree, m24)
    assert placed["a"].sharding.spec == P("dp") and placed["b"][0].sharding == sharding
    assert placed["k"].is_fully_replicated and len(placed["k"].devices()) == 8
    assert placed["b"][1:] == ["text", None] and (placed["a"] == 1).all()


def test_one_layout_for_all(m24):
    for layout in (P("tp"), NamedSharding(m24.build(), P("tp")), lambda x: P("tp")):
        placed = apply_shardings({"a": np.ones(8, "f4"), "b": np.ones((4, 2), "f4")}, layout, m24)
        assert [x.sharding.spec for x in placed.values()] == [P("tp"), P("tp")]
    one = jax.devices()[3]
    assert apply_shardings(jnp.ones(3), SingleDeviceSharding(one)).devices() == {one}


def test_plans_none_and_no_mesh(m24):
    tree = {"a": np.ones((8, 4), "f4")}
    plan = eqshard.replicated_plan(tree, m24).at("a").set(P("tp"))
    assert apply_shardings(tree, plan)["a"].sharding.spec == P("tp")
    assert apply_shardings(tree, None)["a"] is tree["a"]
    assert apply_shardings(tree, {"a": None})["a"].devices() == {jax.devices()[0]}
    assert apply_shardings(tree, plan.shardings(tree))["a"].sharding.spec == P("tp")


def test_a_mismatch_names_the_leaf(m24):
    tree = {"a": np.ones((8, 4), "f4"), "b": np.ones(6, "f4")}
    with pytest.raises(eqshard.MismatchError, match=r"`\['b'\]` is only in the second"):
        apply_shardings(tree, {"a": P()}, m24)
    with pytest.raises(eqshard.IndivisibleError, match=r"\['b'\]"):
        apply_shardings(tree, {"a": P("dp"), "b": P("tp")}, m24)
    with pytest.raises(eqshard.MismatchError, match=r"\['b'\].*got a str"):
        apply_shardings(tree, {"a": P("dp"), "b": "tp"}, m24)
    with pytest.raises(eqshard.ShardingError, match=r"\['a'\].*`mesh`"):
        apply_shardings(tree, {"a": P("dp"), "b": None})
    with pytest.raises(eqshard.UnknownAxisError, match=r"\['a'\]"):
        apply_shardings(tree, {"a": P("typo"), "b": None}, m24)
    with pytest.raises(eqshard.MismatchError):
        apply_shardings(tree, eqshard.replicated_plan({"a": tree["a"]}, m24))
    with pytest.raises(eqshard.ShardingError, match="traced"):
        jax.jit(lambda x: apply_shardings(x, P(), m24))(tree)


def test_same_structure():
    model = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    specs = eqshard.replicated_plan(model, eqshard.MeshSpec(x=8)).specs(model)
    assert same_structure({"a": None, "b": [P("x"), 1]}, {"a": 3, "b": [2, None]})
    assert same_structure(specs, eqx.filter(model, eqx.is_array)) and str(same_structure(1, 2)) == "the same structure"
    found = same_structure({"a": 1, "b": 2}, {"b": 2, "c": 3})
    assert not found and found.differences == ("`['a']` is only in the first", "`['c']` is only in the second")
    with pytest.raises(eqshard.MismatchError, match="the trees and others differ"):
        found.check("the trees", "others")


def test_same_names_in_other_containers():
    found = same_structure({"a": [(1, 2), 3]}, {"a": [[1, 2], 3]})
    assert found.differences == ("`['a'][0]` is a tuple in the first, a list in the second",)
    one, two = (eqx.nn.Linear(2, 2, key=jax.random.key(0)), eqx.nn.Linear(2, 2, key=jax.random.key(0)))
    two = eqx.tree_at(lambda m: m.weight, two, jnp.zeros((3, 2)))
    assert same_structure(one, two)
    object.__setattr__(two, "out_features", 3)
    assert "static fields" in str(same_structure({"m": one}, {"m": two}))


def test_a_plan_has_shapes_and_dtypes():
    tree = {"a": jnp.ones((8, 4)), "f": len}
    plan = eqshard.replicated_plan(tree, eqshard.MeshSpec(x=8))
    assert same_structure(plan, tree) and same_structure(tree, plan) and same_structure(plan, plan)
    found = same_structure(plan, {"a": jnp.ones((8, 5))})
    assert found.differences == ("`['a']` is float32[8,4] in the first, float32[8,5] in the second",)
