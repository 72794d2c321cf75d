"""`apply` and `constrain_to`: everywhere the same call, with the same layout and the same values."""

import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P

import eqshard


def model(key=0):
    return eqx.nn.MLP(8, 8, 16, 2, key=jax.random.key(key))


def plan_for(tree, mesh, **specs):
    plan = eqshard.replicated_plan(tree, mesh)
    for pattern, spec in specs.items():
        plan = plan.at(pattern).set(spec)
    return plan


def mlp_plan(mesh):
    tree = model()
    return tree, plan_for(tree, mesh, weight=P("tp", "dp"), bias=P("tp"))


def assert_lies(plan, tree):
    for leaf, x in zip(plan, jax.tree.leaves(eqx.filter(tree, eqx.is_array))):
        expected = NamedSharding(plan.build(), leaf.spec)
        assert x.sharding.is_equivalent_to(expected, x.ndim), (leaf.path, x.sharding, expected)
        for shard in x.addressable_shards:
            assert shard.data.shape == expected.shard_shape(x.shape)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(eqshard.gather(a)), jax.tree.leaves(eqshard.gather(b))):
        if eqshard.is_array(x):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


# Eager


def test_eager(m24):
    tree, plan = mlp_plan(m24)
    placed = eqshard.apply(plan, tree)
    assert_lies(plan, placed)
    assert_same(placed, tree)
    assert placed.activation is tree.activation


def test_one_device_put_for_the_whole_tree(m24, monkeypatch):
    tree, plan = mlp_plan(m24)
    calls, real = [], jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda *args, **kwargs: calls.append(args) or real(*args, **kwargs))
    placed = eqshard.apply(plan, tree)
    assert len(calls) == 1 and len(calls[0][0]) == 6
    eqshard.apply(plan, placed)
    assert len(calls) == 1  # nothing to move
    stray = eqx.tree_at(lambda m: m.layers[0].bias, placed, tree.layers[0].bias)
    again = eqshard.apply(plan, stray)
    assert len(calls) == 2 and len(calls[1][0]) == 1  # only the one that lies elsewhere
    assert again.layers[0].weight is placed.layers[0].weight


def test_numpy_becomes_sharded(m24):
    tree = {"w": np.arange(32, dtype=np.float32).reshape(8, 4), "n": np.float32(3.0), "s": np.array(["a"])}
    plan = plan_for(tree, m24, w=P("dp", "tp"))
    assert list(plan.specs()) == ["['w']"]  # numpy scalars and texts are no arrays
    placed = eqshard.apply(plan, tree)
    assert isinstance(placed["w"], jax.Array) and placed["s"] is tree["s"] and placed["n"] is tree["n"]
    assert_lies(plan, {"w": placed["w"]})


def test_integers_beyond_32_bits_are_refused(m24):
    tree = {"a": {"ids": np.array([2**40] * 8)}}
    plan = eqshard.replicated_plan(tree, m24)
    with pytest.raises(eqshard.MismatchError) as error:
        eqshard.apply(plan, tree)
    assert "['a']['ids']" in str(error.value) and "int64" in str(error.value) and "int32" in str(error.value)
    assert "jax_enable_x64" in str(error.value)


@pytest.mark.parametrize("leaf", [np.ones((8, 4), np.int16), jnp.ones((8, 4), jnp.bfloat16)])
def test_structs_come_back_with_their_sharding(m24, leaf):
    tree = {"w": jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), "f": len}
    plan = plan_for(tree, m24, w=P("dp"))
    struct = eqshard.apply(plan, tree)["w"]
    assert struct.sharding == NamedSharding(plan.build(), P("dp"))
    assert eqshard.apply(plan, {"w": struct, "f": len})["w"] is struct
    placed = jax.jit(lambda x: x, out_shardings=struct.sharding)(leaf)
    assert placed.sharding == struct.sharding


def test_a_leaf_that_lies_right_is_not_moved(m24):
    tree, plan = mlp_plan(m24)
    placed = eqshard.apply(plan, tree)
    again = eqshard.apply(plan, placed)
    assert all(a is b for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(again)))


def test_a_twin_spelling_is_made_canonical_without_a_copy(m24):
    x = jax.device_put(jnp.arange(32.0).reshape(8, 4), NamedSharding(m24.build(), P("dp", None)))
    plan = plan_for({"x": x}, m24, x=P("dp"))
    y = eqshard.apply(plan, {"x": x})["x"]
    assert tuple(y.sharding.spec) == ("dp",)
    assert y.addressable_shards[0].data.unsafe_buffer_pointer() == x.addressable_shards[0].data.unsafe_buffer_pointer()


