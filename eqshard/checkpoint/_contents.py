"""What a checkpoint holds, found out without reading an array, whoever wrote it."""

import os
import pathlib
import re
from collections.abc import Mapping

from .._errors import FormatError, MismatchError, ShardingError
from .._plan import ShardingPlan
from .._tree import some
from .._value import Reader
from ._eformer_contents import eformer_contents, INDEX
from ._encode import kept_as, key_words, store_name
from ._files import check_links, denied, folders, is_file, local_path, PathLike, read_json, step_number, Whole
from ._orbax_contents import array_names, METADATA, orbax_contents
from ._safetensors_contents import is_safetensors, safetensors_contents
from ._stored import Contents, keys_of, StoredLeaf
from ._tensors import context, TensorSource


STATE = "state"
PLAN = "plan"
PLAN_FILE = "plan.json"
_ITEMS = (STATE, "item", "default")


def contents(path: PathLike, *, step: Whole | None = None, prefix: str | None = None) -> Contents:
    """What the checkpoint at `path` holds; of a folder of steps, the one asked for, or the latest."""
    root = local_path(path)
    if not _exists(root):
        raise ShardingError(f"no checkpoint at {root}: there is no such file or folder.")
    step = None if step is None else step_number(step)
    found = _at(root, step, prefix)
    return found if prefix is None or found.kind == "eformer" else found.below(prefix)


def _exists(path: pathlib.Path) -> bool:
    try:
        os.stat(path)
    except PermissionError as error:
        raise denied(path, error) from error
    except OSError:
        return False
    return True


def _at(root: pathlib.Path, step: int | None, prefix: str | None) -> Contents:
    numbers = step_numbers(root)
    if step is not None:
        if step not in numbers:
            listed = some(map(str, numbers), 10) or "none"
            raise ShardingError(f"no complete checkpoint of step {step} in {root}; there are: {listed}.")
        return _at(root / numbers[step], None, prefix)
    if os.path.lexists(root / PLAN / PLAN_FILE):
        return _eqshard_contents(root)
    if is_file(root / METADATA):
        return orbax_contents(root)
    if is_file(root / INDEX):
        return eformer_contents(root, prefix)
    if is_safetensors(root):
        return safetensors_contents(root)
    items = [name for name in folders(root) if is_file(root / name / METADATA)]
    known = [name for name in _ITEMS if name in items] or items
    if len(known) == 1 or (known and known[0] in _ITEMS):
        return orbax_contents(root / known[0])
    if items:
        raise ShardingError(f"{root} holds several checkpoints: {some(items)}. Add the one you want to the path.")
    if numbers:
        return _at(root / numbers[max(numbers)], None, prefix)
    raise FormatError(
        f"{root} is no checkpoint: it has none of `{PLAN}/{PLAN_FILE}` (eqshard), `{METADATA}` (Orbax), `{INDEX}` "
        "(eformer), `*.safetensors`, or folders named after steps. A save that was cut short leaves none."
    )


def step_numbers(root: pathlib.Path) -> dict[int, str]:
    """The complete steps in a folder: number to folder name, in order.

    A save is written beside, under another name, and renamed when it is complete.
    """
    found = {int(name): name for name in folders(root) if re.fullmatch(r"0|[1-9]\d{0,17}", name)}
    return {n: found[n] for n in sorted(found) if _is_complete(root / found[n])}


def _is_complete(folder: pathlib.Path) -> bool:
    if is_file(folder / METADATA) or is_file(folder / INDEX):
        return True
    return any(is_file(folder / name / METADATA) for name in folders(folder))


def _eqshard_contents(root: pathlib.Path) -> Contents:
    file, state = root / PLAN / PLAN_FILE, root / STATE
    check_links(root, root)
    read = Reader(read_json(file), "checkpoint", str(file))
    read.header()
    read.only("format", "version", "plan", "keys", "step")
    plan = ShardingPlan.from_dict(read.get("plan", Mapping))
    impls = Reader(read.get("keys", Mapping, {}), "checkpoint", f"{file}: keys")
    there: set[str] = set()
    ocdbt, driver = True, "zarr"
    if any(0 not in leaf.shape for leaf in plan):
        names, ocdbt, driver = array_names(state)
        there = {name for _, name in names}
    shared, leaves = context(), []
    for leaf in plan:
        impl = impls.get(leaf.path, str) if leaf.dtype.startswith("key<") else None
        if impl is not None and key_words(impl, str(file))[0] != leaf.dtype:
            raise FormatError(f"{file}: `{leaf.path}` is {leaf.dtype}, but of the implementation {impl!r}.")
        name = store_name(leaf.path)
        if 0 in leaf.shape:
            source = None
        elif name in there:
            source = TensorSource(state, name, ocdbt, driver, shared)
        else:
            raise FormatError(f"{file} lists `{leaf.path}`, which is not in {state}.")
        leaves.append(
            StoredLeaf(
                leaf.path, leaf.shape, leaf.dtype, leaf.spec, keys_of(leaf.path), impl, kept_as(leaf.dtype), source
            )
        )
    return Contents(root, "eqshard", tuple(leaves), plan)


def read_plan(path: PathLike, *, step: Whole | None = None) -> ShardingPlan:
    """The plan that `save` put beside the arrays: how they lay, on which mesh.

    ```python
    import eqshard, jax.numpy as jnp, tempfile
    tree = eqshard.replicate({"w": jnp.ones((8, 4))}, eqshard.MeshSpec(data=8))
    with tempfile.TemporaryDirectory() as folder:
        eqshard.checkpoint.save(f"{folder}/a", tree)
        assert eqshard.checkpoint.read_plan(f"{folder}/a") == eqshard.plan_of(tree)
    ```

    **Arguments:**

    - `path`: a checkpoint, or a folder of steps.
    - `step`: which step; by default the latest.

    **Raises:**

    - `MismatchError`: it is a checkpoint, but not one of eqshard's.
    - `ShardingError`: there is no checkpoint, or it cannot be read.
    """
    found = contents(path, step=step)
    if found.plan is None:
        raise MismatchError(
            f"{found.where} is a checkpoint of {found.kind}, which holds no plan: `plan_from_index` makes one."
        )
    return found.plan
