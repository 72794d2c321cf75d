"""Serves a trained model: one move to the serving layout, a prefill, then tokens one by one from a sharded KV cache."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import eqshard
from eqshard import BATCH, KV_HEAD, KV_HEAD_DIM, KV_LENGTH


HEADS, HEAD_DIM, VOCAB, LAYERS = 4, 8, 32, 2
DIM = HEADS * HEAD_DIM


class Layer(eqx.Module):
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.qkv, self.out = eqx.nn.Linear(DIM, 3 * DIM, key=k1), eqx.nn.Linear(DIM, DIM, key=k2)

    def __call__(self, x, cache, start):  # x: (batch, new tokens, dim)
        parts = jnp.split(jax.vmap(jax.vmap(self.qkv))(x), 3, axis=-1)
        q, k, v = (a.reshape(*x.shape[:2], HEADS, HEAD_DIM) for a in parts)
        cache = jax.tree.map(lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, start, 1), cache, (k, v))
        seen = jnp.arange(cache[0].shape[1])[None, :] <= start + jnp.arange(x.shape[1])[:, None]
        h = jax.nn.dot_product_attention(q, *cache, mask=seen[None, None])
        return x + jax.vmap(jax.vmap(self.out))(h.reshape(x.shape)), cache


class Model(eqx.Module):
    embed: eqx.nn.Embedding
    head: eqx.nn.Linear
    layers: list[Layer]

    def __init__(self, key):
        self.embed, self.head = eqx.nn.Embedding(VOCAB, DIM, key=key), eqx.nn.Linear(DIM, VOCAB, key=key)
        self.layers = [Layer(k) for k in jax.random.split(key, LAYERS)]

    def __call__(self, tokens, caches, start):
        x, new = jax.vmap(jax.vmap(self.embed))(tokens), []
        for layer, cache in zip(self.layers, caches):
            x, cache = layer(x, cache, start)
            new.append(cache)
        return jnp.argmax(jax.vmap(self.head)(x[:, -1]), axis=-1)[:, None], new


def generate(model, plan, prompt, count, length=32):
    shape = jax.ShapeDtypeStruct((len(prompt), length, HEADS, HEAD_DIM), "float32")
    caches = [(shape, shape) for _ in range(LAYERS)]
    axes = (BATCH, KV_LENGTH, KV_HEAD, KV_HEAD_DIM)
    cache_plan = eqshard.logical_plan(caches, plan.mesh, [(".", axes)], mode="decode")
    caches = eqshard.init(cache_plan, lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), caches))
    step = lambda model, caches, tokens, start: model(tokens, caches, start)
    run = eqshard.filter_jit(step, in_plans=(plan, cache_plan), out_plans=(None, cache_plan), donate="all-except-first")
    found, start = [prompt], 0
    for _ in range(count):  # the prompt first, then token by token
        token, caches = run(model, caches, jnp.asarray(found[-1]), jnp.array(start))
        start += found[-1].shape[1]
        found.append(np.asarray(token))
    return np.concatenate(found, axis=1), caches


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    model, _ = eqshard.init(Model, jax.random.key(0), mesh=eqshard.MeshSpec(fsdp=8), planner=eqshard.fsdp_plan)
    serving, shape = eqshard.MeshSpec(dp=2, tp=4), eqx.filter_eval_shape(Model, jax.random.key(0))
    rules = [("qkv.weight", jax.P("tp")), ("out.weight", jax.P(None, "tp")), (".", jax.P())]
    plan = eqshard.rule_plan(shape, serving, rules)
    model = eqshard.apply(plan, model, donate=True)  # from the layout of training to that of serving
    text, caches = generate(model, plan, np.arange(8).reshape(2, 4), 12)
    print(text, caches[0][0].sharding.spec)
    alone = eqshard.replicated_plan(shape, eqshard.MeshSpec(dp=1))
    assert (generate(Model(jax.random.key(0)), alone, np.arange(8).reshape(2, 4), 12)[0] == text).all()
    assert caches[0][0].sharding.spec == jax.P("dp", None, "tp")
