"""The training examples on one device and on eight, under each kind of plan; and what their steps compile to."""

import functools
import pathlib
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqshard


sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))
import fsdp_gpt
import long_sequences
import lora
import mixture_of_experts
import move_mesh
import resnet_data_parallel
import tensor_parallel


STEPS = 50


def fsdp(shape, mesh):
    return eqshard.fsdp_plan(shape, mesh, min_bytes=0)


def tp(shape, mesh):
    return eqshard.rule_plan(shape, mesh, eqshard.tp_rules(shape), strict=False, unused="ignore")


def fsdp_tp(shape, mesh):  # (the stacked biases of the GPT have but their layers left to cut)
    return eqshard.fsdp_plan(shape, mesh, min_bytes=4000, base=tp(shape, mesh))


PLANS = {
    "dp": (eqshard.MeshSpec(dp=8), eqshard.replicated_plan),
    "fsdp": (eqshard.MeshSpec(fsdp=8), fsdp),
    "tp": (eqshard.MeshSpec(dp=2, tp=4), tp),
    "fsdp_tp": (eqshard.MeshSpec(fsdp=4, tp=2), fsdp_tp),
}
EXAMPLES = {
    "gpt": functools.partial(fsdp_gpt.train, optim=optax.sgd(0.3, momentum=0.9)),
    "transformer": tensor_parallel.train,
    "experts": mixture_of_experts.train,
    "resnet": resnet_data_parallel.train,
    "sequences": long_sequences.train,
    "lora": lora.train,
    "mlp": move_mesh.train,
}


@functools.cache
def alone(name):
    losses, model = EXAMPLES[name](eqshard.MeshSpec(dp=1), eqshard.replicated_plan, STEPS)
    return losses, eqshard.gather(eqx.filter(model, eqx.is_array))


@pytest.fixture(autouse=True)
def as_users_have_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_eight_devices_learn_what_one_does(name, kind):
    mesh, planner = PLANS[kind]
    losses, model = EXAMPLES[name](mesh, planner, STEPS)
    assert len(losses) == STEPS
    one, parameters = alone(name)
    np.testing.assert_allclose(losses, one, rtol=1e-4, atol=1e-5)
    for (path, x), (_, y) in zip(
        jax.tree.leaves_with_path(eqx.filter(model, eqx.is_array)), jax.tree.leaves_with_path(parameters), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4, err_msg=str(path))
        assert len(x.devices()) == 8


@pytest.mark.parametrize("name", ["experts", "sequences"])
def test_the_axis_that_an_example_is_for(name):
    mesh = {"experts": eqshard.MeshSpec(dp=2, ep=4), "sequences": eqshard.MeshSpec(dp=2, sp=4)}[name]
    losses, _ = EXAMPLES[name](mesh, steps=STEPS)
    np.testing.assert_allclose(losses, alone(name)[0], rtol=1e-4, atol=1e-5)


class Unrolled(eqx.Module):
    """The GPT of the example with its layers in a list."""

    embed: eqx.nn.Embedding
    blocks: list[fsdp_gpt.Block]

    def __init__(self, key, layers, dim):
        self.embed = eqx.nn.Embedding(64, dim, key=key)
        self.blocks = [fsdp_gpt.Block(dim, k) for k in jax.random.split(key, layers)]

    def __call__(self, tokens, plan):
        embed = eqshard.use(plan.select(".embed"), self.embed)
        x = jax.vmap(jax.vmap(embed))(tokens)
        for i, block in enumerate(self.blocks):
            layer_plan = plan.select(f".blocks[{i}]")

            @eqx.filter_checkpoint
            def run(block, x, layer_plan=layer_plan):
                block, x = eqshard.sequenced(block, x)  # else all layers may be gathered at once
                x = jax.vmap(eqshard.use(layer_plan, block))(x)
                return eqshard.shard(x, (eqshard.BATCH,), layer_plan.mesh)

            x = run(block, x)
        return x @ embed.weight.T


DIM = 48


