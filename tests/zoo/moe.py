"""A Mixtral-style mixture of experts: each token goes to the best two of its experts, as far as they have room."""

import math
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from ._case import Hooks, Model, tokens
from ._layers import next_token_loss, normal, rms_norm, stack
from .llama import attend


@dataclass(frozen=True)
class Config:
    batch: int
    length: int
    layers: int
    embed: int
    heads: int
    kv_heads: int
    mlp: int
    experts: int
    vocab: int
    dispatch: str = "einsum"
    chosen: int = 2
    room: float = 1.25
    compute: str = "bfloat16"

    @property
    def head(self) -> int:
        return self.embed // self.heads

    @property
    def capacity(self) -> int:
        """How many tokens of a sequence an expert takes."""
        return math.ceil(self.room * self.chosen * self.length / self.experts)


class Layer(eqx.Module):
    norm1: Array
    q: Array
    k: Array
    v: Array
    out: Array
    norm2: Array
    router: Array
    gate: Array
    up: Array
    down: Array

    def __init__(self, c: Config, key: Array):
        keys = jax.random.split(key, 8)
        d, kv = c.embed, c.kv_heads * c.head
        self.norm1 = self.norm2 = jnp.ones(d)
        self.q, self.out = normal(keys[0], d, d), normal(keys[3], d, d)
        self.k, self.v = normal(keys[1], d, kv), normal(keys[2], d, kv)
        self.router = normal(keys[4], d, c.experts)
        self.gate, self.up = normal(keys[5], c.experts, d, c.mlp), normal(keys[6], c.experts, d, c.mlp)
        self.down = normal(keys[7], c.experts, c.mlp, d)


class MoE(eqx.Module):
    embed: Array
    layers: Layer
    norm: Array
    head: Array

    def __init__(self, c: Config, key: Array):
        one, two, three = jax.random.split(key, 3)
        self.embed = normal(one, c.vocab, c.embed, fan_in=1)
        self.layers = stack(lambda k: Layer(c, k), two, c.layers)
        self.norm = jnp.ones(c.embed)
        self.head = normal(three, c.embed, c.vocab)


def route(layer: Layer, n: Array, c: Config) -> tuple[Array, Array, Array, Array]:
    """For each token's choices, (batch, length, chosen): the expert, the place there, the weight; and the balance loss.

    A weight is 0 where the expert is full. First choices have their places before second ones.
    """
    scores = jax.nn.softmax((n @ layer.router).astype(jnp.float32), axis=-1)
    weight, expert = jax.lax.top_k(scores, c.chosen)
    weight = weight / jnp.sum(weight, axis=-1, keepdims=True)
    taken = jax.nn.one_hot(expert, c.experts, dtype=jnp.float32)
    in_turn = jnp.swapaxes(taken, 1, 2).reshape(n.shape[0], -1, c.experts)
    before = (jnp.cumsum(in_turn, axis=1) - in_turn).reshape(n.shape[0], c.chosen, n.shape[1], c.experts)
    place = jnp.sum(jnp.swapaxes(before, 1, 2) * taken, axis=-1).astype(jnp.int32)
    balance = c.experts * jnp.sum(jnp.mean(taken[:, :, 0], axis=(0, 1)) * jnp.mean(scores, axis=(0, 1)))
    return expert, place, jnp.where(place < c.capacity, weight, 0.0), balance


def experts(layer: Layer, x: Array, hooks: Hooks) -> Array:
    """Each expert on its own tokens: (expert, batch, place, embed)."""
    x = hooks.pin(x, "expert")
    gate = jnp.einsum("ebcd,edf->ebcf", x, layer.gate)
    hidden = hooks.pin(jax.nn.silu(gate) * jnp.einsum("ebcd,edf->ebcf", x, layer.up), "expert_mlp")
    return hooks.pin(jnp.einsum("ebcf,efd->ebcd", hidden, layer.down), "expert")


