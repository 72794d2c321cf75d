"""The checkpoints of a run: a folder of steps, which are kept how long, and how the run goes on."""

import os
import pathlib
import re
import shutil
from typing import Any, TypeVar

import equinox as eqx
import jax

from .._errors import ShardingError
from .._plan import ShardingPlan
from .._tree import Tree
from .._value import Value
from ._choose import Names
from ._contents import step_numbers
from ._files import count_from_one, folders, integer, local_path, PathLike, step_number, Whole
from ._restore import Rename, restore
from ._save import save, Saving, UNFINISHED


T = TypeVar("T")

_REMOVED = ".removed"
_LEFTOVER = re.compile(rf"\d+({re.escape(UNFINISHED)}.*|{re.escape(_REMOVED)})")


def _as_int(value: Any) -> Any:
    """Integers of any kind as int; anything else as it is, to be refused by name."""
    number = integer(value)
    return value if number is None else number


class Checkpoints(Value):
    """The checkpoints of one run, and which of them are kept.

    ```python
    import eqshard, jax.numpy as jnp, tempfile
    state = {"w": jnp.zeros(8)}
    with tempfile.TemporaryDirectory() as folder:
        writer = eqshard.checkpoint.Checkpoints(folder, every=2, keep=2).open()
        start, state = writer.resume(state)
        for step in range(start, 10):
            state = {"w": state["w"] + 1}
            writer.save(step + 1, state)
        writer.close()
        assert eqshard.checkpoint.Checkpoints(folder).steps() == (8, 10)
    ```
    """

    path: str = eqx.field(static=True, converter=lambda path: str(local_path(path)))
    """The folder: each step is a folder in it."""
    every: int = eqx.field(static=True, default=1, converter=_as_int)
    """`Writer.save` saves the steps that this divides, and passes over the others."""
    keep: int | None = eqx.field(static=True, default=None, converter=_as_int)
    """How many of the latest steps are kept; None: all."""
    keep_every: int | None = eqx.field(static=True, default=None, converter=_as_int)
    """Steps that this divides are kept however old."""

    def __check_init__(self) -> None:
        for name in ("every", "keep", "keep_every"):
            value = getattr(self, name)
            if value is not None or name == "every":
                count_from_one(name, value)

    def _key(self) -> Any:
        return self.path, self.every, self.keep, self.keep_every

    def steps(self) -> tuple[int, ...]:
        """The complete steps there are, in order. A save that was cut short is not among them."""
        return tuple(step_numbers(pathlib.Path(self.path)))

    def latest(self) -> int | None:
        """The last complete step; None if there is none."""
        return max(self.steps(), default=None)

    def outdated(self) -> tuple[int, ...]:
        """The steps that are not to be kept."""
        steps = self.steps()
        old = () if self.keep is None else steps[: -self.keep]
        return tuple(s for s in old if self.keep_every is None or s % self.keep_every)

    def open(self) -> "Writer":
        """A writer, which saves while the run goes on. What an interrupted save left behind is removed.

        One run writes to a folder at a time. All processes must open, save and close.
        """
        if jax.process_index() == 0:
            for name in folders(pathlib.Path(self.path)):
                if _LEFTOVER.fullmatch(name):
                    shutil.rmtree(pathlib.Path(self.path) / name, ignore_errors=True)
        return Writer(self)


class Writer:
    """Saves the steps of a run in the background, one at a time, and removes what is outdated."""

    def __init__(self, checkpoints: Checkpoints):
        self.checkpoints = checkpoints
        self._saving: Saving | None = None

    def resume(
        self,
        like: T,
        plan: ShardingPlan | None = None,
        *,
        rename: Rename | None = None,
        missing: Names = (),
        extra: Names = (),
        progress: bool | None = None,
    ) -> tuple[int, T]:
        """The step to go on from, and the state that was saved there; `(0, like)` where there is none.

        **Arguments:**

        - `like`: the state of a new run: it is what a first run starts from.
        - `plan`, `rename`, `missing`, `extra`, `progress`: as in `restore`.
        """
        step = self.checkpoints.latest()
        if step is None:
            return 0, like
        state = restore(
            self.checkpoints.path,
            like,
            plan,
            step=step,
            rename=rename,
            missing=missing,
            extra=extra,
            progress=progress,
        )
        return step, state

    def save(self, step: Whole, tree: Tree, *, plan: ShardingPlan | None = None, force: bool = False) -> bool:
        """Saves a step in the background, if it is one of every `every`; returns as soon as the arrays are copied.

        Waits for the save before, and raises what went wrong with it.

        **Arguments:**

        - `plan`: as in `eqshard.checkpoint.save`.
        - `force`: whether to save a step that `every` passes over.

        **Returns:**

        Whether the step is being saved.
        """
        step = step_number(step)
        if step % self.checkpoints.every and not force:
            return False
        self.wait()
        self._saving = save(self.checkpoints.path, tree, plan=plan, step=step, wait=False)
        return True

    def wait(self, *, progress: bool | None = None) -> None:
        """Returns when the last save is complete, and what is outdated is removed."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait(progress=progress)
            if jax.process_index() == 0:
                for step in self.checkpoints.outdated():
                    remove(self.checkpoints.path, step)

    def close(self, *, progress: bool | None = None) -> None:
        """Waits for the last save. To be called at the end of a run."""
        self.wait(progress=progress)


def remove(path: PathLike, step: Whole) -> None:
    """Removes a step: first its name, at once, so that half of it is never taken for a checkpoint.

    ```python
    import eqshard, jax.numpy as jnp, tempfile
    with tempfile.TemporaryDirectory() as folder:
        for step in (1, 2):
            eqshard.checkpoint.save(folder, jnp.ones(3), step=step)
        eqshard.checkpoint.remove(folder, 1)
        assert eqshard.checkpoint.Checkpoints(folder).steps() == (2,)
    ```

    **Raises:**

    - `ShardingError`: there is no such step, or it may not be removed.
    """
    root, step = local_path(path), step_number(step)
    if step not in step_numbers(root):
        raise ShardingError(f"no complete checkpoint of step {step} in {root}.")
    gone = root / f"{step}{_REMOVED}"
    shutil.rmtree(gone, ignore_errors=True)
    try:
        os.rename(root / str(step), gone)
    except OSError as error:
        raise ShardingError(f"cannot remove step {step} in {root}: {error.strerror}.") from error
    shutil.rmtree(gone, ignore_errors=True)
