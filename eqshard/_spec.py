"""The algebra of PartitionSpecs: canonical form, names, factors, what fits. Device-free; the one place for each."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.tree_util as jtu
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from ._errors import DuplicateAxisError, FormatError, IndivisibleError, RankError, ShardingError, UnknownAxisError
from ._mesh import MeshLike, MeshSpec
from ._tree import did_you_mean, itemsize, shown, size_text, type_text
from ._value import short


UNCONSTRAINED = PartitionSpec.UNCONSTRAINED


def entry_axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a spec, major first."""
    if entry is None or entry is UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def entries(spec: PartitionSpec) -> tuple[Any, ...]:
    """The entries of a spec; JAX refuses to iterate one that has unreduced axes."""
    return spec.partitions


def spec_text(spec: PartitionSpec) -> str:
    """A spec as people write it: `P('data', None, ('fsdp', 'tp'))`."""
    return f"P({', '.join('UNCONSTRAINED' if e is UNCONSTRAINED else repr(e) for e in entries(spec))})"


def canonical(spec: PartitionSpec, sizes: Mapping[str, int] | None = None) -> PartitionSpec:
    """The one way to write a layout: no trailing None, no axis of size 1, no tuple of one.

    Two spellings of one layout are different keys to `jax.jit`, and so two compilations. An axis that `sizes` lacks
    stays: it is for the checks to refuse.

    ```python
    import eqshard
    from jax.sharding import PartitionSpec as P
    assert eqshard.canonical(P(("x",), "one", None), {"x": 2, "one": 1}) == P("x")
    ```
    """
    parts: list[Any] = []
    for entry in entries(spec):
        if entry is UNCONSTRAINED:
            parts.append(entry)
            continue
        axes = tuple(a for a in entry_axes(entry) if sizes is None or sizes.get(a, 0) != 1)
        parts.append(None if not axes else axes[0] if len(axes) == 1 else axes)
    while parts and parts[-1] is None:
        parts.pop()
    if spec.unreduced or spec.reduced:
        return PartitionSpec(*parts, unreduced=spec.unreduced, reduced=spec.reduced)
    return PartitionSpec(*parts)


def axis_names(x: Any) -> tuple[str, ...]:
    """The mesh axes that a spec, a sharding, a plan, or a tree of these uses, each once, in order of appearance.

    ```python
    import eqshard
    from jax.sharding import PartitionSpec as P
    assert eqshard.axis_names({"w": P(("fsdp", "dp"), "tp"), "b": P("tp")}) == ("tp", "fsdp", "dp")
    ```
    """
    names: dict[str, None] = {}
    specs = [leaf.spec for leaf in x] if hasattr(x, "leaves") else jtu.tree_leaves(x)
    for spec in specs:
        spec = spec.spec if isinstance(spec, NamedSharding) else spec
        if not isinstance(spec, PartitionSpec):
            raise TypeError(f"expected PartitionSpecs, NamedShardings or a plan, got a {type(spec).__name__}.")
        for entry in entries(spec):
            names.update(dict.fromkeys(entry_axes(entry)))
    return tuple(names)


def shard_factor(spec: PartitionSpec, mesh: MeshLike) -> int:
    """Into how many different pieces `spec` cuts an array.

    ```python
    import eqshard
    from jax.sharding import PartitionSpec as P
    assert eqshard.shard_factor(P(("fsdp", "tp")), eqshard.MeshSpec(fsdp=2, tp=4)) == 8
    ```
    """
    sizes = MeshSpec.of(mesh).shape
    _check_names(spec, sizes, "")
    return math.prod(sizes[a] for entry in entries(spec) for a in entry_axes(entry))


def shard_shape(shape: Iterable[int], spec: PartitionSpec, mesh: MeshLike) -> tuple[int, ...]:
    """The shape of the piece that each device holds.

    ```python
    import eqshard
    from jax.sharding import PartitionSpec as P
    assert eqshard.shard_shape((8, 6), P("x"), eqshard.MeshSpec(x=4)) == (2, 6)
    ```

    **Raises:**

    - `ShardingError`: `spec` does not fit `shape`.
    """
    shape, sizes = tuple(shape), MeshSpec.of(mesh).shape
    check(spec, shape, sizes)
    return cut(shape, spec, sizes)


