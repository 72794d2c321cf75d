"""The layout of a checkpoint, as a plan, without reading an array."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from .._errors import MeshError, ShardingError
from .._leaf import leaf_plan, LeafPlan
from .._mesh import MeshLike, MeshSpec
from .._plan import ShardingPlan
from .._tree import shown
from ._contents import contents
from ._encode import key_words
from ._files import PathLike, Whole
from ._stored import Contents, StoredLeaf


Default = str | Sharding | PartitionSpec | Callable[..., Any] | None


def plan_from_index(
    path: PathLike,
    mesh: MeshLike,
    *,
    prefix: str | None = None,
    default: Default = None,
    step: Whole | None = None,
    strict: bool = True,
) -> ShardingPlan:
    """A plan for what a checkpoint holds, from its index alone: no array is read.

    Understands what `restore` does: checkpoints of eqshard, Orbax and eformer, and safetensors files.

    ```python
    import eqshard, jax.numpy as jnp, tempfile
    from jax.sharding import PartitionSpec as P
    with tempfile.TemporaryDirectory() as folder:
        eqshard.checkpoint.save(f"{folder}/a", {"embed": jnp.ones((16, 8)), "scale": jnp.ones(8)})
        where = f"{folder}/a", eqshard.MeshSpec(x=8)
        by_leaf = eqshard.checkpoint.plan_from_index(*where, default=lambda leaf: P("x") if leaf.shape[0] > 8 else P())
        whole = eqshard.checkpoint.plan_from_index(*where)
    assert by_leaf["['embed']"].spec == P("x") and whole["['embed']"].spec == P()
    ```

    **Arguments:**

    - `path`: a checkpoint, a folder of steps, or a safetensors file.
    - `mesh`: the mesh to lay out on.
    - `prefix`: the part of the checkpoint to plan, which is taken off the paths; in a checkpoint of eformer, the name
        it was saved under.
    - `default`: how the leaves lie. A PartitionSpec or a `jax.sharding.NamedSharding`, for all; a function of a
        `StoredLeaf` (`.path`, `.shape`, `.dtype`, `.spec`) that gives one of these, or None; a function of a tree and a
        mesh that makes a plan, as `eqshard.auto_plan`; `"saved"` for the layout that each leaf was saved from, where it
        is known; or None. None is whole on every device.
    - `step`: which step; by default the latest.
    - `strict`: whether a dimension that does not divide is an error, or gives up axes and records it.

    **Returns:**

    A plan whose paths are those of the checkpoint.

    **Raises:**

    - `FormatError`: there is no index, or it cannot be read.
    - `MismatchError`: nothing lies below `prefix`.
    - `ShardingError`: a spec does not fit its leaf.
    """
    stored, spec = contents(path, step=step, prefix=prefix), MeshSpec.of(mesh)
    if isinstance(default, str):
        if default != "saved":
            raise ShardingError(f"`default={default!r}`: the only text it may be is 'saved'.")
        return _rows(stored, spec, lambda leaf: leaf.spec, "saved so", strict)
    if default is None or isinstance(default, (PartitionSpec, Sharding)):
        return _rows(stored, spec, lambda leaf: default, "the default", strict)
    if _takes_tree_and_mesh(default):
        return default(stored_tree(stored), mesh)
    return _rows(stored, spec, default, "by the function of its leaf", strict)


def _rows(
    stored: Contents, mesh: MeshSpec, layout: Callable[[StoredLeaf], Any], why: str, strict: bool
) -> ShardingPlan:
    rows: list[LeafPlan] = []
    for leaf in stored.leaves:
        given = layout(leaf)
        spec, kind = as_spec(given, mesh, leaf.path)
        said = why if given is not None else "replicated"
        rows.append(leaf_plan(leaf.path, _struct(leaf), spec, mesh, memory_kind=kind, why=said, strict=strict))
    return ShardingPlan(mesh, tuple(rows))


def as_spec(layout: Any, mesh: MeshSpec, path: str) -> tuple[PartitionSpec, str | None]:
    """The spec and the memory kind of a PartitionSpec, a sharding, or None."""
    if layout is None:
        return PartitionSpec(), None
    if isinstance(layout, PartitionSpec):
        return layout, None
    if isinstance(layout, NamedSharding):
        if dict(layout.mesh.shape) != mesh.shape:
            raise MeshError(f"{shown(path)}: the sharding is of a mesh {dict(layout.mesh.shape)}, not of {mesh}.")
        return layout.spec, layout.memory_kind
    if isinstance(layout, Sharding) and layout.is_fully_replicated:
        return PartitionSpec(), None
    raise ShardingError(
        f"{shown(path)}: a {type(layout).__name__} says no layout on a mesh; expected a PartitionSpec, a "
        "`jax.sharding.NamedSharding`, or None."
    )


def _takes_tree_and_mesh(fn: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return False
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in places and p.default is p.empty for p in parameters) == 2


class _PathKey(str):
    """A key that is a whole path, so that leaves of a flat tree are called what the checkpoint calls them."""


class StoredTree(tuple[Any, ...]):
    """Shapes under the names that a checkpoint has for them: a tree that planners can read."""

    names: tuple[str, ...]

    def __new__(cls, leaves: Any, names: tuple[str, ...]) -> "StoredTree":
        self = super().__new__(cls, leaves)
        self.names = names
        return self


jtu.register_pytree_with_keys(
    StoredTree,
    lambda tree: ([(_PathKey(name), leaf) for name, leaf in zip(tree.names, tree)], tree.names),
    lambda names, leaves: StoredTree(leaves, names),
)


def stored_tree(stored: Contents) -> StoredTree:
    """What a checkpoint holds, as a tree of `jax.ShapeDtypeStruct`s."""
    return StoredTree(map(_struct, stored.leaves), tuple(leaf.path for leaf in stored.leaves))


def _struct(leaf: StoredLeaf) -> jax.ShapeDtypeStruct:
    if leaf.key_impl is not None:
        key_words(leaf.key_impl, leaf.path)
        dtype: Any = jax.eval_shape(lambda: jax.random.key(0, impl=leaf.key_impl)).dtype
    else:
        dtype = jnp.dtype(leaf.dtype)
    return jax.ShapeDtypeStruct(leaf.shape, dtype)
