"""The plan: a layout for every array leaf of a tree, as a value."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any

import equinox as eqx
import jax.tree_util as jtu
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ._errors import FormatError, MeshError, MismatchError, ShardingError
from ._layer import check_stacked, layer_row, stacked_row, used_row
from ._leaf import leaf_from_dict, leaf_plan as leaf_plan, leaf_to_dict, LeafPlan as LeafPlan
from ._match import match_rows, row_shardings, Rows
from ._mesh import MeshLike, MeshSpec
from ._spec import canonical
from ._tree import array_leaves, did_you_mean, dtype_name, shown, some, Tree
from ._value import digest, header, Reader, Value


# A path as `path_name` writes it, with a bracket in it: `.layers[0]`, `['a']['b']`.
_PATH = re.compile(r"""(?=.*\[)(\.\w+|\[\d+\]|\['[^']*'\]|\["[^"]*"\])+""")


class ShardingPlan(Value):
    """For each array leaf of a tree: its layout at rest and in use, where it is kept, and why.

    A value: immutable, hashable, without array leaves, so it can be an argument of a jitted function, closed over, or
    a dictionary's key. Two plans of one layout are equal, whoever made them. Leaves are known by their path, so a plan
    needs no tree, and JSON holds all of it.

    ```python
    import eqshard, jax.numpy as jnp
    from jax.sharding import PartitionSpec as P
    mesh = eqshard.MeshSpec(data=2, tp=4)
    plan = eqshard.replicated_plan({"w": jnp.ones((8, 16)), "b": jnp.ones(16)}, mesh)
    plan = plan.at("w").set(P(None, "tp"))
    assert plan["['w']"].spec == P(None, "tp")
    assert eqshard.ShardingPlan.from_json(plan.to_json()) == plan
    ```
    """

    mesh: MeshSpec = eqx.field(static=True)
    leaves: tuple[LeafPlan, ...] = eqx.field(static=True)

    def __init__(self, mesh: MeshLike, leaves: Iterable[LeafPlan]):
        """**Arguments:**

        - `mesh`: where the leaves lie.
        - `leaves`: a row for each; specs are made canonical, and checked when the plan is used.

        **Raises:**

        - `ShardingError`: a leaf is there twice.
        """
        self.mesh = MeshSpec.of(mesh)
        self.leaves = Rows(_canonical_rows(leaves, self.mesh))

    def __check_init__(self) -> None:
        if len(self._rows.by_path) != len(self.leaves):
            seen: set[str] = set()
            twice = next(leaf.path for leaf in self.leaves if leaf.path in seen or seen.add(leaf.path))
            raise ShardingError(f"a plan holds each leaf once; {shown(twice)} is there twice.")

    @property
    def _rows(self) -> Rows:
        assert isinstance(self.leaves, Rows)
        return self.leaves

    def _key(self) -> Any:
        return self.mesh, self.leaves

    def __repr__(self) -> str:
        return f"ShardingPlan({len(self.leaves)} leaves on {self.mesh})"

    def _repr_html_(self) -> str:
        from ._report._notebook import plan_html  # noqa: PLC0415  reports read this module: above, it would be a cycle

        return plan_html(self)

    def __len__(self) -> int:
        return len(self.leaves)

    def __iter__(self) -> Iterator[LeafPlan]:
        return iter(self.leaves)

    def __contains__(self, path: object) -> bool:
        return path in self._rows.by_path

    def __getitem__(self, path: str) -> LeafPlan:
        """The row of the leaf at `path`."""
        try:
            return self._rows.by_path[path]
        except KeyError:
            raise MismatchError(
                f"no leaf {shown(path)} in the plan; there are {some(self._rows.by_path)}."
                + did_you_mean(path, self._rows.by_path)
            ) from None

    def at(self, pattern: str) -> "_At":
        """The leaves at or below a path, or that a regular expression finds, to `set`.

        ```python
        import eqshard, jax
        from jax.sharding import PartitionSpec as P
        tree = [{"w": jax.ShapeDtypeStruct((8, 8), "float32")} for _ in range(3)]
        plan = eqshard.replicated_plan(tree, eqshard.MeshSpec(tp=4))
        plan = plan.at("[0]['w']").set(P("tp")).at(r"\\[[12]\\]").set(P(None, "tp"))
        assert list(plan.specs().values()) == [P("tp"), P(None, "tp"), P(None, "tp")]
        ```

        **Raises:**

        - `MismatchError`: no leaf matches.
        """
        paths = [path for path in self._rows.by_path if is_below(path, pattern)]
        if not paths and not _PATH.fullmatch(pattern):  # as a regular expression, `['w']` finds any path with a quote
            try:
                paths = [path for path in self._rows.by_path if re.search(pattern, path)]
            except re.error as error:
                raise ShardingError(f"`{pattern}` is neither a path nor a regular expression: {error}.") from None
        if not paths:
            self[pattern]  # raises, with what there is
        return _At(self, frozenset(paths))

    def select(self, prefix: str) -> "ShardingPlan":
        """The plan of a subtree: `apply(plan.select(".encoder"), model.encoder)`.

        ```python
        import eqshard, jax
        tree = {"a": {"w": jax.ShapeDtypeStruct((8,), "int32")}, "b": jax.ShapeDtypeStruct((8,), "int32")}
        plan = eqshard.replicated_plan(tree, eqshard.MeshSpec(x=4))
        assert plan.select("['a']") == eqshard.replicated_plan(tree["a"], plan.mesh)
        ```

        **Raises:**

        - `MismatchError`: the plan has no leaf below `prefix`.
        """
        found = [replace(leaf, path=leaf.path[len(prefix) :]) for leaf in self if is_below(leaf.path, prefix)]
        if not found:
            raise MismatchError(
                f"no leaf at or below {shown(prefix)} in the plan; there are {some(self._rows.by_path)}."
            )
        return ShardingPlan(self.mesh, tuple(found))

    def merge(self, other: "ShardingPlan", *, at: str = "") -> "ShardingPlan":
        """Both plans as one; where both have a leaf, `other`'s row is taken.

        ```python
        import eqshard, jax
        tree = {"a": jax.ShapeDtypeStruct((8,), "int32"), "b": jax.ShapeDtypeStruct((8,), "int32")}
        plan = eqshard.replicated_plan(tree, eqshard.MeshSpec(x=4))
        assert plan.merge(plan.select("['a']"), at="['a']") == plan
        ```

        **Arguments:**

        - `at`: a prefix for `other`'s paths: the inverse of `select`.
        """
        if self.mesh != other.mesh:
            raise MeshError(f"cannot merge plans of different meshes: {self.mesh} and {other.mesh}.")
        rows = dict(self._rows.by_path)
        for leaf in other:
            rows[at + leaf.path] = replace(leaf, path=at + leaf.path)
        return ShardingPlan(self.mesh, tuple(rows.values()))

    def layer(self) -> "ShardingPlan":
        """The plan of one layer of layers that are stacked along their first dimension, for `use` in a scan's body.

        ```python
        import eqshard, jax
        from jax.sharding import PartitionSpec as P
        layers = {"w": jax.ShapeDtypeStruct((12, 64, 64), "float32")}
        plan = eqshard.replicated_plan(layers, eqshard.MeshSpec(tp=4)).at("w").set(P(None, "tp"))
        assert plan.layer()["['w']"].spec == P("tp") and plan.layer().stack(12) == plan
        ```

        **Raises:**

        - `ShardingError`: a leaf is cut along the first dimension, or has none, or holds another number of layers.
        """
        check_stacked(self)
        return self._viewed("layer", layer_row)

    def stack(self, n: int) -> "ShardingPlan":
        """The plan of `n` such trees, stacked along a new first dimension that stays whole: `layer` undoes it."""
        return self._viewed(("stack", n), lambda leaf: stacked_row(leaf, n))

    def in_use(self) -> "ShardingPlan":
        """The plan whose layouts at rest are those in use: `apply(plan.in_use(), model)` gathers once for many uses."""
        return self._viewed("in_use", used_row)

    def _viewed(self, name: Any, view: Callable[[LeafPlan], LeafPlan]) -> "ShardingPlan":
        memo, key = self._rows.memo, ("view", name, self.mesh)
        if key not in memo:
            memo[key] = ShardingPlan(self.mesh, tuple(map(view, self)))
        return memo[key]

    def specs(self, like: Tree = None) -> Any:
        """The layouts at rest: `{path: spec}`, or a tree like `like` with None where it has no array."""
        if like is None:
            return {leaf.path: leaf.spec for leaf in self}
        return self._as_tree(like, lambda i: self.leaves[i].spec)

    def shardings(self, like: Tree = None) -> Any:
        """The layouts at rest as NamedShardings on the built mesh: `{path: sharding}`, or a tree like `like`.

        Such a tree is what `jax.jit`'s `in_shardings` and Orbax take.
        """
        built = named_shardings(self, self.build())
        if like is None:
            return {leaf.path: sharding for leaf, sharding in zip(self, built)}
        return self._as_tree(like, lambda i: built[i])

    def _as_tree(self, like: Tree, at: Any) -> Tree:
        leaves, treedef = jtu.tree_flatten(like)
        return jtu.tree_unflatten(treedef, [None if i is None else at(i) for i in match(self, leaves, treedef)])

    def build(self) -> Mesh:
        """The jax Mesh that this plan places on."""
        memo = self._rows.memo
        key = "mesh", self.mesh
        if key not in memo:
            memo[key] = self.mesh.build()
        return memo[key]

    def fingerprint(self) -> str:
        """A hash of the layout that is the same in every process, machine and Python."""
        data = self.to_dict()
        for leaf in data["leaves"]:
            leaf.pop("why", None)
            leaf.pop("given_up", None)
        data["leaves"].sort(key=lambda leaf: leaf["path"])
        return digest(data)

    def to_dict(self) -> dict[str, Any]:
        return header("plan") | {"mesh": self.mesh.to_dict(), "leaves": [leaf_to_dict(leaf) for leaf in self]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ShardingPlan":
        read = Reader(data, "plan")
        read.header()
        read.only("format", "version", "mesh", "leaves")
        mesh = MeshSpec.from_dict(read.get("mesh", Mapping))
        leaves = [leaf_from_dict(leaf, i) for i, leaf in enumerate(read.get("leaves", list))]
        try:
            return cls(mesh, tuple(leaves))
        except FormatError:
            raise
        except ShardingError as error:
            raise FormatError(f"plan: {error}") from None


@dataclass(frozen=True)
class _At:
    """Some leaves of a plan, about to be changed."""

    plan: ShardingPlan
    paths: frozenset[str]

    def set(
        self,
        spec: PartitionSpec | None = None,
        *,
        use: PartitionSpec | None = None,
        memory_kind: str | EllipsisType | None = ...,
        why: str = "set by hand",
        strict: bool = True,
    ) -> ShardingPlan:
        """A new plan with these leaves laid out so.

        **Arguments:**

        - `spec`: the layout at rest; default: as it is.
        - `use`: the layout in use; default: the layout at rest if `spec` is given, else as it is.
        - `memory_kind`: `"pinned_host"`, `"device"`, …, or None for where the device keeps arrays; default: as it is.
        - `strict`: whether a dimension that does not divide is an error, or gives up axes and records it.
        """

        def changed(leaf: LeafPlan) -> LeafPlan:
            return leaf_plan(
                leaf.path,
                leaf,
                leaf.spec if spec is None else spec,
                self.plan.mesh,
                use=use if use is not None or spec is not None else leaf.use,
                memory_kind=leaf.memory_kind if isinstance(memory_kind, EllipsisType) else memory_kind,
                why=why,
                strict=strict,
            )

        rows = tuple(changed(leaf) if leaf.path in self.paths else leaf for leaf in self.plan)
        return ShardingPlan(self.plan.mesh, rows)


def replicated_plan(tree: Tree, mesh: MeshLike) -> ShardingPlan:
    """The plan that keeps every array leaf of `tree` whole on every device.

    ```python
    import eqshard, equinox as eqx, jax
    model = eqx.nn.MLP(4, 4, 8, 2, key=jax.random.key(0))
    plan = eqshard.replicated_plan(model, eqshard.MeshSpec(data=8))
    assert len(plan) == 6
    ```
    """
    spec = MeshSpec.of(mesh)
    whole = PartitionSpec()
    rows = [
        LeafPlan(path, tuple(leaf.shape), dtype_name(leaf), whole, whole, None, "replicated")
        for path, leaf in array_leaves(tree)
    ]
    return ShardingPlan(spec, tuple(rows))


def match(plan: ShardingPlan, leaves: list[Any], treedef: Any) -> list[int | None]:
    """For each leaf of a tree the number of its row in `plan`, as `match_rows`."""
    return match_rows(plan._rows, plan.mesh, leaves, treedef)


def named_shardings(plan: ShardingPlan, mesh: Mesh | AbstractMesh) -> list[NamedSharding]:
    """The sharding of each row of `plan` on `mesh`, as `row_shardings`."""
    return row_shardings(plan._rows, plan.mesh.shape, mesh)


def is_below(path: str, prefix: str) -> bool:
    """Whether a path is `prefix` or goes on from it; `.encoder` does not go on from `.enc`."""
    return path.startswith(prefix) and (len(path) == len(prefix) or not prefix or path[len(prefix)] in ".[")


def _canonical_rows(leaves: Iterable[LeafPlan], mesh: MeshSpec) -> Iterator[LeafPlan]:
    sizes, known = mesh.shape, {}
    for leaf in leaves:
        for spec in (leaf.spec, leaf.use):
            if spec not in known:
                known[spec] = canonical(spec, sizes)
        spec, use = known[leaf.spec], known[leaf.use]
        yield leaf if (spec, use) == (leaf.spec, leaf.use) else replace(leaf, spec=spec, use=use)
