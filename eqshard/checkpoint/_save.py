"""Saving: array leaves in a database that Orbax reads, the plan as JSON beside them, all or nothing."""

import dataclasses
import json
import os
import pathlib
import secrets
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait as futures_wait
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer

from .._agree import agree_to, exchange
from .._errors import ProcessError, ShardingError
from .._layout import plan_of
from .._plan import match, ShardingPlan
from .._put import is_key
from .._tree import array_leaves, shown, some, Tree
from .._value import digest, header
from ._contents import PLAN, PLAN_FILE, STATE
from ._encode import encode, store_name
from ._files import local_path, PathLike, step_number, Whole
from ._library import library
from ._progress import Progress
from ._tensors import context, TENSORSTORE_ERRORS, text_of
from ._write import HostArray, merge, to_host, write_arrays, write_metadata


UNFINISHED = ".orbax-checkpoint-tmp"
"""What the name of a folder has in it until the checkpoint is complete; Orbax knows it too."""

_LONGEST_NAME = 60_000  # bytes; the store's keys end at 65,535
_PATIENCE = 1800.0  # seconds that a process waits for the slowest one


class Saving:
    """A save under way: `wait` until it is complete.

    The arrays have been copied already: they may be donated, changed or dropped. A save that is never waited for may
    be cut short by the end of the program; then it was none.
    """

    def __init__(self, path: pathlib.Path, folder: pathlib.Path, future: "Future[None]", nbytes: int):
        self.path = path
        self._folder, self._future, self._nbytes = folder, future, nbytes

    def wait(self, *, progress: bool | None = None) -> None:
        """Returns when the checkpoint is complete. All processes must call it.

        **Raises:**

        - `ShardingError`: the checkpoint could not be written; the cause is kept. Nothing is left at its path.
        """
        bar = Progress("saving", self._nbytes, progress)
        try:
            if bar.wanted:
                _watch(self._future, self._folder, bar)
            self._future.result()
        finally:
            bar.close()


def _watch(future: "Future[None]", folder: pathlib.Path, bar: Progress) -> None:
    """Draws how much is on disk until the save is over."""
    while not future.done():
        bar.to(_bytes_on_disk(folder))
        futures_wait([future], 0.1)
    bar.to(bar.total)


def _bytes_on_disk(folder: pathlib.Path) -> int:
    total = 0
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
    step: Whole | None = None,
    wait: bool = True,
    progress: bool | None = None,
) -> Saving:
    """Writes the array leaves of `tree` to a new checkpoint, and the plan beside them.

    Each process writes its own pieces; all must make the call. The checkpoint appears under its name when it is
    complete: a program killed at any moment leaves no half of one. Leaves that are no arrays are not saved; `restore`
    takes them from its `like`. A plain Orbax checkpoint: its `state` is a dictionary from paths to arrays. Every chunk
    has a checksum, which `restore` verifies.

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

    - `ShardingError`: there is something at `path` already; a leaf has no value; the files cannot be written. The
        cause is kept, and nothing is left at `path`.
    - `MismatchError`: `plan` is not of this tree.
    - `ProcessError`: the processes do not save the same arrays at the same path, or one does not within five minutes.
    """
    library("tensorstore")
    where = local_path(path)
    if step is not None:
        step = step_number(step)
        where = where / str(step)
    if os.path.lexists(where):
        raise ShardingError(f"there is something at {where} already: a checkpoint is never overwritten.")
    arrays, record = _contents(tree, plan)
    if step is not None:
        record["step"] = step
    if jax.process_count() > 1:
        facts = {"the path": str(where), "the plan": digest(record["plan"]), "the arrays": digest(sorted(arrays))}
        agree_to("checkpoint.save", facts, jax.devices())
    folder = _begin(where)
    host = to_host(arrays, copy=not wait)
    nbytes = sum(x.nbytes for x in arrays.values())
    shardings = {name: x.sharding if isinstance(x, jax.Array) else None for name, x in arrays.items()}
    # A thread that ends with its only task; nothing but that task can hold up the end of the program.
    pool = ThreadPoolExecutor(1, thread_name_prefix="eqshard_save")
    saving = Saving(where, folder, pool.submit(_write, where, folder, host, shardings, record), nbytes)
    pool.shutdown(wait=False)
    del host, arrays
    if wait:
        saving.wait(progress=progress)
    return saving


