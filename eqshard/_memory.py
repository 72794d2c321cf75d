"""Plans that fit a memory budget with as little sharding as can be."""

import math
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from ._auto import auto_plan, plan_leaves
from ._budget import Kind, least_cuts
from ._errors import ShardingError
from ._mesh import MeshLike, MeshSpec
from ._plan import LeafPlan, ShardingPlan
from ._spread import Names, Places, reachable, spec_of, Units, units_of
from ._tree import divisible_shape, itemsize, shown, size_text, Tree, type_text


class BudgetError(ShardingError):
    """No layout of the tree fits the memory that was allowed."""


def memory_plan(
    tree: Tree,
    mesh: MeshLike,
    max_bytes: int | float | None,
    *,
    names: Names | None = None,
) -> ShardingPlan:
    """The least sharding with which the whole tree fits in `max_bytes` on each device.

    Least means least to communicate: a leaf of `n` bytes cut in `k` costs `n (k - 1) / k` bytes for each device to
    gather. Of sums within 2 % of the least, the one that cuts the fewest leaves is taken.

    ```python
    import eqshard, jax
    from jax.sharding import PartitionSpec as P
    tree = {"a": jax.ShapeDtypeStruct((1024, 1024), "float32"), "b": jax.ShapeDtypeStruct((1024,), "float32")}
    plan = eqshard.memory_plan(tree, eqshard.MeshSpec(dp=2, tp=4), max_bytes=3 * 2**20)
    assert plan["['a']"].spec == P("dp") and plan["['b']"].spec == P()
    ```

    **Arguments:**

    - `max_bytes`: what the tree may take on each device; None for no limit, which gives `auto_plan`.
    - `names`: the mesh axes to use; a tuple is used as one axis.

    **Raises:**

    - `BudgetError`: nothing fits; with the least bytes that can be reached and the leaves that stand in the way.
    """
    described = MeshSpec.of(mesh)
    if max_bytes is None:
        return auto_plan(tree, mesh, names=names)
    if math.isnan(max_bytes):
        raise ShardingError("`max_bytes` is not a number.")
    whole = plan_leaves(tree, described, _whole)
    groups = _groups(whole, units_of(described, names))
    least = sum(g.cuts[-1].nbytes * len(g.paths) for g in groups)
    if least > max_bytes:
        raise BudgetError(_too_large(groups, least, max_bytes, described))
    cut = _choose(groups, max_bytes)
    limit = size_text(max_bytes)

    def row(leaf: LeafPlan) -> LeafPlan:
        spec, why = PartitionSpec(), f"whole: fits {limit}"
        if leaf.path in cut:
            spec, why = cut[leaf.path].spec, f"{cut[leaf.path].factor}-way to fit {limit}"
        return LeafPlan(leaf.path, leaf.shape, leaf.dtype, spec, spec, None, why)

    return ShardingPlan(described, map(row, whole))


def _whole(path: str, shape: tuple[int, ...], dtype: str) -> LeafPlan:
    return LeafPlan(path, shape, dtype, PartitionSpec(), PartitionSpec())


class _Cut(NamedTuple):
    factor: int
    nbytes: int
    spec: PartitionSpec


class _Group(NamedTuple):
    """Leaves of one shape and dtype, and the ways to cut them, from whole to the finest."""

    type: str
    paths: list[str]
    cuts: list[_Cut]


def _groups(plan: ShardingPlan, units: Units) -> list[_Group]:
    by_type: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for leaf in plan:
        by_type.setdefault((leaf.shape, leaf.dtype), []).append(leaf.path)
    specs: dict[Places, PartitionSpec] = {}
    return [
        _Group(type_text(shape, dtype), paths, _cuts(shape, dtype, units, specs))
        for (shape, dtype), paths in by_type.items()
    ]


def _cuts(shape: tuple[int, ...], dtype: str, units: Units, specs: dict[Places, PartitionSpec]) -> list[_Cut]:
    """For each number of pieces the way with the fewest axes, on the largest dimensions."""
    nbytes = math.prod(shape) * itemsize(dtype)
    if not nbytes or dtype.startswith("key<"):
        return [_Cut(1, nbytes, PartitionSpec())]
    best: dict[int, tuple[Any, Places]] = {}
    shape = divisible_shape(shape, dtype)
    elements = math.prod(shape)
    for pieces, way in reachable(shape, units.factors, lambda i, dim: dim is not None).items():
        factor = elements // math.prod(pieces)
        rank = way.cost, max(pieces, default=1), pieces
        if factor not in best or rank < best[factor][0]:
            best[factor] = rank, way.places
    cuts = []
    for factor in sorted(best):
        places = best[factor][1]
        if places not in specs:
            specs[places] = spec_of(places, units)
        cuts.append(_Cut(factor, nbytes // factor, specs[places]))
    return cuts


def _choose(groups: list[_Group], max_bytes: int | float) -> dict[str, _Cut]:
    """The leaves to cut, and how."""
    need = sum(g.cuts[0].nbytes * len(g.paths) for g in groups) - max_bytes
    if need <= 0:
        return {}
    kinds = [Kind(len(g.paths), tuple(g.cuts[0].nbytes - cut.nbytes for cut in g.cuts[1:])) for g in groups]
    free = [iter(g.paths) for g in groups]
    return {next(free[k]): groups[k].cuts[way + 1] for k, way in least_cuts(kinds, math.ceil(need))}


def _too_large(groups: list[_Group], least: int, max_bytes: int | float, mesh: MeshSpec) -> str:
    worst = sorted(groups, key=lambda g: -g.cuts[-1].nbytes * len(g.paths))
    lines = [
        f"{shown(g.paths[0])}{f' and {len(g.paths) - 1} like it' if len(g.paths) > 1 else ''} {g.type}: "
        f"{f'at most {g.cuts[-1].factor}-way' if len(g.cuts) > 1 else 'cannot be cut'}, "
        f"{size_text(g.cuts[-1].nbytes * len(g.paths))}"
        for g in worst[:5]
    ]
    if len(worst) > 5:
        lines.append(f"and {len(worst) - 5} other kinds of leaves")
    return (
        f"no layout on {mesh} fits {size_text(max_bytes)} a device: the least is {size_text(least)} ({least} bytes).\n"
        f"  What stands in the way:\n    " + "\n    ".join(lines) + "\n  Ways out: a larger mesh, other dtypes, "
        f"or dims padded to a multiple of the mesh ({' x '.join(map(str, mesh.sizes))})."
    )
