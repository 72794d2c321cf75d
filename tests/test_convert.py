"""Plans carried over to other meshes: the peers' table with the right answers, and the laws."""

import jax
import pytest
from hypothesis import given, strategies as st
from jax.sharding import PartitionSpec as P

import eqshard
from eqshard import DuplicateAxisError, MeshSpec, ShardingError, UnknownAxisError


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def plan_of(mesh, spec, shape=(64, 64)):
    return eqshard.replicated_plan(f32(*shape), mesh).at("").set(spec)


def converted(plan, mesh, **how):
    return eqshard.convert_plan(plan, mesh, **how)[""].spec


# --- the table of the peers: from (dp 2, tp 4) to (dp 4, tp 2) ---


@pytest.mark.parametrize("strategy", ["preserve_layout", "preserve_balance"])
def test_peers_whole_stays_whole(m24, make_mesh, strategy):
    assert converted(plan_of(m24, P()), make_mesh(dp=4, tp=2), strategy=strategy) == P()


def test_peers_an_axis_stays_on_its_dimension(m24, make_mesh):
    assert converted(plan_of(m24, P(None, "tp")), make_mesh(dp=4, tp=2)) == P(None, "tp")


@pytest.mark.parametrize("strategy", ["preserve_layout", "preserve_balance"])
@pytest.mark.parametrize("spec", [P(), P("tp"), P(None, "tp"), P("dp", "tp"), P(("tp", "dp")), P(None, ("dp", "tp"))])
def test_peers_the_same_mesh_changes_nothing(m24, spec, strategy):
    plan = plan_of(m24, spec)
    assert eqshard.convert_plan(plan, m24, strategy=strategy) is plan
    assert eqshard.convert_plan(plan, m24.build(), strategy=strategy) == plan


def test_peers_each_leaf_by_its_own_shape(m24, make_mesh):
    tree = {"a": f32(64, 64), "b": [f32(6, 4), {"c": f32(12)}]}
    plan = eqshard.replicated_plan(tree, m24).at("a").set(P("dp", "tp"))
    plan = plan.at("['b'][0]").set(P("dp", "tp")).at("['b'][1]['c']").set(P("tp"))
    new = eqshard.convert_plan(plan, make_mesh(dp=4, tp=2))
    assert new.specs() == {"['a']": P("dp", "tp"), "['b'][0]": P(None, "tp"), "['b'][1]['c']": P("tp")}
    assert [(g.dim, g.size, g.axes) for g in new["['b'][0]"].given_up] == [(0, 6, ("dp",))]


def test_peers_tuples_and_abstract_meshes(m24, make_mesh):
    plan = plan_of(m24, P(("dp", "tp"), None))
    assert converted(plan, make_mesh(dp=4, tp=2).abstract()) == P(("dp", "tp"))
    assert converted(plan, make_mesh(dp=4, tp=2).build()) == P(("dp", "tp"))
    assert converted(plan_of(m24, P(("dp", "tp")), (8, 3)), make_mesh(dp=2, tp=3)) == P("dp")


def test_peers_an_unknown_strategy_lists_the_known(m24):
    with pytest.raises(ShardingError, match="'foo': it is one of 'preserve_layout', 'preserve_balance'"):
        eqshard.convert_plan(plan_of(m24, P()), m24, strategy="foo")


def test_convert_sharding_strategy(m24, make_mesh):
    """By balance: as many pieces as before, with whatever axes the new mesh has."""
    plan = plan_of(m24, P(None, "tp"))
    new = eqshard.convert_plan(plan, make_mesh(dp=4, tp=2), strategy="preserve_balance")
    assert new[""].spec == P(None, "dp") and eqshard.shard_factor(new[""].spec, new.mesh) == 4
    assert converted(plan, make_mesh(x=2, y=2, z=2), strategy="preserve_balance") == P(None, ("x", "y"))
    assert converted(plan, make_mesh(x=8), strategy="preserve_balance") == P(None, "x")  # 8 is nearer to 4 than 1
    assert "4 pieces and now 8" in eqshard.convert_plan(plan, make_mesh(x=8), strategy="preserve_balance")[""].why


# --- names ---


def test_rename(m24, make_mesh):
    new = make_mesh(data=4, model=2)
    assert converted(plan_of(m24, P("dp", "tp")), new, rename={"tp": "model", "dp": "data"}) == P("data", "model")
    swap = converted(plan_of(m24, P("dp", "tp")), make_mesh(dp=4, tp=2), rename={"tp": "dp", "dp": "tp"})
    assert swap == P("tp", "dp")
    leaf = eqshard.convert_plan(plan_of(m24, P("dp", "tp")), new, rename={"tp": "model"})[""]
    assert leaf.spec == P(None, "model") and leaf.given_up[0].axes == ("dp",)
    assert leaf.why.startswith("from P('dp', 'tp') on MeshSpec(dp=2, tp=4")


