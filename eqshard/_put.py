"""Moving concrete arrays: one `jax.device_put`; where other processes hold a part, each process places its own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec


def put_all(arrays: list[Any], shardings: list[NamedSharding], *, donate: bool = False) -> list[Any]:
    """Each array, which every process holds whole, laid out by its sharding.

    `jax.device_put` to devices of several processes first sends every array to everyone, to compare them: as much
    traffic as the arrays are large, and NaNs are reported as differences. Here nothing is sent.
    """
    if jax.process_count() == 1 or all(s.is_fully_addressable for s in shardings) or _tracing():
        return jax.device_put(arrays, shardings, donate=donate)
    return [_put_part(x, s, donate) for x, s in zip(arrays, shardings)]


def _put_part(x: Any, sharding: NamedSharding, donate: bool) -> jax.Array:
    if is_global(x):
        if not is_key(x):
            return jax.device_put(x, sharding, donate=donate)
        moved = jax.device_put(jax.random.key_data(x), sharding)  # of keys that are elsewhere, JAX moves the data only
        return jax.random.wrap_key_data(moved, impl=jax.random.key_impl(x))
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding, donate=donate)
    if is_key(x):
        impl, data = jax.random.key_impl(x), np.asarray(jax.random.key_data(x))
        return jax.make_array_from_callback(
            x.shape, sharding, lambda index: jax.random.wrap_key_data(jnp.asarray(data[index]), impl=impl)
        )
    whole = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: whole[index])


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


def _tracing() -> bool:
    """Whether an eager call here would be staged out: then `device_put` must be too."""
    return isinstance(jnp.zeros(()), Tracer)
