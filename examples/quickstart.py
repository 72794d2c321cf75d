"""Trains a small Equinox transformer over 8 simulated devices, sharded, and shows what each device held."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import eqshard


jax.config.update("jax_num_cpu_devices", 8)
VOCAB, WIDTH, HEADS, LAYERS, BATCH, LENGTH, STEPS = 512, 256, 8, 4, 16, 32, 40


class Block(eqx.Module):
    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __call__(self, x):
        h = jax.vmap(self.norm1)(x)
        x = x + self.attention(h, h, h, mask=jnp.tril(jnp.ones((len(x), len(x)), bool)))
        return x + jax.vmap(self.mlp)(jax.vmap(self.norm2)(x))


class Transformer(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: list[Block]
    head: eqx.nn.Linear

    def __call__(self, tokens):
        x = jax.vmap(self.embed)(tokens)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x)


def make_model(key):
    def block(key):
        k1, k2 = jax.random.split(key)
        attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=k1)
        mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, activation=jax.nn.gelu, key=k2)
        return Block(eqx.nn.LayerNorm(WIDTH), attention, eqx.nn.LayerNorm(WIDTH), mlp)

    k1, k2, *keys = jax.random.split(key, LAYERS + 2)
    embed, head = eqx.nn.Embedding(VOCAB, WIDTH, key=k1), eqx.nn.Linear(WIDTH, VOCAB, key=k2)
    return Transformer(embed, list(map(block, keys)), head)


def step(model, state, tokens):
    def loss_fn(model):
        logits = jax.vmap(model)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
    updates, state = optim.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), state, loss


optim, mesh = optax.adamw(1e-3), eqshard.MeshSpec(data=2, fsdp=2, tp=2)
model, plan = eqshard.init(make_model, jax.random.key(0), mesh=mesh, planner=eqshard.auto_plan)  # born sharded
state_plan = eqshard.plan_like(plan, optim.init)  # the moments lie as their parameters
state = eqshard.init(state_plan, optim.init, eqx.filter(model, eqx.is_inexact_array))
train = eqshard.filter_jit(step, out_plans=(plan, state_plan, None), donate="all")
print(eqshard.report(plan))
columns = TextColumn("training"), BarColumn(), TextColumn("loss {task.fields[loss]:.3f}"), TimeRemainingColumn()
with Progress(*columns) as bar:
    task, losses = bar.add_task("", total=STEPS, loss=float("nan")), []
    for i in range(STEPS):
        start = jax.random.randint(jax.random.key(i), (BATCH, 1), 0, VOCAB)
        tokens = (start + 7 * jnp.arange(LENGTH + 1)[None]) % VOCAB  # every sequence counts in sevens
        model, state, loss = train(model, state, eqshard.shard_batch(tokens, mesh, jax.P(("data", "fsdp"))))
        losses.append(float(loss))
        bar.update(task, advance=1, loss=losses[-1])
held = max(map(sum, zip(*(eqshard.analyze(p).bytes_per_device for p in (plan, state_plan)), strict=True)))
whole = sum(leaf.nbytes for p in (plan, state_plan) for leaf in p)
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; held {held / 1e6:.1f} MB a device, on one alone {whole / 1e6:.1f} MB")
assert losses[-1] < losses[0] and held < whole / 4
