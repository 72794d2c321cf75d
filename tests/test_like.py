"""State lies as its parameters: every optimizer, after a jitted init and after a jitted step that donates."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from hypothesis import given, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P
from optimizers import by_kind, multi, OPTIMIZERS

import eqshard
from eqshard import MeshSpec, MismatchError


class Net(eqx.Module):
    embed: jax.Array
    stack: jax.Array
    mlp: eqx.nn.MLP
    scale: jax.Array
    steps: jax.Array
    name: str = eqx.field(static=True)

    def __init__(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.embed = jax.random.normal(k1, (64, 32))
        self.stack = jax.random.normal(k2, (2, 32, 32))
        self.mlp = eqx.nn.MLP(32, 32, 64, 1, key=k3)
        self.scale = jnp.ones(32)
        self.steps = jnp.zeros((), jnp.int32)
        self.name = "net"


def placed(mesh):
    model = Net(jax.random.key(0))
    plan = eqshard.auto_plan(model, mesh, min_bytes=1000)
    params = eqx.filter(eqshard.apply(plan, model), eqx.is_inexact_array)
    assert params.embed.sharding.spec == P("tp", "dp")
    return plan, params


def check_moments(state, params, least):
    """Every leaf of the state that is named after a parameter and shaped like it lies exactly as that parameter."""
    by_path = {jtu.keystr(path): x for path, x in jtu.tree_flatten_with_path(params)[0]}
    found = 0
    for path, x in jtu.tree_flatten_with_path(state)[0]:
        name = jtu.keystr(path)
        own = max((p for p in by_path if name.endswith(p)), key=len, default=None)
        if own is not None and by_path[own].shape == x.shape and x.shape:
            assert eqshard.canonical(x.sharding.spec) == eqshard.canonical(by_path[own].sharding.spec), name
            assert [s.index for s in x.addressable_shards] == [s.index for s in by_path[own].addressable_shards]
            found += 1
        elif not x.shape:
            assert x.sharding.is_fully_replicated
    assert found >= least


def trained(optim, plan, params, state_plan, update):
    """A jitted init, and a jitted step that donates; any warning is an error."""
    shapes = jax.eval_shape(optim.init, params)
    state = jax.jit(optim.init, out_shardings=state_plan.shardings(shapes))(params)
    first = jax.tree.map(lambda x: x.sharding, state)

    def step(params, state):
        grads = jax.tree.map(lambda x: x * jnp.asarray(0.1, x.dtype), params)
        updates, state = update(grads, state, params)
        params_plan = eqshard.plan_like(plan, params)
        return eqshard.apply(params_plan, optax.apply_updates(params, updates)), eqshard.apply(state_plan, state)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "Some donated buffers were not usable"
        params, state = jax.block_until_ready(jax.jit(step, donate_argnums=(0, 1))(params, state))
    same = jax.tree.map(lambda s, x: s.is_equivalent_to(x.sharding, x.ndim), first, state)
    assert all(jax.tree.leaves(same))
    return params, state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(m24, name):
    plan, params = placed(m24)
    with jax.numpy_dtype_promotion("standard"):  # optax adds integers to floats
        optim = OPTIMIZERS[name]()
        state_plan = eqshard.plan_like(plan, optim.init)
        update = optim.update
        if name == "muon" and m24.axis_types[0] == "explicit":  # its products say no layout: let the compiler choose
            out = (plan_like_shardings(plan, params), state_plan.shardings(jax.eval_shape(optim.init, params)))
            update = jax.sharding.auto_axes(update, out_sharding=out)
        params, state = trained(optim, plan, params, state_plan, update)
    least = {"adafactor": 2, "inject_hyperparams": 14, "multi_steps": 21}.get(name, 7)
    check_moments(state, params, least)
    assert not [i for i in eqshard.validate(state_plan, state) if i.severity == "error"]
    assert eqshard.plan_like(plan, jax.eval_shape(optim.init, params)) == state_plan  # the tree says the same


def plan_like_shardings(plan, tree):
    return eqshard.plan_like(plan, tree).shardings(tree)


def test_multi_transform_with_a_tree_of_labels(m24):
    plan, params = placed(m24)
    with jax.numpy_dtype_promotion("standard"):
        optim = multi(by_kind(params))
        with pytest.raises(MismatchError, match=r"jax.eval_shape\(init, params\)"):
            eqshard.plan_like(plan, optim.init)
        state_plan = eqshard.plan_like(plan, jax.eval_shape(optim.init, params))
        params, state = trained(optim, plan, params, state_plan, optim.update)
    check_moments(state, params, 7)
    assert state_plan == eqshard.plan_like(plan, multi(by_kind).init)


def test_adafactor_follows_the_dims_it_keeps(m24):
    shapes = {
        "tall": (64, 32),
        "wide": (32, 64),
        "square": (32, 32),
        "stack": (2, 32, 32),
        "cube": (32, 32, 32),
        "ends": (64, 8, 64),
    }
    tree = {k: jax.ShapeDtypeStruct(s, "float32") for k, s in shapes.items()}
    plan = eqshard.auto_plan(tree, m24, min_bytes=0, names=["dp", "tp"])
    init = optax.scale_by_factored_rms(min_dim_size_to_factor=8).init
    for state_plan in (eqshard.plan_like(plan, init), eqshard.plan_like(plan, jax.eval_shape(init, tree))):
        for name, shape in shapes.items():
            entries = [*plan[f"['{name}']"].spec, None, None, None][: len(shape)]
            order = np.argsort(shape)  # as Adafactor: the two largest dims, the last of equal ones first
            for kind, gone in (("row", order[-1]), ("col", order[-2])):
                leaf = state_plan[f".v_{kind}['{name}']"]
                kept = P(*(e for d, e in enumerate(entries) if d != gone))
                assert leaf.shape == tuple(n for d, n in enumerate(shape) if d != gone)
                assert leaf.spec == eqshard.canonical(kept), (name, kind)
            assert state_plan[f".v['{name}']"].spec == P()  # a placeholder of one element


def test_adafactor_names_inside_the_model_mean_nothing(m24):
    tree = {"v_col": jax.ShapeDtypeStruct((32, 32), "float32")}
    plan = eqshard.replicated_plan(tree, m24).at("v_col").set(P("tp", "dp"))
    init = optax.scale_by_factored_rms(min_dim_size_to_factor=8).init
    state_plan = eqshard.plan_like(plan, init)
    assert state_plan[".v_row['v_col']"].spec == P("tp") and state_plan[".v_col['v_col']"].spec == P("dp")


def test_lbfgs_history_is_whole_in_front(m24):
    plan, params = placed(m24)
    with jax.numpy_dtype_promotion("standard"):
        optim = optax.lbfgs(memory_size=3)
        state_plan = eqshard.plan_like(plan, optim.init)
        state = jax.jit(optim.init, out_shardings=state_plan.shardings(jax.eval_shape(optim.init, params)))(params)
    memory = state[0].diff_params_memory
    assert memory.embed.shape == (3, 64, 32) and memory.embed.sharding.spec == P(None, "tp", "dp")
    check_moments(state, params, 14)


def test_exponential_moving_average_of_a_model(m24):
    """A model is a tree, though it can be called."""
    model = eqx.nn.MLP(64, 64, 64, 1, key=jax.random.key(0))
    plan = eqshard.auto_plan(model, m24, min_bytes=0)
    assert eqshard.plan_like(plan, model) == plan
    assert eqshard.plan_like(plan, eqx.filter_eval_shape(lambda m: m, model)) == plan
    nested = eqshard.plan_like(plan, {"ema": model, "decay": jnp.float32(0.9)})
    assert nested["['ema'].layers[0].weight"].spec == plan[".layers[0].weight"].spec
    assert nested["['decay']"].spec == P()
    ema = eqshard.apply(plan, model)
    assert (
        eqshard.apply(nested, {"ema": ema, "decay": jnp.float32(0.9)})["ema"].layers[0].weight is ema.layers[0].weight
    )


def test_gradients(m24):
    """With None where there is nothing to differentiate, and whatever the optimizer needs of them."""
    plan, params = placed(m24)
    model = eqx.combine(params, eqx.filter(Net(jax.random.key(0)), eqx.is_inexact_array, inverse=True))
    loss = lambda m: sum(jnp.sum(x**2) for x in jax.tree.leaves(eqx.filter(m, eqx.is_inexact_array)))
    shapes = eqx.filter_eval_shape(eqx.filter_grad(loss), model)
    grad_plan = eqshard.plan_like(plan, shapes)
    assert ".steps" in plan and ".steps" not in grad_plan

    @eqx.filter_jit
    def f(m):
        return eqshard.apply(grad_plan, eqx.filter_grad(loss)(m))

    assert eqshard.canonical(f(model).embed.sharding.spec) == plan[".embed"].spec


def test_accumulators_of_another_dtype(m24):
    plan, params = placed(m24)
    sums = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), params)
    like = eqshard.plan_like(plan, {"sums": sums, "count": jax.ShapeDtypeStruct((), "int32")})
    assert like["['sums'].embed"].spec == P("tp", "dp") and like["['sums'].embed"].dtype == "bfloat16"
    assert like["['count']"].spec == P() and like["['count']"].why == "a scalar"


def test_never_from_the_sharding_of_eval_shape(m24):
    plan, _ = placed(m24)
    other = NamedSharding(m24.build(), P("dp"))
    tree = {"mu": {"embed": jax.ShapeDtypeStruct((64, 32), "float32", sharding=other)}}
    plan = eqshard.auto_plan({"embed": jax.ShapeDtypeStruct((64, 32), "float32")}, m24, min_bytes=0)
    assert eqshard.plan_like(plan, tree)["['mu']['embed']"].spec == P("tp", "dp")


def test_the_longest_name_wins_and_ends_at_a_key(m24):
    tree = {"w": jnp.zeros((8, 8)), "sub": {"w": jnp.zeros((8, 8))}, "a.b": jnp.zeros((8, 8))}
    plan = eqshard.replicated_plan(tree, m24)
    plan = plan.at("['w']").set(P("dp")).at("['sub']['w']").set(P("tp")).at("['a.b']").set(P(None, "tp"))
    state = {"mu": tree, "sub": {"nw": jnp.zeros((8, 8))}}
    like = eqshard.plan_like(plan, state)
    assert like["['mu']['w']"].spec == P("dp") and like["['mu']['sub']['w']"].spec == P("tp")
    assert like["['mu']['a.b']"].spec == P(None, "tp")
    assert like["['sub']['nw']"].spec == P() and like["['sub']['nw']"].why == "belongs to no parameter"


def test_what_is_not_shaped_like_its_parameter_is_whole(m24):
    plan = eqshard.auto_plan({"w": jnp.zeros((8, 16))}, m24, min_bytes=0)
    like = eqshard.plan_like(plan, {"a": {"w": jnp.zeros((5, 7))}, "b": {"w": jnp.zeros((16, 8))}})
    assert {leaf.spec for leaf in like} == {P()} and like["['a']['w']"].why == "not shaped like ['w']"


def test_a_single_array(m24):
    plan = eqshard.auto_plan(jnp.zeros((256, 256)), m24)
    state_plan = eqshard.plan_like(plan, optax.adam(1e-3).init)
    assert state_plan["[0].mu"].spec == P("tp", "dp") and state_plan["[0].count"].spec == P()
    assert eqshard.plan_like(plan, optax.adam(1e-3).init(jnp.zeros((256, 256)))) == state_plan


def test_functions_of_every_make(m24):
    class Optimizer(eqx.Module):
        decay: jax.Array

        def init(self, params):
            return jax.tree.map(lambda x: x * 0, params)

    plan = eqshard.auto_plan({"w": jnp.zeros((256, 256))}, m24)
    for init in (Optimizer(jnp.ones(3)).init, jtu.Partial(optax.identity().init), optax.sgd(1e-2, momentum=0.9).init):
        eqshard.plan_like(plan, init)
    assert eqshard.plan_like(plan, Optimizer(jnp.ones(3)).init)["['w']"].spec == plan["['w']"].spec


def test_keys_and_integers_get_no_moments(m24):
    tree = {"w": jnp.zeros((256, 256)), "key": jax.random.key(0), "n": jnp.zeros((256, 256), jnp.int32)}
    state_plan = eqshard.plan_like(eqshard.auto_plan(tree, m24), optax.trace(0.9).init)
    assert [leaf.path for leaf in state_plan] == [".trace['w']"]


def test_memory_kind_follows(m24):
    plan = eqshard.auto_plan({"w": jnp.zeros((256, 256))}, m24).at("w").set(memory_kind="pinned_host")
    assert eqshard.plan_like(plan, optax.trace(0.9).init)[".trace['w']"].memory_kind == "pinned_host"


def test_stored_layout_is_followed_not_the_one_in_use(make_mesh):
    plan = eqshard.fsdp_plan({"w": jnp.zeros((256, 256))}, make_mesh(fsdp=8))
    leaf = eqshard.plan_like(plan, optax.trace(0.9).init)[".trace['w']"]
    assert leaf.spec == leaf.use == P("fsdp")


@given(
    st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3),
    st.lists(st.lists(st.sampled_from([1, 2, 3, 8, 12, 16]), max_size=3).map(tuple), min_size=1, max_size=4),
    st.sampled_from(["adamw", "adafactor", "lion", "multi_transform", "multi_steps", "muon"]),
)
def test_state_plans_are_valid_in_both_forms(sizes, shapes, name):
    mesh = MeshSpec({f"a{i}": n for i, n in enumerate(sizes)})
    tree = {f"p{i}": jax.ShapeDtypeStruct(s, "float32") for i, s in enumerate(shapes)}
    plan = eqshard.auto_plan(tree, mesh, min_bytes=0)
    with jax.numpy_dtype_promotion("standard"):
        init = OPTIMIZERS[name]().init
        state = jax.eval_shape(init, tree)
    state_plan = eqshard.plan_like(plan, init)
    assert not [i for i in eqshard.validate(state_plan, state) if i.severity == "error"]
    assert state_plan == eqshard.plan_like(plan, state)
