"""Llama: grouped-query attention, rotary positions, gated MLPs; its layers stacked and scanned, or one by one."""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from ._case import Hooks, Model, tokens
from ._layers import attention, causal, next_token_loss, normal, rms_norm, rope, stack


@dataclass(frozen=True)
class Config:
    batch: int
    length: int
    layers: int
    embed: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    scanned: bool = True
    compute: str = "bfloat16"
    params: str = "float32"

    @property
    def head(self) -> int:
        return self.embed // self.heads


class Layer(eqx.Module):
    norm1: Array
    q: Array
    k: Array
    v: Array
    out: Array
    norm2: Array
    gate: Array
    up: Array
    down: Array

    def __init__(self, c: Config, key: Array):
        keys = jax.random.split(key, 7)
        d, kv, dtype = c.embed, c.kv_heads * c.head, c.params
        self.norm1 = self.norm2 = jnp.ones(d, dtype)
        self.q, self.out = normal(keys[0], d, d, dtype=dtype), normal(keys[3], d, d, dtype=dtype)
        self.k, self.v = normal(keys[1], d, kv, dtype=dtype), normal(keys[2], d, kv, dtype=dtype)
        self.gate, self.up = normal(keys[4], d, c.mlp, dtype=dtype), normal(keys[5], d, c.mlp, dtype=dtype)
        self.down = normal(keys[6], c.mlp, d, dtype=dtype)


class Llama(eqx.Module):
    embed: Array
    layers: Any
    """One `Layer` with a dim in front, or a list of them."""
    norm: Array
    head: Array

    def __init__(self, c: Config, key: Array):
        one, two, three = jax.random.split(key, 3)
        self.embed = normal(one, c.vocab, c.embed, fan_in=1, dtype=c.params)
        if c.scanned:
            self.layers = stack(lambda k: Layer(c, k), two, c.layers)
        else:
            self.layers = [Layer(c, k) for k in jax.random.split(two, c.layers)]
        self.norm = jnp.ones(c.embed, c.params)
        self.head = normal(three, c.embed, c.vocab, dtype=c.params)


def project(layer: Any, x: Array, positions: Array, c: Any, hooks: Hooks) -> tuple[Array, Array, Array]:
    """Queries, keys and values of (batch, length, embed), by heads."""
    n = rms_norm(x, layer.norm1)
    q, k, v = (y.reshape(*x.shape[:2], -1, c.head) for y in (n @ layer.q, n @ layer.k, n @ layer.v))
    q, k = rope(q, positions), rope(k, positions)
    return hooks.pin(q, "heads"), hooks.pin(k, "kv_heads"), hooks.pin(v, "kv_heads")


def gated(layer: Any, x: Array, hooks: Hooks) -> Array:
    n = rms_norm(x, layer.norm2)
    return hooks.pin(jax.nn.silu(n @ layer.gate) * (n @ layer.up), "mlp") @ layer.down


def attend(layer: Any, x: Array, c: Any, hooks: Hooks) -> Array:
    """The attention half of a layer, with what it adds to."""
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    q, k, v = project(layer, x, positions, c, hooks)
    mixed = attention(q, k, v, causal(x.shape[1]))
    return hooks.pin(x + mixed.reshape(x.shape) @ layer.out, "residual")


def block(layer: Layer, x: Array, c: Config, hooks: Hooks) -> Array:
    x = attend(layer, x, c, hooks)
    return hooks.pin(x + gated(layer, x, hooks), "residual")


def init(c: Config, key: Array) -> Llama:
    return Llama(c, key)


def batch(c: Config, key: Array) -> Array:
    return tokens(key, (c.batch, c.length), c.vocab)


def loss(model: Llama, batch: Any, c: Config, hooks: Hooks) -> Array:
    x = hooks.pin(hooks.use(model.embed, ".embed")[batch], "residual")
    if c.scanned:

        @jax.checkpoint
        def body(x: Array, layer: Layer) -> tuple[Array, None]:
            return block(hooks.use(layer, ".layers"), x, c, hooks), None

        x, _ = jax.lax.scan(body, x, model.layers)
    else:
        for i, layer in enumerate(model.layers):
            x = jax.checkpoint(lambda one, x, at=f".layers[{i}]": block(hooks.use(one, at), x, c, hooks))(layer, x)
    x = rms_norm(x, hooks.use(model.norm, ".norm"))
    logits = hooks.pin(x @ hooks.use(model.head, ".head"), "logits")
    return next_token_loss(logits, batch)


_SIZES = {
    "tiny": Config(8, 16, 3, 32, heads=8, kv_heads=4, mlp=64, vocab=64, compute="float32"),
    "bench": Config(64, 1024, 16, 2048, heads=32, kv_heads=8, mlp=8192, vocab=32000),
    # Everything in bfloat16, the optimizer's moments too.
    "bf16": Config(64, 1024, 16, 2048, heads=32, kv_heads=8, mlp=8192, vocab=32000, params="bfloat16"),
    "405b": Config(4096, 4096, 126, 16384, heads=128, kv_heads=8, mlp=53248, vocab=128256),
    # The same load a chip on an eighth of the chips.
    "405b_512": Config(512, 4096, 126, 16384, heads=128, kv_heads=8, mlp=53248, vocab=128256),
}

WEIGHTS = {
    r"embed": ("vocab", "embed"),
    r"head": ("embed", "vocab"),
    r"norm": ("embed",),
    r"\.q": ("embed", "heads"),
    r"\.[kv]": ("embed", "heads"),
    r"\.out": ("heads", "embed"),
    r"\.(gate|up)": ("embed", "mlp"),
    r"\.down": ("mlp", "embed"),
}

VALUES = {
    "^residual": ("batch", "length", "embed"),
    "^heads": ("batch", "length", "heads", None),
    "^kv_heads": ("batch", "length", "heads", None),
    "^mlp": ("batch", "length", "mlp"),
    "^logits": ("batch", "length", "vocab"),
    "^$": ("batch", "length"),
}

SCANNED = Model(_SIZES, init, batch, WEIGHTS, VALUES, loss)

UNROLLED = Model(
    {
        "tiny": Config(8, 16, 3, 32, heads=8, kv_heads=4, mlp=64, vocab=64, scanned=False, compute="float32"),
        "bench": Config(64, 1024, 8, 2048, heads=32, kv_heads=8, mlp=8192, vocab=32000, scanned=False),
        "deep": Config(64, 1024, 96, 2048, heads=32, kv_heads=8, mlp=8192, vocab=32000, scanned=False),
    },
    init,
    batch,
    WEIGHTS,
    VALUES,
    loss,
)
