"""The plan: a layout for every array leaf of a tree, as a value."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ._errors import FormatError, MeshError, MismatchError, ShardingError
from ._mesh import MeshLike, MeshSpec
from ._spec import _cut, canonical, check, Fit, fit_spec, GivenUp, spec_from_list, spec_to_list
from ._tree import did_you_mean, dtype_name, is_array, itemsize, path_name, shown, some, type_text
from ._value import digest, header, Reader, Value, whole_number


@jtu.register_static
@dataclass(frozen=True, slots=True)
class LeafPlan:
    """How one array leaf lies: a row of a plan.

    Equality and hash are of the layout, not of the words. (A plain dataclass, not an `eqx.Module`: a plan may hold a
    hundred thousand of them, and a module takes 40 times as long to make.)
    """

    path: str
    """The leaf's name in its tree: `.layers[0].weight`."""
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    """The layout at rest: how the leaf is stored between steps."""
    use: PartitionSpec
    """The layout in use: how the step wants it."""
    memory_kind: str | None = None
    why: str = field(default="", compare=False)
    given_up: tuple[GivenUp, ...] = field(default=(), compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        n = itemsize(self.dtype)
        for dim in self.shape:
            n *= dim
        return n

    @property
    def type(self) -> str:
        """Dtype and shape as one text: `float32[512,768]`."""
        return type_text(self.shape, self.dtype)


def leaf_plan(
    path: str,
    leaf: Any,
    spec: PartitionSpec,
    mesh: MeshSpec,
    *,
    use: PartitionSpec | None = None,
    memory_kind: str | None = None,
    why: str = "",
    strict: bool = True,
) -> LeafPlan:
    """A row for `leaf`, with a spec that fits: checked if `strict`, else fitted and what was lost recorded."""
    shape, dtype = tuple(leaf.shape), leaf.dtype if isinstance(leaf, LeafPlan) else dtype_name(leaf)

    def fitted(s: PartitionSpec) -> Fit:
        if strict:
            check(s, shape, mesh.shape, path, dtype)
            return Fit(canonical(s, mesh.shape), ())
        return fit_spec(s, shape, mesh, path=path)

    at_rest = fitted(spec)
    in_use = at_rest if use is None else fitted(use)
    lost = at_rest.given_up + tuple(g for g in in_use.given_up if g not in at_rest.given_up)
    return LeafPlan(path, shape, dtype, at_rest.spec, in_use.spec, memory_kind, why, lost)


class _Leaves(tuple[LeafPlan, ...]):
    """The rows, with what is dear to compute kept beside them: the hash, the index, the shardings."""

    by_path: dict[str, LeafPlan]
    memo: dict[Any, Any]

    def __new__(cls, leaves: Iterable[LeafPlan]) -> "_Leaves":
        self = super().__new__(cls, leaves)
        self.by_path = {leaf.path: leaf for leaf in self}
        self.memo = {}
        return self

    def __hash__(self) -> int:
        if "hash" not in self.memo:
            self.memo["hash"] = tuple.__hash__(self)
        return self.memo["hash"]

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, _Leaves) and hash(self) == hash(other) and tuple.__eq__(self, other)

    def __reduce__(self) -> Any:
        return _Leaves, (tuple(self),)


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

    mesh: MeshSpec = eqx.field(static=True, converter=MeshSpec.of)
    leaves: tuple[LeafPlan, ...] = eqx.field(static=True, converter=_Leaves)

    def __check_init__(self):
        if len(self._rows.by_path) != len(self.leaves):
            seen: set[str] = set()
            twice = next(leaf.path for leaf in self.leaves if leaf.path in seen or seen.add(leaf.path))
            raise ShardingError(f"a plan holds each leaf once; {shown(twice)} is there twice.")

    @property
    def _rows(self) -> _Leaves:
        assert isinstance(self.leaves, _Leaves)
        return self.leaves

    def _key(self) -> Any:
        return self.mesh, self.leaves

    def __repr__(self) -> str:
        return f"ShardingPlan({len(self.leaves)} leaves on {self.mesh})"

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
        """The leaves of a path, or that a regular expression finds, to `set`.

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
        if pattern in self._rows.by_path:
            return _At(self, frozenset([pattern]))
        try:
            paths = frozenset(path for path in self._rows.by_path if re.search(pattern, path))
        except re.error as error:
            raise ShardingError(f"`{pattern}` is neither a leaf's path nor a regular expression: {error}.") from None
        if not paths:
            self[pattern]  # raises, with what there is
        return _At(self, paths)

    def select(self, prefix: str) -> "ShardingPlan":
        """The plan of a subtree: `apply(plan.select(".encoder"), model.encoder)`.

        **Raises:**

        - `MismatchError`: the plan has no leaf below `prefix`.
        """
        found = [
            replace(leaf, path=leaf.path[len(prefix) :]) for leaf in self if _is_below(leaf.path, prefix)
        ]  # a key begins with '.' or '[': `.enc` is no prefix of `.encoder`
        if not found:
            raise MismatchError(f"no leaf below `{prefix}` in the plan; there are {some(self._rows.by_path)}.")
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

    def specs(self, like: PyTree[Any] = None) -> Any:
        """The layouts at rest: `{path: spec}`, or a tree like `like` with None where it has no array."""
        if like is None:
            return {leaf.path: leaf.spec for leaf in self}
        return self._as_tree(like, lambda i: self.leaves[i].spec)

    def shardings(self, like: PyTree[Any] = None) -> Any:
        """The layouts at rest as NamedShardings on the built mesh: `{path: sharding}`, or a tree like `like`.

        Such a tree is what `jax.jit`'s `in_shardings` and Orbax take.
        """
        built = named_shardings(self, self.build())
        if like is None:
            return {leaf.path: sharding for leaf, sharding in zip(self, built)}
        return self._as_tree(like, lambda i: built[i])

    def _as_tree(self, like: PyTree[Any], at: Any) -> PyTree[Any]:
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
        return digest(data)

    def to_dict(self) -> dict[str, Any]:
        return header("plan") | {"mesh": self.mesh.to_dict(), "leaves": [_leaf_to_dict(leaf) for leaf in self]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ShardingPlan":
        read = Reader(data, "plan")
        read.header()
        read.only("format", "version", "mesh", "leaves")
        mesh = MeshSpec.from_dict(read.get("mesh", Mapping))
        leaves = [_leaf_from_dict(leaf, i) for i, leaf in enumerate(read.get("leaves", list))]
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
        memory_kind: str | None = None,
        why: str = "set by hand",
        strict: bool = True,
    ) -> ShardingPlan:
        """A new plan with these leaves laid out so.

        **Arguments:**

        - `spec`: the layout at rest; default: as it is.
        - `use`: the layout in use; default: the layout at rest if `spec` is given, else as it is.
        - `memory_kind`: `"pinned_host"`, `"device"`, …; default: as it is.
        - `strict`: whether a dimension that does not divide is an error, or gives up axes and records it.
        """

        def changed(leaf: LeafPlan) -> LeafPlan:
            return leaf_plan(
                leaf.path,
                leaf,
                leaf.spec if spec is None else spec,
                self.plan.mesh,
                use=use if use is not None or spec is not None else leaf.use,
                memory_kind=leaf.memory_kind if memory_kind is None else memory_kind,
                why=why,
                strict=strict,
            )

        rows = tuple(changed(leaf) if leaf.path in self.paths else leaf for leaf in self.plan)
        return ShardingPlan(self.plan.mesh, rows)


def replicated_plan(tree: PyTree[Any], mesh: MeshLike) -> ShardingPlan:
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
        LeafPlan(path_name(path), tuple(leaf.shape), dtype_name(leaf), whole, whole, None, "replicated")
        for path, leaf in jtu.tree_flatten_with_path(tree)[0]
        if is_array(leaf)
    ]
    return ShardingPlan(spec, tuple(rows))


def match(plan: ShardingPlan, leaves: list[Any], treedef: Any) -> list[int | None]:
    """For each leaf of a tree the number of its row in the plan; None for leaves that are no arrays.

    **Raises:**

    - `MismatchError`: a leaf is missing, too many, or of another shape or dtype.
    """
    memo = plan._rows.memo
    known = memo.get("match")
    if known is None or known[0] != treedef or known[1] != [is_array(x) for x in leaves]:
        order = _match_paths(plan, leaves, treedef)
        known = memo["match"] = treedef, [i is not None for i in order], order
    rows = plan.leaves
    for x, i in zip(leaves, known[2]):
        if i is not None and (x.shape != rows[i].shape or x.dtype.name != rows[i].dtype):
            _check_types(plan, leaves, known[2])
            break
    return known[2]


def _match_paths(plan: ShardingPlan, leaves: list[Any], treedef: Any) -> list[int | None]:
    numbers = {leaf.path: i for i, leaf in enumerate(plan)}
    paths = [path_name(path) for path, _ in jtu.tree_flatten_with_path(jtu.tree_unflatten(treedef, leaves))[0]]
    found = {path for path, x in zip(paths, leaves) if is_array(x)}
    missing = [shown(path) for path in numbers if path not in found]
    extra = [shown(path) for path in paths if path in found and path not in numbers]
    if missing or extra:
        lines = ["the tree does not match its plan."]
        lines += [f"  in the plan, not in the tree: {some(missing)}"] if missing else []
        lines += [f"  in the tree, not in the plan: {some(extra)}"] if extra else []
        raise MismatchError("\n".join(lines) + "\n  Make a plan from this tree, or `plan.select` the part it is of.")
    return [numbers[path] if is_array(x) else None for path, x in zip(paths, leaves)]


def _check_types(plan: ShardingPlan, leaves: list[Any], order: list[int | None]) -> None:
    """Compares shapes and dtypes, inside `shard_map` those of the piece that the manual axes leave."""
    wrong = []
    for x, i in zip(leaves, order):
        if i is None:
            continue
        leaf = plan.leaves[i]
        if tuple(x.shape) != _local_shape(leaf, x, plan.mesh) or dtype_name(x) != leaf.dtype:
            wrong.append(f"{shown(leaf.path)} is {type_text(tuple(x.shape), dtype_name(x))}, planned as {leaf.type}")
    if wrong:
        raise MismatchError("the tree does not match its plan.\n  " + "\n  ".join(wrong[:5]) + _more(wrong))


def _more(wrong: list[str]) -> str:
    return f"\n  and {len(wrong) - 5} more" if len(wrong) > 5 else ""


def _local_shape(leaf: LeafPlan, x: Any, mesh: MeshSpec) -> tuple[int, ...]:
    manual = frozenset(jax.typeof(x).sharding.mesh.manual_axes) if isinstance(x, Tracer) else frozenset()
    if not manual:
        return leaf.shape
    return _cut(leaf.shape, leaf.spec, {n: s if n in manual else 1 for n, s in mesh.axes})


def named_shardings(plan: ShardingPlan, mesh: Mesh | AbstractMesh) -> list[NamedSharding]:
    """The sharding of each row on `mesh`, checked, made once for a plan and a mesh."""
    memo = plan._rows.memo
    key = "shardings", mesh
    if key not in memo:
        sizes, made = plan.mesh.shape, {}
        for leaf in plan:
            check(leaf.spec, leaf.shape, sizes, leaf.path, leaf.dtype)
            layout = leaf.spec, leaf.memory_kind
            if layout not in made:
                made[layout] = NamedSharding(mesh, canonical(leaf.spec, sizes), memory_kind=leaf.memory_kind)
        memo[key] = [made[leaf.spec, leaf.memory_kind] for leaf in plan]
    return memo[key]


def _is_below(path: str, prefix: str) -> bool:
    return path.startswith(prefix) and (len(path) == len(prefix) or not prefix or path[len(prefix)] in ".[")


def _leaf_to_dict(leaf: LeafPlan) -> dict[str, Any]:
    data: dict[str, Any] = {
        "path": leaf.path,
        "shape": list(leaf.shape),
        "dtype": leaf.dtype,
        "spec": spec_to_list(leaf.spec),
    }
    if leaf.use != leaf.spec:
        data["use"] = spec_to_list(leaf.use)
    if leaf.memory_kind is not None:
        data["memory_kind"] = leaf.memory_kind
    if leaf.why:
        data["why"] = leaf.why
    if leaf.given_up:
        data["given_up"] = [{"dim": g.dim, "size": g.size, "axes": list(g.axes)} for g in leaf.given_up]
    return data


def _leaf_from_dict(data: Any, number: int) -> LeafPlan:
    read = Reader(data, "plan", f"plan leaf {number}")
    read.only("path", "shape", "dtype", "spec", "use", "memory_kind", "why", "given_up")
    shape = tuple(whole_number(n, f"{read.where}: shape") for n in read.get("shape", list))
    dtype = read.get("dtype", str)
    try:
        itemsize(dtype)
    except TypeError:
        raise FormatError(f"{read.where}: unknown dtype {dtype[:60]!r}.") from None
    spec = spec_from_list(read.get("spec", list), read.where)
    return LeafPlan(
        path=read.get("path", str),
        shape=shape,
        dtype=dtype,
        spec=spec,
        use=spec_from_list(read.get("use", list), read.where) if "use" in data else spec,
        memory_kind=read.get("memory_kind", str, None),
        why=read.get("why", str, ""),
        given_up=tuple(_given_up(g, read.where) for g in read.get("given_up", list, [])),
    )


def _given_up(data: Any, where: str) -> GivenUp:
    read = Reader(data, "plan", f"{where}: given_up")
    read.only("dim", "size", "axes")
    dim, size = (whole_number(read.get(n, int), read.where) for n in ("dim", "size"))
    return GivenUp(dim, size, read.strings("axes"))
