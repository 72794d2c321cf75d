"""Reading arrays straight into their layout: each process what its devices need, each piece once."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from .._errors import FormatError, MismatchError
from .._narrow import narrow
from .._spec import UNCONSTRAINED
from .._tree import itemsize, narrow_dtype, shown, type_text
from ._encode import decode, key_words
from ._progress import Progress
from ._safetensors_contents import FileSource
from ._stored import StoredLeaf
from ._tensors import begin_read, open_tensors, read_chunk, TensorSource


Index = tuple[slice, ...]

_IN_FLIGHT = 2**30  # bytes that are being read at a time
_OPEN_AT_ONCE = 256
_SMALL = 2**16  # bytes of an array of which one read costs less than one for each shard


@dataclass(frozen=True)
class Job:
    """One array to be read: from where, to where, as what."""

    path: str
    stored: StoredLeaf
    sharding: NamedSharding
    dtype: str


def settled(sharding: NamedSharding) -> NamedSharding:
    """A sharding without UNCONSTRAINED: what is not said is whole."""
    if UNCONSTRAINED not in tuple(sharding.spec):
        return sharding
    return sharding.update(spec=PartitionSpec(*(None if e is UNCONSTRAINED else e for e in sharding.spec)))


def read_arrays(jobs: list[Job], progress: Progress) -> list[jax.Array]:
    """The arrays, laid out; reads overlap, up to a number of bytes."""
    waiting: deque[tuple[int, Callable[[], jax.Array], int]] = deque()
    out: list[Any] = [None] * len(jobs)
    flying = 0

    def land() -> None:
        nonlocal flying
        number, finish, nbytes = waiting.popleft()
        out[number] = finish()
        flying -= nbytes
        progress.add(nbytes)

    for number, (job, view) in enumerate(_opened(jobs)):
        nbytes = local_bytes(job)
        while waiting and flying + nbytes > _IN_FLIGHT:
            land()
        waiting.append((number, _begin(job, view), nbytes))
        flying += nbytes
    while waiting:
        land()
    return out


def local_bytes(job: Job) -> int:
    """Bytes that this process reads of an array: those of its devices' pieces, each once."""
    pieces = {_key(i): i for i in job.sharding.addressable_devices_indices_map(job.stored.shape).values()}
    sizes = (math.prod(_size(s, n) for s, n in zip(i or (), job.stored.shape)) for i in pieces.values())
    return sum(sizes) * itemsize(job.stored.dtype)


def _opened(jobs: list[Job]) -> Iterator[tuple[Job, Any]]:
    """Each job with the array it reads from, which is what the index said it is."""
    for start in range(0, len(jobs), _OPEN_AT_ONCE):
        part = jobs[start : start + _OPEN_AT_ONCE]
        tensors = [(job.path, job.stored.source) for job in part if isinstance(job.stored.source, TensorSource)]
        stores = iter(open_tensors(tensors))
        for job in part:
            source = job.stored.source
            if isinstance(source, TensorSource):
                store = next(stores)
                _check_same(job, tuple(store.shape), store.dtype.name)
                yield job, store
            else:
                yield job, source.view(job.path) if isinstance(source, FileSource) else None


def _check_same(job: Job, shape: tuple[int, ...], dtype: str) -> None:
    stored = job.stored
    expected = stored.shape + (key_words(stored.key_impl, job.path)[1] if stored.key_impl else ())
    if shape != expected or dtype != (stored.kept_as or stored.dtype):
        raise FormatError(
            f"{shown(stored.path)}: the index says {type_text(expected, stored.kept_as or stored.dtype)}, the array "
            f"itself is {type_text(shape, dtype)}."
        )


def _begin(job: Job, view: Any) -> Callable[[], jax.Array]:
    """Starts to read what this process needs of one array; the result waits, and places it."""
    stored = job.stored
    words = key_words(stored.key_impl, job.path)[1] if stored.key_impl else ()
    shape, sharding = stored.shape + words, job.sharding
    places = {d: _whole(i, shape) for d, i in sharding.addressable_devices_indices_map(shape).items()}
    pieces = {_key(index): index for index in places.values()}
    take = _take(job, view, shape, list(pieces.values()))

    def finish() -> jax.Array:
        host = {key: _converted(get(), job) for key, get in zip(pieces, take)}
        devices = [SingleDeviceSharding(d, memory_kind=sharding.memory_kind) for d in places]
        parts = jax.device_put([host[_key(index)] for index in places.values()], devices)
        made = jax.make_array_from_single_device_arrays(
            shape, sharding, parts, dtype=jnp.uint32 if words else np.dtype(job.dtype)
        )
        return jax.random.wrap_key_data(made, impl=stored.key_impl) if words else made

    return finish


def _take(job: Job, view: Any, shape: tuple[int, ...], pieces: list[Index]) -> list[Callable[[], np.ndarray]]:
    """For each piece a function that gives it."""
    if view is None:  # of an array without elements nothing is stored
        return [lambda i=i: np.zeros([s.stop - s.start for s in i], job.stored.kept_as) for i in pieces]
    if not isinstance(job.stored.source, TensorSource):
        return [lambda i=i: np.array(view[i]) for i in pieces]
    box = _box(pieces)
    small = math.prod(shape) * itemsize(job.stored.kept_as or job.stored.dtype) <= _SMALL
    if box is not None and len(pieces) > 1 and (small or not _on_grid(pieces, read_chunk(view), shape)):
        # Pieces that share chunks are cut from one read, so that no chunk is read twice.
        block = _once(begin_read(job.path, view, box))
        inner = [tuple(slice(s.start - b.start, s.stop - b.start) for s, b in zip(i, box)) for i in pieces]
        return [lambda i=i: block()[i] for i in inner]
    return [begin_read(job.path, view, index) for index in pieces]


def _once(get: Callable[[], np.ndarray]) -> Callable[[], np.ndarray]:
    kept: list[np.ndarray] = []

    def result() -> np.ndarray:
        if not kept:
            kept.append(get())
        return kept[0]

    return result


def _box(pieces: list[Index]) -> Index | None:
    """The block that pieces make up together, if they leave no hole."""
    if not pieces:
        return None
    box = tuple(slice(min(s.start for s in dim), max(s.stop for s in dim)) for dim in zip(*pieces))
    volume = sum(math.prod(s.stop - s.start for s in piece) for piece in pieces)
    return box if math.prod(s.stop - s.start for s in box) == volume else None


def _on_grid(pieces: list[Index], chunk: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return all(
        s.start % c == 0 and (s.stop % c == 0 or s.stop == n)
        for piece in pieces
        for s, c, n in zip(piece, chunk, shape)
    )


def _whole(index: Any, shape: tuple[int, ...]) -> Index:
    """An index with every bound written out."""
    return tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, shape))


def _key(index: Any) -> tuple[tuple[Any, Any], ...]:
    return tuple((s.start, s.stop) for s in index)


def _size(s: slice, n: int) -> int:
    start, stop, _ = s.indices(n)
    return stop - start


def _converted(piece: np.ndarray, job: Job) -> np.ndarray:
    """A piece in the dtype that is wanted; integers that would not survive are an error."""
    piece = decode(piece, job.stored.dtype)
    if job.stored.key_impl or piece.dtype.name == job.dtype:
        return piece
    if narrow_dtype(piece.dtype) == job.dtype:
        return narrow(piece, job.path)
    cast = piece.astype(job.dtype)
    if piece.dtype.kind in "iu" and not np.array_equal(cast.astype(piece.dtype), piece):
        raise MismatchError(f"{shown(job.path)}: a value of {piece.dtype} does not fit into {job.dtype}.")
    return cast