@functools.cache
def compiled(make, layers, what="step"):
    """A step of gradient descent, or the loss alone, over eight devices."""
    mesh = eqshard.MeshSpec(fsdp=8)
    shape = eqx.filter_eval_shape(lambda key: make(key, layers, DIM), jax.random.key(0))
    plan = eqshard.fsdp_plan(shape, mesh, min_bytes=4000)

    def step(model, tokens):
        grads = eqx.filter_grad(fsdp_gpt.loss_fn)(model, tokens, plan)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))

    tokens = jax.ShapeDtypeStruct((8, 9), jnp.int32)
    if what == "loss":
        loss = eqshard.filter_jit(lambda m, t: fsdp_gpt.loss_fn(m, t, plan), in_plans=plan)
        return loss.lower(shape, tokens).compile()
    return eqshard.filter_jit(step, in_plans=plan, out_plans=plan, donate="all").lower(shape, tokens).compile()


def temporary(program):
    return program.memory_analysis().temp_size_in_bytes


def test_a_scanned_model_is_gathered_inside_its_loop():
    gathers = [c for c in eqshard.collectives(compiled(fsdp_gpt.GPT, 4)) if c.kind == "all-gather"]
    weights = [c for c in gathers if c.bytes in (4 * DIM * DIM, 16 * DIM * DIM)]
    assert len(weights) >= 12 and all(c.trips == 4 for c in weights)  # six of them, forth and back, layer by layer
    assert not [c for c in gathers if c.bytes > 16 * DIM * DIM]  # never all layers of a weight


def test_an_unrolled_model_is_gathered_layer_by_layer():
    gathers = [c for c in eqshard.collectives(compiled(Unrolled, 4)) if c.kind == "all-gather"]
    weights = [c for c in gathers if c.bytes in (4 * DIM * DIM, 16 * DIM * DIM)]
    assert len(weights) >= 4 * 12  # six of each layer, forth and back
    assert not [c for c in gathers if c.bytes > 16 * DIM * DIM]  # never two layers of a weight at once


def test_temporary_memory_stays_flat_as_layers_grow():
    make, most = fsdp_gpt.GPT, 32
    few, many = (temporary(compiled(make, n, "loss")) for n in (4, most))
    assert many < few * 1.1
    few, many = (temporary(compiled(make, n)) for n in (4, most))
    # A layer adds at most its gradient, an eighth on each device, and its saved input; not its weights.
    assert (many - few) / (most - 4) < 1.5 * (12 * DIM * DIM * 4 / 8 + 8 * DIM * 4)


@pytest.mark.tpu
def test_an_unrolled_model_has_few_layers_whole_at_once_on_tpu():
    """XLA for CPUs drops the barriers that keep layers in order; the TPU compiler keeps them."""
    pytest.importorskip("libtpu")
    mesh, dim, most, length = eqshard.MeshSpec(fsdp=16), 512, 32, 128
    weights, found = 12 * dim * dim * 4, {}
    for n in (4, most):
        shape = eqx.filter_eval_shape(lambda key, n=n: Unrolled(key, n, dim), jax.random.key(0))
        plan = eqshard.fsdp_plan(shape, mesh, min_bytes=4000)
        tokens = jax.ShapeDtypeStruct((16, length + 1), jnp.int32)

        def step(model, tokens, plan=plan):
            grads = eqx.filter_grad(fsdp_gpt.loss_fn)(model, tokens, plan)
            return eqshard.apply(plan, eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)))

        plans = plan, eqshard.replicated_plan(tokens, mesh).at("").set(jax.P("fsdp"))
        report = eqshard.compile_report(step, shape, tokens, plans=plans, target="v5e:4x4", donate=(0,))
        gathers = [c for c in report.collectives if c.kind == "all-gather"]
        assert max(c.bytes for c in gathers) * 2 <= weights  # never two layers of a weight at once
        found[n] = report.memory.temporary
    # A layer adds at most its gradient, a sixteenth on each device, and its saved input; not its weights.
    assert (found[most] - found[4]) / (most - 4) < 1.5 * (weights / 16 + length * dim * 4)
    assert found[most] < 4 * weights
