"""A residual network of bottlenecks from `eqx.nn.Conv2d`, with group norm, so that it has no running statistics."""

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
    width: int
    blocks: tuple[int, ...]
    classes: int
    groups: int = 32
    compute: str = "bfloat16"


class Conv(eqx.Module):
    """A convolution and its norm."""

    conv: eqx.nn.Conv2d
    norm: eqx.nn.GroupNorm

    def __init__(self, c: Config, into: int, out: int, size: int, stride: int, key: Array):
        self.conv = eqx.nn.Conv2d(into, out, size, stride, padding=size // 2, use_bias=False, key=key)
        self.norm = eqx.nn.GroupNorm(c.groups, out)

    def __call__(self, x: Array) -> Array:
        return self.norm(self.conv(x))


class Bottleneck(eqx.Module):
    narrow: Conv
    middle: Conv
    widen: Conv
    shortcut: Conv | None

    def __init__(self, c: Config, into: int, width: int, stride: int, key: Array):
        keys = jax.random.split(key, 4)
        self.narrow = Conv(c, into, width, 1, 1, keys[0])
        self.middle = Conv(c, width, width, 3, stride, keys[1])
        self.widen = Conv(c, width, 4 * width, 1, 1, keys[2])
        self.shortcut = None if into == 4 * width else Conv(c, into, 4 * width, 1, stride, keys[3])

    def __call__(self, x: Array, hooks: Hooks) -> Array:
        y = hooks.pin(jax.nn.relu(jax.vmap(self.narrow)(x)), "narrow")
        y = hooks.pin(jax.nn.relu(jax.vmap(self.middle)(y)), "maps")
        y = jax.vmap(self.widen)(y)
        x = x if self.shortcut is None else jax.vmap(self.shortcut)(x)
        return hooks.pin(jax.nn.relu(x + y), "maps")


class ResNet(eqx.Module):
    stem: Conv
    pool: eqx.nn.MaxPool2d
    blocks: list[Bottleneck]
    head: eqx.nn.Linear

    def __init__(self, c: Config, key: Array):
        one, two, three = jax.random.split(key, 3)
        self.stem = Conv(c, 3, c.width, 7, 2, one)
        self.pool = eqx.nn.MaxPool2d(3, 2, padding=1)
        self.blocks, channels = [], c.width
        keys = iter(jax.random.split(two, sum(c.blocks)))
        for stage, count in enumerate(c.blocks):
            for i in range(count):
                width = c.width * 2**stage
                stride = 2 if stage > 0 and i == 0 else 1
                self.blocks.append(Bottleneck(c, channels, width, stride, next(keys)))
                channels = 4 * width
        self.head = eqx.nn.Linear(channels, c.classes, key=three)


def batch(c: Config, key: Array) -> dict[str, Array]:
    one, two = jax.random.split(key)
    images = jax.random.normal(one, (c.batch, 3, c.image, c.image))
    return {"image": images, "label": tokens(two, (c.batch,), c.classes)}


def loss(model: ResNet, batch: Any, c: Config, hooks: Hooks) -> Array:
    x = jax.nn.relu(jax.vmap(hooks.use(model.stem, ".stem"))(batch["image"].astype(c.compute)))
    x = hooks.pin(jax.vmap(model.pool)(x), "maps")
    for i, block in enumerate(model.blocks):
        x = hooks.use(block, f".blocks[{i}]")(x, hooks)
    logits = over(hooks.use(model.head, ".head"), jnp.mean(x, axis=(2, 3))).astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]))


# Splitting the model, the narrow maps are split by channel between the two convolutions that write and read them.
MODEL = Model(
    sizes={
        "tiny": Config(8, image=32, width=8, blocks=(1, 1), classes=16, groups=4, compute="float32"),
        "bench": Config(1024, image=224, width=64, blocks=(2, 2, 2, 2), classes=1000),
    },
    init=ResNet,
    batch=batch,
    loss=loss,
    weights={
        r"narrow.conv": ("mlp", "embed", None, None),
        r"narrow.norm": ("mlp",),
        r"middle.conv": ("embed", "mlp", None, None),
        r"stem.conv": ("embed", None, None, None),
        r"conv": ("embed", "embed_in", None, None),
        r"norm": ("embed",),
        r"head.weight": (None, "embed"),
        r"head.bias": (None,),
    },
    values={
        "^maps": ("batch", "embed", None, None),
        "^narrow": ("batch", "mlp", None, None),
        "image": ("batch", None, None, None),
        "label": ("batch",),
    },
)
