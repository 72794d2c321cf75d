"""What a correcting `with_sharding_constraint` and its companions should have answered, name by name."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import eqshard


def test_names_in_current_mesh(m24):
    assert m24.has("dp", "tp") and not m24.has("dp", "fsdp")


def test_make_shard_and_gather_fns(m24):
    """Numpy is sharded; what does not divide is an error, with one process as with two."""
    tree = {"w": np.arange(64, dtype=np.float32).reshape(8, 8)}
    plan = eqshard.replicated_plan(tree, m24).at("w").set(P("dp", "tp"))
    shard, gather = eqshard.shard_and_gather_fns(plan)
    placed = shard["['w']"](tree["w"])
    assert isinstance(placed, jax.Array) and placed.sharding.shard_shape((8, 8)) == (4, 2)
    np.testing.assert_array_equal(gather["['w']"](placed), tree["w"])
    row = eqshard.LeafPlan("['w']", (7, 8), "float32", P("dp"), P("dp"))
    shard, _ = eqshard.shard_and_gather_fns(eqshard.ShardingPlan(m24, [row]))
    with pytest.raises(eqshard.IndivisibleError, match="7 % 2"):
        shard["['w']"](np.ones((7, 8), np.float32))


def test_get_names_from_partition_spec():
    specs = {"a": P(("fsdp", "dp"), None, "tp"), "b": {"c": P("tp"), "d": P(P.UNCONSTRAINED)}, "e": None}
    assert eqshard.axis_names(specs) == ("fsdp", "dp", "tp")


def in_and_out(x, spec, mesh, **kwargs):
    """The canonical spec that an array gets, which must be the same inside jit and outside."""
    outside = eqshard.constrain_to(x, spec, mesh, **kwargs)
    inside = jax.jit(lambda x: eqshard.constrain_to(x, spec, mesh, **kwargs))(x)
    assert inside.sharding.is_equivalent_to(outside.sharding, x.ndim)
    np.testing.assert_array_equal(inside, outside)
    return outside.sharding.spec


@pytest.mark.parametrize("shape", [(8, 8), (6, 8), (3, 8), (8, 6)])
def test_with_sharding_constraint_keeps_the_longest_prefix(m24, shape):
    spec = P(("dp", "tp"))
    expected = {8: P(("dp", "tp")), 6: P("dp"), 3: P()}[shape[0]]
    assert in_and_out(jnp.ones(shape), spec, m24, strict=False) == expected
    given_up = eqshard.fit_spec(spec, shape, m24).given_up
    assert [g.axes for g in given_up] == {8: [], 6: [("tp",)], 3: [("dp", "tp")]}[shape[0]]


@pytest.mark.parametrize("strict", [True, False])
def test_with_sharding_constraint_never_corrects_a_typo(m24, strict):
    x = jnp.ones((8, 8))
    for spec, error in (
        (P("pd"), eqshard.UnknownAxisError),
        (P(("dp", "pt")), eqshard.UnknownAxisError),
        (P("dp", "dp"), eqshard.DuplicateAxisError),
        (P(None, None, "tp"), eqshard.RankError),
    ):
        with pytest.raises(error):
            eqshard.constrain_to(x, spec, m24, strict=strict)
        with pytest.raises(error):
            jax.jit(lambda x, spec=spec: eqshard.constrain_to(x, spec, m24, strict=strict))(x)


def test_with_sharding_constraint_is_never_silently_nothing(m24):
    """An indivisible constraint inside jit: JAX itself replicates without a word."""
    with pytest.raises(eqshard.IndivisibleError, match="7 % 2"):
        jax.jit(lambda x: eqshard.constrain_to(x, P("dp"), m24))(jnp.ones((7, 8)))


def test_with_sharding_constraint_needs_no_ambient_mesh(m24):
    assert in_and_out(jnp.ones((8, 8)), P("dp"), m24) == P("dp")
    with jax.set_mesh(m24.build()):
        assert in_and_out(jnp.ones((8, 8)), P("dp"), m24) == P("dp")


def test_with_sharding_constraint_inside_shard_map(m24):
    mesh = m24.build()
    mapped = jax.shard_map(
        lambda x: eqshard.constrain_to(x, P("dp"), mesh), mesh=mesh, in_specs=P("dp"), out_specs=P("dp")
    )
    x = eqshard.constrain_to(jnp.arange(8.0), P("dp"), m24)
    np.testing.assert_array_equal(jax.jit(mapped)(x), np.arange(8.0))


def test_get_corrected_named_sharding(m24):
    found = eqshard.fit_sharding(P(("dp", "tp"), "tp"[:0] or None), (6, 8), m24, memory_kind="pinned_host")
    assert found == NamedSharding(m24.build(), P("dp"), memory_kind="pinned_host")
    auto = eqshard.MeshSpec(dp=2, tp=4)
    assert eqshard.fit_sharding(P("tp", P.UNCONSTRAINED), (6, 8), auto).spec == P(None, P.UNCONSTRAINED)


@pytest.mark.parametrize("read", [eqshard.shardings_of, eqshard.specs_of])
def test_extract_sharding_structure(m24, read):
    """None leaves do not change the structure."""
    tree = {"a": jnp.ones(8), "none": None, "f": len, "m": eqx.nn.Linear(2, 2, use_bias=False, key=jax.random.key(0))}
    found = read(eqshard.replicate(tree, m24))
    assert jax.tree.structure(found) == jax.tree.structure(eqx.filter(tree, eqx.is_array))
    assert found["none"] is None and found["f"] is None and found["m"].bias is None


def test_get_shardings_with_structure(m24):
    placed = eqshard.constrain_to(jnp.ones((8, 8)), P("dp", "tp"), m24)
    assert eqshard.shardings_of([placed, np.ones(3)]) == [placed.sharding, None]


def test_get_partition_spec(m24):
    placed = eqshard.constrain_to(jnp.ones((8, 8)), P("dp", "tp"), m24)
    tree = {"placed": placed, "single": jnp.ones(3), "host": np.ones(3), "number": 3}
    assert eqshard.specs_of(tree) == {"placed": P("dp", "tp"), "single": P(), "host": P(), "number": None}


def test_get_incontext_mesh(m24):
    assert eqshard.MeshSpec.of({"w": eqshard.replicate(jnp.ones(3), m24), "n": 3}) == m24


def test_get_axes_size_in_mesh(m24):
    assert m24.size("tp") == 4 and m24.size(["dp", "tp"]) == 8


def test_get_mesh_axis_names(m24):
    assert m24.names == ("dp", "tp")


def test_get_mesh_axis_size_and_get_submesh_device_index(m24):
    spec = P(("dp", "tp"))

    @jax.jit
    @jax.shard_map(mesh=m24.build(), in_specs=spec, out_specs=spec)
    def f(x):
        return x + eqshard.axis_size(("dp", "tp")) * 10 + eqshard.axis_index(("dp", "tp"))

    x = eqshard.constrain_to(jnp.zeros(8, jnp.int32), spec, m24)
    np.testing.assert_array_equal(f(x), 80 + np.arange(8))
    with pytest.raises(eqshard.UnknownAxisError):
        eqshard.axis_size("dp")


def test_get_safe_hash_int():
    plan = eqshard.replicated_plan(jax.ShapeDtypeStruct((8,), jnp.float32), eqshard.MeshSpec(x=8))
    assert plan.fingerprint() == eqshard.ShardingPlan.from_json(plan.to_json()).fingerprint()
    assert int(plan.fingerprint(), 16) > 0