def test_renames_that_make_no_sense(m24, make_mesh):
    plan, new = plan_of(m24, P("dp", "tp")), make_mesh(dp=4, model=2)
    with pytest.raises(UnknownAxisError, match="Did you mean 'model'"):
        eqshard.convert_plan(plan, new, rename={"tp": "modle"})
    with pytest.raises(UnknownAxisError, match="'tq'"):
        eqshard.convert_plan(plan, new, rename={"tq": "model"})
    with pytest.raises(DuplicateAxisError, match="'dp' twice"):
        eqshard.convert_plan(plan, new, rename={"tp": "dp"})


def test_another_axis_type_keeps_the_layout(m24):
    other = m24.replace(axis_type="auto" if m24.axis_types[0] == "explicit" else "explicit")
    plan = plan_of(m24, P("tp", "dp"))
    new = eqshard.convert_plan(plan, other)
    assert new.mesh == other and new[""].spec == P("tp", "dp")


def test_use_memory_kind_and_unconstrained_are_carried(m24, make_mesh):
    mesh = make_mesh(dp=4, tp=2)
    plan = eqshard.replicated_plan(f32(64, 64), m24).at("").set(P("dp"), use=P(None, "tp"), memory_kind="pinned_host")
    leaf = eqshard.convert_plan(plan, mesh)[""]
    assert (leaf.spec, leaf.use, leaf.memory_kind) == (P("dp"), P(None, "tp"), "pinned_host")
    for strategy in ("preserve_layout", "preserve_balance"):
        assert converted(plan_of(m24, P(P.UNCONSTRAINED, "tp")), mesh, strategy=strategy) == P(P.UNCONSTRAINED, "tp")


# --- laws ---

axis_sizes = st.lists(st.sampled_from([1, 2, 4]), min_size=2, max_size=3)
specs = st.permutations([0, 0, 1, 2, None])  # the dimension of each axis
dims = st.lists(st.sampled_from([64, 128, 192]), min_size=3, max_size=3).map(tuple)


def laid(mesh, places, shape):
    entries = [tuple(n for n, p in zip(mesh.names, places) if p == d) for d in range(3)]
    return plan_of(mesh, P(*entries), shape)


@given(axis_sizes, axis_sizes, specs, dims)
def test_there_and_back_on_commensurate_meshes(sizes, others, places, shape):
    """All sizes divide all dimensions, and no axis of size 1 loses its place on the way."""
    n = min(len(sizes), len(others))
    names = [f"a{i}" for i in range(n)]
    here = MeshSpec(dict(zip(names, sizes)))
    there = MeshSpec({name: size if here.size(name) == 1 else max(2, size) for name, size in zip(names, others)})
    plan = laid(here, places, shape)
    moved = eqshard.convert_plan(plan, there)
    assert eqshard.convert_plan(moved, here) == plan
    assert not [i for i in eqshard.validate(moved) if i.severity == "error"]
    renamed = MeshSpec({f"b{i}": s for i, s in enumerate(there.sizes)})
    to, back = {f"a{i}": f"b{i}" for i in range(n)}, {f"b{i}": f"a{i}" for i in range(n)}
    assert eqshard.convert_plan(eqshard.convert_plan(plan, renamed, rename=to), here, rename=back) == plan


@given(axis_sizes, axis_sizes, specs, dims)
def test_balance_there_and_back_keeps_the_number_of_pieces(sizes, others, places, shape):
    here = MeshSpec({f"a{i}": s for i, s in enumerate(sizes)})
    there = MeshSpec({f"b{i}": s for i, s in enumerate([*others, 2, 2, 2, 2, 2, 2])})  # has every power up to 64
    plan = laid(here, places, shape)
    moved = eqshard.convert_plan(plan, there, strategy="preserve_balance")
    assert not [i for i in eqshard.validate(moved) if i.severity == "error"]
    pieces = eqshard.shard_factor(plan[""].spec, here)
    assert eqshard.shard_factor(moved[""].spec, there) == min(pieces, 64)
    back = eqshard.convert_plan(moved, here, strategy="preserve_balance")
    assert eqshard.shard_factor(back[""].spec, here) == pieces
    assert moved == eqshard.convert_plan(plan, there, strategy="preserve_balance")
