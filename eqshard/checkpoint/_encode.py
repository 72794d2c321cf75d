"""How leaves are written where the store has no type or name for them: PRNG keys, rare dtypes, paths."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import FormatError
from .._put import is_key
from .._value import short


# Dtypes that tensorstore lacks: small integers are kept as larger ones, floats as their bits.
_AS_VALUES = {"uint4": "uint8", "uint2": "uint8"}
_AS_BITS = {"float8_e4m3": "uint8"}


def kept_as(dtype: str) -> str:
    """The dtype that a leaf has in the store."""
    if dtype.startswith("key<"):
        return "uint32"
    return _AS_VALUES.get(dtype) or _AS_BITS.get(dtype) or dtype


def encode(x: Any) -> Any:
    """An array as the store holds it: laid out as it was."""
    if is_key(x):
        return jax.random.key_data(x)
    name = x.dtype.name
    if name in _AS_VALUES:
        return x.astype(_AS_VALUES[name])
    if name in _AS_BITS:
        return x.view(_AS_BITS[name]) if isinstance(x, np.ndarray) else jax.lax.bitcast_convert_type(x, jnp.uint8)
    return x


def decode(x: np.ndarray, dtype: str) -> np.ndarray:
    """The inverse of `encode` for a piece on the host; of keys, their words."""
    if dtype.startswith("key<") or x.dtype.name == dtype:
        return x
    return x.view(dtype) if dtype in _AS_BITS else x.astype(dtype)


def key_words(impl: str, where: str) -> tuple[str, tuple[int, ...]]:
    """The dtype of keys of an implementation, and the shape of the words that make one."""
    try:
        key = jax.eval_shape(lambda: jax.random.key(0, impl=impl))
        return key.dtype.name, tuple(jax.eval_shape(jax.random.key_data, key).shape)
    except (ValueError, TypeError, KeyError):
        raise FormatError(f"{where}: {short(impl)} is no implementation of PRNG keys that this JAX knows.") from None


_UNSAFE = re.compile(r"[^A-Za-z0-9_.\[\]'\-]")


def store_name(path: str) -> str:
    """The name of a leaf in the store: its path, with what no store's key may hold as %XX."""
    return _UNSAFE.sub(lambda m: "".join(f"%{byte:02X}" for byte in m.group().encode()), path) or "%"
