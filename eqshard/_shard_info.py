"""What was sharded: how it lies, how much it was, and statistics computed where it lies."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec

from ._errors import ShardingError
from ._gather import replicate
from ._mesh import MeshSpec
from ._narrow import narrow_leaves
from ._rest import Rest, split
from ._spec import spec_text
from ._tree import array_leaves, dtype_name, itemsize, shown, size_text, Tree, type_text


@dataclass(frozen=True)
class ShardedLeaf:
    """How one array of a batch was laid out."""

    path: str
    dtype: str
    shape_before: tuple[int, ...]
    """As it was given: with `local=True`, this process's part."""
    shape: tuple[int, ...]
    """Of the whole array, padding included."""
    shard_shape: tuple[int, ...]
    """Of the piece on each device."""
    spec: PartitionSpec

    @property
    def shard_bytes(self) -> int:
        """Bytes of the piece on each device."""
        return math.prod(self.shard_shape) * itemsize(self.dtype)


@jtu.register_static
@dataclass(frozen=True)
class ShardInfo:
    """What `shard_batch(..., info=True)` tells.

    ```python
    import eqshard, numpy as np
    from jax.sharding import PartitionSpec as P
    batch = {"x": np.ones((16, 3), "float32")}
    _, info = eqshard.shard_batch(batch, eqshard.MeshSpec(data=8), P("data"), info=True)
    assert info["['x']"].shard_shape == (2, 3) and set(info.bytes_by_device.values()) == {24}
    print(info)
    ```
    """

    leaves: tuple[ShardedLeaf, ...]
    devices: tuple[int, ...]
    """The ids of the mesh's devices, in mesh order."""

    def __getitem__(self, path: str) -> ShardedLeaf:
        for leaf in self.leaves:
            if leaf.path == path:
                return leaf
        raise ShardingError(f"no array {shown(path)} in the batch.")

    @property
    def bytes_by_device(self) -> dict[int, int]:
        """Bytes of the batch on each device, by the device's id."""
        return dict.fromkeys(self.devices, sum(leaf.shard_bytes for leaf in self.leaves))

    def __str__(self) -> str:
        lines = [
            f"{shown(leaf.path)} {type_text(leaf.shape_before, leaf.dtype)} → {type_text(leaf.shape, leaf.dtype)} "
            f"{spec_text(leaf.spec)}, {list(leaf.shard_shape)} on each device"
            for leaf in self.leaves
        ]
        each = size_text(sum(leaf.shard_bytes for leaf in self.leaves))
        return "\n".join([*lines, f"{each} on each of {len(self.devices)} devices"])


@jtu.register_static
@dataclass(frozen=True)
class ShardStats:
    """How much was sharded so far: immutable, each `update` gives a new one.

    ```python
    import eqshard, numpy as np
    stats = eqshard.ShardStats()
    for _ in range(3):
        stats = stats.update({"x": np.ones((16, 2), "float32")})
    assert (stats.batches, stats.examples, stats.bytes) == (3, 48, 384)
    ```
    """

    batches: int = 0
    examples: int = 0
    """Rows of the whole batches."""
    bytes: int = 0
    """Of the whole batches, however many devices hold a copy."""

    def update(self, batch: Tree, *, examples: int | None = None) -> "ShardStats":
        """With one more batch.

        **Arguments:**

        - `examples`: how many rows it has, if not all that its first array has: without the padding.
        """
        arrays = [x for _, x in array_leaves(batch)]
        if examples is None:
            examples = next((int(x.shape[0]) for x in arrays if x.shape), 0)
        size = sum(math.prod(x.shape) * itemsize(dtype_name(x)) for x in arrays)
        return ShardStats(self.batches + 1, self.examples + examples, self.bytes + size)


def batch_statistics(batch: Tree, fn: Callable[[Any], Tree]) -> Tree:
    """Computes `fn(batch)` where the shards are, and makes the result whole on every device.

    The batch is never gathered: the compiler sums over shards. With many processes every one can read the result.

    ```python
    import eqshard, jax.numpy as jnp, numpy as np
    from jax.sharding import PartitionSpec as P
    batch = {"x": np.arange(16, dtype="float32").reshape(8, 2)}
    batch = eqshard.shard_batch(batch, eqshard.MeshSpec(data=8), P("data"))
    mean = eqshard.batch_statistics(batch, lambda batch: batch["x"].mean(axis=0))
    assert np.asarray(mean).tolist() == [7.0, 8.0]
    ```

    **Arguments:**

    - `fn`: called traced, with the whole batch; the same function is compiled once.
    """
    arrays, rest = split(batch)
    arrays = narrow_leaves(arrays, lambda: [path for path, _ in array_leaves(batch)])
    result = _statistics(fn, rest, arrays)
    placed = [x for x in arrays if isinstance(getattr(x, "sharding", None), NamedSharding)]
    return replicate(result, MeshSpec.of(placed)) if placed else result


@functools.partial(jax.jit, static_argnums=(0, 1))
def _statistics(fn: Any, rest: Rest, arrays: list[Any]) -> Tree:
    return fn(rest.join(arrays))
