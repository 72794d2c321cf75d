"""Fully sharded plans, alone and on top of others."""

import equinox as eqx
import jax
import pytest
from hypothesis import given, strategies as st
from jax.sharding import PartitionSpec as P

import eqshard
from eqshard import DuplicateAxisError, MeshSpec, MismatchError, ShardingError, UnknownAxisError


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def test_stored_in_pieces_and_used_whole(make_mesh):
    plan = eqshard.fsdp_plan({"w": f32(512, 1024), "b": f32(8)}, make_mesh(fsdp=8))
    assert (plan["['w']"].spec, plan["['w']"].use) == (P(None, "fsdp"), P())
    assert (plan["['b']"].spec, plan["['b']"].use) == (P(), P())
    assert plan["['w']"].why == "stored over fsdp" and plan["['b']"].why.startswith("small")


def test_the_largest_dimension_that_divides(make_mesh):
    plan = eqshard.fsdp_plan({"w": f32(50257, 768), "v": f32(7, 99991)}, make_mesh(fsdp=8))
    assert plan["['w']"].spec == P(None, "fsdp")
    assert plan["['v']"].spec == P() and plan["['v']"].why == "no dim divides over fsdp"


def test_axes_that_act_as_one(m24):
    plan = eqshard.fsdp_plan({"w": f32(512, 512), "v": f32(130, 513)}, m24, axis=("dp", "tp"))
    assert plan["['w']"].spec == P(("dp", "tp"))
    assert plan["['v']"].spec == P("dp") and plan["['v']"].why == "stored over dp; tp left out: divides no dim"


def test_an_axis_of_size_one_stores_nothing(make_mesh):
    leaf = eqshard.fsdp_plan(f32(512, 512), make_mesh(fsdp=1, tp=8))[""]
    assert leaf.spec == P() and leaf.why == "the axis has size 1"


def test_unknown_axis(m24):
    with pytest.raises(UnknownAxisError, match="'fsdp'"):
        eqshard.fsdp_plan(f32(512, 512), m24)


class TestOnTop:
    def base(self, mesh, spec=None):
        spec = P("tp") if spec is None else spec
        return eqshard.rule_plan({"w": f32(512, 1024), "b": f32(2**17)}, mesh, [("w", spec), ("b", P("tp"))])

    def tree(self):
        return {"w": f32(512, 1024), "b": f32(2**17)}

    def test_beside_tensor_parallel(self, make_mesh):
        mesh = make_mesh(fsdp=4, tp=2)
        plan = eqshard.fsdp_plan(self.tree(), mesh, base=self.base(mesh))
        assert (plan["['w']"].spec, plan["['w']"].use) == (P("tp", "fsdp"), P("tp"))
        assert (plan["['b']"].spec, plan["['b']"].use) == (P(("tp", "fsdp")), P("tp"))
        assert "in use: rule 0 (`w`)" in plan["['w']"].why

    def test_twice_keeps_the_first_storage(self, m222):
        once = eqshard.fsdp_plan(self.tree(), m222, axis="fsdp", base=self.base(m222))
        twice = eqshard.fsdp_plan(self.tree(), m222, axis="dp", base=once)
        assert twice["['w']"].spec == P(("tp", "dp"), "fsdp") or twice["['w']"].spec == P("tp", ("fsdp", "dp"))
        assert twice["['w']"].use == P("tp")

    def test_the_axis_is_taken(self, make_mesh):
        mesh = make_mesh(fsdp=4, tp=2)
        with pytest.raises(DuplicateAxisError, match=r"`\['w'\]` over P\('fsdp'\)"):
            eqshard.fsdp_plan(self.tree(), mesh, base=self.base(mesh, P("fsdp")))

    def test_another_mesh(self, make_mesh):
        with pytest.raises(ShardingError, match="`base` is a plan for"):
            eqshard.fsdp_plan(self.tree(), make_mesh(fsdp=4, tp=2), base=self.base(make_mesh(fsdp=2, tp=4)))

    def test_another_tree(self, make_mesh):
        mesh = make_mesh(fsdp=4, tp=2)
        with pytest.raises(MismatchError, match="no leaf"):
            eqshard.fsdp_plan({"c": f32(8, 8)}, mesh, base=self.base(mesh))
        with pytest.raises(MismatchError, match="planned by `base` as"):
            eqshard.fsdp_plan({"w": f32(8, 8)}, mesh, base=self.base(mesh))

    def test_what_a_device_holds_decides_what_is_small(self, make_mesh):
        mesh = make_mesh(fsdp=4, tp=2)
        plan = eqshard.fsdp_plan(self.tree(), mesh, base=self.base(mesh), min_bytes=2**19)
        assert plan["['w']"].spec == P("tp", "fsdp") and plan["['b']"].spec == P("tp")

    def test_memory_kinds_and_unconstrained_dims_stay(self, make_mesh):
        mesh = make_mesh(fsdp=4, tp=2)
        base = self.base(mesh).at("w").set(P(P.UNCONSTRAINED, "tp"), memory_kind="pinned_host")
        leaf = eqshard.fsdp_plan(self.tree(), mesh, base=base)["['w']"]
        assert leaf.spec == P(P.UNCONSTRAINED, ("tp", "fsdp")) and leaf.memory_kind == "pinned_host"


def test_a_model_with_tensor_parallel_rules(make_mesh):
    mesh = make_mesh(fsdp=4, tp=2)
    model = eqx.nn.MLP(256, 256, 1024, 1, key=jax.random.key(0))
    tensor_parallel = eqshard.rule_plan(model, mesh, eqshard.tp_rules(model))
    plan = eqshard.fsdp_plan(model, mesh, base=tensor_parallel)
    placed = eqshard.apply(plan, model)
    assert placed.layers[0].weight.sharding.spec == P("tp", "fsdp")
    assert placed.layers[1].weight.sharding.spec == P("fsdp", "tp")


@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=2, max_size=3),
    st.lists(st.lists(st.sampled_from([1, 2, 3, 8, 12, 64, 96]), max_size=3).map(tuple), max_size=5),
)
def test_plans_are_valid_and_gather_to_the_base(sizes, shapes):
    mesh = MeshSpec({f"a{i}": n for i, n in enumerate(sizes)})
    tree = [f32(*s) for s in shapes]
    base = eqshard.auto_plan(tree, mesh, names=mesh.names[1:], min_bytes=0)
    for plan in (
        eqshard.fsdp_plan(tree, mesh, mesh.names, min_bytes=0),
        eqshard.fsdp_plan(tree, mesh, mesh.names[0], base=base, min_bytes=0),
    ):
        assert not [i for i in eqshard.validate(plan, tree) if i.severity == "error"]
    for leaf in plan:
        assert leaf.use == base[leaf.path].spec
        assert eqshard.shard_factor(leaf.spec, mesh) % eqshard.shard_factor(leaf.use, mesh) == 0
