"""Plans that fit a memory budget with as little sharding as can be."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from ._auto import auto_plan, MIN_BYTES, plan_leaves, spread, Unit, units_of
from ._errors import ShardingError
from ._mesh import MeshLike, MeshSpec
from ._plan import LeafPlan, ShardingPlan
from ._tree import array_leaves, dtype_name, itemsize, shown, size_text, some, type_text


class BudgetError(ShardingError):
    """No layout of the tree fits the memory that was allowed."""


def memory_plan(
    tree: PyTree[Any],
    mesh: MeshLike,
    max_bytes: int | float | None,
    *,
    names: Sequence[str | tuple[str, ...]] | None = None,
) -> ShardingPlan:
    """The least sharding with which the whole tree fits in `max_bytes` on each device.

    Least means least to communicate: a leaf of `n` bytes cut in `k` costs `n (k - 1) / k` bytes for each device to
    gather; of equal sums, the one that cuts the fewest leaves.

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
        return auto_plan(tree, mesh, names=names, min_bytes=MIN_BYTES)
    described.size()
    groups = _groups(tree, described, units_of(described, names))
    total = sum(g.nbytes * len(g.paths) for g in groups)
    least = sum(g.cuts[-1].nbytes * len(g.paths) for g in groups)
    if least > max_bytes:
        raise BudgetError(_too_large(groups, least, max_bytes, described))
    cut = _choose(groups, total - max_bytes) if total > max_bytes else {}
    limit = size_text(max_bytes)

    def row(path: str, shape: tuple[int, ...], dtype: str) -> LeafPlan:
        if path not in cut:
            return LeafPlan(path, shape, dtype, PartitionSpec(), PartitionSpec(), None, f"whole: fits {limit}")
        spec = cut[path].spec
        return LeafPlan(path, shape, dtype, spec, spec, None, f"{cut[path].factor}-way to fit {limit}")

    return plan_leaves(tree, described, row)


class _Cut(NamedTuple):
    factor: int
    nbytes: int
    spec: PartitionSpec


class _Group(NamedTuple):
    """Leaves of one shape and dtype, and the ways to cut them, from whole to the finest."""

    type: str
    nbytes: int
    paths: list[str]
    cuts: list[_Cut]


def _groups(tree: PyTree[Any], mesh: MeshSpec, units: list[Unit]) -> list[_Group]:
    by_type: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for path, leaf in array_leaves(tree):
        by_type.setdefault((tuple(leaf.shape), dtype_name(leaf)), []).append(path)
    groups = []
    for (shape, dtype), paths in by_type.items():
        nbytes = math.prod(shape) * itemsize(dtype)
        groups.append(_Group(type_text(shape, dtype), nbytes, paths, _cuts(shape, dtype, nbytes, mesh, units)))
    return groups


def _cuts(shape: tuple[int, ...], dtype: str, nbytes: int, mesh: MeshSpec, units: list[Unit]) -> list[_Cut]:
    cuts = {1: _Cut(1, nbytes, PartitionSpec())}
    if nbytes and not dtype.startswith("key<"):
        for count in range(1, len(units) + 1):  # few axes before many
            for some_units in itertools.combinations(units, count):
                factor = math.prod(mesh.size(u) for u in some_units)
                spec, why = spread(shape, list(some_units), mesh)
                if factor not in cuts and "left out" not in why and spec != PartitionSpec():
                    cuts[factor] = _Cut(factor, nbytes // factor, spec)
    return sorted(cuts.values())


def _choose(groups: list[_Group], need: float) -> dict[str, _Cut]:
    """Which leaves to cut, and how, so that at least `need` bytes go: a small integer program over kinds of leaves."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415 (dear to import, seldom needed)
    from scipy.sparse import csr_array  # noqa: PLC0415

    ways = [(g, cut) for g in groups for cut in g.cuts[1:]]
    saved = np.array([g.nbytes - cut.nbytes for g, cut in ways], dtype=float)
    unit = max(need, 1.0)
    numbers = {id(g): i for i, g in enumerate(groups)}
    rows = [numbers[id(g)] for g, _ in ways]
    member = csr_array((np.ones(len(ways)), (rows, range(len(ways)))), shape=(len(groups), len(ways)))
    # A leaf more costs a millionth of the need: it decides only between equal sums.
    most: Any = np.array([len(g.paths) for g, _ in ways])
    leaves: Any = np.array([len(g.paths) for g in groups])
    result = milp(
        saved / unit + 1e-6,
        integrality=np.ones(len(ways)),
        bounds=Bounds(0, most),
        constraints=[
            LinearConstraint(saved[None] / unit, lb=need / unit),
            LinearConstraint(member, ub=leaves),
        ],
        options={"mip_rel_gap": 1e-3, "time_limit": 10.0},
    )
    if result.x is None:
        raise BudgetError(f"found no layout that fits: {result.message}")
    return _covering(groups, ways, np.rint(result.x).astype(int), need)


def _covering(
    groups: list[_Group], ways: list[tuple[_Group, _Cut]], counts: np.ndarray, need: float
) -> dict[str, _Cut]:
    chosen: dict[str, _Cut] = {}
    free = {id(g): list(g.paths) for g in groups}
    for (group, cut), count in zip(ways, counts):
        for _ in range(count):
            chosen[free[id(group)].pop()] = cut
            need -= group.nbytes - cut.nbytes
    while need > 0:  # the solver's tolerance left a few bytes: cut the smallest leaf that has them
        rest = [(g, c) for g, c in ways if free[id(g)]]
        group, cut = min(
            rest, key=lambda gc: (gc[0].nbytes - gc[1].nbytes < need, abs(gc[0].nbytes - gc[1].nbytes - need))
        )
        chosen[free[id(group)].pop()] = cut
        need -= group.nbytes - cut.nbytes
    return chosen


def _too_large(groups: list[_Group], least: int, max_bytes: float, mesh: MeshSpec) -> str:
    worst = sorted(groups, key=lambda g: -g.cuts[-1].nbytes * len(g.paths))[:5]
    lines = [
        f"{shown(g.paths[0])}{f' and {len(g.paths) - 1} like it' if len(g.paths) > 1 else ''} {g.type}: at most "
        f"{g.cuts[-1].factor}-way, {size_text(g.cuts[-1].nbytes * len(g.paths))}"
        for g in worst
    ]
    return (
        f"no layout on {mesh} fits {size_text(max_bytes)} a device: the least is {size_text(least)} ({least} bytes).\n"
        f"  What stands in the way:\n    " + "\n    ".join(lines) + "\n  Ways out: a larger mesh, other dtypes, "
        "or dims padded to a multiple of the mesh" + (f" ({some(map(str, mesh.sizes))})." if mesh.sizes else ".")
    )
