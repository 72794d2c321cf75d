"""Plans from shapes alone."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.tree_util as jtu
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ._errors import DuplicateAxisError, ShardingError
from ._mesh import MeshLike, MeshSpec
from ._plan import LeafPlan, ShardingPlan
from ._spec import canonical, entry_axes, spec_text
from ._tree import dtype_name, is_array, itemsize, path_name, shown, size_text


MIN_BYTES = 2**16
"""Leaves smaller than this many bytes stay whole: a collective's latency costs more than they do."""

Unit = tuple[str, ...]
"""Mesh axes that are used as one."""


def auto_spec(
    x: Any,
    mesh: MeshLike,
    *,
    names: Sequence[str | tuple[str, ...]] | None = None,
    min_bytes: int = MIN_BYTES,
    reverse: bool = False,
) -> PartitionSpec:
    """A layout for one array from its shape: every axis that divides is used, on the largest dimensions first.

    More than one axis goes on a dimension where its pieces would still be the largest, or where nothing else divides.

    ```python
    import eqshard, jax
    from jax.sharding import PartitionSpec as P
    mesh = eqshard.MeshSpec(dp=2, tp=4)
    assert eqshard.auto_spec(jax.ShapeDtypeStruct((1024, 4096), "float32"), mesh) == P("dp", "tp")
    assert eqshard.auto_spec(jax.ShapeDtypeStruct((7, 4096), "float32"), mesh) == P(None, ("tp", "dp"))
    ```

    **Arguments:**

    - `x`: an array, tracer, or `jax.ShapeDtypeStruct`.
    - `names`: the mesh axes to use, the one for the largest dimension first; a tuple is used as one axis. Default: all,
        the largest first.
    - `min_bytes`: arrays smaller than this stay whole.
    - `reverse`: the smallest dimensions first.

    **Raises:**

    - `UnknownAxisError`, `DuplicateAxisError`: `names` are no axes of the mesh, or one is there twice.
    """
    described = MeshSpec.of(mesh)
    return _chooser(described, units_of(described, names), min_bytes, reverse)(tuple(x.shape), dtype_name(x))[0]


def auto_sharding(
    x: Any,
    mesh: MeshLike,
    *,
    names: Sequence[str | tuple[str, ...]] | None = None,
    min_bytes: int = MIN_BYTES,
    reverse: bool = False,
) -> NamedSharding:
    """`auto_spec` as a `jax.sharding.NamedSharding`.

    ```python
    import eqshard, functools, jax.numpy as jnp
    sharding_for = functools.partial(eqshard.auto_sharding, mesh=eqshard.MeshSpec(data=8))
    assert sharding_for(jnp.ones((256, 256))).shard_shape((256, 256)) == (32, 256)
    ```
    """
    where = mesh if isinstance(mesh, AbstractMesh) else MeshSpec.of(mesh).build()
    return NamedSharding(where, auto_spec(x, mesh, names=names, min_bytes=min_bytes, reverse=reverse))


def auto_plan(
    tree: PyTree[Any],
    mesh: MeshLike,
    *,
    names: Sequence[str | tuple[str, ...]] | None = None,
    min_bytes: int = MIN_BYTES,
    reverse: bool = False,
) -> ShardingPlan:
    """A plan for a tree from the shapes of its leaves: `auto_spec` for each. PRNG keys stay whole.

    ```python
    import equinox as eqx, eqshard, jax
    shape = eqx.filter_eval_shape(eqx.nn.MLP, 256, 256, 1024, 2, key=jax.random.key(0))
    plan = eqshard.auto_plan(shape, eqshard.MeshSpec(fsdp=4, tp=2))
    print(plan[".layers[0].weight"].spec)
    ```

    **Arguments:** as of `auto_spec`.
    """
    described = MeshSpec.of(mesh)
    choose = _chooser(described, units_of(described, names), min_bytes, reverse)

    def row(path: str, shape: tuple[int, ...], dtype: str) -> LeafPlan:
        spec, why = choose(shape, dtype)
        return LeafPlan(path, shape, dtype, spec, spec, None, why)

    return plan_leaves(tree, described, row)