def by_einsum(layer: Layer, n: Array, c: Config, hooks: Hooks) -> tuple[Array, Array]:
    """Sends tokens to their experts and back by products with one-hot tensors."""
    expert, place, weight, balance = route(layer, n, c)
    to = jax.nn.one_hot(expert, c.experts, dtype=n.dtype)
    at = jax.nn.one_hot(place, c.capacity, dtype=n.dtype)
    back = hooks.pin(jnp.einsum("bske,bskc,bsk->bsec", to, at, weight.astype(n.dtype)), "dispatch")
    there = hooks.pin(jnp.einsum("bske,bskc->bsec", to, at), "dispatch")
    done = experts(layer, jnp.einsum("bsec,bsd->ebcd", there, n), hooks)
    return jnp.einsum("bsec,ebcd->bsd", back, done), balance


def by_index(layer: Layer, n: Array, c: Config, hooks: Hooks) -> tuple[Array, Array]:
    """Sends tokens to their experts and back by scatter and gather."""
    expert, place, weight, balance = route(layer, n, c)
    places = c.experts * c.capacity
    slot = jnp.where(place < c.capacity, expert * c.capacity + place, places)

    def send(n: Array, slot: Array) -> Array:
        rows = jnp.repeat(n, c.chosen, axis=0)
        return jnp.zeros((places, n.shape[-1]), n.dtype).at[slot.reshape(-1)].set(rows, mode="drop")

    sent = jax.vmap(send)(n, slot).reshape(n.shape[0], c.experts, c.capacity, -1)
    done = jnp.swapaxes(experts(layer, jnp.swapaxes(sent, 0, 1), hooks), 0, 1).reshape(n.shape[0], places, -1)
    taken = jax.vmap(lambda d, s: d.at[s].get(mode="fill", fill_value=0))(done, slot)
    return jnp.einsum("bskd,bsk->bsd", taken, weight.astype(n.dtype)), balance


def init(c: Config, key: Array) -> MoE:
    return MoE(c, key)


def batch(c: Config, key: Array) -> Array:
    return tokens(key, (c.batch, c.length), c.vocab)


def loss(model: MoE, batch: Any, c: Config, hooks: Hooks) -> Array:
    mix = by_einsum if c.dispatch == "einsum" else by_index

    @jax.checkpoint
    def body(x: Array, layer: Layer) -> tuple[Array, Array]:
        layer = hooks.use(layer, ".layers")
        x = attend(layer, x, c, hooks)
        mixed, balance = mix(layer, rms_norm(x, layer.norm2), c, hooks)
        return hooks.pin(x + mixed, "residual"), balance

    x = hooks.pin(hooks.use(model.embed, ".embed")[batch], "residual")
    x, balance = jax.lax.scan(body, x, model.layers)
    x = rms_norm(x, hooks.use(model.norm, ".norm"))
    logits = hooks.pin(x @ hooks.use(model.head, ".head"), "logits")
    return next_token_loss(logits, batch) + 0.01 * jnp.mean(balance)


_WEIGHTS = {
    r"embed": ("vocab", "embed"),
    r"head": ("embed", "vocab"),
    r"norm": ("embed",),
    r"\.router": ("embed", None),
    r"\.[qkv]": ("embed", "heads"),
    r"\.out": ("heads", "embed"),
    r"\.(gate|up)": ("expert", "embed", "mlp"),
    r"\.down": ("expert", "mlp", "embed"),
}

_VALUES = {
    "^residual": ("batch", "length", "embed"),
    "^(kv_)?heads": ("batch", "length", "heads", None),
    "^dispatch": ("batch", "length", None, None),
    "^expert$": ("expert", "expert_batch", None, "embed"),
    "^expert_mlp": ("expert", "expert_batch", None, "mlp"),
    "^logits": ("batch", "length", "vocab"),
    "^$": ("batch", "length"),
}


def _model(dispatch: str) -> Model:
    tiny = Config(8, 16, 2, 32, 8, 4, mlp=64, experts=8, vocab=64, dispatch=dispatch, compute="float32")
    bench = Config(64, 1024, 8, 1024, 16, 8, mlp=3584, experts=8, vocab=32000, dispatch=dispatch)
    return Model({"tiny": tiny, "bench": bench}, init, batch, _WEIGHTS, _VALUES, loss)


BY_EINSUM, BY_INDEX = _model("einsum"), _model("index")