def cut(shape: tuple[int, ...], spec: PartitionSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """`shard_shape`, for a spec that was checked."""
    split = tuple(math.prod(sizes[a] for a in entry_axes(entry)) for entry in entries(spec)[: len(shape)])
    return tuple(dim // n for dim, n in zip(shape, split)) + shape[len(split) :]


class Misfit(NamedTuple):
    """A dimension that does not divide: `size % factor != 0`."""

    dim: int
    size: int
    axes: tuple[str, ...]
    factor: int


def misfits(shape: tuple[int, ...], spec: PartitionSpec, sizes: Mapping[str, int], path: str = "") -> list[Misfit]:
    """Lists the dimensions of `shape` that `spec` cannot split evenly.

    Device-free, so safe at trace time and for shapes too large to allocate.

    **Raises:**

    - `ShardingError`: `spec` is too long, names an axis twice, or one the mesh lacks: typos are never corrected.
    """
    _check_names(spec, sizes, path)
    if len(canonical(spec)) > len(shape):
        raise RankError(
            f"cannot lay {spec_text(spec)} over {shown(path)}: {len(spec)} entries for {len(shape)} dimensions."
        )
    found = []
    for dim, entry in enumerate(entries(spec)[: len(shape)]):
        axes = entry_axes(entry)
        factor = math.prod(sizes[a] for a in axes)
        if shape[dim] % factor:
            found.append(Misfit(dim, shape[dim], axes, factor))
    return found


def _check_names(spec: PartitionSpec, sizes: Mapping[str, int], path: str) -> None:
    if spec.unreduced or spec.reduced:
        raise ShardingError(f"{spec} for {shown(path)}: a layout at rest has no unreduced or reduced axes.")
    seen: dict[str, int] = {}
    for dim, entry in enumerate(entries(spec)):
        for axis in entry_axes(entry):
            if axis not in sizes:
                raise UnknownAxisError(
                    f"{spec_text(spec)} for {shown(path)} names the mesh axis {axis!r}; "
                    f"the mesh has {', '.join(map(repr, sizes))}." + did_you_mean(axis, sizes)
                )
            if axis in seen:
                where = f"dims {seen[axis]} and {dim}" if seen[axis] != dim else f"dim {dim}"
                raise DuplicateAxisError(
                    f"{spec_text(spec)} for {shown(path)} uses the mesh axis {axis!r} twice, in {where}."
                )
            seen[axis] = dim


def check(
    spec: PartitionSpec, shape: tuple[int, ...], sizes: Mapping[str, int], path: str = "", dtype: str | None = None
) -> None:
    """Raises unless every device can hold an equal piece; says what, where, the arithmetic and the ways out."""
    found = misfits(shape, spec, sizes, path)
    if not found:
        return
    what = f" {type_text(shape, dtype)}" if dtype else f" {list(shape)}"
    lines = [f"cannot lay {spec_text(spec)} over {shown(path)}{what}."]
    for m in found:
        axes = f"axis {m.axes[0]!r}" if len(m.axes) == 1 else "axes " + " x ".join(f"{a!r} {sizes[a]}" for a in m.axes)
        lines.append(f"  dim {m.dim}: {m.size} % {m.factor} (mesh {axes}) = {m.size % m.factor}")
    lines.append("  Ways out: " + "; ".join(_ways_out(found, spec, shape, sizes, dtype)) + ".")
    raise IndivisibleError("\n".join(lines))


def _ways_out(
    found: list[Misfit], spec: PartitionSpec, shape: tuple[int, ...], sizes: Mapping[str, int], dtype: str | None
) -> list[str]:
    ways = []
    used = {dim for dim, entry in enumerate(entries(spec)) if entry_axes(entry)}
    first = found[0]
    for dim, n in enumerate(shape):
        if dim not in used and n and n % first.factor == 0:
            ways.append(f"shard dim {dim} instead ({n} = {first.factor} x {n // first.factor})")
            break
    ways += [f"pad dim {m.dim} to {-(-m.size // m.factor) * m.factor}" for m in found]
    fit = _fit(spec, shape, sizes).spec
    give_up = f"strict=False to make it {spec_text(fit)}"
    if dtype:
        whole = math.prod(shape) * itemsize(dtype)
        ideal = whole / math.prod(sizes[a] for e in entries(spec) for a in entry_axes(e))
        real = math.prod(cut(shape, fit, sizes)) * itemsize(dtype)
        give_up += f" (+{size_text(real - ideal)} per device)"
    return [*ways, give_up]


@dataclass(frozen=True)
class GivenUp:
    """Axes that a spec asked for on a dimension and that did not divide it."""

    dim: int
    size: int
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"dim {self.dim} ({self.size}) does not divide over {', '.join(self.axes)}"


class Fit(NamedTuple):
    """A spec that fits, and what was given up to make it so."""

    spec: PartitionSpec
    given_up: tuple[GivenUp, ...]


def fit_spec(spec: PartitionSpec, shape: Iterable[int], mesh: MeshLike, *, path: str = "") -> Fit:
    """The nearest layout that divides: on each dimension the longest prefix of its axes that fits.

    ```python
    import eqshard
    from jax.sharding import PartitionSpec as P
    mesh = eqshard.MeshSpec(dp=2, tp=4)
    spec, given_up = eqshard.fit_spec(P(("dp", "tp"), None), (6, 8), mesh)
    assert spec == P("dp") and given_up[0].axes == ("tp",)
    ```

    **Raises:**

    - `ShardingError`: `spec` is too long, names an axis twice, or one the mesh lacks: typos are never corrected.
    """
    shape, sizes = tuple(shape), MeshSpec.of(mesh).shape
    misfits(shape, spec, sizes, path)
    return _fit(spec, shape, sizes)


def _fit(spec: PartitionSpec, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Fit:
    parts: list[Any] = []
    given_up: list[GivenUp] = []
    for dim, entry in enumerate(entries(spec)[: len(shape)]):
        axes = entry_axes(entry)
        kept = len(axes)
        while shape[dim] % math.prod(sizes[a] for a in axes[:kept]):
            kept -= 1
        lost = tuple(a for a in axes[kept:] if sizes[a] != 1)
        if lost:
            given_up.append(GivenUp(dim, shape[dim], lost))
        parts.append(entry if kept == len(axes) else axes[:kept])
    fitted = PartitionSpec(*parts, unreduced=spec.unreduced, reduced=spec.reduced)
    return Fit(canonical(fitted, sizes), tuple(given_up))


def fit_sharding(
    spec: PartitionSpec, shape: Iterable[int], mesh: MeshLike, *, memory_kind: str | None = None
) -> NamedSharding:
    """`fit_spec` as a `jax.sharding.NamedSharding`, over an abstract mesh if `mesh` is one.

    ```python
    import eqshard
    from jax.sharding import PartitionSpec as P
    sharding = eqshard.fit_sharding(P("dp", "tp"), (6, 7), eqshard.MeshSpec(dp=2, tp=4))
    assert sharding.spec == P("dp")
    ```
    """
    where = mesh if isinstance(mesh, AbstractMesh) else MeshSpec.of(mesh).build()
    return NamedSharding(where, fit_spec(spec, shape, mesh).spec, memory_kind=memory_kind)


def spec_to_list(spec: PartitionSpec) -> list[Any]:
    """A spec as JSON holds it."""
    if spec.unreduced or spec.reduced:
        raise FormatError(f"{spec}: a layout at rest has no unreduced or reduced axes.")
    return [
        {"unconstrained": True} if e is UNCONSTRAINED else e if e is None or isinstance(e, str) else list(e)
        for e in entries(spec)
    ]


def spec_from_list(data: Any, where: str) -> PartitionSpec:
    """The spec that `spec_to_list` wrote."""
    if not isinstance(data, list):
        raise FormatError(f"{where}: a spec is a list, got {short(data)}.")
    parts: list[Any] = []
    for e in data:
        if isinstance(e, dict) and e == {"unconstrained": True}:
            parts.append(UNCONSTRAINED)
        elif isinstance(e, list) and e and all(isinstance(a, str) and a for a in e):
            parts.append(tuple(e))
        elif e is None or (isinstance(e, str) and e):
            parts.append(e)
        else:
            raise FormatError(f"{where}: {short(e)} is no entry of a spec: expected null, a name or a list of names.")
    return PartitionSpec(*parts)
