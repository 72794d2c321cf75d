"""GPT-2 from the layers of `eqx.nn`, with biases and tied embeddings, its blocks one after the other."""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from ._case import Hooks, Model, tokens
from ._layers import attention, causal, next_token_loss, over


@dataclass(frozen=True)
class Config:
    batch: int
    length: int
    layers: int
    embed: int
    heads: int
    vocab: int
    compute: str = "bfloat16"


class Block(eqx.Module):
    norm1: eqx.nn.LayerNorm
    q: eqx.nn.Linear
    k: eqx.nn.Linear
    v: eqx.nn.Linear
    out: eqx.nn.Linear
    norm2: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    heads: int = eqx.field(static=True)

    def __init__(self, c: Config, key: Array):
        keys = jax.random.split(key, 6)
        self.norm1 = eqx.nn.LayerNorm(c.embed)
        self.q, self.k, self.v, self.out = (eqx.nn.Linear(c.embed, c.embed, key=k) for k in keys[:4])
        self.norm2 = eqx.nn.LayerNorm(c.embed)
        self.up = eqx.nn.Linear(c.embed, 4 * c.embed, key=keys[4])
        self.down = eqx.nn.Linear(4 * c.embed, c.embed, key=keys[5])
        self.heads = c.heads

    def __call__(self, x: Array, hooks: Hooks) -> Array:
        n = over(self.norm1, x)
        split = x.shape[0], x.shape[1], self.heads, x.shape[2] // self.heads
        q, k, v = (hooks.pin(over(layer, n).reshape(split), "heads") for layer in (self.q, self.k, self.v))
        mixed = attention(q, k, v, causal(x.shape[1]))
        x = hooks.pin(x + over(self.out, mixed.reshape(x.shape)), "residual")
        hidden = hooks.pin(jax.nn.gelu(over(self.up, over(self.norm2, x))), "mlp")
        return hooks.pin(x + over(self.down, hidden), "residual")


class GPT2(eqx.Module):
    embed: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm

    def __init__(self, c: Config, key: Array):
        one, two, *keys = jax.random.split(key, 2 + c.layers)
        self.embed = eqx.nn.Embedding(weight=0.02 * jax.random.normal(one, (c.vocab, c.embed)))
        self.positions = eqx.nn.Embedding(weight=0.02 * jax.random.normal(two, (c.length, c.embed)))
        self.blocks = [Block(c, k) for k in keys]
        self.norm = eqx.nn.LayerNorm(c.embed)


def init(c: Config, key: Array) -> GPT2:
    return GPT2(c, key)


def batch(c: Config, key: Array) -> Array:
    return tokens(key, (c.batch, c.length), c.vocab)


def loss(model: GPT2, batch: Any, c: Config, hooks: Hooks) -> Array:
    embed = hooks.use(model.embed, ".embed")
    positions = hooks.use(model.positions, ".positions")
    x = over(embed, batch, 2) + over(positions, jnp.arange(c.length), 1)[None]
    x = hooks.pin(x, "residual")
    for i, block in enumerate(model.blocks):
        # A checkpointed block keeps what it reads and computes the rest again.
        run = eqx.filter_checkpoint(lambda b, h, at=f".blocks[{i}]": hooks.use(b, at)(h, hooks))
        x = run(block, x)
    x = over(hooks.use(model.norm, ".norm"), x)
    logits = hooks.pin(x @ embed.weight.T, "logits")
    return next_token_loss(logits, batch)


MODEL = Model(
    sizes={
        "tiny": Config(batch=8, length=16, layers=2, embed=32, heads=4, vocab=64, compute="float32"),
        "bench": Config(batch=128, length=1024, layers=12, embed=768, heads=12, vocab=50304),
    },
    init=init,
    batch=batch,
    loss=loss,
    weights={
        r"^\.embed.weight": ("vocab", "embed"),
        r"^\.positions.weight": (None, "embed"),
        r"\.norm": ("embed",),
        r"\.[qkv]\.weight": ("heads", "embed"),
        r"\.[qkv]\.bias": ("heads",),
        r"\.out\.weight": ("embed", "heads"),
        r"\.up\.weight": ("mlp", "embed"),
        r"\.up\.bias": ("mlp",),
        r"\.down\.weight": ("embed", "mlp"),
        r"\.bias": ("embed",),
    },
    values={
        "residual": ("batch", "length", "embed"),
        "heads": ("batch", "length", "heads", None),
        "mlp": ("batch", "length", "mlp"),
        "logits": ("batch", "length", "vocab"),
        "^$": ("batch", "length"),
    },
)
