"""Plans and layouts from logical names, in every form that `axes` can have."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P

import eqshard
from eqshard import (
    BATCH,
    EMBED,
    HEAD,
    HEAD_DIM,
    IndivisibleError,
    LENGTH,
    LogicalAxes,
    MeshSpec,
    MismatchError,
    MLP_INTERMEDIATE,
    PartitionAxis,
    QUERY_LENGTH,
    RankError,
    ShardingError,
    UnknownAxisError,
    VOCAB,
)


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


# --- one array ---


def test_partition_manager_shard(m24):
    """Inside a step and outside, on an array and on a tree."""
    x = jnp.arange(64.0).reshape(4, 2, 8)
    axes = (BATCH, LENGTH, EMBED)
    eager = eqshard.shard(x, axes, m24)
    traced = jax.jit(lambda x: eqshard.shard(x * 1, axes, m24))(x)
    for y in (eager, traced):
        assert y.sharding.spec == P("dp", None, "tp") and (np.asarray(y) == np.asarray(x)).all()
    tree = eqx.filter_jit(lambda t: eqshard.shard(t, (BATCH,), m24))({"a": x, "f": jnp.tanh, "n": None})
    assert eqshard.canonical(tree["a"].sharding.spec) == P("dp") and tree["f"] is jnp.tanh


def test_apply_logical_sharding(m24):
    """The correction that the seeds do by default has to be asked for; without it what does not divide is an error."""
    x = jnp.zeros((4, 6))
    with pytest.raises(IndivisibleError, match="6 % 4"):
        eqshard.shard(x, (BATCH, EMBED), m24)
    assert eqshard.shard(x, (BATCH, EMBED), m24, strict=False).sharding.spec == P("dp")


def test_partition_manager_resolve(m24):
    """A mode, the index of a dimension, or a value that holds axes and mode."""
    axes = (BATCH, QUERY_LENGTH, HEAD, HEAD_DIM)
    mesh = MeshSpec(dp=2, sp=2, tp=2)
    spec = lambda mode, length: eqshard.logical_spec(axes, mesh, mode=mode, shape=(8, length, 4, 16))
    assert spec("train", 8) == spec(1, 8) == P("dp", "sp", "tp")
    assert spec("decode", 1) == spec(1, 1) == P("dp", None, "tp")
    x = jnp.zeros((8, 1, 4, 16))
    assert eqshard.shard(x, axes, mesh, mode=1).sharding.spec == P("dp", None, "tp")
    assert eqshard.shard(x, LogicalAxes(axes, "decode"), mesh).sharding.spec == P("dp", None, "tp")
    assert eqshard.shard(jnp.zeros((8, 4, 4, 16)), LogicalAxes(axes, 1), mesh).sharding.spec == P("dp", "sp", "tp")


def test_unknown_names_are_errors(m24):
    with pytest.raises(UnknownAxisError, match=r"`\['x'\]`: unknown logical axis 'batc'.*Did you mean 'batch'"):
        eqshard.shard({"x": jnp.zeros((4, 4))}, ("batc",), m24)
    with pytest.raises(ShardingError, match="unknown `mode` 'trian'"):
        eqshard.shard(jnp.zeros((4, 4)), (BATCH,), m24, mode="trian")


def test_a_parallelism_that_the_mesh_lacks_is_not_used(m24):
    assert eqshard.logical_spec((BATCH, LENGTH, EMBED), m24) == P("dp", None, "tp")
    by_hand = PartitionAxis(sequence_parallel_axis="seq")
    with pytest.raises(UnknownAxisError, match="'seq'"):
        eqshard.logical_spec((BATCH, LENGTH), m24, names=by_hand)
    custom = PartitionAxis().register("latent", "sp")
    with pytest.raises(UnknownAxisError, match="'sp'"):
        eqshard.logical_spec(("latent",), m24, names=custom)


def test_too_many_names(m24):
    with pytest.raises(RankError, match="1 dimensions, but 2 logical axes"):
        eqshard.shard(jnp.zeros(4), (BATCH, EMBED), m24)


def test_a_name_instead_of_names(m24):
    with pytest.raises(ShardingError, match=r"write `\('batch',\)`"):
        eqshard.shard(jnp.zeros((4, 4)), BATCH, m24)


def test_logical_sharding(m24):
    assert eqshard.logical_sharding((BATCH, EMBED), m24) == NamedSharding(m24.build(), P("dp", "tp"))
    assert eqshard.logical_sharding((BATCH,), m24.abstract()).mesh == m24.abstract()


def test_inside_shard_map(m24):
    """There an array is a piece, and the manual axes are done."""
    mesh = m24.build()

    def body(x):
        assert x.shape == (2, 8)
        return eqshard.shard(x, (BATCH, EMBED), m24)

    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"}))
    x = jax.device_put(jnp.arange(32.0).reshape(4, 8), NamedSharding(mesh, P("dp")))
    assert (np.asarray(f(x)) == np.asarray(x)).all()


# --- trees of names, prefixes, rules ---

TREE = {"embed": f32(32, 16), "blocks": [{"up": f32(16, 64), "b": f32(64)}, {"up": f32(16, 64), "b": f32(64)}]}
UP = (None, MLP_INTERMEDIATE)


def test_a_tree_of_names(m24):
    block = {"up": UP, "b": (MLP_INTERMEDIATE,)}
    plan = eqshard.logical_plan(TREE, m24, {"embed": (VOCAB, None), "blocks": [block, block]})
    assert plan["['embed']"].spec == P("tp")
    assert plan["['blocks'][1]['up']"].spec == P(None, "tp") and plan["['blocks'][0]['b']"].spec == P("tp")
    assert plan["['embed']"].why == "logical axes ('vocab', None)"


def test_a_prefix(m24):
    plan = eqshard.logical_plan(TREE, m24, {"embed": (VOCAB,), "blocks": None})
    assert plan["['embed']"].spec == P("tp") and plan["['blocks'][0]['up']"].spec == P()
    assert {leaf.spec for leaf in eqshard.logical_plan(TREE, m24, (VOCAB,))} == {P("tp")}
    assert {leaf.spec for leaf in eqshard.logical_plan(TREE, m24, None)} == {P()}
    assert eqshard.logical_plan(f32(8, 8), m24, (BATCH, EMBED))[""].spec == P("dp", "tp")


def test_rules(m24):
    plan = eqshard.logical_plan(TREE, m24, [("embed", (VOCAB, None)), ("up", UP), ("", None)])
    assert plan["['embed']"].spec == P("tp") and plan["['blocks'][1]['b']"].spec == P()
    with pytest.raises(MismatchError, match=r"no rule in `axes` matches `\['blocks'\]\[0\]\['b'\]`"):
        eqshard.logical_plan(TREE, m24, [("embed", (VOCAB, None)), ("up", UP)])
    with pytest.raises(MismatchError, match=r"`ebmed`.* matches no leaf"):
        eqshard.logical_plan(TREE, m24, [("ebmed", (VOCAB,)), ("", None)])
    assert len(eqshard.logical_plan(TREE, m24, [("ebmed", (VOCAB,)), ("", None)], unused="ignore")) == 5
    with pytest.raises(ShardingError, match="no regular expression"):
        eqshard.logical_plan(TREE, m24, [("(embed", (VOCAB,)), ("", None)])


def test_names_for_the_leaves_of_tuples_and_lists(m24):
    a, b = f32(8, 8), f32(8, 8)
    each = ((BATCH,), (EMBED,))
    plan = eqshard.logical_plan((a, b), m24, each)
    assert [leaf.spec for leaf in plan] == [P("dp"), P("tp")]
    plan = eqshard.logical_plan([a, b], m24, [(EMBED, None), (BATCH, None)])
    assert [leaf.spec for leaf in plan] == [P("tp"), P("dp")]
    plan = eqshard.logical_plan([a, b], m24, [(BATCH, EMBED), None])
    assert [leaf.spec for leaf in plan] == [P("dp", "tp"), P()]
    assert {leaf.spec for leaf in eqshard.logical_plan((a, b), m24, (BATCH, EMBED))} == {P("dp", "tp")}  # of both

    class Pair(NamedTuple):
        a: object
        b: object

    plan = eqshard.logical_plan(Pair(a, b), m24, Pair((BATCH,), (EMBED,)))
    assert [leaf.spec for leaf in plan] == [P("dp"), P("tp")]


def test_an_equinox_model(m24):
    model = eqx.nn.MLP(16, 16, 64, 1, key=jax.random.key(0))
    axes = eqx.tree_at(
        lambda m: [x for layer in m.layers for x in (layer.weight, layer.bias)],
        model,
        [(MLP_INTERMEDIATE, None), (MLP_INTERMEDIATE,), (None, MLP_INTERMEDIATE), None],
        is_leaf=lambda x: x is None,
    )
    plan = eqshard.logical_plan(model, m24, axes)
    assert [leaf.spec for leaf in plan] == [P("tp"), P("tp"), P(None, "tp"), P()]
    assert eqshard.apply(plan, model).layers[0].weight.sharding.spec == P("tp")


def test_axes_that_do_not_match_the_tree(m24):
    with pytest.raises(MismatchError, match=r"says nothing of `\['blocks'\]`"):
        eqshard.logical_plan(TREE, m24, {"embed": (VOCAB,)})
    with pytest.raises(MismatchError, match=r"`axes` has `\['more'\]`"):
        eqshard.logical_plan(TREE, m24, {"embed": (VOCAB,), "blocks": None, "more": None})
    with pytest.raises(ShardingError, match=r"`axes` for `\['embed'\]` must be a tuple of names"):
        eqshard.logical_plan(TREE, m24, {"embed": 3, "blocks": None})
    with pytest.raises(RankError, match=r"`\['embed'\]` has 2 dimensions"):
        eqshard.logical_plan(TREE, m24, {"embed": (VOCAB, None, None), "blocks": None})


def test_modes_and_logical_axes_in_a_tree(m24):
    mesh = MeshSpec(dp=2, sp=2, tp=2)
    axes = (BATCH, QUERY_LENGTH, HEAD)
    tree = {"a": f32(8, 8, 8), "b": f32(8, 8, 8)}
    assert eqshard.logical_plan(tree, mesh, axes, mode="decode")["['a']"].spec == P("dp", None, "tp")
    plan = eqshard.logical_plan(tree, mesh, {"a": LogicalAxes(axes, "decode"), "b": axes})
    assert [leaf.spec for leaf in plan] == [P("dp", None, "tp"), P("dp", "sp", "tp")]


def test_what_does_not_divide(m24):
    with pytest.raises(IndivisibleError, match="6 % 4"):
        eqshard.logical_plan({"w": f32(6)}, m24, (EMBED,))
    leaf = eqshard.logical_plan({"w": f32(6)}, m24, (EMBED,), strict=False)["['w']"]
    assert leaf.spec == P() and leaf.given_up[0].axes == ("tp",)


def test_every_form_of_leaf_and_mesh(m24):
    seen = []
    for mesh in (m24, m24.build(), m24.abstract()):
        for x in (f32(8, 8), np.zeros((8, 8), np.float32), jnp.zeros((8, 8))):
            seen.append(eqshard.logical_plan(x, mesh, (BATCH, EMBED))[""].spec)
        jax.jit(lambda x, m=mesh: seen.append(eqshard.logical_plan(x, m, (BATCH, EMBED))[""].spec))(jnp.zeros((8, 8)))
    assert seen == [P("dp", "tp")] * 12


@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=3, max_size=3),
    st.lists(st.sampled_from([BATCH, EMBED, LENGTH, HEAD_DIM, None]), max_size=3, unique=True),
    st.sampled_from(["train", "prefill", "decode", "insert"]),
)
def test_plans_that_are_made_are_valid(shape, axes, mode):
    mesh, tree = MeshSpec(fsdp=2, sp=2, tp=2), {"x": f32(*shape)}
    plan = eqshard.logical_plan(tree, mesh, tuple(axes), mode=mode, strict=False)
    assert not [i for i in eqshard.validate(plan, tree) if i.severity == "error"]
    full = eqshard.logical_spec(axes, mesh, mode=mode)
    assert plan["['x']"].spec == eqshard.fit_spec(full, shape, mesh).spec
