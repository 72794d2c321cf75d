"""How large the chunks of a saved array are: so that other layouts read little in vain, and saving stays fast."""

import math
from typing import Any

import jax


_LEAST = 2**20  # bytes; smaller chunks make the store slow
_MOST = 2**24  # larger ones make it no faster
_CUTS = 8  # parts of a dimension that another layout may want one of


def chunk_shape(x: Any) -> tuple[int, ...]:
    """The shape of the chunks that `x` is written in."""
    return _chunk(tuple(x.shape), _written(x), chunk_bytes(x) // x.dtype.itemsize)


def chunk_bytes(x: Any) -> int:
    """The most bytes of a chunk of `x`.

    A reader gets whole chunks: one who wants an eighth of the rows reads no more than that if chunks end there. But
    each chunk costs time to write. So the largest ones that come closest to `_CUTS` parts of every dimension.
    """
    shape, size = tuple(x.shape), x.dtype.itemsize
    piece = _written(x)
    target = min(math.prod(piece) * size, _MOST)
    best, found = target, _cuts(shape, _chunk(shape, piece, target // size))
    least = _LEAST if math.prod(shape) * size < 64 * _LEAST else 2 * _LEAST  # most bytes are in few arrays
    while target // 2 >= least:
        target //= 2
        cuts = _cuts(shape, _chunk(shape, piece, target // size))
        if cuts > found:
            best, found = target, cuts
    return max(best, _LEAST)


def _written(x: Any) -> tuple[int, ...]:
    """The shape of what a device writes: its piece, or its part of one that several devices hold."""
    if not isinstance(x, jax.Array):
        return tuple(x.shape)
    piece = x.sharding.shard_shape(x.shape)
    copies = len(x.sharding.device_set) * math.prod(piece) // max(math.prod(x.shape), 1)
    dim = next((i for i, n in enumerate(piece) if n % copies == 0), None) if copies > 1 else None
    return piece if dim is None else (*piece[:dim], piece[dim] // copies, *piece[dim + 1 :])


def _cuts(shape: tuple[int, ...], chunk: tuple[int, ...]) -> int:
    return math.prod(min(n // c, _CUTS) for n, c in zip(shape, chunk))


def _chunk(shape: tuple[int, ...], piece: tuple[int, ...], elements: int) -> tuple[int, ...]:
    """A piece cut down to so many elements: its longest dimension first, those that are split already before others."""
    chunk = list(piece)
    split = [n != m for n, m in zip(shape, piece)]
    while math.prod(chunk) > elements:
        dims = [i for i, n in enumerate(chunk) if split[i] and n > 1]
        if not dims:
            split = [True] * len(chunk)
            continue
        dim = max(dims, key=lambda i: chunk[i])
        chunk[dim] = max(d for d in _divisors(piece[dim]) if d < chunk[dim])
    return tuple(chunk)


def _divisors(n: int) -> set[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return {*small, *(n // d for d in small)}
