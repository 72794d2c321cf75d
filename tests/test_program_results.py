"""Results keep the layouts of the arguments that they replace, whatever the structure of the results."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from program_checks import EAGER, mesh_of, shape
from result_forms import FORMS, make_args, make_step

import eqshard
from eqshard.program._trace import trace


def arrays(tree):
    return [x for x in jax.tree.leaves(tree) if eqx.is_array(x)]


def held(trees):
    """Bytes of arrays on the first device."""
    return sum(s.data.nbytes for x in arrays(trees) for s in x.addressable_shards if s.device == jax.devices()[0])


def plan_form(form, axis_type):
    mesh = eqshard.MeshSpec({"data": 2, "tp": 4}, axis_type=axis_type, chip="v5e")
    return eqshard.step_plan(make_step(form), *make_args(form), mesh=mesh, objective="memory")


def check_results(form, plan, train):
    """Three calls: model and state stay where they are, in the memory that they had."""
    model, state, x = (eqshard.apply(p, a) for p, a in zip(plan.args, make_args(form)))
    assert any(leaf.sharding.spec != P() for leaf in arrays(model))
    before, begun = [leaf.sharding for leaf in arrays((model, state))], held((model, state))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            given = arrays((model, state))
            model, state = form.read(train(model, state, eqshard.apply(plan.args[2], jnp.copy(x))))
            assert all(leaf.is_deleted() for leaf in given)
    for leaf, sharding in zip(arrays((model, state)), before, strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    assert held((model, state)) == begun


@pytest.mark.parametrize("name", FORMS)
def test_layouts_and_memory_of_results(name, axis_type):
    form = FORMS[name]
    plan = plan_form(form, axis_type)
    assert not any("replaces no argument" in note for note in plan.notes)
    train = eqx.filter_jit(eqshard.constrain(plan, make_step(form)), donate="all")
    check_results(form, plan, train)
    args = [eqshard.apply(p, a) for p, a in zip(plan.args, make_args(form))]
    memory = train.lower(*args).compile().compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= held(args[:2])  # all of it is written over
    used = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert used - memory.alias_size_in_bytes == pytest.approx(plan.bytes_per_device, rel=0.2)


@pytest.mark.parametrize("name", ["loss, (model, state)", "dict", "loss, (state, model) with State"])
def test_layouts_of_results_of_eqshard_filter_jit(name, axis_type):
    form = FORMS[name]
    plan = plan_form(form, axis_type)
    step = eqshard.constrain(plan, make_step(form))
    check_results(form, plan, eqshard.filter_jit(step, in_plans=plan.args, donate="all"))


W, BIG = (16, 16), {"w": jnp.zeros((8, 4)), "b": jnp.zeros(4)}


def pairs(step, *args):
    """For each result the argument leaf that it replaces: as the names of both."""
    traced = trace(step, args)
    names = [traced.names[leaf.arg] + leaf.path for leaf in traced.ins]
    partners = [names[traced.kept[i]] if i in traced.kept else None for i in range(len(traced.outs))]
    return {jax.tree_util.keystr(leaf.keys): partner for leaf, partner in zip(traced.outs, partners)}


def momentum(w, m, v, x):
    g = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    m, v = 0.9 * m + g, 0.9 * v + g * g
    return w - m / jnp.sqrt(v), m, v


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)])
def test_bare_arrays_are_paired_by_what_they_are_computed_from(order):
    """Weights and both moments have one shape and no names."""
    args = shape(*W), shape(*W), shape(*W), shape(8, 16)
    step = lambda w, m, v, x: (jnp.float32(0), *(momentum(w, m, v, x)[i] for i in order))
    found = pairs(step, *args)
    assert found == {"[0]": None} | {f"[{1 + k}]": "wmv"[i] for k, i in enumerate(order)}


def test_names_of_results_and_parameters():
    step = lambda w, m, v, x: dict(zip("vmw", (jnp.ones(W), jnp.ones(W), jnp.ones(W))))
    assert pairs(step, *[shape(*W)] * 3, shape(4)) == {"['m']": "m", "['v']": "v", "['w']": "w"}


def test_trees_of_one_structure_are_not_swapped():
    mean = lambda model, ema, x: (lambda new: (jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, ema, new), new))(
        jax.tree.map(lambda w: w * x.sum(), model)
    )
    found = pairs(mean, BIG, BIG, shape(8, 4))
    assert found == {"[0]['b']": "ema['b']", "[0]['w']": "ema['w']", "[1]['b']": "model['b']", "[1]['w']": "model['w']"}


def test_gradients_do_not_take_the_place_of_the_model():
    def step(model, x):
        grads = jax.grad(lambda m: jnp.mean((x @ m["w"] + m["b"][None]) ** 2))(model)
        return grads, jax.tree.map(lambda w, g: w - g, model, grads)

    found = pairs(step, BIG, shape(2, 8))
    assert found == {"[0]['b']": None, "[0]['w']": None, "[1]['b']": "model['b']", "[1]['w']": "model['w']"}


def test_a_part_of_a_model_is_paired_leaf_by_leaf():
    model = {"layers": [{"base": jnp.ones(W), "a": jnp.ones(W)} for _ in range(3)]}
    step = lambda model, x: (x.sum(), {"layers": [{"a": layer["a"] * 2.0} for layer in model["layers"]]})
    found = pairs(step, model, shape(8, 16))
    assert found == {"[0]": None} | {f"[1]['layers'][{i}]['a']": f"model['layers'][{i}]['a']" for i in range(3)}


def test_loops_and_parts_that_are_set_are_updates():
    def step(x, cache, w):
        w = jax.lax.fori_loop(0, 3, lambda i, w: w @ w, w)
        cache = jax.jit(lambda c: c.at[0].set(1.0))(cache)
        return jax.lax.scan(lambda c, k: (c + k, k * 2.0), x[0] * 0, x)[1], cache, w

    args = shape(5, 4), shape(6, 6), shape(3, 3)
    swapped = lambda x, cache, w: step(x, cache, w)[::-1]
    assert pairs(swapped, *args) == {"[0]": "w", "[1]": "cache", "[2]": "x"}


def test_unrelated_results_are_not_paired():
    """Predictions that have the shape of the batch; and those of a model alone."""
    predict = lambda w, x: (w - 1.0, jnp.tanh(x @ w) @ w)
    assert pairs(predict, shape(*W), shape(8, 16)) == {"[0]": "w", "[1]": None}
    assert pairs(lambda w, x: x @ w, shape(*W), shape(8, 16)) == {"": None}
    assert pairs(lambda w, x: w - x.sum(), shape(*W), shape(8, 16)) == {"": "w"}


def test_large_results_without_a_partner(axis_type):
    """They are computed sharded, returned so, counted in the memory, and noted."""
    args = shape(512, 1024), shape(2048, 512)
    step = lambda w, x: (jnp.mean(x @ w), {"logits": x @ w})
    mesh = mesh_of(axis_type, data=2, tp=4)
    plan = eqshard.step_plan(step, *args, mesh=mesh)
    (note,) = plan.notes
    assert "result [1]['logits'], float32[2048,1024], replaces no argument" in note
    alone = eqshard.step_plan(lambda w, x: jnp.mean(x @ w), *args, mesh=mesh)
    assert not alone.notes
    arrays = [eqshard.apply(p, jnp.ones(a.shape)) for p, a in zip(plan.args, args)]
    logits = eqx.filter_jit(eqshard.constrain(plan, step))(*arrays)[1]["logits"]
    (spec,) = [spec for path, side, slot, spec in plan.inner if side == "result" and slot == 1]
    assert logits.addressable_shards[0].data.size == logits.size / 8
    assert logits.sharding.is_equivalent_to(jax.NamedSharding(mesh.build(), spec), 2)
    own = 2048 * 1024 * 4 / 8
    given = sum(eqshard.analyze(p).bytes_per_device[0] for p in plan.args)
    assert plan.bytes_per_device >= given + own


def test_elementwise_results_are_counted():
    """XLA fuses what they are computed by, but not the results themselves."""
    mesh = eqshard.MeshSpec(a=8, chip=EAGER)
    step = lambda x: [jnp.sin(x).sum(), jnp.stack([x, x]), (x + 1.0)[None], (x * 2.0)[None]]
    plan = eqshard.step_plan(step, shape(1024, 1024), mesh=mesh)
    assert len(plan.notes) == 3 and plan.bytes_per_device >= 5 * 4 * 1024**2 / 8
