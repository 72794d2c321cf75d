"""Which part of the data is this process's: shares of a batch, slices of a dataset."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from ._errors import IndivisibleError, MismatchError, ProcessError, ShardingError
from ._mesh import MeshLike, MeshSpec
from ._spec import canonical, entry_axes, spec_text
from ._tree import is_array


class Share(NamedTuple):
    """Which of how many equal parts."""

    part: int
    parts: int


def process_share(mesh: MeshLike, spec: PartitionSpec, *, dim: int = 0) -> Share:
    """Which part of a dimension this process's devices hold, and how many such parts there are.

    What a data loader needs to know. Often it is `(jax.process_index(), jax.process_count())`; but where a mesh axis
    that does not split the batch crosses processes, several processes hold, and so must load, the same part.

    ```python
    import eqshard
    from jax.sharding import PartitionSpec as P
    assert eqshard.process_share(eqshard.MeshSpec(data=4, tp=2), P("data")) == (0, 1)  # one process: all of it
    ```

    **Raises:**

    - `ProcessError`: processes hold parts that overlap, so that none of them is a part of its own.
    """
    built = mesh if isinstance(mesh, Mesh) else MeshSpec.of(mesh).build()
    described = MeshSpec.of(built)
    entry = tuple(spec)[dim] if dim < len(spec) else None
    described.size(entry_axes(entry))  # typos raise
    return mesh_share(built, entry_axes(entry), jax.process_index(), spec_text(spec))


@functools.lru_cache(maxsize=256)
def mesh_share(mesh: Any, axes: tuple[str, ...], process: int, shown: str) -> Share:
    """`process_share` for the axes of one dimension of a jax Mesh."""
    held = _blocks_held(mesh, axes)
    parts = sorted(set(held.values()), key=min)
    blocks = math.prod(mesh.shape[a] for a in axes)
    if len({len(part) for part in parts}) > 1 or sum(map(len, parts)) != blocks:
        raise ProcessError(
            f"{shown} on this mesh gives the processes overlapping parts of a dimension: "
            + "; ".join(f"process {i} holds blocks {sorted(part)}" for i, part in sorted(held.items())[:4])
            + f" of {blocks}. Give every process the whole batch, or let the axes that cross processes be the `dcn` "
            "axes of a MeshSpec."
        )
    if process not in held:
        raise ProcessError(f"process {process} has no device in the mesh {dict(mesh.shape)}.")
    return Share(parts.index(held[process]), len(parts))


def _blocks_held(mesh: Any, axes: tuple[str, ...]) -> dict[int, frozenset[int]]:
    """For each process the numbers of the blocks, of those that `axes` cut a dimension into, on its devices."""
    sizes = tuple(mesh.shape[a] for a in axes)
    held: dict[int, set[int]] = {}
    for place in np.ndindex(*mesh.devices.shape):
        at = dict(zip(mesh.axis_names, place))
        block = int(np.ravel_multi_index(tuple(at[a] for a in axes), sizes)) if axes else 0
        held.setdefault(mesh.devices[place].process_index, set()).add(block)
    return {process: frozenset(blocks) for process, blocks in held.items()}


class _View(Sequence[Any]):
    """Some elements of a sequence, fetched when asked for."""

    def __init__(self, of: Any, indices: Sequence[int]):
        self.of, self.indices = of, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return _View(self.of, self.indices[i])
        return self.of[self.indices[i]]

    def __repr__(self) -> str:
        return f"<{len(self)} of the {len(self.of)} elements of a {type(self.of).__name__}>"


def process_slice(
    data: Any,
    *,
    mesh: MeshLike | None = None,
    spec: PartitionSpec | None = None,
    share: tuple[int, int] | None = None,
    remainder: Literal["error", "keep", "drop", "pad"] = "error",
    order: Literal["block", "stride"] = "block",
) -> Any:
    """This process's part of a dataset: over the processes, every element is in exactly one part.

    ```python
    import eqshard
    assert list(eqshard.process_slice(10, share=(1, 3), remainder="keep")) == [4, 5, 6]
    assert eqshard.process_slice("abcdef", share=(0, 2), order="stride") == "ace"
    parts = [eqshard.process_slice({"x": [1, 2, 3]}, share=(i, 2), remainder="pad")["x"] for i in (0, 1)]
    assert parts == [[1, 2], [3, 1]]
    ```

    **Arguments:**

    - `data`: the number of elements, for a range of indices; a list, tuple, array or string, for the same with fewer
        elements; a dictionary of these; or anything with a length and elements by number (a grain or torch dataset),
        for a view that fetches an element when it is asked for.
    - `mesh`, `spec`: how batches lie, so that processes that hold the same rows get the same elements; see
        `process_share`. By default each process has a part of its own.
    - `share`: which of how many parts, instead of finding it out.
    - `remainder`: what to do if the parts cannot be equal: `"error"`; `"keep"` all elements, so that the first
        processes have one more (and take more steps: collectives then wait for ever); `"drop"` the last elements; or
        `"pad"` with the first ones again.
    - `order`: neighbours together (`"block"`), or dealt out one by one (`"stride"`).

    **Raises:**

    - `IndivisibleError`: the elements do not divide, and `remainder` does not say what to do.
    """
    part = _share(mesh, spec, share)
    if isinstance(data, Mapping):
        lengths = {name: len(x) for name, x in data.items()}
        if len(set(lengths.values())) > 1:
            raise MismatchError(f"the columns of a dataset must be equally long; they are {lengths}.")
        indices = _indices(next(iter(lengths.values()), 0), part, remainder, order)
        return {name: _take(x, indices) for name, x in data.items()}
    if isinstance(data, (int, np.integer)):
        return _indices(int(data), part, remainder, order)
    return _take(data, _indices(len(data), part, remainder, order))


def _share(mesh: MeshLike | None, spec: PartitionSpec | None, share: tuple[int, int] | None) -> Share:
    if share is not None:
        index, count = share
        if not 0 <= index < count:
            raise ShardingError(f"`share={share}`: the index must be from 0 to {count - 1}.")
        return Share(index, count)
    if (mesh is None) != (spec is None):
        raise ShardingError("`mesh` and `spec` go together: how batches lie, and on what.")
    if mesh is not None and spec is not None:
        return process_share(mesh, canonical(spec))
    return Share(jax.process_index(), jax.process_count())


def _indices(n: int, part: Share, remainder: str, order: str) -> Sequence[int]:
    index, count = part
    if remainder not in ("error", "keep", "drop", "pad") or order not in ("block", "stride"):
        raise ShardingError(f"`remainder={remainder!r}`, `order={order!r}`: no such choice.")
    if n % count and remainder == "error":
        raise IndivisibleError(
            f"{n} elements do not divide over {count} processes: {n} % {count} = {n % count}.\n  Ways out: "
            f'remainder="drop" leaves out the last {n % count}; remainder="pad" repeats the first {-n % count}; '
            'remainder="keep" lets the first processes have one more.'
        )
    if remainder == "keep":
        if order == "stride":
            return range(index, n, count)
        return range(*(i * (n // count) + min(i, n % count) for i in (index, index + 1)))
    each = n // count if remainder == "drop" else -(-n // count)
    positions = range(index * each, (index + 1) * each) if order == "block" else range(index, each * count, count)
    if remainder == "pad" and n and positions and positions[-1] >= n:
        return [i % n for i in positions]
    return positions


def _take(data: Any, indices: Sequence[int]) -> Any:
    if isinstance(data, (str, bytes)):
        return data[:0].join(data[i : i + 1] for i in indices)  # pyright: ignore[reportCallIssue, reportArgumentType]
    if isinstance(data, (list, tuple)):
        taken = [data[i] for i in indices]
        return taken if isinstance(data, list) else tuple(taken)
    if isinstance(data, np.ndarray) or is_array(data):
        if isinstance(indices, range):
            return data[indices.start : max(indices.stop, 0) : indices.step]
        return data[np.asarray(indices, dtype=int)]
    return _View(data, indices)
