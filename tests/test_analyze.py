import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import AxisType, PartitionSpec as P

import eqshard


U = P.UNCONSTRAINED
S = jax.ShapeDtypeStruct


def placed_bytes(tree, mesh):
    """What each device of the mesh really holds: the oracle."""
    arrays = {id(x): x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)}
    held = dict.fromkeys(mesh.devices.flat, 0)
    for x in arrays.values():
        for shard in x.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return tuple(held.values())


# ---- 20 trees x 5 meshes


@functools.cache
def keys(impl):
    return jax.random.wrap_key_data(np.zeros((8, 4 if impl == "rbg" else 2), "uint32"), impl=impl)


def random_tree(seed):
    rng = np.random.default_rng(seed)
    dtypes = ["float32", "bfloat16", "int8", "int4", "uint4", "float8_e4m3fn", "bool", "complex64", "float16"]

    def leaf():
        shape = tuple(int(n) for n in rng.choice([1, 2, 3, 4, 6, 8, 12, 16, 24], size=rng.integers(0, 4)))
        return np.zeros(shape, jnp.dtype(str(rng.choice(dtypes))))  # numpy: placing it compiles nothing

    tied = leaf()
    return {
        "layers": [{"w": leaf(), "b": leaf()} for _ in range(3)],
        "tied": [tied, tied],
        "empty": np.zeros((0, 8), "float32"),
        "keys": keys("rbg" if seed % 2 else "threefry2x32"),
        "name": "a string",
        "none": None,
    }


MESHES = {
    "8": {"x": 8},
    "2x4": {"dp": 2, "tp": 4},
    "2x2x2": {"dp": 2, "fsdp": 2, "tp": 2},
    "1x4": {"one": 1, "x": 4},
    "3x2": {"a": 3, "b": 2},
}


def random_plan(tree, mesh, seed):
    """Each leaf over a random choice of axes that fits it."""
    rng = np.random.default_rng(seed)
    plan = eqshard.replicated_plan(tree, mesh)
    rows = []
    for leaf in plan:
        axes = [str(name) for name in rng.permutation(mesh.names)]
        entries = [tuple(axes.pop() for _ in range(rng.integers(0, 3)) if axes) for _ in leaf.shape]
        spec = eqshard.fit_spec(P(*entries), leaf.shape, mesh).spec
        rows.append(eqshard.LeafPlan(leaf.path, leaf.shape, leaf.dtype, spec, spec))
    return eqshard.ShardingPlan(mesh, rows)


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("seed", range(20))
def test_bytes_are_those_of_the_placed_arrays(seed, mesh):
    mesh = eqshard.MeshSpec(mesh)
    tree = random_tree(seed)
    plan = random_plan(tree, mesh, seed)
    placed = eqshard.apply(plan, tree)
    found = eqshard.analyze(plan, placed)
    assert found.bytes_per_device == placed_bytes(placed, plan.build())
    assert found.bytes_per_device == eqshard.analyze(plan, tree).bytes_per_device
    loose = eqshard.analyze(plan)  # which does not know of the tied leaf
    twice = placed["tied"][0].addressable_shards[0].data.nbytes
    tied_once = plan["['tied'][0]"].spec == plan["['tied'][1]"].spec
    assert loose.bytes_per_device == tuple(n + twice * tied_once for n in found.bytes_per_device)


# ---- numbers


def test_totals(m24):
    tree = {"w": S((8, 16), "float32"), "b": S((16,), "bfloat16"), "n": S((), "int32"), "f": len}
    plan = eqshard.replicated_plan(tree, m24).at("w").set(P("dp", "tp"))
    found = eqshard.analyze(plan)
    assert (found.leaves, found.params, found.sharded_params, found.replicated_params) == (3, 145, 128, 17)
    assert (found.nbytes, found.sharded_bytes, found.replicated_bytes) == (548, 512, 36)
    assert found.bytes_per_device == (64 + 36,) * 8
    assert found.balance == 1 and found.replication == pytest.approx(800 / 548)
    assert found.memory_kinds == (("default", 100),)
    dp, tp = found.axes
    assert (dp.name, dp.size, dp.leaves, dp.nbytes, dp.share) == ("dp", 2, 1, 512, 512 / 548)
    assert tp.name == "tp" and tp.leaves == 1
    assert [(leaf.path, leaf.bytes_per_device) for leaf in found.largest] == [
        ("['w']", 64),
        ("['b']", 32),
        ("['n']", 4),
    ]


def test_all_whole_and_all_split(m24):
    tree = {"w": S((64, 64), "float32")}
    whole = eqshard.replicated_plan(tree, m24)
    assert eqshard.analyze(whole).replication == 8 and eqshard.analyze(whole).sharded_params == 0
    split = whole.at("w").set(P(("dp", "tp")))
    assert eqshard.analyze(split).replication == 1 and eqshard.analyze(split).replicated_bytes == 0


