import pathlib
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqshard
from eqshard import _init


def make(key):
    return eqx.nn.MLP(16, 16, 32, 2, key=key)


def fsdp(tree, mesh):
    return eqshard.fsdp_plan(tree, mesh, min_bytes=0)


def same(a, b):
    a, b = (jax.tree.leaves(eqshard.gather(eqx.filter(t, eqshard.is_array))) for t in (a, b))
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b))


def test_is_born_in_its_layout_with_the_values_of_a_plain_call(make_mesh):
    plan = fsdp(eqx.filter_eval_shape(make, jax.random.key(0)), make_mesh(fsdp=8))
    model = eqshard.init(plan, make, jax.random.key(0))
    assert eqshard.plan_of(model).specs() == plan.specs()
    assert model.layers[1].weight.addressable_shards[0].data.shape == (4, 32)
    assert same(model, make(jax.random.key(0)))
    assert model.activation is make(jax.random.key(0)).activation  # what is no array comes through


def test_values_do_not_depend_on_the_mesh(axis_type):
    made = [
        eqshard.init(make, jax.random.key(3), mesh=eqshard.MeshSpec({"fsdp": n}, axis_type=axis_type), planner=fsdp)[0]
        for n in (1, 2, 8)
    ]
    made.append(eqshard.init(make, jax.random.key(3), mesh=eqshard.MeshSpec(a=2, b=4))[0])
    assert all(same(model, made[0]) for model in made[1:])


def test_plans_from_shapes_first(m24):
    model, plan = eqshard.init(make, jax.random.key(0), mesh=m24)
    assert plan == eqshard.auto_plan(eqx.filter_eval_shape(make, jax.random.key(0)), m24)
    assert eqshard.plan_of(model).specs() == plan.specs()


def test_all_that_a_tree_may_hold_comes_through(m24):
    def mixed(key, n, name):
        weight = jax.random.uniform(key, (8, n))  # which rounds alike in pieces of any size
        return {
            "tied": (weight, weight),
            "numpy": np.arange(8, dtype="int32"),
            "key": key,
            "scalar": jnp.float32(2),
            "empty": jnp.zeros((0, 4)),
            "half": weight.astype(jnp.bfloat16),
            "name": name,
            "fn": jnp.sin,
            "none": None,
            "float": 0.5,
        }

    args = jax.random.key(1), 4, "a name"
    tree, plan = eqshard.init(mixed, *args, mesh=m24, planner=lambda t, m: eqshard.auto_plan(t, m, min_bytes=0))
    assert eqshard.plan_of(tree).specs() == plan.specs()
    assert tree["tied"][0] is tree["tied"][1]  # made once
    assert isinstance(tree["numpy"], jax.Array) and len(tree["numpy"].devices()) == 8
    assert (tree["name"], tree["fn"], tree["none"], tree["float"]) == ("a name", jnp.sin, None, 0.5)
    plain = mixed(*args)
    keys = [jax.random.key_data(t.pop("key")) for t in (tree, plain)]
    assert same(tree, plain) and (keys[0] == keys[1]).all()


def test_twins_that_lie_differently_are_two_arrays(m24):
    def tied(key):
        weight = jax.random.normal(key, (8, 8))
        return weight, weight

    plan = eqshard.replicated_plan(jax.eval_shape(tied, jax.random.key(0)), m24).at("[1]").set(P("tp"))
    one, two = eqshard.init(plan, tied, jax.random.key(0))
    assert one.sharding.spec == P() and two.sharding.spec == P("tp") and (np.asarray(one) == np.asarray(two)).all()


def test_leaves_may_be_made_by_several_programs(m24, monkeypatch):
    monkeypatch.setattr(_init, "_LEAST_BYTES", 1000)
    sizes = {i: 4 * n for i, n in enumerate([512, 32, 1024, 32, 512, 16])}
    assert list(_init._groups(sizes)) == [[0], [1], [2], [3], [4], [5]]
    assert list(_init._groups({0: 400, 1: 500, 2: 600, 3: 2000, 4: 1})) == [[0, 1], [2], [3], [4]]
    model, plan = eqshard.init(make, jax.random.key(0), mesh=m24)
    assert same(model, make(jax.random.key(0))) and eqshard.plan_of(model).specs() == plan.specs()


