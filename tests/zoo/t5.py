"""T5, an encoder and a decoder that looks at it; positions are a bias on the scores that all layers share."""

import math
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from ._case import Hooks, Model, tokens
from ._layers import attention, causal, next_token_loss, normal, rms_norm, stack


@dataclass(frozen=True)
class Config:
    batch: int
    source: int
    length: int
    layers: int
    embed: int
    heads: int
    mlp: int
    vocab: int
    buckets: int = 32
    compute: str = "bfloat16"


class Attention(eqx.Module):
    norm: Array
    q: Array
    k: Array
    v: Array
    out: Array

    def __init__(self, c: Config, key: Array):
        keys = jax.random.split(key, 4)
        self.norm = jnp.ones(c.embed)
        self.q, self.k, self.v, self.out = (normal(k, c.embed, c.embed) for k in keys)

    def __call__(self, x: Array, other: Array | None, allowed: Any, bias: Any, c: Config, hooks: Hooks) -> Array:
        n = rms_norm(x, self.norm)
        read = n if other is None else other
        q, k, v = (
            hooks.pin((y @ w).reshape(*y.shape[:2], c.heads, -1), "heads")
            for y, w in ((n, self.q), (read, self.k), (read, self.v))
        )
        mixed = attention(q, k, v, allowed, bias)
        return hooks.pin(x + mixed.reshape(x.shape) @ self.out, "residual")


class Gated(eqx.Module):
    norm: Array
    gate: Array
    up: Array
    down: Array

    def __init__(self, c: Config, key: Array):
        keys = jax.random.split(key, 3)
        self.norm = jnp.ones(c.embed)
        self.gate, self.up = normal(keys[0], c.embed, c.mlp), normal(keys[1], c.embed, c.mlp)
        self.down = normal(keys[2], c.mlp, c.embed)

    def __call__(self, x: Array, hooks: Hooks) -> Array:
        n = rms_norm(x, self.norm)
        hidden = hooks.pin(jax.nn.gelu(n @ self.gate) * (n @ self.up), "mlp")
        return hooks.pin(x + hidden @ self.down, "residual")


class Layer(eqx.Module):
    own: Attention
    cross: Attention | None
    mlp: Gated

    def __init__(self, c: Config, key: Array, crossing: bool):
        one, two, three = jax.random.split(key, 3)
        self.own, self.mlp = Attention(c, one), Gated(c, three)
        self.cross = Attention(c, two) if crossing else None


class T5(eqx.Module):
    embed: Array
    encoder: Layer
    encoder_bias: Array
    encoder_norm: Array
    decoder: Layer
    decoder_bias: Array
    decoder_norm: Array

    def __init__(self, c: Config, key: Array):
        keys = jax.random.split(key, 5)
        self.embed = normal(keys[0], c.vocab, c.embed, fan_in=c.embed)
        self.encoder = stack(lambda k: Layer(c, k, False), keys[1], c.layers)
        self.decoder = stack(lambda k: Layer(c, k, True), keys[2], c.layers)
        self.encoder_bias, self.decoder_bias = (normal(k, c.buckets, c.heads) for k in keys[3:])
        self.encoder_norm = self.decoder_norm = jnp.ones(c.embed)


def position_bias(table: Array, length: int, both_ways: bool) -> Array:
    """(heads, length, length): near distances each have a bucket, far ones share them by logarithm."""
    distance = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
    count = table.shape[0] // 2 if both_ways else table.shape[0]
    ahead = jnp.where(distance < 0, count, 0) if both_ways else jnp.zeros_like(distance)
    away = jnp.abs(distance) if both_ways else jnp.maximum(distance, 0)
    near = count // 2
    ratio = jnp.log(jnp.maximum(away, 1).astype(jnp.float32) / near) / math.log(128 / near)
    far = jnp.minimum(near + (ratio * (count - near)).astype(jnp.int32), count - 1)
    return jnp.moveaxis(table[ahead + jnp.where(away < near, away, far)], -1, 0)


def batch(c: Config, key: Array) -> dict[str, Array]:
    one, two = jax.random.split(key)
    return {"source": tokens(one, (c.batch, c.source), c.vocab), "target": tokens(two, (c.batch, c.length), c.vocab)}


def loss(model: T5, batch: Any, c: Config, hooks: Hooks) -> Array:
    use = hooks.use
    embed = use(model.embed, ".embed")
    bias = position_bias(use(model.encoder_bias, ".encoder_bias"), c.source, both_ways=True)

    @jax.checkpoint
    def encode(x: Array, layer: Layer) -> tuple[Array, None]:
        layer = use(layer, ".encoder")
        return layer.mlp(layer.own(x, None, None, bias, c, hooks), hooks), None

    read, _ = jax.lax.scan(encode, hooks.pin(embed[batch["source"]], "residual"), model.encoder)
    read = hooks.pin(rms_norm(read, use(model.encoder_norm, ".encoder_norm")), "residual")
    own_bias = position_bias(use(model.decoder_bias, ".decoder_bias"), c.length, both_ways=False)
    allowed = causal(c.length)

    @jax.checkpoint
    def decode(x: Array, layer: Layer) -> tuple[Array, None]:
        layer = use(layer, ".decoder")
        x = layer.own(x, None, allowed, own_bias, c, hooks)
        assert layer.cross is not None
        return layer.mlp(layer.cross(x, read, None, None, c, hooks), hooks), None

    x, _ = jax.lax.scan(decode, hooks.pin(embed[batch["target"]], "residual"), model.decoder)
    x = rms_norm(x, use(model.decoder_norm, ".decoder_norm"))
    return next_token_loss(hooks.pin(x @ embed.T, "logits"), batch["target"])


MODEL = Model(
    sizes={
        "tiny": Config(8, 16, 8, layers=2, embed=32, heads=4, mlp=64, vocab=64, buckets=8, compute="float32"),
        "bench": Config(128, 512, 512, layers=24, embed=1024, heads=16, mlp=2816, vocab=32128),
    },
    init=T5,
    batch=batch,
    loss=loss,
    weights={
        r"embed": ("vocab", "embed"),
        r"norm": ("embed",),
        r"_bias": (None, "heads"),
        r"\.[qkv]$": ("embed", "heads"),
        r"\.out": ("heads", "embed"),
        r"\.(gate|up)": ("embed", "mlp"),
        r"\.down": ("mlp", "embed"),
    },
    values={
        "^residual": ("batch", "length", "embed"),
        "^heads": ("batch", "length", "heads", None),
        "^mlp": ("batch", "length", "mlp"),
        "^logits": ("batch", "length", "vocab"),
        "(source|target)": ("batch", "length"),
    },
)