def fsdp_plan(
    tree: PyTree[Any],
    mesh: MeshLike,
    axis: str | Sequence[str] = "fsdp",
    *,
    min_bytes: int = MIN_BYTES,
    base: ShardingPlan | None = None,
) -> ShardingPlan:
    """Fully sharded data parallel: each large leaf stored in pieces over `axis`, and gathered to be used.

    ```python
    import equinox as eqx, eqshard, jax
    from jax.sharding import PartitionSpec as P
    shape = eqx.filter_eval_shape(eqx.nn.Linear, 512, 1024, key=jax.random.key(0))
    leaf = eqshard.fsdp_plan(shape, eqshard.MeshSpec(fsdp=8))[".weight"]
    assert leaf.spec == P("fsdp") and leaf.use == P()
    ```

    **Arguments:**

    - `axis`: the axis, or axes that act as one, to store over.
    - `min_bytes`: smaller leaves stay whole.
    - `base`: a plan to go on from (tensor parallel, say): `axis` comes on top of its layouts, and the layout in use is
        that of `base`.
    """
    described = MeshSpec.of(mesh)
    (unit,) = units_of(described, [axis if isinstance(axis, str) else tuple(axis)]) or [()]
    if base is not None and base.mesh != described:
        raise ShardingError(f"`base` is a plan for {base.mesh}, not for {described}.")

    def row(path: str, shape: tuple[int, ...], dtype: str) -> LeafPlan:
        use = PartitionSpec() if base is None else base[path].use
        kind = None if base is None else base[path].memory_kind
        taken = {a for e in use for a in entry_axes(e)}
        if taken & set(unit):
            raise DuplicateAxisError(f"`base` lays {shown(path)} over {spec_text(use)}, which uses {unit} already.")
        spec, why = _store(shape, dtype, use, unit, described, min_bytes)
        return LeafPlan(path, shape, dtype, spec, use, kind, why)

    return plan_leaves(tree, described, row)