def test_uncommitted_arrays_become_committed():
    x = jnp.ones(4)
    plan = eqshard.replicated_plan(x, eqshard.MeshSpec(one=1))
    assert not x.committed and eqshard.apply(plan, x).committed


def test_shared_leaves_stay_shared(m24):
    x = jnp.arange(8.0)
    tree = {"a": x, "b": x, "c": [x]}
    plan = plan_for(tree, m24, a=P("tp"), b=P("tp"))
    placed = eqshard.apply(plan, tree)
    assert placed["a"] is placed["b"] and placed["c"][0] is not placed["a"]
    assert placed["c"][0].sharding.is_fully_replicated


def test_donate(m24, monkeypatch):
    tree, plan = mlp_plan(m24)
    expected = eqshard.gather(tree)
    first = eqshard.replicate(tree, m24)
    asked, real = [], jax.device_put
    monkeypatch.setattr(
        jax, "device_put", lambda *args, donate, **kw: asked.append(donate) or real(*args, donate=donate)
    )
    placed = eqshard.apply(plan, first, donate=True)
    assert asked == [True]  # all in one group; whether the buffers can be used again is for JAX to say
    assert_same(placed, expected)
    assert_lies(plan, placed)
    kept = eqshard.apply(plan, placed, donate=True)  # lies right: nothing is given up
    assert kept.layers[0].weight is placed.layers[0].weight and not kept.layers[0].weight.is_deleted()


DONATE = """
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
import eqshard, jax.numpy as jnp, eqshard._put
from jax.sharding import PartitionSpec as P

LEAF = 2**20  # bytes
eqshard._put.GROUP_BYTES = 2 * LEAF
mesh = eqshard.MeshSpec({"x": 8}, axis_type="AXIS")
rows, columns = (
    eqshard.ShardingPlan(mesh, [eqshard.LeafPlan(f"[{i}]", (512, 512), "float32", spec, spec) for i in range(16)])
    for spec in (P("x"), P(None, "x"))
)
make = jax.jit(lambda: [jnp.full((512, 512), i, jnp.float32) for i in range(16)], out_shardings=list(rows.shardings(
    [jax.ShapeDtypeStruct((512, 512), "float32")] * 16)))

def live():
    shards = [s.data for x in jax.live_arrays() for s in x.addressable_shards if s.device == jax.devices()[0]]
    return sum({x.unsafe_buffer_pointer(): x.nbytes for x in shards}.values()) * 8 / LEAF

most, real = [], jax.device_put
def put(*args, **kwargs):
    moved = jax.block_until_ready(real(*args, **kwargs))
    most.append(live())
    return moved
jax.device_put = put

new = eqshard.apply(columns, make(), donate=True)
print(max(most), len(most), live(), all((x == i).all() and x.sharding.spec[-1] == "x" for i, x in enumerate(new)))
del new
most.clear()
held = make()
new = eqshard.apply(columns, held, donate=True)
print(max(most), len(most), live(), all((x == i).all() for i, x in enumerate(held)))
"""


def test_donate_never_holds_two_trees(axis_type):
    """16 arrays, moved in pairs: at most 18 are in memory at once, unless the caller holds the tree."""
    script = DONATE.replace("AXIS", axis_type)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    given_up, held = (line.split() for line in run.stdout.splitlines())
    assert given_up == ["18.0", "8", "16.0", "True"]
    assert held == ["32.0", "8", "32.0", "True"]


def test_donate_shared_and_numpy(m24):
    x = jax.device_put(jnp.arange(8.0), jax.devices()[0])
    tree = {"a": x, "b": x, "n": np.ones(8, np.float32)}
    placed = eqshard.apply(plan_for(tree, m24, a=P("tp"), b=P("tp")), tree, donate=True)
    assert placed["a"] is placed["b"] and (np.asarray(placed["a"]) == np.arange(8)).all()


