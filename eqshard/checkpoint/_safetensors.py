"""Weights as safetensors files: one, or several with an index, as Hugging Face keeps them."""

import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from .._errors import ShardingError
from .._gather import gather
from .._plan import ShardingPlan
from .._put import is_key
from .._tree import shown, size_text, Tree
from ._choose import Names, renamed, Wanted, wanted_leaves
from ._files import local_path, PathLike
from ._library import library
from ._replace import failed, file_names, put_in_place, write_beside
from ._restore import Rename, restore_contents
from ._safetensors_contents import DTYPES, is_safetensors, safetensors_contents
from ._save import exchange_all
from ._stored import keys_of


T = TypeVar("T")

_WRITABLE = frozenset(DTYPES.values())


def load_safetensors(
    files: PathLike | Sequence[PathLike],
    like: T,
    plan: ShardingPlan | None = None,
    *,
    rename: Rename | None = None,
    only: Names | None = None,
    missing: Names = (),
    extra: Names = (),
    cast: bool = True,
    progress: bool | None = None,
) -> T:
    """Reads weights from safetensors files into a tree like `like`, laid out as `plan` says.

    Each process reads the slices that its devices need. Without `rename`, a leaf `.layers[0].weight` is looked for as
    `layers.0.weight`.

    ```python
    import equinox as eqx, eqshard, jax, tempfile
    from jax.sharding import PartitionSpec as P
    model = eqx.nn.Linear(16, 8, key=jax.random.key(0))
    plan = eqshard.replicated_plan(model, eqshard.MeshSpec(tp=8)).at("weight").set(P("tp"))
    with tempfile.TemporaryDirectory() as folder:
        eqshard.checkpoint.save_safetensors(f"{folder}/model.safetensors", model)
        loaded = eqshard.checkpoint.load_safetensors(folder, model, plan)
    assert (loaded.weight == model.weight).all() and loaded.weight.sharding.spec == P("tp")
    ```

    **Arguments:**

    - `files`: a file, several, a folder (with or without `model.safetensors.index.json`), or an index.
    - `like`, `plan`, `only`, `missing`, `extra`, `cast`, `progress`: as in `restore`.
    - `rename`: path in the tree, or of a subtree, to name in the files; or a function from the one to the other. Two
        leaves may have the same name, as tied weights do.

    **Raises:**

    - `MismatchError`: tensors are missing, left over, or of another shape or dtype: it lists them.
    - `FormatError`: a file is damaged, or the index does not fit the files.
    """
    if isinstance(files, (str, os.PathLike)):
        path = local_path(files)
        if not is_safetensors(path):
            raise ShardingError(f"no safetensors at {path}: expected a file, an index, or a folder that has some.")
        stored = safetensors_contents(path)
    else:
        paths = [local_path(file) for file in files]
        if not paths:
            raise ShardingError("`files` is empty.")
        stored = safetensors_contents(paths[0], paths)
    return restore_contents(
        stored, like, plan, only=only, rename=rename, missing=missing, extra=extra, cast=cast, progress=progress
    )


def save_safetensors(
    path: PathLike,
    tree: Tree,
    *,
    rename: Rename | None = None,
    max_bytes: int = 5 * 10**9,
    metadata: Mapping[str, str] | None = None,
) -> tuple[pathlib.Path, ...]:
    """Writes the array leaves of `tree` as safetensors, whole, by the first process.

    Into one file if `path` ends in `.safetensors`; else into a folder, in files of about `max_bytes` with an index.
    An older save there is replaced at once: a program killed at any moment leaves the old weights or the new ones. Its
    files are removed; new files that would have the same names are called `model-00001-of-00002.v2.safetensors`, as the
    index says. Arrays that lie in several processes are gathered, one after the other.

    ```python
    import eqshard, jax.numpy as jnp, tempfile
    with tempfile.TemporaryDirectory() as folder:
        files = eqshard.checkpoint.save_safetensors(folder, {"a": jnp.ones(64), "b": jnp.ones(64)}, max_bytes=300)
    assert [f.name for f in files] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    ```

    **Arguments:**

    - `rename`: as in `load_safetensors`; by default `.layers[0].weight` is called `layers.0.weight`.
    - `metadata`: texts for the header.

    **Returns:**

    The files.

    **Raises:**

    - `ShardingError`: two leaves have one name, or a dtype that safetensors lacks; the files cannot be written.
    """
    library("safetensors.numpy")
    target = local_path(path)
    named = _named(wanted_leaves(tree), rename)
    one = target.name.endswith(".safetensors")
    groups = [named] if one else _groups(named, max_bytes)
    folder = target.parent if one else target
    names = [target.name] if one else file_names(len(groups))
    problem: ShardingError | None = None
    written: list[pathlib.Path] = []
    try:
        for group in groups:
            arrays = {n: _whole(x) for n, x in group.items()}  # by all processes, also after a failure of the first
            if jax.process_index() == 0 and problem is None:
                try:
                    written.append(write_beside(folder, arrays, metadata))
                except (OSError, ValueError) as error:
                    problem = failed(target, error)
        if jax.process_index() == 0 and problem is None:
            try:
                names = put_in_place(
                    folder, written, names, [{n: x.nbytes for n, x in group.items()} for group in groups]
                )
            except (OSError, ValueError) as error:
                problem = failed(target, error)
    finally:
        for file in written:
            file.unlink(missing_ok=True)
    told, names = json.loads(exchange_all(target, json.dumps(["" if problem is None else str(problem), names]))[0])
    if told:
        raise problem or ShardingError(told)
    return tuple(folder / name for name in names)


def _named(wanted: Iterable[Wanted], rename: Rename | None) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for w in wanted:
        name = _name(w, rename)
        if isinstance(w.leaf, jax.ShapeDtypeStruct):
            raise ShardingError(f"cannot save {shown(w.path)}: it is only a shape.")
        if is_key(w.leaf) or w.leaf.dtype.name not in _WRITABLE:
            raise ShardingError(
                f"safetensors has no type for {shown(w.path)}, which is {w.leaf.dtype.name}: leave it out with "
                "`eqx.filter`, or cast it."
            )
        if name in named and named[name] is not w.leaf:
            raise ShardingError(
                f"two leaves would be called {name!r}; one is {shown(w.path)}. `rename` tells them apart."
            )
        named[name] = w.leaf
    return named


def _name(w: Wanted, rename: Rename | None) -> str:
    name = rename(w.path) if callable(rename) else renamed(w.path, rename or {})
    if name == w.path:
        return ".".join(w.keys)
    return name if callable(rename) or w.path in (rename or {}) else ".".join(keys_of(name))


def _groups(named: dict[str, Any], max_bytes: int) -> list[dict[str, Any]]:
    if max_bytes < 1:
        raise ShardingError(f"`max_bytes={max_bytes}`: a file needs room, such as {size_text(5 * 10**9)}.")
    groups: list[dict[str, Any]] = [{}]
    size = 0
    for name, x in named.items():
        if groups[-1] and size + x.nbytes > max_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = x
        size += x.nbytes
    return groups


def _whole(x: Any) -> np.ndarray:
    return np.ascontiguousarray(gather(x, to="all")).reshape(x.shape)
