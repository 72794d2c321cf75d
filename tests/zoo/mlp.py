"""`eqx.nn.MLP`, as regression."""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from ._case import Hooks, Model
from ._layers import over


@dataclass(frozen=True)
class Config:
    batch: int
    embed: int
    hidden: int
    depth: int
    compute: str = "bfloat16"


def init(c: Config, key: Array) -> eqx.nn.MLP:
    return eqx.nn.MLP(c.embed, c.embed, c.hidden, c.depth, key=key)


def batch(c: Config, key: Array) -> dict[str, Array]:
    one, two = jax.random.split(key)
    return {"x": jax.random.normal(one, (c.batch, c.embed)), "y": jax.random.normal(two, (c.batch, c.embed))}


def loss(model: eqx.nn.MLP, batch: Any, c: Config, hooks: Hooks) -> Array:
    x = batch["x"].astype(c.compute)
    for i, layer in enumerate(model.layers):
        x = over(hooks.use(layer, f".layers[{i}]"), x)
        if i < c.depth:
            x = hooks.pin(model.activation(x), "wide" if i % 2 == 0 else "narrow")
    return jnp.mean((x.astype(jnp.float32) - batch["y"]) ** 2)


# Layers in pairs, as Megatron has them: the first of a pair splits what it writes, the second what it reads.
MODEL = Model(
    sizes={
        "tiny": Config(16, 16, 32, 2, compute="float32"),
        "bench": Config(batch=16384, embed=2048, hidden=8192, depth=6),
    },
    init=init,
    batch=batch,
    loss=loss,
    weights={
        r"\[[02468]\].weight": ("mlp", "embed"),
        r"\[[02468]\].bias": ("mlp",),
        r"weight": ("embed", "mlp"),
        r"bias": ("embed",),
    },
    values={"wide": ("batch", "mlp"), "narrow": ("batch", "embed"), r"\['[xy]'\]": ("batch", None)},
)