def test_memory_kinds(m24):
    tree = {"w": jnp.arange(32.0).reshape(8, 4), "b": jnp.ones(4)}
    plan = plan_for(tree, m24, w=P("dp")).at("w").set(memory_kind="pinned_host")
    placed = eqshard.apply(plan, tree)
    assert placed["w"].sharding.memory_kind == "pinned_host" and placed["w"].sharding.spec == P("dp")
    assert placed["b"].sharding.memory_kind == "device"
    assert eqshard.apply(plan, placed)["w"] is placed["w"]
    assert eqshard.apply(plan, eqx.filter_eval_shape(lambda: tree))["w"].sharding.memory_kind == "pinned_host"
    back = plan.at("w").set(memory_kind=None)
    assert eqshard.apply(back, placed)["w"].sharding.memory_kind == "device"
    assert back["['w']"].spec == P("dp")


def test_an_unknown_memory_kind(m24):
    tree = {"w": jnp.ones((8, 4))}
    plan = eqshard.replicated_plan(tree, m24).at("w").set(memory_kind="tape")
    with pytest.raises(eqshard.ShardingError, match=r"'tape'.*'pinned_host'"):
        eqshard.apply(plan, tree)


def test_memory_kind_inside_jit(m24):
    tree = {"w": jnp.arange(32.0).reshape(8, 4)}
    plan = plan_for(tree, m24, w=P("dp", "tp")).at("w").set(memory_kind="pinned_host")
    placed = eqx.filter_jit(lambda t: eqshard.apply(plan, t))(eqshard.apply(plan, tree))
    assert placed["w"].sharding.memory_kind == "pinned_host" and placed["w"].sharding.spec == P("dp", "tp")
    assert_same(placed, tree)


def test_unconstrained_keeps_the_layout_there(m24):
    x = jax.device_put(jnp.ones((8, 8)), NamedSharding(m24.build(), P(None, "tp")))
    plan = plan_for(x, m24).at("").set(P("dp", P.UNCONSTRAINED))
    assert eqshard.apply(plan, x).sharding.spec == P("dp", "tp")
    assert eqshard.apply(plan, jnp.ones((8, 8))).sharding.spec == P("dp")
    moved = plan.at("").set(P("tp", P.UNCONSTRAINED))  # tp cannot be in both
    assert eqshard.apply(moved, x).sharding.spec == P("tp")


def test_unconstrained_inside_jit(m24):
    x = jax.device_put(jnp.ones((8, 8)), NamedSharding(m24.build(), P(None, "tp")))
    plan = plan_for(x, m24).at("").set(P("dp", P.UNCONSTRAINED))
    assert eqx.filter_jit(lambda x: eqshard.apply(plan, x))(x).sharding.spec == P("dp", "tp")


def test_a_concrete_mesh_with_permuted_devices(axis_type):
    kind = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}[axis_type]
    devices = np.array(jax.devices())[[3, 1, 4, 7, 5, 0, 2, 6]].reshape(2, 4)
    mesh = Mesh(devices, ("dp", "tp"), axis_types=(kind,) * 2)
    x = jnp.arange(8.0)
    plan = plan_for(x, mesh).at("").set(P(("dp", "tp")))
    assert plan.build() == mesh
    for placed in (eqshard.apply(plan, x), eqx.filter_jit(lambda x: eqshard.apply(plan, x))(x)):
        assert [s.device for s in sorted(placed.addressable_shards, key=lambda s: s.index[0].start)] == list(
            devices.flat
        )
    assert eqshard.ShardingPlan.from_json(plan.to_json()).build() == mesh


def test_a_mesh_larger_than_the_machine():
    tree = {"w": jnp.ones((64, 8))}
    plan = plan_for(tree, eqshard.MeshSpec(dp=16, tp=4), w=P("dp"))
    with pytest.raises(eqshard.MeshError) as error:
        eqshard.apply(plan, tree)
    assert "64 devices" in str(error.value) and "there are 8" in str(error.value)
    assert "jax_num_cpu_devices" in str(error.value)
    struct = eqshard.apply(plan, jax.eval_shape(lambda: tree))["w"]
    assert isinstance(struct.sharding.mesh, AbstractMesh) and struct.sharding.spec == P("dp")
    assert struct.sharding.shard_shape(struct.shape) == (4, 8)
    with pytest.raises(eqshard.MeshError, match="64 devices"):
        jax.jit(lambda t: eqshard.apply(plan, t))(tree)


# Traced


def test_inside_filter_jit(m24):
    tree, plan = mlp_plan(m24)

    @eqx.filter_jit
    def step(tree):
        return eqshard.apply(plan, jax.tree.map(lambda x: x * 2 if eqx.is_array(x) else x, tree))

    for start in (tree, eqshard.apply(plan, tree)):
        out = step(start)
        assert_lies(plan, out)
        np.testing.assert_array_equal(out.layers[0].weight, np.asarray(tree.layers[0].weight) * 2)


