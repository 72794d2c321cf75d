"""A mixture of experts: each device holds some of the experts, and tokens travel to them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqshard
from eqshard import BATCH, EXPERT


EXPERTS, CAPACITY = 8, 2.0


class Mixture(eqx.Module):
    gate: eqx.nn.Linear
    experts: eqx.nn.MLP  # all experts, stacked

    def __init__(self, key, dim=16):
        k1, k2 = jax.random.split(key)
        self.gate = eqx.nn.Linear(dim, EXPERTS, use_bias=False, key=k1)
        self.experts = eqx.filter_vmap(lambda k: eqx.nn.MLP(dim, dim, 4 * dim, 1, key=k))(jax.random.split(k2, EXPERTS))

    def __call__(self, x, mesh):
        probabilities = jax.nn.softmax(jax.vmap(self.gate)(x))
        chosen = probabilities.argmax(axis=1)
        one_hot = jax.nn.one_hot(chosen, EXPERTS)
        place = (jnp.cumsum(one_hot, axis=0) * one_hot).sum(axis=1).astype(int) - 1  # in the queue of its expert
        slots = int(CAPACITY * len(x) / EXPERTS)
        dispatch = one_hot[:, :, None] * jax.nn.one_hot(place, slots)[:, None, :]  # those out of capacity go nowhere
        queues = jnp.einsum("nd,nes->esd", x, dispatch)
        queues = eqshard.shard(queues, (EXPERT,), mesh)  # here the tokens travel
        answers = eqx.filter_vmap(lambda expert, xs: jax.vmap(expert)(xs))(self.experts, queues)
        answers = eqshard.shard(answers, (EXPERT,), mesh)
        weight = jnp.take_along_axis(probabilities, chosen[:, None], axis=1)
        return x + weight * eqshard.shard(jnp.einsum("esd,nes->nd", answers, dispatch), (BATCH,), mesh)


def expert_parallel(shape, mesh):
    return eqshard.logical_plan(shape, mesh, [("experts", (EXPERT,)), ("gate", None)])


def train(mesh, planner=expert_parallel, steps=50):
    model, plan = eqshard.init(Mixture, jax.random.key(0), mesh=mesh, planner=planner)
    optim = optax.sgd(0.3, momentum=0.9)
    state_plan = eqshard.plan_like(plan, optim.init)
    state = eqshard.init(state_plan, optim.init, eqx.filter(model, eqx.is_array))

    def step(model, state, x, y):
        x, y = eqshard.shard((x, y), (BATCH,), mesh)
        loss, grads = eqx.filter_value_and_grad(lambda m: ((eqshard.use(plan, m)(x, mesh) - y) ** 2).mean())(model)
        updates, state = optim.update(grads, state)
        return eqx.apply_updates(model, updates), state, loss

    step = eqshard.filter_jit(step, in_plans=(plan, state_plan), out_plans=(plan, state_plan, None), donate="all")
    losses, rng = [], np.random.default_rng(0)
    for _ in range(steps):
        x = rng.normal(size=(64, 16)).astype("float32")
        model, state, loss = step(model, state, x, np.roll(x, 1, axis=1))
        losses.append(float(loss))
    return losses, model


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    losses, model = train(eqshard.MeshSpec(dp=2, ep=4))
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    assert losses[-1] < losses[0] * 0.8
    assert model.experts.layers[0].weight.addressable_shards[0].data.shape == (2, 64, 16)  # two experts a device
