"""Mamba: in each layer a recurrence over time whose coefficients depend on what is read.

The recurrence is an associative scan, or a `lax.scan` step by step.
"""

import math
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from ._case import Hooks, Model, tokens
from ._layers import along_last, next_token_loss, normal, rms_norm, stack


@dataclass(frozen=True)
class Config:
    batch: int
    length: int
    layers: int
    embed: int
    state: int
    vocab: int
    loop: bool = False
    window: int = 4
    compute: str = "bfloat16"

    @property
    def inner(self) -> int:
        return 2 * self.embed

    @property
    def rank(self) -> int:
        return math.ceil(self.embed / 16)


class Layer(eqx.Module):
    norm: Array
    enter: Array
    gate: Array
    filter: Array
    to_rate: Array
    to_read: Array
    to_write: Array
    rate: Array
    rate_bias: Array
    decay: Array
    skip: Array
    leave: Array

    def __init__(self, c: Config, key: Array):
        keys = jax.random.split(key, 8)
        self.norm = jnp.ones(c.embed)
        self.enter, self.gate = normal(keys[0], c.embed, c.inner), normal(keys[1], c.embed, c.inner)
        self.filter = normal(keys[2], c.window, c.inner)
        self.to_rate, self.to_read = normal(keys[3], c.inner, c.rank), normal(keys[4], c.inner, c.state)
        self.to_write = normal(keys[5], c.inner, c.state)
        self.rate, self.rate_bias = normal(keys[6], c.rank, c.inner), jnp.full(c.inner, -4.6)
        self.decay = jnp.log(jnp.tile(jnp.arange(1, c.state + 1, dtype=jnp.float32)[None, :], (c.inner, 1)))
        self.skip = jnp.ones(c.inner)
        self.leave = normal(keys[7], c.inner, c.embed)


class Mamba(eqx.Module):
    embed: Array
    layers: Layer
    norm: Array

    def __init__(self, c: Config, key: Array):
        one, two = jax.random.split(key)
        self.embed = normal(one, c.vocab, c.embed, fan_in=c.embed)
        self.layers = stack(lambda k: Layer(c, k), two, c.layers)
        self.norm = jnp.ones(c.embed)


def convolve(x: Array, filter: Array) -> Array:
    """Each channel with its own short filter over the past."""
    window = filter.shape[0]
    padded = jnp.pad(x, ((0, 0), (window - 1, 0), (0, 0)))
    return sum(
        (padded[:, i : i + x.shape[1]] * along_last(filter[i], x) for i in range(window)), start=jnp.zeros_like(x)
    )


def by_association(kept: Array, added: Array, read: Array) -> Array:
    """All states at once, (batch, length, inner, state); then what is read of them."""

    def join(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        return a[0] * b[0], b[0] * a[1] + b[1]

    _, states = jax.lax.associative_scan(join, (kept, added), axis=1)
    return jnp.einsum("bldn,bln->bld", states, read)


def by_loop(kept: Array, added: Array, read: Array) -> Array:
    """One time after the other."""

    def one(state: Array, now: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        state = now[0] * state + now[1]
        return state, jnp.einsum("bdn,bn->bd", state, now[2])

    inputs = tuple(jnp.moveaxis(x, 1, 0) for x in (kept, added, read))
    _, out = jax.lax.scan(one, jnp.zeros_like(added[:, 0]), inputs)
    return jnp.moveaxis(out, 0, 1)


def mix(layer: Layer, n: Array, c: Config, hooks: Hooks) -> Array:
    x = hooks.pin(jax.nn.silu(convolve(n @ layer.enter, layer.filter)), "inner")
    bias = along_last(layer.rate_bias, x)
    rate = jax.nn.softplus(((x @ layer.to_rate) @ layer.rate + bias).astype(jnp.float32))
    rate = hooks.pin(rate, "inner")
    write, read = ((x @ w).astype(jnp.float32) for w in (layer.to_write, layer.to_read))
    decay = -jnp.exp(layer.decay.astype(jnp.float32))
    kept = hooks.pin(jnp.exp(rate[..., None] * decay[None, None]), "states")
    added = hooks.pin((rate * x.astype(jnp.float32))[..., None] * write[:, :, None, :], "states")
    y = (by_loop if c.loop else by_association)(kept, added, read).astype(x.dtype)
    y = hooks.pin(y + x * along_last(layer.skip, x), "inner")
    return (y * jax.nn.silu(n @ layer.gate)) @ layer.leave


def batch(c: Config, key: Array) -> Array:
    return tokens(key, (c.batch, c.length), c.vocab)


def loss(model: Mamba, batch: Any, c: Config, hooks: Hooks) -> Array:
    embed = hooks.use(model.embed, ".embed")

    @jax.checkpoint
    def body(x: Array, layer: Layer) -> tuple[Array, None]:
        layer = hooks.use(layer, ".layers")
        return hooks.pin(x + mix(layer, rms_norm(x, layer.norm), c, hooks), "residual"), None

    x, _ = jax.lax.scan(body, hooks.pin(embed[batch], "residual"), model.layers)
    x = rms_norm(x, hooks.use(model.norm, ".norm"))
    return next_token_loss(hooks.pin(x @ embed.T, "logits"), batch)


def _model(loop: bool) -> Model:
    return Model(
        sizes={
            "tiny": Config(8, 16, 2, 32, state=8, vocab=64, loop=loop, compute="float32"),
            "bench": Config(32, 1024, 48, 1024, state=16, vocab=50304, loop=loop),
        },
        init=Mamba,
        batch=batch,
        loss=loss,
        weights={
            r"embed": ("vocab", "embed"),
            r"norm": ("embed",),
            r"\.(enter|gate)": ("embed", "mlp"),
            r"\.filter": (None, "mlp"),
            r"\.to_": ("mlp", None),
            r"\.rate$": (None, "mlp"),
            r"\.(rate_bias|skip)": ("mlp",),
            r"\.decay": ("mlp", None),
            r"\.leave": ("mlp", "embed"),
        },
        values={
            "^residual": ("batch", "length", "embed"),
            "^inner": ("batch", "length", "mlp"),
            "^states": ("batch", "length", "mlp", None),
            "^logits": ("batch", "length", "vocab"),
            "^$": ("batch", "length"),
        },
    )


ASSOCIATIVE, LOOP = _model(False), _model(True)
