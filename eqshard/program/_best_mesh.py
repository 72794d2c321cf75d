"""Which mesh for so many devices: a step is planned on each, and the quickest that fits is taken."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from .._chip import Chip
from .._errors import ShardingError
from .._memory import BudgetError
from .._mesh import MeshSpec
from .._tree import size_text
from ._explain import ms, table
from ._ops import OpRules
from ._planner import step_plan
from ._step import StepPlan


@dataclass(frozen=True)
class Candidate:
    """A mesh that was looked at."""

    mesh: MeshSpec
    plan: StepPlan | None
    """The plan of the step on it; None if nothing fits."""
    why: str = ""
    """Why nothing fits."""


@dataclass(frozen=True)
class BestMesh:
    """The meshes that were looked at, the quickest first.

    ```python
    import eqshard, jax
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((512, 512), (1024, 512))]
    found = eqshard.best_mesh(lambda w, x: x @ w, *shapes, devices=8, chip="v5e")
    print(found)
    assert found.mesh.size() == 8 and found.plan.mesh == found.mesh
    ```
    """

    candidates: tuple[Candidate, ...]

    @property
    def mesh(self) -> MeshSpec:
        """The best."""
        return self.candidates[0].mesh

    @property
    def plan(self) -> StepPlan:
        """The plan of the step on it."""
        plan = self.candidates[0].plan
        assert plan is not None
        return plan

    def table(self) -> str:
        """The candidates, for a terminal."""
        rows = [["mesh", "a step", "work", "waiting", "a device"]]
        for c in self.candidates:
            text = " x ".join(f"{name} {size}" for name, size in c.mesh.axes)
            if c.plan is None:
                rows.append([text, "does not fit", "", "", ""])
            else:
                p = c.plan
                times = [ms(p.seconds), ms(p.compute_seconds), ms(p.communication_seconds)]
                rows.append([text, *times, size_text(p.bytes_per_device)])
        return table(rows)

    __str__ = table

    def to_dict(self) -> dict[str, Any]:
        """The candidates as data for JSON; of the best, its plan too."""
        rows = []
        for c in self.candidates:
            fits = c.plan is not None
            rows.append({
                "mesh": c.mesh.to_dict(),
                "fits": fits,
                "seconds": c.plan.seconds if c.plan else None,
                "bytes_per_device": c.plan.bytes_per_device if c.plan else None,
            })  # fmt: skip
        return {"candidates": rows, "plan": self.plan.to_dict()}


def best_mesh(
    fn: Callable[..., Any],
    *args: Any,
    devices: int,
    chip: Chip | str,
    max_bytes: int | float | None = None,
    axes: Sequence[str] = ("data", "tp"),
    fixed: Mapping[str, PartitionSpec] | None = None,
    rules: OpRules | None = None,
    progress: Callable[[str], None] | None = None,
) -> BestMesh:
    """Plans a step on every way to arrange the devices, and says which is the quickest.

    Nothing is allocated, and no device is needed.

    ```python
    import eqshard, jax
    shapes = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((4096, 4096), (64, 4096))]
    found = eqshard.best_mesh(lambda w, x: x @ w, *shapes, devices=16, chip="v5e")
    print(found.table())
    ```

    **Arguments:**

    - `args`: as of `step_plan`.
    - `devices`: how many there are.
    - `chip`: what they are: a name in `eqshard.CHIPS`, or a `Chip`.
    - `max_bytes`: what a step may take on each; by default the memory of the chip.
    - `axes`: the names of the mesh axes; their number is how many at most. As the plan decides what each axis is used
        for, a name is only a name. With three, the search takes much longer.
    - `fixed`, `rules`: as of `step_plan`; what `fixed` names must be in `axes`.
    - `progress`: is called with a line of text for each candidate.

    **Raises:**

    - `BudgetError`: on no mesh anything fits.
    """
    if devices < 1 or not axes:
        raise ShardingError(f"best_mesh needs devices and axes, got {devices} devices and the axes {tuple(axes)}.")
    say = progress or (lambda text: None)
    found: list[Candidate] = []
    for sizes in _factorizations(devices, len(axes)):
        mesh = MeshSpec(dict(zip(axes, sizes)), chip=chip)
        try:
            plan = step_plan(fn, *args, mesh=mesh, max_bytes=max_bytes, fixed=fixed, rules=rules)
            found.append(Candidate(mesh, plan))
            say(f"{mesh}: {ms(plan.seconds)}, {size_text(plan.bytes_per_device)} a device")
        except BudgetError as error:
            found.append(Candidate(mesh, None, str(error)))
            say(f"{mesh}: does not fit")
    found.sort(key=lambda c: (c.plan is None, c.plan.seconds if c.plan else 0.0, len(c.mesh.names)))
    if found[0].plan is None:
        raise BudgetError(f"on none of {len(found)} meshes of {devices} devices the step fits.\n{found[0].why}")
    return BestMesh(tuple(found))


def _factorizations(n: int, most: int) -> Iterator[tuple[int, ...]]:
    """Every way to write `n` as a product of at most `most` factors above 1, in falling order."""
    divisors = [d for d in range(2, n + 1) if n % d == 0]
    seen: set[tuple[int, ...]] = set()
    for count in range(1, most + 1):
        for factors in itertools.combinations_with_replacement(divisors, count - 1):
            product = 1
            for f in factors:
                product *= f
            rest, left = divmod(n, product)
            sizes = tuple(sorted((*factors, rest), reverse=True))
            if not left and (rest > 1 or n == 1) and sizes not in seen:
                seen.add(sizes)
                yield sizes
