"""Gathers and scatters of rows in the form that XLA has a fast kernel for.

`jax.vmap` of an index, as in `jax.vmap(eqx.nn.Embedding(...))`, makes windows of one row, found by an index for every
dimension: also for those that a window takes whole, where it can only be 0. A TPU goes through a scatter of that form
row by row, in a loop of many small kernels. The same rows by one index each are one kernel.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.lax import GatherScatterMode


def windows(eqn: Any) -> dict[int, tuple[int, int]]:
    """For each dimension of a table that windows have: which dimension of the windows it is, and its size there."""
    numbers, table = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
    if eqn.primitive.name == "gather":
        gone, there = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims), numbers.offset_dims
        shape = eqn.outvars[0].aval.shape
    else:
        gone, there = (*numbers.inserted_window_dims, *numbers.operand_batching_dims), numbers.update_window_dims
        shape = eqn.invars[2].aval.shape
    kept = [d for d in range(len(table)) if d not in gone]
    return {d: (int(w), shape[w]) for d, w in zip(kept, there)}


def row_dims(eqn: Any) -> tuple[int, ...]:
    """The dimensions of a table from which an index picks one, whether or not they are left in the windows."""
    numbers = eqn.params["dimension_numbers"]
    gone = numbers.collapsed_slice_dims if eqn.primitive.name == "gather" else numbers.inserted_window_dims
    return tuple(sorted({int(d) for d in (*gone, *_single(eqn))}))


def _single(eqn: Any) -> list[int]:
    """The dimensions of a table from which an index picks one that is left in the windows."""
    numbers, table = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
    of = numbers.start_index_map if eqn.primitive.name == "gather" else numbers.scatter_dims_to_operand_dims
    return sorted(d for d, (_, size) in windows(eqn).items() if size == 1 and table[d] > 1 and d in of)


def row_by_row(eqn: Any, as_written: bool = False) -> bool:
    """Whether a TPU goes through it row by row, as windows are parts of the table: in the form that is made here, or as
    it is written."""
    table, single = eqn.invars[0].aval.shape, () if as_written else _single(eqn)
    return any(size < table[d] and d not in single for d, (_, size) in windows(eqn).items())


def picked(eqn: Any) -> list[int]:
    """The columns of an index that say something; in a dimension that windows take whole it can only be 0."""
    numbers, table, there = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape, windows(eqn)
    of = numbers.start_index_map if eqn.primitive.name == "gather" else numbers.scatter_dims_to_operand_dims
    if eqn.params["mode"] not in (GatherScatterMode.CLIP, GatherScatterMode.PROMISE_IN_BOUNDS):
        return list(range(len(of)))  # where it is not 0, nothing is read or written
    return [k for k, d in enumerate(of) if d not in there or there[d][1] != table[d]]


def bind_rows(eqn: Any, ins: Sequence[Any]) -> Any | None:
    """Runs a gather or scatter by rows; None if it has that form, or cannot have it."""
    numbers, there = eqn.params["dimension_numbers"], windows(eqn)
    of_index = numbers.start_index_map if eqn.primitive.name == "gather" else numbers.scatter_dims_to_operand_dims
    columns_left, single = picked(eqn), _single(eqn)
    if not single or not columns_left:
        return None
    gone = sorted(there[d][0] for d in single)
    left = tuple(w - sum(g < w for g in gone) for w, _ in there.values() if w not in gone)
    columns = [jax.lax.slice_in_dim(ins[1], k, k + 1, axis=-1) for k in columns_left]
    index = jax.lax.concatenate(columns, columns[0].ndim - 1)
    left_in_index = tuple(of_index[k] for k in columns_left)
    if eqn.primitive.name == "gather":
        new = numbers._replace(
            offset_dims=left,
            collapsed_slice_dims=tuple(sorted((*numbers.collapsed_slice_dims, *single))),
            start_index_map=left_in_index,
        )
        out = eqn.primitive.bind(ins[0], index, **eqn.params | {"dimension_numbers": new})
        return jax.lax.expand_dims(out, gone)
    new = type(numbers)(
        update_window_dims=left,
        inserted_window_dims=tuple(sorted((*numbers.inserted_window_dims, *single))),
        scatter_dims_to_operand_dims=left_in_index,
        operand_batching_dims=numbers.operand_batching_dims,
        scatter_indices_batching_dims=numbers.scatter_indices_batching_dims,
    )
    update = jax.lax.squeeze(ins[2], gone)
    return eqn.primitive.bind(ins[0], index, update, **eqn.params | {"dimension_numbers": new})
