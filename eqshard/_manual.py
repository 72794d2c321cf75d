"""Inside `jax.shard_map`: how many devices, and which one this is."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import Array, Int

from ._errors import UnknownAxisError


def axis_size(names: str | Sequence[str]) -> int:
    """Inside `jax.shard_map`: the number of devices along the named mesh axes.

    ```python
    import eqshard, jax, jax.numpy as jnp
    from jax.sharding import PartitionSpec as P
    mesh = eqshard.MeshSpec(x=8).build()
    f = jax.shard_map(lambda a: a * eqshard.axis_size("x"), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    assert (jax.jit(f)(jnp.ones(8)) == 8).all()
    ```

    **Raises:**

    - `UnknownAxisError`: not inside a `shard_map` over these axes.
    """
    size = 1
    for name in (names,) if isinstance(names, str) else names:
        size *= _inside(jax.lax.axis_size, name)
    return size


def axis_index(names: str | Sequence[str]) -> Int[Array, ""] | int:
    """Inside `jax.shard_map`: this device's index along the named mesh axes, the first name major.

    ```python
    import eqshard, jax, jax.numpy as jnp
    from jax.sharding import PartitionSpec as P
    mesh = eqshard.MeshSpec(x=8).build()
    f = jax.shard_map(lambda a: a + eqshard.axis_index("x"), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    assert (jax.jit(f)(jnp.zeros(8, int)) == jnp.arange(8)).all()
    ```

    **Raises:**

    - `UnknownAxisError`: not inside a `shard_map` over these axes.
    """
    index: Any = 0
    for name in (names,) if isinstance(names, str) else names:
        index = index * _inside(jax.lax.axis_size, name) + _inside(jax.lax.axis_index, name)
    return index


def _inside(fn: Callable[[str], Any], name: str) -> Any:
    try:
        return fn(name)
    except NameError:
        raise UnknownAxisError(
            f"the mesh axis {name!r} is not manual here: `axis_size` and `axis_index` work inside a `jax.shard_map` "
            "over that axis. Elsewhere, `MeshSpec.size` tells an axis's size."
        ) from None