def _begin(where: pathlib.Path) -> pathlib.Path:
    """Makes the folder that is written to, of a name that no other writer has; the same in all processes."""
    told, cause = "", None
    if jax.process_index() == 0:
        folder = where.with_name(f"{where.name}{UNFINISHED}-{secrets.token_hex(4)}")
        try:
            where.parent.mkdir(parents=True, exist_ok=True)
            (folder / STATE).mkdir(parents=True)
            (folder / PLAN).mkdir()
            told = f"made {folder.name}"
        except (OSError, ValueError) as error:
            told, cause = _reason(error), error
    said = exchange_all(where, told)
    if not said[0].startswith("made "):
        raise _failed(where, {0: said[0]}) from cause
    return where.with_name(said[0].removeprefix("made "))


def _write(
    where: pathlib.Path, folder: pathlib.Path, host: list[HostArray], shardings: dict[str, Any], record: dict[str, Any]
) -> None:
    """Writes everything, and gives it its name. One process that fails makes all fail."""
    shared = context()
    _together(where, folder, lambda: write_arrays(folder / STATE, host, shared))
    host.clear()
    _together(where, folder, lambda: _complete(where, folder, shardings, record) if jax.process_index() == 0 else None)


def _complete(where: pathlib.Path, folder: pathlib.Path, shardings: dict[str, Any], record: dict[str, Any]) -> None:
    if shardings:
        merge(folder / STATE, context())
        write_metadata(folder / STATE, shardings)
    else:
        (folder / STATE).rmdir()
    (folder / PLAN / PLAN_FILE).write_text(json.dumps(record))
    now = time.time_ns()
    (folder / "_CHECKPOINT_METADATA").write_text(
        json.dumps({"item_handlers": {}, "init_timestamp_nsecs": now, "commit_timestamp_nsecs": now})
    )
    try:
        os.rename(folder, where)
    except OSError as error:
        if os.path.lexists(where):
            raise ShardingError(f"another save has written {where} meanwhile; that checkpoint is as it was.") from error
        raise


def _together(where: pathlib.Path, folder: pathlib.Path, act: Callable[[], None]) -> None:
    """Acts in all processes; where one fails, what was written is removed and all raise."""
    told, cause = "stopped", None
    try:
        act()
        told = ""
    except (*TENSORSTORE_ERRORS, MemoryError) as error:
        told, cause = _reason(error), error
    finally:
        if told and jax.process_count() == 1:
            shutil.rmtree(folder, ignore_errors=True)
    wrong = {i: text for i, text in exchange_all(where, told).items() if text}
    if wrong:
        if jax.process_index() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise _failed(where, wrong) from cause


def exchange_all(where: pathlib.Path, text: str) -> dict[int, str]:
    """What every process says of this save."""
    if jax.process_count() == 1:
        return {0: text}
    said = exchange(f"save/{digest(str(where))[:16]}", text, _PATIENCE)
    if len(said) < jax.process_count():
        missing = [str(i) for i in range(jax.process_count()) if i not in said]
        raise ProcessError(f"cannot save {where}: processes {some(missing, 20)} did not answer in {_PATIENCE:g} s.")
    return said


def _reason(error: BaseException) -> str:
    return text_of(error) or type(error).__name__


def _failed(where: pathlib.Path, wrong: dict[int, str]) -> ShardingError:
    number, text = next(iter(sorted(wrong.items())))
    process = f" in process {number}" if jax.process_count() > 1 else ""
    return ShardingError(f"cannot save the checkpoint {where}: {text.rstrip('.')}{process}. Nothing is left of it.")


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
    for path, _ in leaves:
        if len(store_name(path)) > _LONGEST_NAME:
            raise ShardingError(
                f"cannot save {shown(path)}: its path takes {len(store_name(path))} bytes, the store's names at most "
                f"{_LONGEST_NAME}. To fix this, shorten the keys or field names."
            )
    arrays = {store_name(path): _host_if_local(encode(x)) for path, x in leaves if 0 not in x.shape}
    stored = {path: x.dtype.name for path, x in leaves}  # as it is written: 64-bit numpy arrays are not narrowed
    plan = ShardingPlan(plan.mesh, [dataclasses.replace(leaf, dtype=stored[leaf.path]) for leaf in plan])
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
