import functools
import warnings

import equinox as eqx
import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqshard


@pytest.fixture
def compiles():
    """How many programs were compiled since the last look."""
    seen = []

    def listen(event, duration, **_):
        if event.endswith("backend_compile_duration"):
            seen.append(event)

    def count():
        found = len(seen)
        seen.clear()
        return found

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield count
    jax.monitoring.unregister_event_duration_listener(listen)


def make(seed=0):
    return eqx.nn.MLP(16, 16, 32, 2, key=jax.random.key(seed))


@pytest.fixture
def plan(m24):
    return eqshard.auto_plan(eqx.filter_eval_shape(make), m24, min_bytes=0)


def halve(model):
    return jax.tree.map(lambda x: x / 2 if eqx.is_array(x) else x, model)


def test_keeps_plans_on_arguments_and_results(plan):
    step = eqshard.filter_jit(halve, in_plans=plan, out_plans=plan)
    model = step(make())  # arrays that JAX placed anywhere
    assert eqshard.plan_of(model).specs() == plan.specs() and model.activation is make().activation
    np.testing.assert_array_equal(model.layers[0].weight, make().layers[0].weight / 2)
    model = step(jax.tree.map(lambda x: np.asarray(x) if eqx.is_array(x) else x, make()))  # numpy
    assert eqshard.plan_of(model).specs() == plan.specs()
    again = step(eqshard.replicate(make(), plan.mesh))  # on the mesh, in another layout
    assert eqshard.plan_of(again).specs() == plan.specs()


def test_shapes_can_be_lowered(plan):
    shape = eqx.filter_eval_shape(make)
    compiled = eqshard.filter_jit(lambda model, x: (halve(model), x), in_plans=(plan, None)).lower(shape, 3).compile()
    first = compiled.input_shardings[0][0][0]
    assert first.is_equivalent_to(plan.shardings()[".layers[0].weight"], 2)


def test_a_plan_for_each_result(m24, plan):
    scalar = eqshard.replicated_plan(jax.ShapeDtypeStruct((), "float32"), m24)
    step = eqshard.filter_jit(lambda m: (halve(m), jnp.float32(1), "text"), out_plans=[plan, scalar, None])
    model, one, text = step(make())
    assert eqshard.plan_of(model).specs() == plan.specs() and len(one.devices()) == 8 and text == "text"
    with pytest.raises(eqshard.MismatchError, match=r"returned a tuple of 3; `out_plans` is for a tuple of 2"):
        eqshard.filter_jit(lambda m: (m, 1, 2), out_plans=[plan, None])(make())
    with pytest.raises(eqshard.MismatchError, match=r"returned a MLP; `out_plans` is for a tuple of 1"):
        eqshard.filter_jit(halve, out_plans=[plan])(make())


def test_keyword_arguments_have_their_plans_too(plan):
    step = eqshard.filter_jit(lambda x, model: (x, model), in_plans=(None, plan), out_plans=(None, plan))
    x, model = step(model=make(), x=3)
    assert x == 3 and eqshard.plan_of(model).specs() == plan.specs()
    with pytest.raises(eqshard.MismatchError, match="called with 1 arguments; `in_plans` has 2"):
        step(3)


@pytest.mark.parametrize("donate", ["all", "warn", "all-except-first", "warn-except-first", "none"])
def test_donation(plan, donate):
    first, second = eqshard.apply(plan, make()), eqshard.apply(plan, make(1))
    step = eqshard.filter_jit(
        lambda a, b: (halve(a), halve(b)), in_plans=(plan, plan), out_plans=(plan, plan), donate=donate
    )
    step(first, second)
    deleted = [m.layers[0].weight.is_deleted() for m in (first, second)]
    assert deleted == [donate in ("all", "warn"), donate != "none"]


def test_no_recompile_no_move_no_warning(m222, compiles):
    plan = eqshard.fsdp_plan(eqx.filter_eval_shape(make), m222, min_bytes=0)
    optim = optax.sgd(1e-3, momentum=0.9)  # (optax's Adam mixes dtypes, which the tests forbid)
    state_plan = eqshard.plan_like(plan, optim.init)
    model = eqshard.init(plan, make)
    state = eqshard.init(state_plan, optim.init, eqx.filter(model, eqx.is_array))

    def step(x, model, state):
        def loss(model):
            weights = jax.tree.leaves(eqx.filter(eqshard.use(plan, model), eqx.is_array))
            return sum((w**2).sum() * x.mean() for w in weights)

        grads = eqx.filter_grad(loss)(model)
        updates, state = optim.update(grads, state)
        return eqx.apply_updates(model, updates), state

    plans = plan, state_plan
    step = eqshard.filter_jit(step, in_plans=(None, *plans), out_plans=plans, donate="warn-except-first")
    batches = eqshard.shard([jnp.full((8, 16), i, float) for i in range(21)], (eqshard.BATCH,), m222)
    with warnings.catch_warnings(), jax.transfer_guard("disallow_explicit"):  # no move, asked for or not
        warnings.simplefilter("error")
        model, state = step(batches[0], model, state)
        assert compiles() > 0
        for x in batches[1:]:
            model, state = step(x, model, state)
        assert compiles() == 0
    compiled = step.lower(batches[0], model, state).compile()
    arrays = jax.tree.leaves(eqx.filter((model, state), eqx.is_array))
    ins, outs = jax.tree.leaves(compiled.input_shardings[0])[1:], jax.tree.leaves(compiled.output_shardings)
    assert all(a.is_equivalent_to(b, x.ndim) for a, b, x in zip(ins, outs, arrays, strict=True))
    assert compiled.as_text().count("-alias)") == len(arrays)  # each result takes the place of its argument


