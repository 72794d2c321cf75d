"""A row of a plan: how one array leaf lies, and its JSON."""

import math
from dataclasses import dataclass, field
from typing import Any

import jax.tree_util as jtu
from jax.sharding import PartitionSpec

from ._errors import FormatError
from ._mesh import MeshSpec
from ._spec import canonical, check, Fit, fit_spec, GivenUp, spec_from_list, spec_to_list
from ._tree import dtype_name, is_dtype_name, itemsize, type_text
from ._value import Reader, short, whole_number


_MOST_DIMS = 64  # as many as numpy has


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
        return math.prod(self.shape) * itemsize(self.dtype)

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


def leaf_to_dict(leaf: LeafPlan) -> dict[str, Any]:
    """A row as JSON holds it."""
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


def leaf_from_dict(data: Any, number: int) -> LeafPlan:
    """The row that `leaf_to_dict` wrote."""
    read = Reader(data, "plan", f"plan leaf {number}")
    read.only("path", "shape", "dtype", "spec", "use", "memory_kind", "why", "given_up")
    shape = _shape(read)
    dtype = read.get("dtype", str)
    if not is_dtype_name(dtype):
        raise FormatError(f"{read.where}: unknown dtype {short(dtype)}.")
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


def _shape(read: Reader) -> tuple[int, ...]:
    dims = read.get("shape", list)
    if len(dims) > _MOST_DIMS:
        raise FormatError(f"{read.where}: {len(dims)} dimensions; an array has at most {_MOST_DIMS}.")
    shape = tuple(whole_number(n, f"{read.where}: shape") for n in dims)
    whole_number(math.prod(shape), f"{read.where}: number of elements")
    return shape


def _given_up(data: Any, where: str) -> GivenUp:
    read = Reader(data, "plan", f"{where}: given_up")
    read.only("dim", "size", "axes")
    dim, size = (whole_number(read.get(n, int), read.where) for n in ("dim", "size"))
    return GivenUp(dim, size, read.strings("axes"))