def test_optimizer_state_follows_its_parameters(make_mesh):
    model, plan = eqshard.init(make, jax.random.key(0), mesh=make_mesh(fsdp=8), planner=fsdp)
    optim = optax.adamw(1e-3)
    state_plan = eqshard.plan_like(plan, optim.init)
    state = eqshard.init(state_plan, optim.init, eqx.filter(model, eqx.is_array))
    assert eqshard.plan_of(state).specs() == state_plan.specs()
    assert state[0].mu.layers[0].weight.sharding.spec == P("fsdp")


def test_states_of_stateful_layers():
    made, mesh = eqx.nn.make_with_state(eqx.nn.BatchNorm), eqshard.MeshSpec(dp=2, tp=4)
    (norm, state), _ = eqshard.init(lambda: made(8, "batch", mode="ema"), mesh=mesh, planner=eqshard.replicated_plan)
    out, state = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(jnp.ones((4, 8)), state)
    assert len(out.devices()) == 8


def test_stacked_layers(make_mesh):
    def stack(key):
        return eqx.filter_vmap(lambda k: eqx.nn.Linear(16, 32, key=k))(jax.random.split(key, 4))

    model, _ = eqshard.init(stack, jax.random.key(0), mesh=make_mesh(fsdp=8), planner=fsdp)
    assert same(model, stack(jax.random.key(0))) and model.weight.sharding.spec == P(None, "fsdp")


def test_offloaded_leaves_are_born_there(make_mesh):
    plan = eqshard.replicated_plan(jax.ShapeDtypeStruct((8, 8), "float32"), make_mesh(x=8))
    x = eqshard.init(plan.at("").set(P("x"), memory_kind="pinned_host"), lambda: jnp.ones((8, 8)))
    assert x.sharding.memory_kind == "pinned_host" and x.sharding.spec == P("x")


def test_under_jit(m24):
    plan = eqshard.auto_plan(eqx.filter_eval_shape(make, jax.random.key(0)), m24, min_bytes=0)
    model = eqx.filter_jit(lambda key: eqshard.init(plan, make, key))(jax.random.key(0))
    assert eqshard.plan_of(model).specs() == plan.specs() and same(model, make(jax.random.key(0)))


def test_another_tree_is_refused(m24):
    plan = eqshard.auto_plan(eqx.filter_eval_shape(make, jax.random.key(0)), m24)
    with pytest.raises(eqshard.MismatchError, match=r"not in the tree: `\.layers\[0\]\.weight`"):
        eqshard.init(plan, lambda key: eqx.nn.Linear(4, 4, key=key), jax.random.key(0))
    with pytest.raises(eqshard.MismatchError, match=r"`\.layers\[0\]\.weight` is float32\[64,16\], planned as"):
        eqshard.init(plan, lambda key: eqx.nn.MLP(16, 16, 64, 2, key=key), jax.random.key(0))


def test_arguments_that_lie_elsewhere_are_named(m24):
    plan = eqshard.replicated_plan(jax.ShapeDtypeStruct((8,), "float32"), m24)
    stray = jax.device_put(jnp.ones(8), jax.devices()[3])
    with pytest.raises(eqshard.StrayError, match=r"the plan's mesh, cpu 0 to 7: `\[0\]\['a'\]` on cpu 3\."):
        eqshard.init(plan, lambda tree: tree["a"] * 2, {"a": stray})


def test_needs_a_plan_or_a_mesh(m24):
    with pytest.raises(eqshard.ShardingError, match="needs a plan"):
        eqshard.init(make, jax.random.key(0))
    with pytest.raises(eqshard.ShardingError, match="then no `mesh`"):
        eqshard.init(eqshard.replicated_plan({}, m24), dict, mesh=m24)


def test_init_array(m24):
    normal = lambda shape: jax.random.normal(jax.random.key(0), shape)
    table = eqshard.init_array(normal, (16, 8), (eqshard.VOCAB, None), m24)
    assert table.sharding.spec == P("tp") and (np.asarray(table) == np.asarray(normal((16, 8)))).all()
    assert eqshard.init_array(normal, [16, 8], P(None, "tp"), m24).sharding.spec == P(None, "tp")
    with pytest.raises(eqshard.IndivisibleError, match=r"6 % 4"):
        eqshard.init_array(normal, (6, 8), (eqshard.VOCAB, None), m24)
    assert eqshard.init_array(normal, (6, 8), (eqshard.VOCAB, None), m24, strict=False).sharding.spec == P()


def test_peak_memory_of_init():
    script = pathlib.Path(__file__).parent / "benchmarks" / "init_memory.py"
    done = subprocess.run([sys.executable, script, "init", "0.25"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout.split()[-1]) < 1.6, done.stdout  # of 0.25 GiB; a plain init, then a move, takes 2.5