def test_in_use_is_counted_apart(m24):
    tree = [S((64, 64), "float32"), S((64, 64), "float32"), S((8,), "float32")]
    plan = eqshard.replicated_plan(tree, m24).at(r"\[[01]\]").set(P("tp", "dp"), use=P(None, "dp"))
    found = eqshard.analyze(plan)
    assert found.bytes_per_device == (2 * 2048 + 32,) * 8
    assert found.use_bytes_per_device == (2 * 8192 + 32,) * 8
    assert found.gathered_bytes == 8192
    assert eqshard.analyze(eqshard.replicated_plan(tree, m24)).gathered_bytes == 0


def test_memory_kinds_are_told_apart(m24):
    tree = [S((64,), "float32"), S((64,), "float32")]
    plan = eqshard.replicated_plan(tree, m24).at("[1]").set(P("tp"), memory_kind="pinned_host")
    assert eqshard.analyze(plan).memory_kinds == (("default", 256), ("pinned_host", 64))


def test_unconstrained_counts_whole_or_as_it_lies():
    mesh = eqshard.MeshSpec(dp=2, tp=4)
    tree = {"w": jnp.ones((8, 8))}
    row = eqshard.LeafPlan("['w']", (8, 8), "float32", P(U, "tp"), P(U, "tp"))
    plan = eqshard.ShardingPlan(mesh, (row,))
    assert eqshard.analyze(plan).bytes_per_device == (64,) * 8
    assert eqshard.analyze(plan, tree).bytes_per_device == (64,) * 8
    laid = eqshard.apply(eqshard.replicated_plan(tree, mesh).at("w").set(P("dp")), tree)
    placed = eqshard.apply(plan, laid)
    assert eqshard.analyze(plan, laid).bytes_per_device == (32,) * 8 == placed_bytes(placed, plan.build())


def test_uneven_pieces_are_counted_device_by_device():
    row = eqshard.LeafPlan(".w", (10, 2), "float32", P("x"), P("x"))
    found = eqshard.analyze(eqshard.ShardingPlan(eqshard.MeshSpec(x=4, y=2), (row,)))
    assert found.bytes_per_device == (24, 24, 24, 24, 24, 24, 8, 8)
    assert found.balance == pytest.approx(20 / 24)


@pytest.mark.parametrize("spec", [P("zz"), P("x", "x"), P("x", None, "y"), P(("x", "zz"))])
def test_wrong_rows_do_not_raise(spec):
    row = eqshard.LeafPlan(".w", (8, 8), "float32", spec, spec)
    found = eqshard.analyze(eqshard.ShardingPlan(eqshard.MeshSpec(x=4, y=2), (row,)))
    assert found.nbytes == 256 and set(found.bytes_per_device) <= {64, 256}


def test_only_the_leaves_of_the_tree_count(m24):
    tree = {"a": jnp.ones(8), "b": jnp.ones(8)}
    plan = eqshard.replicated_plan(tree, m24)
    assert eqshard.analyze(plan, {"a": tree["a"], "c": 1}).nbytes == 32


def test_empty_plans(m24):
    found = eqshard.analyze(eqshard.replicated_plan({"f": len}, m24))
    assert found.bytes_per_device == (0,) * 8 and found.balance == 1 and found.replication == 1


def test_an_analysis_is_a_value(m24):
    plan = eqshard.auto_plan({"w": S((64, 64), "float32")}, m24, min_bytes=0)
    one, two = eqshard.analyze(plan), eqshard.analyze(plan)
    assert one == two and hash(one) == hash(two) and jax.tree.leaves(one) == []
    assert eqx.filter_jit(lambda a: a.nbytes)(one) == 64 * 64 * 4
    data = one.to_dict()
    assert data["bytes_per_device"] == list(one.bytes_per_device) and data["axes"][0]["name"] == "dp"
    assert "16.4 kB" in repr(one) and '"replication"' in one.to_json()


def test_any_mesh_form():
    tree = {"w": S((64, 64), "float32")}
    for mesh in (
        eqshard.MeshSpec(x=8),
        jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,)),
        eqshard.MeshSpec(x=8).abstract(),
    ):
        plan = eqshard.replicated_plan(tree, mesh).at("w").set(P("x"))
        assert eqshard.analyze(plan).bytes_per_device == (2048,) * 8


@given(st.lists(st.integers(1, 12), max_size=3), st.permutations(["dp", "fsdp", "tp"]), st.integers(0, 3))
def test_pieces_are_where_jax_puts_them(m222, shape, order, count):
    from eqshard._pieces import boxes, dim_axes

    spec = eqshard.fit_spec(P(*[tuple(order[:count]), *order[count:]][: len(shape)]), shape, m222).spec
    found = boxes(tuple(shape), dim_axes(tuple(shape), spec, m222.shape), m222)
    index = jax.sharding.NamedSharding(m222.build(), spec).devices_indices_map(tuple(shape))
    for i, device in enumerate(m222.build().devices.flat):
        slices = [s.indices(n)[:2] for s, n in zip(index[device], shape)]
        assert slices == list(zip(found.start[i].tolist(), found.stop[i].tolist()))
