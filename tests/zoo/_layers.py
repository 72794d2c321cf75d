"""Pieces that several models share. Activations have the batch in front."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


def over(layer: Callable[[Array], Array], x: Array, times: int | None = None) -> Array:
    """A layer of one vector, as Equinox has them, over all dims in front, or the first `times`."""
    for _ in range(x.ndim - 1 if times is None else times):
        layer = jax.vmap(layer)
    return layer(x)


def normal(key: Array, *shape: int, fan_in: int | None = None, dtype: str = "float32") -> Array:
    """Weights of the variance that keeps activations as large as they are."""
    scale = 1 / math.sqrt(shape[-2] if fan_in is None else fan_in)
    return (jax.random.normal(key, shape) * scale).astype(dtype)


def rms_norm(x: Array, scale: Array) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * along_last(scale, x)


def along_last(v: Array, x: Array) -> Array:
    """A vector, shaped to meet the last dim of `x`."""
    return v.reshape((1,) * (x.ndim - 1) + v.shape)


def rope(x: Array, positions: Array) -> Array:
    """Rotary embedding of (batch, length, heads, head dim) at (batch, length) positions."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[:, :, None, None] * along_last(frequencies, x)
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def attention(q: Array, k: Array, v: Array, allowed: Array | None, bias: Array | None = None) -> Array:
    """Grouped attention: q (batch, length, heads, dim); k, v (batch, other, kv heads, dim).

    **Arguments:**

    - `allowed`: (length, other), True where a query may look.
    - `bias`: (heads, length, other), added to the scores.
    """
    batch, length, heads, dim = q.shape
    kv = k.shape[2]
    grouped = q.reshape(batch, length, kv, heads // kv, dim)
    scores = jnp.einsum("bskgd,btkd->bkgst", grouped, k, preferred_element_type=jnp.float32) / math.sqrt(dim)
    if bias is not None:
        scores = scores + bias.reshape(1, kv, heads // kv, *bias.shape[1:]).astype(jnp.float32)
    if allowed is not None:
        scores = jnp.where(allowed[None, None, None], scores, -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    return jnp.einsum("bkgst,btkd->bskgd", weights, v).reshape(batch, length, heads, dim)


def causal(length: int) -> Array:
    return jnp.tril(jnp.ones((length, length), bool))


def cross_entropy(logits: Array, labels: Array) -> Array:
    """The mean over all labels; by comparison, not by indexing, so that the classes may be split over devices."""
    wide = logits.astype(jnp.float32)
    classes = jax.lax.broadcasted_iota(jnp.int32, wide.shape, wide.ndim - 1)
    right = jnp.sum(jnp.where(classes == labels[..., None], wide, 0.0), axis=-1)
    return jnp.mean(jax.nn.logsumexp(wide, axis=-1) - right)


def next_token_loss(logits: Array, tokens: Array) -> Array:
    """Cross entropy of each position with the token after it; the last one is asked for the first."""
    return cross_entropy(logits, jnp.roll(tokens, -1, axis=1))


def stack(make: Callable[[Array], Any], key: Array, n: int) -> Any:
    """`n` layers as one, with a dim in front."""
    return jax.vmap(make)(jax.random.split(key, n))
