"""DLRM: large tables of embeddings for categories, a small MLP for numbers, and the products of all pairs of both."""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import Array

from ._case import cast, Hooks, Model, tokens
from ._layers import over


@dataclass(frozen=True)
class Config:
    batch: int
    numbers: int
    embed: int
    rows: tuple[int, ...]
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    products: str = "bfloat16"
    compute: str = "float32"  # a table is read in few places, so it is not cast; what is read of it is


class DLRM(eqx.Module):
    tables: list[eqx.nn.Embedding]
    bottom: list[eqx.nn.Linear]
    top: list[eqx.nn.Linear]

    def __init__(self, c: Config, key: Array):
        one, two, three = jax.random.split(key, 3)
        keys = jax.random.split(one, len(c.rows))
        self.tables = [eqx.nn.Embedding(weight=jax.random.normal(k, (n, c.embed)) / 8) for k, n in zip(keys, c.rows)]
        self.bottom = _linears((c.numbers, *c.bottom, c.embed), two)
        pairs = (len(c.rows) + 1) * len(c.rows) // 2
        self.top = _linears((pairs + c.embed, *c.top, 1), three)


def _linears(widths: tuple[int, ...], key: Array) -> list[eqx.nn.Linear]:
    keys = jax.random.split(key, len(widths) - 1)
    return [eqx.nn.Linear(a, b, key=k) for a, b, k in zip(widths, widths[1:], keys)]


def batch(c: Config, key: Array) -> dict[str, Array]:
    one, two, three = jax.random.split(key, 3)
    columns = [tokens(k, (c.batch,), n) for k, n in zip(jax.random.split(two, len(c.rows)), c.rows)]
    return {
        "numbers": jax.random.normal(one, (c.batch, c.numbers)),
        "category": jnp.stack(columns, axis=1),
        "label": jax.random.bernoulli(three, 0.3, (c.batch,)).astype(jnp.float32),
    }


def loss(model: DLRM, batch: Any, c: Config, hooks: Hooks) -> Array:
    bottom, top = cast((model.bottom, model.top), c.products)
    x = batch["numbers"].astype(c.products)
    for i, layer in enumerate(bottom):
        x = hooks.pin(jax.nn.relu(over(hooks.use(layer, f".bottom[{i}]"), x)), "features")
    looked_up = [
        hooks.pin(over(hooks.use(table, f".tables[{i}]"), batch["category"][:, i], 1), "features")
        for i, table in enumerate(model.tables)
    ]
    vectors = hooks.pin(jnp.stack([x, *cast(looked_up, c.products)], axis=1), "vectors")
    products = jnp.einsum("bie,bje->bij", vectors, vectors)
    first, second = jnp.triu_indices(len(c.rows) + 1, k=1)
    x = hooks.pin(jnp.concatenate([x, products[:, first, second]], axis=1), "features")
    for i, layer in enumerate(top):
        x = over(hooks.use(layer, f".top[{i}]"), x)
        x = hooks.pin(jax.nn.relu(x) if i + 1 < len(top) else x, "features")
    return jnp.mean(optax.sigmoid_binary_cross_entropy(x[:, 0].astype(jnp.float32), batch["label"]))


_BENCH_ROWS = (1_000_000,) * 3 + (262_144,) * 5 + (65_536,) * 8 + (4096,) * 10

# Splitting the model, the rows of the tables are split, and the small layers are whole.
MODEL = Model(
    sizes={
        "tiny": Config(16, 8, 16, rows=(256, 64, 64), bottom=(32,), top=(32,), products="float32"),
        "bench": Config(65_536, 16, 128, _BENCH_ROWS, bottom=(512, 256), top=(1024, 1024, 512, 256)),
    },
    init=DLRM,
    batch=batch,
    loss=loss,
    weights={
        r"tables": ("vocab", "embed"),
        r"weight": ("embed_out", "embed"),
        r"bias": ("embed",),
    },
    values={
        "^features": ("batch", None),
        "^vectors": ("batch", None, None),
        "(numbers|category)": ("batch", None),
        "label": ("batch",),
    },
)
