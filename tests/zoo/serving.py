"""Llama without training, with a cache of keys and values: a prompt at once (prefill), a token at a time (decode)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ._case import Case, Hooks, Model, shapes, tokens
from ._layers import attention, rms_norm
from .llama import Config, gated, init, Layer, project, VALUES, WEIGHTS


Cache = dict[str, Array]

_TINY = Config(8, 16, 3, 32, heads=8, kv_heads=4, mlp=64, vocab=64, compute="float32")
_BENCH = Config(64, 2048, 16, 2048, heads=32, kv_heads=8, mlp=8192, vocab=32000, params="bfloat16")

_MODEL = Model(
    sizes={"tiny": _TINY, "bench": _BENCH},
    init=init,
    batch=lambda c, key: tokens(key, (c.batch, c.length), c.vocab),
    weights=WEIGHTS,
    values=VALUES
    | {r"^\['[kv]'\]": ("batch", None, "heads", None), "^last": ("batch", "vocab"), r"^\['token": ("batch", None)},
)


def prefill_case(size: str) -> Case:
    """(model, cache, tokens) → (cache, logits of the last position); the cache is written from its start."""

    def inputs(c: Config, key: Array) -> Array:
        return tokens(key, (c.batch, c.length), c.vocab)

    def build(c: Config, hooks: Hooks) -> Callable[..., Any]:
        def step(model: Any, cache: Cache, prompt: Array) -> tuple[Cache, Array]:
            return _forward(model, cache, prompt, jnp.zeros((), jnp.int32), c, hooks)

        return step

    return _case("llama_prefill", size, _MODEL.sizes[size], inputs, build)


def decode_case(size: str) -> Case:
    """(model, cache, {"token", "at"}) → (cache, logits): one more token for each sequence, at one place for all."""

    def inputs(c: Config, key: Array) -> dict[str, Array]:
        return {"token": tokens(key, (c.batch, 1), c.vocab), "at": jnp.asarray(c.length // 2, jnp.int32)}

    def build(c: Config, hooks: Hooks) -> Callable[..., Any]:
        def step(model: Any, cache: Cache, given: dict[str, Array]) -> tuple[Cache, Array]:
            return _forward(model, cache, given["token"], given["at"], c, hooks)

        return step

    config = _MODEL.sizes[size]
    return _case("llama_decode", size, config if size == "tiny" else replace(config, batch=256), inputs, build)


def _case(name: str, size: str, c: Config, inputs: Callable[..., Any], build: Callable[..., Any]) -> Case:
    def make(key: Array) -> tuple[Any, ...]:
        one, two = jax.random.split(key)
        shape = c.layers, c.batch, c.length, c.kv_heads, c.head
        cache = {name: jnp.zeros(shape, c.compute) for name in "kv"}
        return init(c, one), cache, inputs(c, two)

    kinds = ("weights", "values", "values")
    return Case(name, size, c, _MODEL, shapes(make), make, lambda hooks: build(c, hooks), kinds, donate=(1,))


def _forward(model: Any, cache: Cache, given: Array, at: Array, c: Config, hooks: Hooks) -> tuple[Cache, Array]:
    """Reads `given`, (batch, length), from position `at` on, over the cache."""
    places = at + jnp.arange(given.shape[1])
    seen = jnp.arange(c.length)[None, :] <= places[:, None]

    def body(x: Array, inputs: tuple[Layer, Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        layer, keys, values = inputs
        layer = hooks.use(layer, ".layers")
        q, k, v = project(layer, x, jnp.broadcast_to(places, x.shape[:2]), c, hooks)
        keys = jax.lax.dynamic_update_slice_in_dim(keys, k, at, axis=1)
        values = jax.lax.dynamic_update_slice_in_dim(values, v, at, axis=1)
        mixed = attention(q, keys, values, seen)
        x = hooks.pin(x + mixed.reshape(x.shape) @ layer.out, "residual")
        return hooks.pin(x + gated(layer, x, hooks), "residual"), (keys, values)

    x = hooks.pin(hooks.use(model.embed, ".embed")[given], "residual")
    x, (keys, values) = jax.lax.scan(body, x, (model.layers, cache["k"], cache["v"]))
    last = rms_norm(x[:, -1], hooks.use(model.norm, ".norm"))
    logits = hooks.pin(last @ hooks.use(model.head, ".head"), "last")
    return {"k": keys, "v": values}, logits
