"""Trains a GPT with fully sharded parameters: stored in eighths, and one layer whole at a time."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqshard


class Block(eqx.Module):
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, dim, key):
        keys = jax.random.split(key, 3)
        self.norms = eqx.nn.LayerNorm(dim), eqx.nn.LayerNorm(dim)
        self.attention = eqx.nn.MultiheadAttention(4, dim, key=keys[0])
        self.up, self.down = eqx.nn.Linear(dim, 4 * dim, key=keys[1]), eqx.nn.Linear(4 * dim, dim, key=keys[2])

    def __call__(self, x):
        h = jax.vmap(self.norms[0])(x)
        x = x + self.attention(h, h, h, mask=jnp.tril(jnp.ones((len(x), len(x)), bool)))
        return x + jax.vmap(lambda h: self.down(jax.nn.gelu(self.up(self.norms[1](h)))))(x)


class GPT(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: Block  # all layers, stacked

    def __init__(self, key, layers=4, dim=32):
        self.embed = eqx.nn.Embedding(weight=jax.random.normal(key, (64, dim)) * 0.1)
        self.blocks = eqx.filter_vmap(lambda key: Block(dim, key))(jax.random.split(key, layers))

    def __call__(self, tokens, plan):
        embed = eqshard.use(plan.select(".embed"), self.embed)
        layers, static = eqx.partition(self.blocks, eqx.is_array)

        @jax.checkpoint  # the backward pass gathers a layer again, instead of keeping all of them
        def body(x, layer):
            block = eqshard.use(plan.select(".blocks").layer(), eqx.combine(layer, static))
            return eqshard.shard(jax.vmap(block)(x), (eqshard.BATCH,), plan.mesh), None

        x, _ = jax.lax.scan(body, jax.vmap(jax.vmap(embed))(tokens), layers)
        return x @ embed.weight.T


def loss_fn(model, tokens, plan):
    tokens = eqshard.shard(tokens, (eqshard.BATCH,), plan.mesh)
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1], plan), tokens[:, 1:]).mean()


def train(mesh, planner=eqshard.fsdp_plan, steps=50, make_model=GPT, optim=optax.adamw(3e-3)):  # noqa: B008
    model, plan = eqshard.init(make_model, jax.random.key(0), mesh=mesh, planner=planner)
    state_plan = eqshard.plan_like(plan, optim.init)  # the moments lie as their parameters
    state = eqshard.init(state_plan, optim.init, eqx.filter(model, eqx.is_array))

    def step(model, state, tokens):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, tokens, plan)
        updates, state = optim.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, loss

    step = eqshard.filter_jit(step, in_plans=(plan, state_plan), out_plans=(plan, state_plan, None), donate="all")
    losses, rng = [], np.random.default_rng(0)
    for _ in range(steps):  # sequences that count upwards by 1, 2 or 3
        tokens = (rng.integers(64, size=(16, 1)) + rng.integers(1, 4, (16, 1)) * np.arange(17)) % 64
        model, state, loss = step(model, state, tokens.astype("int32"))
        losses.append(float(loss))
    return losses, model


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    losses, model = train(eqshard.MeshSpec(fsdp=8), lambda tree, mesh: eqshard.fsdp_plan(tree, mesh, min_bytes=1000))
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    assert losses[-1] < losses[0] / 1.5 and model.blocks.up.weight.addressable_shards[0].data.shape == (4, 16, 32)
