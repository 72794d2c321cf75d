"""Moving concrete arrays; where other processes hold a part, each process places its own."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.extend.core import find_top_trace
from jax.sharding import NamedSharding, PartitionSpec


_EAGER = find_top_trace(())  # of calls that nothing traces
GROUP_BYTES = 64 * 2**20
"""How much is moved at once where the sources are given up; a larger array is moved alone."""


def put_all(arrays: list[Any], shardings: list[NamedSharding], *, donate: bool = False) -> list[Any]:
    """Each array, which every process holds whole, laid out by its sharding.

    `jax.device_put` to devices of several processes first sends every array to everyone, to compare them: as much
    traffic as the arrays are large, and NaNs are reported as differences. Here nothing is sent.
    """
    if is_tracing():
        return jax.device_put(arrays, shardings, donate=donate)
    if jax.process_count() > 1 and not all(s.is_fully_addressable for s in shardings):
        return _put_parts(arrays, shardings, donate)
    return jax.device_put(arrays, shardings, donate=donate)


def move_all(arrays: list[Any], shardings: list[NamedSharding]) -> list[Any]:
    """As `put_all`, but empties `arrays`, group by group: a source that nobody else holds is freed once it has moved.

    `jax.device_put(donate=True)` to another layout does not free its source; nor may it be deleted by hand, for the
    result may share its buffers.
    """
    if is_tracing():
        return put_all(arrays, shardings, donate=True)
    moved: list[Any] = []
    while arrays:
        n, nbytes = 1, arrays[0].nbytes
        while n < len(arrays) and (nbytes := nbytes + arrays[n].nbytes) <= GROUP_BYTES:
            n += 1
        group, arrays[:n] = arrays[:n], []
        moved += jax.block_until_ready(put_all(group, shardings[len(moved) : len(moved) + n], donate=True))
        del group
    return moved


def can_cut() -> bool:
    """Whether `cut` may stand for `jax.device_put` here: nothing is traced, and no guard asks who wanted the move."""
    return find_top_trace(()) is _EAGER and _guard() in (None, "allow")


def cut(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """As `jax.device_put` of a numpy array to devices of this process: the same transfers, less overhead."""
    return jax.make_array_from_callback(x.shape, sharding, x.__getitem__ if x.ndim else lambda _: x)


def from_part(x: np.ndarray, sharding: NamedSharding, whole: tuple[int, ...]) -> jax.Array:
    """The array of the shape `whole` of which this process holds the part `x`.

    As by `jax.make_array_from_process_local_data`; but what lies where is worked out once.
    """
    moved = _starts(sharding, whole, x.shape)
    if not moved:
        return _from_pieces(whole, sharding, x.__getitem__ if x.ndim else lambda _: x)

    def piece(index: tuple[slice, ...]) -> np.ndarray:
        here = list(index)
        for dim, places in moved:
            here[dim] = places[here[dim].start or 0]
        return x[tuple(here)]

    return _from_pieces(whole, sharding, piece)


@functools.lru_cache(maxsize=1024)
def _starts(
    sharding: NamedSharding, whole: tuple[int, ...], part: tuple[int, ...]
) -> tuple[tuple[int, dict[int, slice]], ...]:
    """For each dimension that the processes share: where a piece begins in the whole, and where it is in the part."""
    held = sharding.addressable_devices_indices_map(whole).values()
    sizes = sharding.shard_shape(whole)
    out = []
    for dim, (n, m) in enumerate(zip(whole, part)):
        if n != m:
            starts = sorted({index[dim].start or 0 for index in held if index is not None})
            places = {start: slice(i * sizes[dim], (i + 1) * sizes[dim]) for i, start in enumerate(starts)}
            out.append((dim, places))
    return tuple(out)


def _from_pieces(shape: tuple[int, ...], sharding: NamedSharding, piece: Callable[[Any], Any]) -> jax.Array:
    if _guard() != "disallow":
        return jax.make_array_from_callback(shape, sharding, piece)
    with jax.transfer_guard_host_to_device("allow"):  # it is asked for, as by `device_put`
        return jax.make_array_from_callback(shape, sharding, piece)


def _guard() -> str | None:
    return jax.config.jax_transfer_guard_host_to_device  # pyright: ignore[reportAttributeAccessIssue]


def _put_parts(arrays: list[Any], shardings: list[NamedSharding], donate: bool) -> list[Any]:
    """Moves arrays between layouts over several processes, one at a time, each waited for.

    Each such move is a program with collectives. On CPUs, programs that run at the same time share a pool of threads;
    processes that fill it with different programs wait for each other forever.
    """
    if any(is_global(x) for x in arrays):
        jax.block_until_ready(arrays)  # the programs that compute them may have collectives too
    uses = Counter(id(x) for x in arrays)
    return [jax.block_until_ready(_put_part(x, s, donate and uses[id(x)] == 1)) for x, s in zip(arrays, shardings)]


def _put_part(x: Any, sharding: NamedSharding, donate: bool) -> jax.Array:
    if is_global(x):
        if not is_key(x):
            # Shards of another shape cannot take over the buffers: JAX would warn, and free nothing.
            fits = x.sharding.shard_shape(x.shape) == sharding.shard_shape(x.shape)
            return jax.device_put(x, sharding, donate=donate and fits)
        moved = jax.device_put(jax.random.key_data(x), sharding)  # of keys that are elsewhere, JAX moves the data only
        return jax.random.wrap_key_data(moved, impl=jax.random.key_impl(x))
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding, donate=donate)
    if is_key(x):
        impl, data = jax.random.key_impl(x), np.asarray(jax.random.key_data(x))
        return _from_pieces(
            x.shape, sharding, lambda index: jax.random.wrap_key_data(jnp.asarray(data[index]), impl=impl)
        )
    whole = np.asarray(x)
    return _from_pieces(x.shape, sharding, lambda index: whole[index])


def is_here(x: Any) -> bool:
    """Whether this process can read all of `x` by itself."""
    if not isinstance(x, jax.Array):
        return True
    return x.is_fully_addressable or (x.is_fully_replicated and bool(x.addressable_shards))


def fetch(x: jax.Array) -> np.ndarray:
    """All of an array of which other processes hold parts. Every process must ask, in the same order.

    For a moment every device holds the array whole.
    """
    if isinstance(x.sharding, NamedSharding):
        whole = jax.device_put(x, x.sharding.update(spec=PartitionSpec()))
        return np.asarray(whole.addressable_data(0))
    return multihost_utils.process_allgather(x, tiled=True)


def is_global(x: Any) -> bool:
    """Whether `x` is an array of which other processes hold parts or copies."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer) and not x.is_fully_addressable


def is_key(x: Any) -> bool:
    """Whether `x` is an array of typed PRNG keys."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def is_tracing() -> bool:
    """Whether an eager call here would be staged out: then `device_put` must be too."""
    return find_top_trace(()) is not _EAGER and isinstance(jnp.zeros(()), Tracer)