def test_arguments_that_lie_elsewhere_are_named(plan):
    step = eqshard.filter_jit(lambda model, x: x, in_plans=plan)
    stray = {"a": jax.device_put(jnp.ones(3), jax.devices()[2])}
    with pytest.raises(eqshard.StrayError, match=r"the plans' mesh, cpu 0 to 7: .*argument 1 `x`.*\['a'\]` on cpu 2"):
        step(make(), stray)
    broken = eqx.tree_at(lambda m: m.layers[1].bias, make(), jax.device_put(jnp.ones(32), jax.devices()[5]))
    with pytest.raises(eqshard.StrayError, match=r"argument 0 `model`.*layers\[1\]\.bias` on cpu 5"):
        step(broken, 3)
    step(make(), {"a": jnp.ones(3)})
    with pytest.raises(eqshard.StrayError):  # it lies as the one before did, but the user placed it
        step(make(), {"a": jax.device_put(jnp.ones(3), jax.devices()[0])})


def test_without_plans_arguments_are_held_against_each_other():
    step = eqshard.filter_jit(lambda x, y: x + y)
    assert (step(jnp.ones(2), np.ones(2, "float32")) == 2).all()
    one, two = (jax.device_put(jnp.ones(2), d) for d in jax.devices()[:2])
    with pytest.raises(eqshard.StrayError, match=r"`y`.*on cpu 1"):
        step(one, two)


def test_another_tree_is_refused(plan):
    with pytest.raises(eqshard.MismatchError, match="argument 0 `model`: the tree does not match"):
        eqshard.filter_jit(halve, in_plans=plan)(eqx.nn.Linear(2, 2, key=jax.random.key(0)))
    with pytest.raises(eqshard.MismatchError, match="the result: the tree does not match"):
        eqshard.filter_jit(lambda model: model.layers, out_plans=plan)(make())


def test_errors_of_the_function_pass():
    def fails(x):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        eqshard.filter_jit(fails)(jnp.ones(2))


def test_under_other_transformations(plan):
    double = eqshard.filter_jit(lambda m: jax.tree.map(lambda x: 2 * x, m), in_plans=plan, out_plans=plan)
    arrays = eqshard.apply(plan, make())
    arrays = eqx.filter(arrays, eqx.is_array)
    inner = jax.jit(lambda t: double(t))(arrays)
    np.testing.assert_array_equal(inner.layers[0].weight, 2 * make().layers[0].weight)
    grads = jax.jit(jax.grad(lambda t: sum((x**2).sum() for x in jax.tree.leaves(double(t)))))(arrays)
    np.testing.assert_allclose(grads.layers[0].weight, 8 * make().layers[0].weight, rtol=1e-6)


def test_is_a_method_a_decorator_and_has_a_name(m24):
    class Scaler(eqx.Module):
        scale: jax.Array

        @functools.partial(eqshard.filter_jit, donate="none")
        def __call__(self, x):
            """Scales."""
            return self.scale * x

    assert (Scaler(jnp.ones(3) * 2)(jnp.ones(3)) == 2).all()
    step = eqshard.filter_jit(halve, compiler_options={"xla_cpu_enable_fast_math": True})
    assert step.__name__ == "halve" and step.__wrapped__ is halve
    assert (step({"a": jnp.ones(2)})["a"] == 0.5).all()
    text = step.lower({"a": jax.ShapeDtypeStruct((2,), "float32"), "b": "static"}).as_text()
    assert "halve" in text
    model = Scaler(jnp.ones(3))
    assert (eqshard.filter_jit(model)(jnp.ones(3)) == 1).all()  # a module is a function, its arrays are traced


def test_compiler_options_reach_the_compiler():
    with pytest.raises(Exception, match="no_such_option"):
        eqshard.filter_jit(halve, compiler_options={"no_such_option": True})({"a": jnp.ones(2)})


def test_explicit_and_auto_steps_agree(make_mesh):
    plan = eqshard.auto_plan(eqx.filter_eval_shape(make), make_mesh(dp=2, tp=4), min_bytes=0)
    step = eqshard.filter_jit(halve, in_plans=plan, out_plans=plan, donate="all")
    model = make()
    for _ in range(3):
        model = step(model)
    np.testing.assert_allclose(model.layers[2].weight, make().layers[2].weight / 8, rtol=1e-6)
    assert eqshard.specs_of(model).layers[0].weight == plan[".layers[0].weight"].spec != P()


def test_an_argument_that_was_donated_is_named():
    tree = {"a": jnp.ones(8), "b": jnp.ones(8)}
    step = eqshard.filter_jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate="all")
    out = step(tree)
    with pytest.raises(eqshard.DonatedError, match=r"donated to an earlier call: .*argument 0 `tree`.*\['a'\]"):
        step(tree)
    assert float(step(out)["a"][0]) == 3