def _store(
    shape: tuple[int, ...], dtype: str, use: PartitionSpec, unit: Unit, mesh: MeshSpec, min_bytes: int
) -> tuple[PartitionSpec, str]:
    """`use` with `unit` on top, on the dimension whose pieces are the largest."""
    sizes = mesh.shape
    whole = _stays_whole(shape, dtype, min_bytes)
    if whole or not unit:
        return use, whole or "the axis has size 1"
    entries = [entry_axes(e) for e in use] + [()] * (len(shape) - len(use))
    pieces = [n // math.prod(sizes[a] for a in e) for n, e in zip(shape, entries)]
    for count in range(len(unit), 0, -1):  # the longest prefix of axes that divides
        factor = math.prod(sizes[a] for a in unit[:count])
        fits = [d for d, n in enumerate(pieces) if n % factor == 0]
        if fits:
            dim = max(fits, key=lambda d: (not entries[d], pieces[d], -d))
            entries[dim] = (*entries[dim], *unit[:count])
            left = f"; {', '.join(unit[count:])} left out: divides no dim" if count < len(unit) else ""
            return canonical(PartitionSpec(*entries), sizes), f"stored over {', '.join(unit[:count])}" + left
    return use, f"no dim divides over {', '.join(unit)}"


def plan_leaves(
    tree: PyTree[Any], mesh: MeshSpec, row: Callable[[str, tuple[int, ...], str], LeafPlan]
) -> ShardingPlan:
    """A plan with a row for each array leaf of `tree`."""
    mesh.size()  # an open axis cannot be planned for
    rows = [
        row(path_name(path), tuple(leaf.shape), dtype_name(leaf))
        for path, leaf in jtu.tree_flatten_with_path(tree)[0]
        if is_array(leaf)
    ]
    return ShardingPlan(mesh, tuple(rows))


def units_of(mesh: MeshSpec, names: Sequence[str | tuple[str, ...]] | None) -> list[Unit]:
    """The axes to use, without those of size 1; by default all of the mesh, the largest first."""
    if names is None:
        units = [(n,) for n, _ in sorted(mesh.axes, key=lambda a: -a[1])]
    else:
        units = [(u,) if isinstance(u, str) else tuple(u) for u in names]
    flat = [a for u in units for a in u]
    for axis in flat:
        mesh.size(axis)
        if flat.count(axis) > 1:
            raise DuplicateAxisError(f"`names` uses the mesh axis {axis!r} twice: {list(names or ())}.")
    return [u for u in (tuple(a for a in u if mesh.size(a) > 1) for u in units) if u]


def _stays_whole(shape: tuple[int, ...], dtype: str, min_bytes: int) -> str:
    """Why a leaf should not be sharded, if so."""
    nbytes = math.prod(shape) * itemsize(dtype)
    if dtype.startswith("key<"):
        return "a PRNG key: whole on every device"
    if not shape or nbytes == 0:
        return "nothing to shard"
    return f"small: {size_text(nbytes)} < {size_text(min_bytes)}" if nbytes < min_bytes else ""


def _chooser(
    mesh: MeshSpec, units: list[Unit], min_bytes: int, reverse: bool
) -> Callable[[tuple[int, ...], str], tuple[PartitionSpec, str]]:
    """The spec and the reason for a shape and dtype; each kind of leaf is worked out once."""
    known: dict[tuple[tuple[int, ...], str], tuple[PartitionSpec, str]] = {}

    def choose(shape: tuple[int, ...], dtype: str) -> tuple[PartitionSpec, str]:
        key = shape, dtype
        if key not in known:
            whole = _stays_whole(shape, dtype, min_bytes)
            known[key] = (PartitionSpec(), whole) if whole else spread(shape, units, mesh, reverse)
        return known[key]

    return choose


def spread(
    shape: tuple[int, ...], units: list[Unit], mesh: MeshSpec, reverse: bool = False
) -> tuple[PartitionSpec, str]:
    """Spreads axes over dimensions: greedily, and if that leaves an axis unused, by trying all ways."""
    factors = [mesh.size(u) for u in units]
    places = _greedy(shape, factors, reverse)
    if None in places and any(n % f == 0 for n in shape for f in factors):
        places = _best(shape, factors, places)
    entries: list[list[str]] = [[] for _ in shape]
    for unit, dim in zip(units, places):
        if dim is not None:
            entries[dim] += unit
    left = [a for unit, dim in zip(units, places) if dim is None for a in unit]
    used = [a for unit, dim in zip(units, places) if dim is not None for a in unit]
    why = f"largest dims over {', '.join(used)}" if used else "no dim divides"
    if left and used:
        why += f"; {', '.join(left)} left out: divides no dim"
    return canonical(PartitionSpec(*map(tuple, entries)), mesh.shape), why


def _greedy(shape: tuple[int, ...], factors: list[int], reverse: bool) -> list[int | None]:
    pieces, used = list(shape), [False] * len(shape)
    places: list[int | None] = []
    for factor in factors:
        fits = [d for d, n in enumerate(pieces) if n and n % factor == 0]
        if not fits:
            places.append(None)
            continue
        sign = -1 if reverse else 1
        dim = max(fits, key=lambda d: (sign * pieces[d], not used[d], -d))
        pieces[dim] //= factor
        used[dim] = True
        places.append(dim)
    return places


def _best(shape: tuple[int, ...], factors: list[int], greedy: list[int | None]) -> list[int | None]:
    """The assignment with the most pieces; of equal ones the one nearest to the greedy."""

    def score(places: tuple[int | None, ...]) -> tuple[int, int] | None:
        split = [1] * len(shape)
        for factor, dim in zip(factors, places):
            if dim is not None:
                split[dim] *= factor
        if any(n % s for n, s in zip(shape, split)):
            return None
        return math.prod(split), sum(a == b for a, b in zip(places, greedy))

    dims = [[None, *(d for d, n in enumerate(shape) if n and n % f == 0)] for f in factors]
    scored = ((score(p), p) for p in itertools.product(*dims))
    return list(max(((s, p) for s, p in scored if s is not None), key=lambda sp: sp[0])[1])
