"""A vision transformer from the layers of `eqx.nn`, attention too; its blocks stacked and scanned."""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import Array

from ._case import Hooks, Model, tokens
from ._layers import over


@dataclass(frozen=True)
class Config:
    batch: int
    image: int
    patch: int
    layers: int
    embed: int
    heads: int
    classes: int
    compute: str = "bfloat16"

    @property
    def patches(self) -> int:
        return (self.image // self.patch) ** 2


class Block(eqx.Module):
    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, c: Config, key: Array):
        one, two, three = jax.random.split(key, 3)
        d = c.embed
        self.norm1, self.norm2 = eqx.nn.LayerNorm(d), eqx.nn.LayerNorm(d)
        self.attention = eqx.nn.MultiheadAttention(
            c.heads,
            d,
            use_query_bias=True,
            use_key_bias=True,
            use_value_bias=True,
            use_output_bias=True,
            key=one,
        )
        self.up, self.down = eqx.nn.Linear(d, 4 * d, key=two), eqx.nn.Linear(4 * d, d, key=three)

    def __call__(self, x: Array, hooks: Hooks) -> Array:
        n = over(self.norm1, x)
        x = hooks.pin(x + jax.vmap(self.attention)(n, n, n), "residual")
        hidden = hooks.pin(jax.nn.gelu(over(self.up, over(self.norm2, x))), "mlp")
        return hooks.pin(x + over(self.down, hidden), "residual")


class ViT(eqx.Module):
    patches: eqx.nn.Conv2d
    positions: Array
    blocks: Block
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, c: Config, key: Array):
        one, two, three, four = jax.random.split(key, 4)
        self.patches = eqx.nn.Conv2d(3, c.embed, c.patch, stride=c.patch, key=one)
        self.positions = 0.02 * jax.random.normal(two, (c.patches, c.embed))
        self.blocks = eqx.filter_vmap(lambda k: Block(c, k))(jax.random.split(three, c.layers))
        self.norm = eqx.nn.LayerNorm(c.embed)
        self.head = eqx.nn.Linear(c.embed, c.classes, key=four)


def batch(c: Config, key: Array) -> dict[str, Array]:
    one, two = jax.random.split(key)
    images = jax.random.normal(one, (c.batch, 3, c.image, c.image))
    return {"image": images, "label": tokens(two, (c.batch,), c.classes)}


def loss(model: ViT, batch: Any, c: Config, hooks: Hooks) -> Array:
    maps = jax.vmap(hooks.use(model.patches, ".patches"))(batch["image"].astype(c.compute))
    x = jnp.swapaxes(maps.reshape(c.batch, c.embed, c.patches), 1, 2)
    x = hooks.pin(x + hooks.use(model.positions, ".positions")[None], "residual")
    arrays, rest = eqx.partition(model.blocks, eqx.is_array)

    @jax.checkpoint
    def body(x: Array, layer: Any) -> tuple[Array, None]:
        return eqx.combine(hooks.use(layer, ".blocks"), rest)(x, hooks), None

    x, _ = jax.lax.scan(body, x, arrays)
    pooled = jnp.mean(over(hooks.use(model.norm, ".norm"), x), axis=1)
    logits = over(hooks.use(model.head, ".head"), pooled).astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]))


MODEL = Model(
    sizes={
        "tiny": Config(8, image=16, patch=4, layers=2, embed=32, heads=4, classes=16, compute="float32"),
        "bench": Config(512, image=224, patch=16, layers=24, embed=1024, heads=16, classes=1000),
    },
    init=ViT,
    batch=batch,
    loss=loss,
    weights={
        r"patches.weight": ("embed", None, None, None),
        r"patches.bias": ("embed", None, None),
        r"positions": (None, "embed"),
        r"norm": ("embed",),
        r"(query|key|value)_proj.weight": ("heads", "embed"),
        r"(query|key|value)_proj.bias": ("heads",),
        r"output_proj.weight": ("embed", "heads"),
        r"\.up.weight": ("mlp", "embed"),
        r"\.up.bias": ("mlp",),
        r"\.down.weight": ("embed", "mlp"),
        r"\.head.weight": (None, "embed"),
        r"\.head.bias": (None,),
        r"bias": ("embed",),
    },
    values={
        "^residual": ("batch", None, "embed"),
        "^mlp": ("batch", None, "mlp"),
        "image": ("batch", None, None, None),
        "label": ("batch",),
    },
)
