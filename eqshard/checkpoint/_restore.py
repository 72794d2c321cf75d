"""Restoring: any checkpoint, into any tree of the same leaves, onto any mesh."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.tree_util as jtu
import numpy as np

from .._agree import agree_to
from .._apply import apply
from .._errors import MismatchError
from .._layout import plan_of
from .._plan import match, named_shardings, ShardingPlan
from .._tree import dtype_name, narrow_dtype, shown
from ._choose import check_values, choose, Names, Wanted, wanted_leaves
from ._contents import contents
from ._files import PathLike, Whole
from ._progress import Progress
from ._read import Job, local_bytes, read_arrays, settled
from ._stored import Contents, StoredLeaf


T = TypeVar("T")
Rename = Mapping[str, str] | Callable[[str], str]


def restore(
    path: PathLike,
    like: T,
    plan: ShardingPlan | None = None,
    *,
    step: Whole | None = None,
    only: Names | None = None,
    rename: Rename | None = None,
    missing: Names = (),
    extra: Names = (),
    cast: bool = True,
    prefix: str | None = None,
    progress: bool | None = None,
) -> T:
    """Reads a checkpoint into a tree like `like`, laid out as `plan` says.

    Whatever mesh it was saved from: each process reads what its devices need, straight into the layout. Reads
    checkpoints of eqshard, Orbax, eformer, and safetensors files. Leaves are known by their names, so that a tree
    saved from dictionaries can be restored into modules: `['layers'][0]['weight']` is `.layers[0].weight`.

    ```python
    import eqshard, jax, jax.numpy as jnp, tempfile
    from jax.sharding import PartitionSpec as P
    tree = {"w": jnp.arange(32.0).reshape(8, 4), "b": jnp.ones(4)}
    with tempfile.TemporaryDirectory() as folder:
        eqshard.checkpoint.save(f"{folder}/a", tree)
        like = jax.eval_shape(lambda: tree)
        plan = eqshard.replicated_plan(like, eqshard.MeshSpec(x=8)).at("w").set(P("x"))
        restored = eqshard.checkpoint.restore(f"{folder}/a", like, plan)
    assert restored["w"].sharding.spec == P("x") and (restored["w"] == tree["w"]).all()
    ```

    **Arguments:**

    - `path`: a checkpoint, or a folder of steps.
    - `like`: a tree of arrays, or of `jax.ShapeDtypeStruct`s as `eqx.filter_eval_shape` gives it. What is no array
        comes from here.
    - `plan`: made from `like`; by default, as the leaves of `like` lie.
    - `step`: which step; by default the latest.
    - `only`: paths of subtrees; the other leaves stay as `like` has them.
    - `rename`: path in the tree, or of a subtree, to its name in the checkpoint; or a function from the one to the
        other.
    - `missing`: paths, or of subtrees, that the checkpoint need not have: they keep the value of `like`.
    - `extra`: names, or of subtrees, in the checkpoint that may be left over.
    - `cast`: whether leaves of another dtype are converted on the way. Floats to floats and integers to integers that
        hold them, only.
    - `prefix`: the part of the checkpoint to read; in a checkpoint of eformer, the name it was saved under.
    - `progress`: whether to draw a bar; by default on a terminal, if it takes more than a second.

    **Raises:**

    - `MismatchError`: leaves are missing, left over, or of another shape or dtype: it lists them.
    - `FormatError`: the checkpoint is damaged.
    - `ProcessError`: the processes do not restore the same checkpoint, or one does not within five minutes.
    """
    stored = contents(path, step=step, prefix=prefix)
    return restore_contents(
        stored, like, plan, only=only, rename=rename, missing=missing, extra=extra, cast=cast, progress=progress
    )


def restore_contents(
    stored: Contents,
    like: Any,
    plan: ShardingPlan | None,
    *,
    only: Names | None,
    rename: Rename | None,
    missing: Names,
    extra: Names,
    cast: bool,
    progress: bool | None,
) -> Any:
    """`restore`, from what a checkpoint was found to hold."""
    plan = plan_of(like) if plan is None else plan
    leaves, treedef = jtu.tree_flatten(like)
    order = match(plan, leaves, treedef)
    shardings = named_shardings(plan, plan.build())
    wanted = wanted_leaves(like)
    names = {w.path: rename(w.path) for w in wanted} if callable(rename) else dict(rename or {})
    found = choose(stored, wanted, only=only, rename=names, missing=missing, extra=extra)
    _check_dtypes(wanted, found, cast)
    jobs, numbers = [], []
    for w in wanted:
        row = order[w.number]
        if w.number in found and row is not None:
            jobs.append(Job(w.path, found[w.number], settled(shardings[row]), dtype_name(w.leaf)))
            numbers.append(w.number)
    kept = [w for w in wanted if w.number not in found]
    if only is None:
        check_values(kept, f"not in the checkpoint {stored.where}")
    if jax.process_count() > 1:
        facts = {"the checkpoint": str(stored.where), "the plan": plan.fingerprint()}
        agree_to("checkpoint.restore", facts, plan.build().devices.flat)
    bar = Progress("restoring", sum(map(local_bytes, jobs)), progress)
    try:
        for number, array in zip(numbers, read_arrays(jobs, bar)):
            leaves[number] = array
    finally:
        bar.close()
    tree = jtu.tree_unflatten(treedef, leaves)
    return apply(plan, tree) if kept else tree  # what kept its value is laid out too


def _check_dtypes(wanted: list[Wanted], found: dict[int, StoredLeaf], cast: bool) -> None:
    wrong = []
    for w in wanted:
        if w.number not in found:
            continue
        have, want = found[w.number].dtype, dtype_name(w.leaf)
        held = have if have.startswith("key<") else narrow_dtype(np.dtype(have)) or have
        if want not in (have, held) and not (cast and _can_cast(have, want)):
            wrong.append(f"  {shown(w.path)} is {want}, stored as {have}")
    if wrong:
        way = (
            "Floats are cast to floats, and integers to integers; anything else is for you to do."
            if cast
            else ("Pass `cast=True` to convert them on the way.")
        )
        more = [f"  and {len(wrong) - 20} more"] if len(wrong) > 20 else []
        raise MismatchError("\n".join(["dtypes differ from the checkpoint's.", *wrong[:20], *more, f"  {way}"]))


def _can_cast(have: str, want: str) -> bool:
    if have.startswith("key<") or want.startswith("key<"):
        return False
    old, new = np.dtype(have), np.dtype(want)
    kinds = (jax.numpy.floating, jax.numpy.integer, jax.numpy.complexfloating)
    return any(jax.numpy.issubdtype(old, k) and jax.numpy.issubdtype(new, k) for k in kinds)