def test_closed_over_arrays_inside_jit(m24):
    tree, plan = mlp_plan(m24)
    out = eqx.filter_jit(lambda: eqshard.apply(plan, tree))()
    assert_lies(plan, out)
    assert_same(out, tree)
    numpy = {"w": np.arange(32, dtype=np.float32).reshape(8, 4)}
    plan = plan_for(numpy, m24, w=P("dp", "tp"))
    assert jax.jit(lambda: eqshard.apply(plan, numpy)["w"])().sharding.spec == P("dp", "tp")


def loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


def test_inside_filter_grad(m24):
    tree, plan = mlp_plan(m24)
    x = jnp.ones((4, 8))
    expected = eqx.filter_grad(loss)(tree, x)

    @eqx.filter_jit
    def grads(tree, x):
        return eqshard.apply(plan, eqx.filter_grad(lambda m, x: loss(gathered(m), x))(tree, x))

    def gathered(m):  # to `plan` and back, inside the differentiated function
        return eqshard.apply(eqshard.replicated_plan(m, m24), eqshard.apply(plan, m))

    found = grads(eqshard.apply(plan, tree), eqshard.replicate(x, m24))
    for a, b in zip(jax.tree.leaves(eqx.filter(found, eqx.is_array)), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert found.layers[0].weight.sharding.is_equivalent_to(plan.shardings()[".layers[0].weight"], 2)


def test_eager_grad_on_auto_axes():
    mesh = eqshard.MeshSpec(dp=2, tp=4)
    x = jnp.arange(8.0)
    plan = plan_for(x, mesh).at("").set(P("tp"))
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(eqshard.apply(plan, x) ** 2))(x), 2 * np.arange(8.0))


@pytest.mark.parametrize("jit", [False, True])
def test_inside_filter_vmap(m24, jit):
    if not jit and m24.axis_types[0] == "explicit":
        pytest.skip("JAX itself asks for jit there")
    plan = plan_for(jnp.ones(8), m24).at("").set(P("tp"))
    x = jnp.arange(32.0).reshape(4, 8)
    f = eqx.filter_vmap(lambda x: eqshard.apply(plan, x) * 2)
    out = (eqx.filter_jit(f) if jit else f)(eqshard.replicate(x, m24))
    np.testing.assert_array_equal(out, np.asarray(x) * 2)
    assert not jit or out.sharding.shard_shape(out.shape) == (4, 2)


def test_inside_scan(m24):
    plan = plan_for(jnp.ones((8, 8)), m24).at("").set(P("dp", "tp"))
    other = plan.at("").set(P("tp"))

    @jax.jit
    def run(x):
        def body(x, _):
            return eqshard.apply(plan, jnp.cumsum(eqshard.apply(other, x), axis=1)), None

        out, _ = jax.lax.scan(body, eqshard.apply(plan, x), None, length=3)
        return eqshard.apply(plan, out)  # on Auto axes the carry's layout is the compiler's choice

    x = jnp.arange(64.0).reshape(8, 8)
    out = run(x)
    assert out.sharding.spec == P("dp", "tp")
    inner = [eqn for eqn in jax.make_jaxpr(run)(x).jaxpr.eqns[0].params["jaxpr"].eqns if eqn.primitive.name == "scan"]
    names = [eqn.primitive.name for eqn in inner[0].params["jaxpr"].eqns]
    assert sum(name in ("sharding_constraint", "reshard") for name in names) == 2
    np.testing.assert_array_equal(out, np.cumsum(np.cumsum(np.cumsum(x, axis=1), axis=1), axis=1))


def test_inside_remat(m24):
    plan = plan_for(jnp.ones((8, 8)), m24).at("").set(P("dp", "tp"))

    @eqx.filter_jit
    @eqx.filter_grad
    def grad(x):
        f = eqx.filter_checkpoint(lambda x: jnp.sin(eqshard.apply(plan, x) * 2))
        return jnp.sum(f(x) * f(x))

    x = jnp.linspace(0.0, 1.0, 64).reshape(8, 8)
    expected = jax.grad(lambda x: jnp.sum(jnp.sin(x * 2) ** 2))(x)
    np.testing.assert_allclose(grad(eqshard.replicate(x, m24)), expected, rtol=1e-4, atol=1e-5)


