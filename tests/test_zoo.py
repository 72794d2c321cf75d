"""The zoo itself: that its models are what they say, and its layouts lay out what they say."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
import zoo
from zoo import mamba, moe
from zoo._case import dims_of
from zoo._weights import largest_divisible

import eqshard
from eqshard._tree import array_leaves, path_name


MESH = eqshard.MeshSpec(data=2, tp=4)


@pytest.fixture(autouse=True, scope="module")
def quick_compiles():
    """These programs run once."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def shape_of(x):
    return x.shape, x.dtype


@pytest.mark.parametrize("name", zoo.NAMES)
def test_a_step_returns_what_it_consumes(name):
    case = zoo.case(name)
    out = eqx.filter_eval_shape(case.step, *case.args)
    given = eqx.filter([case.args[i] for i in case.donate], eqshard.is_array)
    returned = eqx.filter(list(out[: len(case.donate)]), eqshard.is_array)
    assert jtu.tree_structure(returned) == jtu.tree_structure(given)
    assert jtu.tree_map(shape_of, returned) == jtu.tree_map(shape_of, given)


@pytest.mark.parametrize("name", zoo.NAMES)
def test_every_weight_is_used_and_every_pin_is_known(name):
    case = zoo.case(name)
    used, pins = set(), []

    def use(tree, at):
        used.update(at + path_name(p) for p, x in jtu.tree_flatten_with_path(tree)[0] if eqshard.is_array(x))
        return tree

    def pin(x, name):
        assert dims_of(name, x.ndim, case.model.values) != (None,) * x.ndim
        pins.append(name)
        return x

    eqx.filter_eval_shape(case.build(zoo.Hooks(pin, use)), *case.args)
    assert pins
    assert used == {path for path, _ in array_leaves(case.args[0])}


@pytest.mark.parametrize("name", zoo.NAMES)
def test_layouts_cover_the_arguments(name):
    case = zoo.case(name)
    layouts = case.layouts(MESH)
    assert {"dp", "fsdp", "megatron", "tp_fsdp", "auto_plan", "scalax_fsdp"} <= set(layouts)
    assert ("ep" in layouts) == name.startswith("moe")
    for layout in layouts.values():
        for plan, arg in zip(layout.plans, case.args, strict=True):
            eqshard.apply(plan, arg)

    def held(name, argument=0):
        return sum(leaf.nbytes / eqshard.shard_factor(leaf.spec, MESH) for leaf in layouts[name].plans[argument])

    whole = held("dp")
    assert held("fsdp") < 0.2 * whole  # an eighth, and what does not divide
    assert whole > held("megatron") > held("tp_fsdp")
    assert all(leaf.use == jax.P() for leaf in layouts["fsdp"].plans[0])
    assert all(leaf.use == leaf.spec for leaf in layouts["megatron"].plans[0])
    if "state" in case.kinds:
        assert held("zero1") == whole and held("zero1", 1) < 0.2 * held("dp", 1)


def test_sizes():
    billions = {
        ("llama_scan", "bench"): 1.1,
        ("llama_scan", "405b"): 405.8,
        ("llama_unrolled", "deep"): 5.97,
        ("moe", "bench"): 0.795,
        ("gpt2", "bench"): 0.124,
        ("resnet", "bench"): 0.0160,
        ("vit", "bench"): 0.304,
    }
    for (name, size), expected in billions.items():
        assert zoo.case(name, size).parameters == pytest.approx(expected * 1e9, rel=0.01)


def test_the_size_rule():
    mesh = eqshard.MeshSpec(fsdp=16)
    assert largest_divisible((1024, 4096), mesh) == jax.P(None, ("fsdp",))
    assert largest_divisible((1024, 4097), mesh) == jax.P(("fsdp",), None)
    assert largest_divisible((512, 512), mesh) == jax.P()


def loss_of(case, model, batch):
    return jax.jit(lambda m, b: case.model.loss(m, b, case.config, zoo.Hooks()))(model, batch)


def test_dispatch_by_einsum_is_dispatch_by_index():
    c = zoo.case("moe").config
    n = jax.random.normal(jax.random.key(1), (c.batch, c.length, c.embed))

    @jax.jit
    def both(key, n):
        layer = moe.Layer(c, key)
        ways = moe.by_einsum(layer, n, c, zoo.Hooks()), moe.by_index(layer, n, c, zoo.Hooks())
        return ways, moe.route(layer, n, c)

    (one, other), (expert, place, weight, _) = both(jax.random.key(0), n)
    np.testing.assert_allclose(one[0], other[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(one[1], other[1])
    full = place >= c.capacity  # some experts are, here, and none takes two tokens in one place
    assert full.any() and not weight[full].any()
    slots = np.asarray(expert * c.capacity + place)[0][~np.asarray(full)[0]]
    assert len(set(slots)) == len(slots)


def test_recurrence_by_association_is_by_loop():
    one, two, three = jax.random.split(jax.random.key(0), 3)
    kept = jax.random.uniform(one, (2, 16, 8, 4))
    added, read = jax.random.normal(two, (2, 16, 8, 4)), jax.random.normal(three, (2, 16, 4))
    found = jax.jit(mamba.by_association)(kept, added, read)
    np.testing.assert_allclose(found, jax.jit(mamba.by_loop)(kept, added, read), rtol=1e-4, atol=1e-5)


def test_scanned_is_unrolled():
    scanned, unrolled = zoo.case("llama_scan"), zoo.case("llama_unrolled")
    model, _, batch = eqx.filter_jit(scanned.make)(jax.random.key(0))
    layers = [jtu.tree_map(lambda x, i=i: x[i], model.layers) for i in range(scanned.config.layers)]
    apart = eqx.tree_at(lambda m: m.layers, model, layers)
    np.testing.assert_allclose(loss_of(scanned, model, batch), loss_of(unrolled, apart, batch), rtol=1e-5)


def test_decoding_goes_on_from_prefill():
    prefill, decode = zoo.case("llama_prefill"), zoo.case("llama_decode")
    model, empty, prompt = eqx.filter_jit(prefill.make)(jax.random.key(0))
    _, expected = jax.jit(prefill.step)(model, empty, prompt)
    last = prompt.shape[1] - 1
    # The last token is seen by no other, so the rest of the cache does not depend on it.
    cache, _ = jax.jit(prefill.step)(model, empty, prompt.at[:, last].set(0))
    given = {"token": prompt[:, last:], "at": jnp.asarray(last, jnp.int32)}
    _, found = jax.jit(decode.step)(model, cache, given)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name, layout",
    [("mlp", "zero1"), ("llama_scan", "fsdp"), ("moe", "ep"), ("dlrm", "tp_fsdp"), ("llama_decode", "megatron")],
)
def test_a_layout_changes_no_value(name, layout):
    case = zoo.case(name)
    args = eqx.filter_jit(case.make)(jax.random.key(0))
    chosen = case.layouts(MESH)[layout]
    laid = tuple(eqshard.apply(plan, x) for plan, x in zip(chosen.plans, args))
    expected, found = eqx.filter_jit(case.step)(*args), eqx.filter_jit(chosen.step)(*laid)
    np.testing.assert_allclose(found[-1], expected[-1], rtol=1e-4, atol=1e-5)
    for i, number in enumerate(case.donate):  # the next step finds its arguments where this one left them
        assert eqshard.specs_of(found[i]) == chosen.plans[number].specs(found[i])
