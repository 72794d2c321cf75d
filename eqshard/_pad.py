"""Rows that do not divide: filled up, with a mask that says which are real."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from ._errors import IndivisibleError, MismatchError, ShardingError
from ._put import is_global, is_key
from ._rows import broadcast, Row
from ._spec import entry_axes
from ._tree import shown, some


def padded(
    leaves: list[Any], lies: tuple[Row | None, ...], treedef: Any, pad: Any, rows: int | None
) -> tuple[list[Any], np.ndarray]:
    """The leaves with as many rows as divide, or as asked for, and which rows are real."""
    values, prefix = jtu.tree_flatten(pad)
    fill = broadcast(tuple(values), prefix, treedef, "`pad`")
    batched = [(i, row) for i, row in enumerate(lies) if row is not None and row.batched]
    if not batched:
        raise ShardingError("nothing to pad: the layout splits the first dimension of no array.")
    counts = {lies[i].path: leaves[i].shape[0] for i, _ in batched}  # pyright: ignore[reportOptionalMemberAccess]
    if len(set(counts.values())) > 1:
        told = some(f"{shown(path)} {n}" for path, n in counts.items())
        raise MismatchError(f"cannot pad arrays of different numbers of rows, as one mask is for all: {told}.")
    n = next(iter(counts.values()))
    wanted = _row_count(n, [row for _, row in batched], rows)
    out = list(leaves)
    for i, row in batched:
        if n != wanted:
            out[i] = _with_rows(leaves[i], wanted, fill[i], row.path)
    return out, np.arange(wanted) < n


def _row_count(n: int, batched: list[Row], rows: int | None) -> int:
    """To how many rows to pad the `n` that this process has."""
    factor = math.lcm(*(_factor(row) for row in batched))
    parts = batched[0].parts[0]
    if rows is None:
        each = factor // parts
        return -(-n // each) * each
    if rows % factor or rows < n * parts:
        raise IndivisibleError(
            f"`rows={rows}` must be a multiple of {factor}, the number of pieces, and at least the {n * parts} rows "
            "there are."
        )
    return rows // parts


def _factor(row: Row) -> int:
    return math.prod(row.sharding.mesh.shape[a] for entry in tuple(row.spec)[:1] for a in entry_axes(entry))


def _with_rows(x: Any, rows: int, fill: Any, path: str) -> Any:
    n = x.shape[0]
    if isinstance(x, (Tracer, jax.ShapeDtypeStruct)) or is_global(x):
        raise ShardingError(f"cannot pad {shown(path)}: only arrays that this process can read are padded.")
    if is_key(x):
        return x[jnp.minimum(jnp.arange(rows), n - 1)]  # keys have no value to fill with: the last one again
    host = np.asarray(x)
    try:
        more = np.full((rows - n, *host.shape[1:]), fill, host.dtype)
    except (OverflowError, ValueError, TypeError) as error:
        raise ShardingError(f"cannot pad {shown(path)}, which is {host.dtype}, with {fill!r}: {error}.") from None
    return np.concatenate([host, more])


@functools.lru_cache(maxsize=64)
def rows_sharding(sharding: NamedSharding) -> NamedSharding:
    """Of a mask: one number for each row."""
    return NamedSharding(sharding.mesh, PartitionSpec(*tuple(sharding.spec)[:1]))
