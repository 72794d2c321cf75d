"""Sequences too long for one device: activations lie in pieces over a sequence axis, the weights are small."""

import equinox as eqx
import jax
import numpy as np
import optax

import eqshard
from eqshard import BATCH, HEAD, KV_LENGTH, LENGTH, QUERY_LENGTH


# Keys and values are gathered to be attended to; everything else stays in pieces of the sequence.
NAMES = eqshard.PartitionAxis(key_sequence_axis=None)


class Reader(eqx.Module):
    embed: eqx.nn.Embedding
    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    mlp: eqx.nn.MLP

    def __init__(self, key, dim=16):
        keys = jax.random.split(key, 5)
        self.embed = eqx.nn.Embedding(16, dim, key=keys[0])
        self.query, self.key, self.value = (eqx.nn.Linear(dim, dim, key=k) for k in keys[1:4])
        self.mlp = eqx.nn.MLP(dim, 16, 2 * dim, 1, key=keys[4])

    def __call__(self, tokens, mesh):
        each = lambda layer: jax.vmap(jax.vmap(layer))
        x = eqshard.shard(each(self.embed)(tokens), (BATCH, LENGTH), mesh)
        query, key, value = (each(f)(x).reshape(*x.shape[:2], 4, -1) for f in (self.query, self.key, self.value))
        query = eqshard.shard(query, (BATCH, QUERY_LENGTH, HEAD), mesh, NAMES)
        key, value = eqshard.shard((key, value), (BATCH, KV_LENGTH, HEAD), mesh, NAMES)
        h = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return each(self.mlp)(eqshard.shard(x + h.reshape(x.shape), (BATCH, LENGTH), mesh))


def loss_fn(model, tokens, mesh):
    logits = model(tokens, mesh)
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, 1:], tokens[:, :-1]).mean()


def make_step(mesh, planner, optim):
    model, plan = eqshard.init(Reader, jax.random.key(0), mesh=mesh, planner=planner)

    def step(model, tokens):  # plain gradient descent has no state
        tokens = eqshard.shard(tokens, (BATCH, LENGTH), mesh)
        loss, grads = eqx.filter_value_and_grad(lambda m: loss_fn(eqshard.use(plan, m), tokens, mesh))(model)
        updates, _ = optim.update(grads, optim.init(eqx.filter(model, eqx.is_array)))
        return eqx.apply_updates(model, updates), loss

    return model, eqshard.filter_jit(step, in_plans=plan, out_plans=(plan, None))


def train(mesh, planner=eqshard.replicated_plan, steps=50, length=64):
    model, step = make_step(mesh, planner, optax.sgd(0.5))
    losses, rng = [], np.random.default_rng(0)
    for _ in range(steps):  # say the token before
        model, loss = step(model, rng.integers(16, size=(8, length)).astype("int32"))
        losses.append(float(loss))
    return losses, model


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    losses, _ = train(eqshard.MeshSpec(dp=2, sp=4))
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    needs = {}
    for pieces in (1, 8):  # one sequence of 1024 tokens
        model, step = make_step(eqshard.MeshSpec(sp=pieces), eqshard.replicated_plan, optax.sgd(0.5))
        memory = step.lower(model, jax.ShapeDtypeStruct((1, 1024), "int32")).compile().memory_analysis()
        needs[pieces] = memory.temp_size_in_bytes if memory else 0
    print(f"bytes for activations on a device: {needs[1]:,} alone, {needs[8]:,} over 8")
    assert losses[-1] < losses[0] and needs[8] < needs[1] / 5
