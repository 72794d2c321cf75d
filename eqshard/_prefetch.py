"""Batches that are on the devices before the step asks for them."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from ._agree import new_channel
from ._batch import place_batch
from ._errors import ShardingError
from ._plan import ShardingPlan
from ._tree import Tree


_END = object()


def prefetch(
    batches: Iterable[Tree],
    plan: ShardingPlan | Callable[[Tree], Any],
    size: int = 2,
    *,
    local: bool = False,
) -> Iterator[Any]:
    """Reads and places the next batches while the step runs on this one.

    A thread takes batches from `batches` and moves them; at most `size` are ahead, so memory for `size + 1` is needed.
    The order is kept. What `batches` raises is raised here, in its turn, after the batches before it. When the consumer
    stops early (`break`, `close`), the thread ends after the batch that it is at.

    ```python
    import eqshard, numpy as np
    from jax.sharding import PartitionSpec as P
    mesh = eqshard.MeshSpec(data=8)
    batches = ({"x": np.full((16, 2), i, "float32")} for i in range(3))
    for i, batch in enumerate(eqshard.prefetch(batches, lambda b: eqshard.shard_batch(b, mesh, P("data")))):
        assert batch["x"].sharding.spec == P("data") and (batch["x"] == i).all()
    ```

    **Arguments:**

    - `batches`: anything to iterate over. It is only used in the thread.
    - `plan`: how each batch lies; or a function that places one, as above. With many processes and each bringing the
        whole batch, let the function pass `check=False` to `shard_batch` unless nothing else calls it meanwhile.
    - `size`: how many batches to be ahead by.
    - `local`: with a plan, whether each process brings its own part; see `shard_batch`.
    """
    if size < 1:
        raise ShardingError(f"`size={size}`: at least one batch must be ahead.")
    if isinstance(plan, ShardingPlan):
        known = plan
        # Compared apart from other batches: threads take no turns.
        channel = new_channel("prefetch") if jax.process_count() > 1 and not local else None
        return _prefetched(batches, lambda b: place_batch(b, known.mesh, known, local=local, channel=channel), size)
    return _prefetched(batches, plan, size)


def _prefetched(batches: Iterable[Any], place: Callable[[Any], Any], size: int) -> Iterator[Any]:
    source = iter(batches)
    wide = bool(jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue]
    ended = False

    def load() -> Any:
        nonlocal ended
        if ended:
            return _END
        ended = True  # unless all goes well: what has raised is not asked again
        batch = next(source, _END)
        if batch is _END:
            return _END
        with jax.enable_x64(wide):  # settings made by context are the thread's own
            placed = place(batch)
        ended = False
        return placed

    worker = ThreadPoolExecutor(1, thread_name_prefix="eqshard-prefetch")
    try:
        ahead = deque(worker.submit(load) for _ in range(size))
        while (batch := ahead.popleft().result()) is not _END:
            ahead.append(worker.submit(load))
            yield batch
    finally:
        worker.shutdown(cancel_futures=True)
