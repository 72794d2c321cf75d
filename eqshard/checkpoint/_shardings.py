"""Trees of shardings: laid over arrays, and compared with them."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.tree_util as jtu
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from .._apply import apply
from .._errors import MismatchError, ShardingError
from .._mesh import MeshLike, MeshSpec
from .._narrow import narrow_leaves
from .._plan import ShardingPlan
from .._put import put_all
from .._spec import canonical, check
from .._tree import array_leaves, dtype_name, is_array, path_name, shown, some, Tree, type_text


def apply_shardings(arrays: Tree, shardings: Any, mesh: MeshLike | None = None) -> Tree:
    """Lays arrays out by a tree of shardings of the same structure, with one `jax.device_put`.

    ```python
    import eqshard, numpy as np
    from jax.sharding import PartitionSpec as P
    arrays = {"w": np.ones((8, 4), "float32"), "b": np.ones(4, "float32")}
    mesh = eqshard.MeshSpec(x=8)
    placed = eqshard.checkpoint.apply_shardings(arrays, {"w": P("x"), "b": None}, mesh)
    assert placed["w"].sharding.spec == P("x") and placed["b"].is_fully_replicated
    ```

    **Arguments:**

    - `arrays`: any tree; leaves that are no arrays pass through.
    - `shardings`: a plan; or a tree like `arrays`, or one value for all its arrays: a `jax.sharding.Sharding`, a
        PartitionSpec on `mesh`, a function of the array that gives one of these, or None for whole on every device of
        `mesh` (without a mesh: on the first device). None for all of it changes nothing.
    - `mesh`: what PartitionSpecs and None are on.

    **Raises:**

    - `MismatchError`: the trees differ, or a plan is of another tree; it names the leaf.
    - `ShardingError`: a layout does not fit its leaf, or needs a `mesh` that was not given.
    """
    if shardings is None:
        return arrays
    if isinstance(shardings, ShardingPlan):
        return apply(shardings, arrays)
    leaves, treedef = jtu.tree_flatten(arrays, is_leaf=_is_none)
    if _is_layout(shardings):
        layouts: list[Any] = [shardings] * len(leaves)
    else:
        same_structure(shardings, arrays).check("the tree of shardings", "the arrays")
        layouts = jtu.tree_leaves(shardings, is_leaf=_is_leaf)
    where = None if mesh is None else MeshSpec.of(mesh)
    paths = [path_name(path) for path, _ in jtu.tree_flatten_with_path(arrays, is_leaf=_is_none)[0]]
    put = [i for i, x in enumerate(leaves) if is_array(x)]
    targets = [_sharding(paths[i], leaves[i], layouts[i], where) for i in put]
    leaves = narrow_leaves(leaves, lambda: paths)
    for group, move in ((True, put_all), (False, jax.device_put)):
        some_of = [(i, t) for i, t in zip(put, targets) if isinstance(t, NamedSharding) is group]
        for (i, _), moved in zip(some_of, move([leaves[i] for i, _ in some_of], [t for _, t in some_of])):
            leaves[i] = moved
    return jtu.tree_unflatten(treedef, leaves)


def _sharding(path: str, x: Any, layout: Any, mesh: MeshSpec | None) -> Any:
    if isinstance(x, (Tracer, jax.ShapeDtypeStruct)):
        kind = "traced" if isinstance(x, Tracer) else "only a shape"
        raise ShardingError(f"{shown(path)} is {kind}: `eqshard.apply` lays out such leaves.")
    if callable(layout):
        layout = layout(x)
    if layout is None:
        layout = SingleDeviceSharding(jax.devices()[0]) if mesh is None else PartitionSpec()
    if isinstance(layout, PartitionSpec):
        if mesh is None:
            raise ShardingError(f"{shown(path)}: a PartitionSpec says nothing without a `mesh`; pass one.")
        check(layout, tuple(x.shape), mesh.shape, path, dtype_name(x))
        layout = NamedSharding(mesh.build(), layout)
    if not isinstance(layout, Sharding):
        raise MismatchError(
            f"{shown(path)}: expected a sharding, a PartitionSpec, a function or None, got a {type(layout).__name__}."
        )
    if isinstance(layout, NamedSharding):
        sizes = dict(layout.mesh.shape)
        check(layout.spec, tuple(x.shape), sizes, path, dtype_name(x))
        return NamedSharding(layout.mesh, canonical(layout.spec, sizes), memory_kind=layout.memory_kind)
    return layout


def _is_none(x: Any) -> bool:
    return x is None


def _is_layout(x: Any) -> bool:
    return isinstance(x, (Sharding, PartitionSpec)) or (callable(x) and jtu.all_leaves([x]))


def _is_leaf(x: Any) -> bool:
    return x is None or isinstance(x, (Sharding, PartitionSpec))


@dataclass(frozen=True)
class Comparison:
    """What `same_structure` found: true if nothing differs, and prints what does."""

    differences: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        return "the same structure" if self else "\n".join(self.differences)

    def check(self, first: str = "the first tree", second: str = "the second") -> None:
        """Raises a `MismatchError` that lists the differences, if there are any."""
        if self.differences:
            raise MismatchError(
                f"{first} and {second} differ.\n  " + some(self.differences, 20).replace(", `", "\n  `")
            )


def same_structure(a: Any, b: Any) -> Comparison:
    """Whether two trees have the same leaves in the same places; and if not, where they differ.

    None counts as a leaf. A plan has the structure, the shapes and the dtypes of the arrays that it is for.

    ```python
    import eqshard
    from jax.sharding import PartitionSpec as P
    found = eqshard.checkpoint.same_structure({"w": P("x"), "c": None}, {"w": 1, "b": 2})
    assert not found and "['b']" in str(found)
    ```

    **Arguments:**

    - `a`, `b`: trees of anything, or plans.

    **Returns:**

    A `Comparison`: true or false, with `.differences`.
    """
    if isinstance(a, ShardingPlan) or isinstance(b, ShardingPlan):
        return Comparison(tuple(_differences(_types(a), _types(b))))
    (left, left_def), (right, right_def) = (jtu.tree_flatten_with_path(x, is_leaf=_is_leaf) for x in (a, b))
    one, two = ({path_name(path): "" for path, _ in leaves} for leaves in (left, right))
    found = _differences(one, two)
    if not found and left_def != right_def:
        found = [_first_difference(a, b, "")]
    return Comparison(tuple(found))


def _types(x: Any) -> dict[str, str]:
    if isinstance(x, ShardingPlan):
        return {leaf.path: leaf.type for leaf in x}
    return {path: type_text(tuple(leaf.shape), dtype_name(leaf)) for path, leaf in array_leaves(x)}


def _differences(one: dict[str, str], two: dict[str, str]) -> list[str]:
    found = [f"{shown(path)} is only in the first" for path in one if path not in two]
    found += [f"{shown(path)} is only in the second" for path in two if path not in one]
    return found + [
        f"{shown(p)} is {t} in the first, {two[p]} in the second" for p, t in one.items() if two.get(p, t) != t
    ]


def _first_difference(a: Any, b: Any, path: str) -> str:
    """Where two trees with leaves of the same names part: another kind of node, or other static fields."""
    if type(a) is not type(b):
        return f"{shown(path)} is a {type(a).__name__} in the first, a {type(b).__name__} in the second"
    (left, right) = (_children(x) for x in (a, b))
    for (key, x), (_, y) in zip(left, right):
        if jtu.tree_structure(x, is_leaf=_is_leaf) != jtu.tree_structure(y, is_leaf=_is_leaf):
            return _first_difference(x, y, path + key)
    return f"{shown(path)}: a {type(a).__name__} with other static fields in the first than in the second"


def _children(x: Any) -> list[tuple[str, Any]]:
    top = [True]

    def below(node: Any) -> bool:
        first, top[0] = top[0], False
        return not first

    return [(path_name(path), leaf) for path, leaf in jtu.tree_flatten_with_path(x, is_leaf=below)[0]]