def test_inside_shard_map_with_all_axes_manual(m24):
    plan = plan_for(jnp.ones((8, 8)), m24).at("").set(P("dp", "tp"))
    x = jnp.arange(64.0).reshape(8, 8)

    @jax.shard_map(mesh=plan.build(), in_specs=P("dp", "tp"), out_specs=P("dp", "tp"))
    def f(x):
        assert x.shape == (4, 2)
        return eqshard.apply(plan, x) + 1

    np.testing.assert_array_equal(jax.jit(f)(eqshard.apply(plan, x)), np.asarray(x) + 1)


def test_inside_shard_map_with_some_axes_manual(m24):
    plan = plan_for(jnp.ones((8, 8)), m24).at("").set(P("dp", "tp"))
    x = jnp.arange(64.0).reshape(8, 8)

    @jax.jit
    @jax.shard_map(mesh=plan.build(), in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"})
    def f(x):
        assert x.shape == (4, 8)
        return eqshard.apply(plan, x * 2)

    out = f(eqshard.constrain_to(x, P("dp"), m24))
    np.testing.assert_array_equal(out, np.asarray(x) * 2)
    assert out.sharding.shard_shape(out.shape) == (4, 2)


def test_a_whole_array_inside_shard_map_is_no_piece(m24):
    plan = plan_for(jnp.ones((8, 8)), m24).at("").set(P("dp"))
    f = jax.shard_map(lambda x: eqshard.apply(plan, x), mesh=plan.build(), in_specs=P(), out_specs=P())
    with pytest.raises(eqshard.MismatchError, match=r"is float32\[8,8\].*here float32\[4,8\] a device"):
        jax.jit(f)(eqshard.replicate(jnp.ones((8, 8)), m24))


SPECS = [P("dp", "tp"), P("tp", "dp"), P("dp"), P("tp"), P(None, ("tp",)), P()]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_one_explicit_and_one_auto_axis(spec):
    mesh = eqshard.MeshSpec(dp=2, tp=4, axis_type={"dp": "explicit"})
    x = jnp.arange(64.0).reshape(8, 8)
    plan = plan_for(x, mesh).at("").set(spec)
    for start in (x, eqshard.apply(plan, x), eqshard.replicate(x, mesh)):
        out = jax.jit(lambda x: eqshard.apply(plan, x * 2))(start)
        assert out.sharding.is_equivalent_to(NamedSharding(plan.build(), plan[""].spec), 2), out.sharding
        np.testing.assert_array_equal(out, np.asarray(x) * 2)


@pytest.mark.parametrize("axes", [("tp", "dp"), ("dp", "tp")])
def test_an_auto_and_an_explicit_axis_in_one_dimension(axes):
    mesh = eqshard.MeshSpec(dp=2, tp=4, axis_type={"dp": "explicit"})
    plan = plan_for(jnp.ones(8), mesh).at("").set(P(axes))
    assert eqshard.apply(plan, jnp.ones(8)).sharding.spec == P(axes)
    with pytest.raises(eqshard.ShardingError, match=r"dim 0.*different dimensions"):  # else it would lie otherwise
        jax.jit(lambda x: eqshard.apply(plan, x))(jnp.ones(8))


def test_same_layout_in_and_out_of_jit_for_keys_and_narrow_types(m24):
    tree = {
        "key": jax.random.split(jax.random.key(0), 8),
        "int4": jnp.ones((8, 4), jnp.int4),
        "fp8": jnp.ones((8,), jnp.float8_e4m3fn),
        "bool": jnp.ones((8,), bool),
        "empty": jnp.ones((0, 8)),
        "scalar": jnp.ones(()),
    }
    specs = {"int4": P("dp", "tp"), "fp8": P("tp"), "bool": P(("dp", "tp")), "empty": P("dp", "tp"), "key": P("tp")}
    plan = plan_for(tree, m24, **specs)
    outside = eqshard.apply(plan, tree)
    inside = eqx.filter_jit(lambda t: eqshard.apply(plan, t))(tree)
    assert_lies(plan, outside)
    for name in tree.keys() - {"empty"}:  # XLA itself forgets the layout of nothing
        assert inside[name].sharding.is_equivalent_to(outside[name].sharding, tree[name].ndim), name
        assert inside[name].dtype == tree[name].dtype
    again = eqshard.apply(plan, outside)
    assert all(again[k] is outside[k] for k in tree)


# The plan as a value in programs


def test_the_plan_as_argument_closure_and_constant(m24):
    tree, plan = mlp_plan(m24)
    assert jax.tree.leaves(plan) == []
    as_argument = jax.jit(lambda plan, x: eqshard.apply(plan.select(".layers[0].bias"), x))
    assert as_argument(plan, tree.layers[0].bias).sharding.spec == P("tp")
    assert_lies(plan, eqx.filter_jit(eqshard.apply)(plan, tree))
    static = jax.jit(lambda plan, x: eqshard.apply(plan.select(".layers[0].bias"), x), static_argnums=0)
    assert static(plan, tree.layers[0].bias).sharding.spec == P("tp")
    assert {plan: "a"}[mlp_plan(m24)[1]] == "a"

    @jax.jit
    def scanned(x):
        row = plan.select(".layers[0].bias")
        return jax.lax.scan(lambda carry, _: ((carry[0], eqshard.apply(carry[0], carry[1])), None), (row, x), None, 2)[
            0
        ]

    kept, out = scanned(eqshard.apply(plan.select(".layers[0].bias"), tree.layers[0].bias))
    assert kept == plan.select(".layers[0].bias") and out.sharding.spec == P("tp")


def test_equal_plans_made_apart_share_a_jit_cache_entry(m24):
    traces = []

    @jax.jit
    def f(plan, x):
        traces.append(1)
        return eqshard.apply(plan, x)

    def made(spec, why):
        x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        mesh = eqshard.MeshSpec(dict(zip(m24.names, m24.sizes)), axis_type=m24.axis_types[0])
        return eqshard.replicated_plan(x, mesh).at("").set(spec, why=why)

    x = jnp.ones((8, 8))
    f(made(P("dp"), "a"), x)
    f(made(P("dp"), "b"), x)
    f(made(P("dp", None), "c"), x)
    f(made(P(("dp",)), "d"), x)
    assert len(traces) == 1
    f(made(P("tp"), "a"), x)
    assert len(traces) == 2


def test_no_retrace_for_another_spelling_of_a_layout(m24):
    traces = []

    @jax.jit
    def f(x):
        traces.append(1)
        return x * 2

    x = jnp.ones((8, 8))
    for spec in (P("dp"), P("dp", None), P(("dp",), None)):
        leaf = eqshard.LeafPlan("", (8, 8), "float32", spec, spec)
        f(eqshard.apply(eqshard.ShardingPlan(m24, [leaf]), x))
        f(eqshard.apply(plan_for(x, m24).at("").set(spec), jax.device_put(x, NamedSharding(m24.build(), spec))))
    assert len(traces) == 1


def test_lowered_as_if_written_by_hand(axis_type):
    mesh = eqshard.MeshSpec({"dp": 2, "tp": 4, "one": 1}, axis_type=axis_type)
    plan = plan_for(jnp.ones((8, 8)), mesh).at("").set(P("dp", ("tp", "one")))
    sharding = NamedSharding(mesh.build(), P("dp", "tp"))
    by_hand = jax.lax.with_sharding_constraint if axis_type == "auto" else jax.sharding.reshard
    x = eqshard.replicate(jnp.ones((8, 8)), mesh)

    def step(place):
        return jax.jit(lambda x: place(jnp.sin(x)) @ jnp.cos(x)).lower(x).as_text()

    assert step(lambda x: eqshard.apply(plan, x)) == step(lambda x: by_hand(x, sharding))


def test_set_mesh_of_the_user_is_neither_needed_nor_disturbed(m24):
    tree, plan = mlp_plan(m24)
    with jax.set_mesh(plan.build()):
        before = jax.sharding.get_mesh()
        inside = eqx.filter_jit(lambda t: eqshard.apply(plan, t))(tree)
        eager = eqshard.apply(plan, tree)
        assert jax.sharding.get_mesh() == before
    assert_lies(plan, inside)
    assert_lies(plan, eager)
    other = eqshard.MeshSpec({"a": 4, "b": 2}, axis_type=m24.axis_types[0])
    with jax.set_mesh(other.build()):
        assert_lies(plan, eqshard.apply(plan, tree))


# What is refused


def test_missing_and_extra_leaves_are_named(m24):
    tree, plan = mlp_plan(m24)
    with pytest.raises(eqshard.MismatchError) as error:
        eqshard.apply(plan, {"layers": tree.layers[0], "more": jnp.ones(3)})
    text = str(error.value)
    assert "in the plan, not in the tree: `.layers[0].weight`, `.layers[0].bias`" in text and "and 1 more" in text
    assert "in the tree, not in the plan: `['layers'].weight`, `['layers'].bias`, `['more']`" in text
    assert "plan.select" in text


def test_other_shapes_and_dtypes_are_named(m24):
    plan = eqshard.replicated_plan({i: jnp.ones(8) for i in range(8)}, m24)
    with pytest.raises(eqshard.MismatchError) as error:
        eqshard.apply(plan, {i: jnp.ones(9) if i else jnp.ones(8, jnp.int32) for i in range(8)})
    text = str(error.value)
    assert "`[0]` is int32[8], planned as float32[8]" in text and "`[1]` is float32[9], planned as float32[8]" in text
    assert "and 3 more" in text


def test_none_where_the_plan_has_an_array(m24):
    plan = eqshard.replicated_plan({"a": jnp.ones(8), "b": jnp.ones(8)}, m24)
    with pytest.raises(eqshard.MismatchError, match=r"not in the tree: `\['b'\]`"):
        eqshard.apply(plan, {"a": jnp.ones(8), "b": None})
    with pytest.raises(eqshard.MismatchError, match=r"not in the tree: `\['b'\]`"):
        eqshard.apply(plan, {"a": jnp.ones(8), "b": "text"})


def test_a_match_is_not_remembered_for_another_tree(m24):
    plan = eqshard.replicated_plan({"a": jnp.ones(8), "b": jnp.ones(4)}, m24)
    eqshard.apply(plan, {"a": jnp.ones(8), "b": jnp.ones(4)})
    with pytest.raises(eqshard.MismatchError):
        eqshard.apply(plan, {"a": jnp.ones(4), "b": jnp.ones(8)})
    with pytest.raises(eqshard.MismatchError):
        eqshard.apply(plan, {"a": jnp.ones(8), "c": jnp.ones(4)})
    with pytest.raises(eqshard.MismatchError):
        eqshard.apply(plan, {"a": jnp.ones(8), "b": 4.0})


def test_rows_that_do_not_fit_are_refused_everywhere(m24):
    x = jnp.ones((7, 8))
    row = eqshard.LeafPlan("", (7, 8), "float32", P("dp"), P("dp"))
    plan = eqshard.ShardingPlan(m24, [row])
    for call in (
        lambda: eqshard.apply(plan, x),
        lambda: eqshard.apply(plan, jax.ShapeDtypeStruct((7, 8), jnp.float32)),
        lambda: jax.jit(lambda x: eqshard.apply(plan, x))(x),
    ):
        with pytest.raises(eqshard.IndivisibleError, match="7 % 2"):
            call()
    row = eqshard.LeafPlan("", (7, 8), "float32", P("nope"), P("nope"))
    with pytest.raises(eqshard.UnknownAxisError, match="nope"):
        jax.jit(lambda x: eqshard.apply(eqshard.ShardingPlan(m24, [row]), x))(x)


# One array


def test_constrain_to(m24):
    x = jnp.ones((8, 6))
    assert eqshard.constrain_to(x, P("dp", None), m24).sharding.spec == P("dp")
    inside = jax.jit(lambda x: eqshard.constrain_to(x, P("dp"), m24))(x)
    assert eqshard.canonical(inside.sharding.spec) == P("dp")
    assert eqshard.constrain_to(np.ones((8, 6), np.float32), P("tp"), m24.build()).sharding.spec == P("tp")
    with pytest.raises(eqshard.IndivisibleError, match="6 % 4"):
        eqshard.constrain_to(x, P(None, "tp"), m24)
    assert eqshard.constrain_to(x, P("dp", "tp"), m24, strict=False).sharding.spec == P("dp")
    with pytest.raises(eqshard.UnknownAxisError, match=r"'tpp'.*Did you mean 'tp'"):
        eqshard.constrain_to(x, P("tpp"), m24, strict=False)


def test_constrain_to_inside_shard_map_leaves_manual_axes_out(m24):
    mesh = m24.build()

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"})
    def f(x):
        return eqshard.constrain_to(x * 2, P("dp", "tp"), mesh)

    # A piece has one row, which dp = 2 would not divide.
    out = f(eqshard.constrain_to(jnp.ones((2, 8)), P("dp"), m24))
    assert out.sharding.shard_shape(out.shape) == (1, 2)
