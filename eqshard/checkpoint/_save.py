"""Saving: array leaves through Orbax, the plan as JSON beside them, all or nothing."""

import os
import pathlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait as futures_wait
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer

from .._agree import agree_to
from .._errors import ShardingError
from .._layout import plan_of
from .._plan import match, ShardingPlan
from .._put import is_key
from .._tree import array_leaves, shown, Tree
from .._value import digest, header
from ._chunks import chunk_bytes
from ._contents import PLAN, PLAN_FILE, STATE
from ._encode import encode, store_name
from ._files import local_path, PathLike
from ._library import library
from ._progress import Progress


class Saving:
    """A save under way: `wait` until it is complete.

    The arrays have been copied already: they may be donated, changed or dropped. A save that is never waited for may
    be cut short by the end of the program; then it was none.
    """

    def __init__(self, path: pathlib.Path, checkpointer: Any, nbytes: int):
        self.path = path
        self._checkpointer, self._nbytes = checkpointer, nbytes

    def wait(self, *, progress: bool | None = None) -> None:
        """Returns when the checkpoint is complete; raises what went wrong. All processes must call it."""
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is None:
            return
        bar = Progress("saving", self._nbytes, progress)
        try:
            if bar.wanted:
                _watch(checkpointer.wait_until_finished, self.path, bar)
            else:
                checkpointer.wait_until_finished()
        finally:
            bar.close()
            checkpointer.close()


def _watch(wait: Callable[[], Any], path: pathlib.Path, bar: Progress) -> None:
    """Draws how much is on disk until `wait` is over."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        while not waiting.done():
            bar.to(_bytes_on_disk(path))
            futures_wait([waiting], 0.1)
        waiting.result()
    bar.to(bar.total)


def _bytes_on_disk(path: pathlib.Path) -> int:
    total = 0
    for folder in path.parent.glob(path.name + ".orbax-checkpoint-tmp*"):
        for where, _, files in os.walk(folder):
            for name in files:
                try:
                    total += os.stat(os.path.join(where, name)).st_size
                except FileNotFoundError:
                    continue  # moved meanwhile
    return total


def save(
    path: PathLike,
    tree: Tree,
    *,
    plan: ShardingPlan | None = None,
    step: int | None = None,
    wait: bool = True,
    progress: bool | None = None,
) -> Saving:
    """Writes the array leaves of `tree` to a new checkpoint, and the plan beside them.

    Each process writes its own pieces; all must make the call. The checkpoint appears under its name when it is
    complete: a program killed at any moment leaves no half of one. Leaves that are no arrays are not saved; `restore`
    takes them from its `like`. A plain Orbax checkpoint: its `state` is a dictionary from paths to arrays.

    ```python
    import equinox as eqx, eqshard, jax, tempfile
    model = eqx.nn.MLP(4, 4, 8, 2, key=jax.random.key(0))
    with tempfile.TemporaryDirectory() as folder:
        eqshard.checkpoint.save(folder, model, step=1)
        same = eqshard.checkpoint.restore(folder, model)
    assert eqx.tree_equal(model, same)
    ```

    **Arguments:**

    - `path`: the checkpoint's folder, which must not exist yet: a checkpoint is never overwritten.
    - `plan`: the plan to record; by default, as the arrays lie. Nothing is moved.
    - `step`: save as this step in the folder `path`.
    - `wait`: whether to return when all is on disk, or as soon as the arrays are copied.
    - `progress`: whether to draw a bar; by default on a terminal, if it takes more than a second.

    **Returns:**

    A `Saving`, whose `wait()` returns when the checkpoint is complete.

    **Raises:**

    - `ShardingError`: there is something at `path` already; a leaf has no value.
    - `MismatchError`: `plan` is not of this tree.
    - `ProcessError`: the processes do not save the same arrays at the same path, or one does not within five minutes.
    """
    ocp = library("orbax.checkpoint")
    where = local_path(path)
    if step is not None:
        if isinstance(step, bool) or not 0 <= step < 10**18:
            raise ShardingError(f"`step={step}` is no step: they count from 0.")
        where = where / str(step)
    if os.path.lexists(where):
        raise ShardingError(f"there is something at {where} already: a checkpoint is never overwritten.")
    arrays, record = _contents(tree, plan)
    if step is not None:
        record["step"] = step
    if jax.process_count() > 1:
        facts = {"the path": str(where), "the plan": digest(record["plan"]), "the arrays": digest(sorted(arrays))}
        agree_to("checkpoint.save", facts, jax.devices())
    if jax.process_index() == 0:
        where.parent.mkdir(parents=True, exist_ok=True)
    chunks = {name: ocp.SaveArgs(chunk_byte_size=chunk_bytes(x)) for name, x in arrays.items()}
    items = {PLAN: ocp.args.JsonSave(record)}
    handlers = {PLAN: ocp.JsonCheckpointHandler(filename=PLAN_FILE)}
    if arrays:
        items[STATE] = ocp.args.PyTreeSave(arrays, save_args=chunks)
        handlers[STATE] = ocp.PyTreeCheckpointHandler()
    checkpointer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(**handlers))
    saving = Saving(where, checkpointer, sum(x.nbytes for x in arrays.values()))
    try:
        checkpointer.save(where, args=ocp.args.Composite(**items))
    except BaseException:
        checkpointer.close()
        raise
    if wait:
        saving.wait(progress=progress)
    return saving


def _contents(tree: Tree, plan: ShardingPlan | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """What Orbax is given, by name, and what is written beside it."""
    leaves = array_leaves(tree)
    for path, x in leaves:
        if isinstance(x, (Tracer, jax.ShapeDtypeStruct)):
            kind = "being traced" if isinstance(x, Tracer) else "only a shape"
            raise ShardingError(f"cannot save {shown(path)}: it is {kind}.")
    if plan is None:
        plan = plan_of(tree)
    else:
        match(plan, *jtu.tree_flatten(tree))
    arrays = {store_name(path): _host_if_local(encode(x)) for path, x in leaves if 0 not in x.shape}
    record: dict[str, Any] = header("checkpoint") | {"plan": plan.to_dict()}
    keys = {path: str(jax.random.key_impl(x)) for path, x in leaves if is_key(x)}
    if keys:
        record["keys"] = keys
    return arrays, record


def _host_if_local(x: Any) -> Any:
    """With several processes, an array that each holds for itself is written by the first alone."""
    if jax.process_count() > 1 and isinstance(x, jax.Array) and x.is_fully_addressable:
        return np.asarray(x)
    return x
