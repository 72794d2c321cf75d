"""A U-Net that predicts noise, as diffusion models have it: convolutions down and up, attention at the bottom."""

import math
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from ._case import Hooks, Model
from ._layers import attention, over


@dataclass(frozen=True)
class Config:
    batch: int
    image: int
    width: int
    factors: tuple[int, ...]
    blocks: int
    heads: int
    groups: int = 32
    compute: str = "bfloat16"


def conv(into: int, out: int, size: int, key: Array) -> eqx.nn.Conv2d:
    return eqx.nn.Conv2d(into, out, size, padding=size // 2, key=key)


class ResBlock(eqx.Module):
    norm1: eqx.nn.GroupNorm
    first: eqx.nn.Conv2d
    time: eqx.nn.Linear
    norm2: eqx.nn.GroupNorm
    second: eqx.nn.Conv2d
    shortcut: eqx.nn.Conv2d | None

    def __init__(self, c: Config, into: int, out: int, key: Array):
        keys = jax.random.split(key, 4)
        self.norm1, self.norm2 = eqx.nn.GroupNorm(c.groups, into), eqx.nn.GroupNorm(c.groups, out)
        self.first, self.second = conv(into, out, 3, keys[0]), conv(out, out, 3, keys[1])
        self.time = eqx.nn.Linear(4 * c.width, out, key=keys[2])
        self.shortcut = None if into == out else conv(into, out, 1, keys[3])

    def __call__(self, x: Array, time: Array, hooks: Hooks) -> Array:
        y = jax.vmap(self.first)(jax.nn.silu(jax.vmap(self.norm1)(x)))
        y = hooks.pin(y + over(self.time, time)[:, :, None, None], "inner")
        y = jax.vmap(self.second)(jax.nn.silu(jax.vmap(self.norm2)(y)))
        return hooks.pin((x if self.shortcut is None else jax.vmap(self.shortcut)(x)) + y, "maps")


class Attention(eqx.Module):
    norm: eqx.nn.GroupNorm
    qkv: list[eqx.nn.Linear]
    out: eqx.nn.Linear
    heads: int = eqx.field(static=True)

    def __init__(self, c: Config, width: int, key: Array):
        *keys, last = jax.random.split(key, 4)
        self.norm = eqx.nn.GroupNorm(c.groups, width)
        self.qkv = [eqx.nn.Linear(width, width, key=k) for k in keys]
        self.out = eqx.nn.Linear(width, width, key=last)
        self.heads = c.heads

    def __call__(self, x: Array, hooks: Hooks) -> Array:
        batch, width, height, breadth = x.shape
        n = jnp.swapaxes(jax.vmap(self.norm)(x).reshape(batch, width, -1), 1, 2)
        split = batch, height * breadth, self.heads, width // self.heads
        q, k, v = (hooks.pin(over(layer, n).reshape(split), "heads") for layer in self.qkv)
        mixed = over(self.out, attention(q, k, v, None).reshape(n.shape))
        return hooks.pin(x + jnp.swapaxes(mixed, 1, 2).reshape(x.shape), "maps")


class UNet(eqx.Module):
    time: list[eqx.nn.Linear]
    enter: eqx.nn.Conv2d
    down: list[list[ResBlock]]
    shrink: list[eqx.nn.Conv2d]
    middle: ResBlock
    attention: Attention
    up: list[list[ResBlock]]
    grow: list[eqx.nn.Conv2d]
    norm: eqx.nn.GroupNorm
    leave: eqx.nn.Conv2d

    def __init__(self, c: Config, key: Array):
        keys = iter(jax.random.split(key, 8 + (2 * c.blocks + 3) * len(c.factors)))
        widths = [c.width * f for f in c.factors]
        wide = 4 * c.width
        self.time = [eqx.nn.Linear(c.width, wide, key=next(keys)), eqx.nn.Linear(wide, wide, key=next(keys))]
        self.enter = conv(3, c.width, 3, next(keys))
        self.down, self.shrink, self.up, self.grow = [], [], [], []
        into = c.width
        for width in widths:
            self.down.append([ResBlock(c, into if i == 0 else width, width, next(keys)) for i in range(c.blocks)])
            self.shrink.append(eqx.nn.Conv2d(width, width, 3, 2, padding=1, key=next(keys)))
            into = width
        self.middle, self.attention = ResBlock(c, into, into, next(keys)), Attention(c, into, next(keys))
        for width in reversed(widths):
            self.grow.append(conv(into, width, 3, next(keys)))
            self.up.append([ResBlock(c, 2 * width, width, next(keys)) for _ in range(c.blocks)])
            into = width
        self.norm, self.leave = eqx.nn.GroupNorm(c.groups, into), conv(into, 3, 3, next(keys))


def batch(c: Config, key: Array) -> dict[str, Array]:
    one, two, three = jax.random.split(key, 3)
    shape = c.batch, 3, c.image, c.image
    return {
        "image": jax.random.normal(one, shape),
        "noise": jax.random.normal(two, shape),
        "level": jax.random.uniform(three, (c.batch,)),
    }


def forward(model: UNet, x: Array, level: Array, c: Config, hooks: Hooks) -> Array:
    use = hooks.use
    rates = jnp.exp(-math.log(1e4) * jnp.arange(c.width // 2, dtype=jnp.float32) / (c.width // 2))
    angles = 1000 * level[:, None] * rates[None, :]
    time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1).astype(c.compute)
    one, two = use(model.time, ".time")
    time = jax.nn.silu(over(two, jax.nn.silu(over(one, time))))
    x = hooks.pin(jax.vmap(use(model.enter, ".enter"))(x), "maps")
    kept = []
    for i, blocks in enumerate(model.down):
        for j, block in enumerate(blocks):
            x = use(block, f".down[{i}][{j}]")(x, time, hooks)
            kept.append(x)
        x = hooks.pin(jax.vmap(use(model.shrink[i], f".shrink[{i}]"))(x), "maps")
    x = use(model.middle, ".middle")(x, time, hooks)
    x = use(model.attention, ".attention")(x, hooks)
    for i, blocks in enumerate(model.up):
        x = jnp.repeat(jnp.repeat(x, 2, axis=2), 2, axis=3)
        x = hooks.pin(jax.vmap(use(model.grow[i], f".grow[{i}]"))(x), "maps")
        for j, block in enumerate(blocks):
            joined = hooks.pin(jnp.concatenate([x, kept.pop()], axis=1), "maps")
            x = use(block, f".up[{i}][{j}]")(joined, time, hooks)
    x = jax.nn.silu(jax.vmap(use(model.norm, ".norm"))(x))
    return jax.vmap(use(model.leave, ".leave"))(x)


def loss(model: UNet, batch: Any, c: Config, hooks: Hooks) -> Array:
    level = batch["level"][:, None, None, None]
    noisy = jnp.sqrt(1 - level) * batch["image"] + jnp.sqrt(level) * batch["noise"]
    found = forward(model, noisy.astype(c.compute), batch["level"], c, hooks)
    return jnp.mean((found.astype(jnp.float32) - batch["noise"]) ** 2)


MODEL = Model(
    sizes={
        "tiny": Config(8, image=16, width=8, factors=(1, 2), blocks=1, heads=4, groups=4, compute="float32"),
        "bench": Config(512, image=32, width=256, factors=(1, 2), blocks=1, heads=8),
    },
    init=UNet,
    batch=batch,
    loss=loss,
    weights={
        r"^\.time\[0\].weight": ("mlp", None),
        r"^\.time\[0\].bias": ("mlp",),
        r"^\.time\[1\].weight": ("embed", "mlp"),
        r"^\.time\[1\].bias": ("embed",),
        r"first.weight": ("mlp", "embed", None, None),
        r"first.bias": ("mlp", None, None),
        r"time.weight": ("mlp", "embed"),
        r"(time.bias|norm2)": ("mlp",),
        r"second.weight": ("embed", "mlp", None, None),
        r"second.bias": ("embed", None, None),
        r"norm": ("embed",),
        r"qkv.*weight": ("heads", "embed"),
        r"qkv.*bias": ("heads",),
        r"out.weight": ("embed", "heads"),
        r"out.bias": ("embed",),
        r"weight": ("embed", "embed_in", None, None),
        r"bias": ("embed", None, None),
    },
    values={
        "^maps": ("batch", "embed", None, None),
        "^inner": ("batch", "mlp", None, None),
        "^heads": ("batch", None, "heads", None),
        "(image|noise)": ("batch", None, None, None),
        "level": ("batch",),
    },
)
