"""Other plans of a step, to hold the planned one against."""

from collections.abc import Iterator, Mapping

import jax
from jax.sharding import PartitionSpec

from .._auto import auto_spec
from .._memory import BudgetError
from .._spec import fit_spec
from .._tree import divisible_shape
from ._step import Alternative, StepPlan
from ._study import arriving, Study
from ._trace import Leaf
from ._write import written


Said = Mapping[int, PartitionSpec]


def candidates(study: Study, said: Said) -> Iterator[tuple[str, StepPlan | None]]:
    """Plans that differ: under other beliefs about overlap, and as people write them. None where one does not fit."""
    beliefs: list[tuple[str, Said, float | None]] = [
        ("planned", said, None),
        ("planned as if transfers were free", said, 1.0),
        ("planned as if nothing were hidden", said, 0.0),
        ("everything sharded, batch over all", _everything(study, said, "sharded"), None),
        ("whole weights, batch over all", _everything(study, said, "whole"), None),
    ]
    for name, fixed, hidden in beliefs:
        try:
            yield name, written(study, study.choose(fixed, hidden))
        except BudgetError:
            if name == "planned":
                raise
            yield name, None


def _everything(study: Study, said: Said, how: str) -> Said:
    comes = arriving(study.traced)
    found: dict[int, PartitionSpec] = {}
    every = tuple(study.mesh.names)
    for i, leaf in enumerate(study.traced.ins):
        if i not in comes:
            found[i] = PartitionSpec() if how == "whole" else _sharded(study, leaf, every)
        elif leaf.shape:
            found[i] = fit_spec(PartitionSpec(every), divisible_shape(leaf.shape, leaf.dtype), study.mesh).spec
    return {**found, **said}


def _sharded(study: Study, leaf: Leaf, every: tuple[str, ...]) -> PartitionSpec:
    if leaf.dtype.startswith("key<") or not leaf.shape:
        return PartitionSpec()
    return auto_spec(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), study.mesh, names=[every])


def compared(study: Study, said: Said) -> tuple[StepPlan, tuple[Alternative, ...]]:
    """The planned step, and what the others would have cost."""
    plans = list(candidates(study, said))
    plan = plans[0][1]
    assert plan is not None
    others = []
    for name, other in plans[1:]:
        if other is None:
            others.append(Alternative(name, None, None, "does not fit"))
        elif (other.args, other.inner) != (plan.args, plan.inner):
            others.append(Alternative(name, other.seconds, other.bytes_per_device, _why(plan, other)))
    return plan, tuple(sorted(others, key=lambda o: float("inf") if o.seconds is None else o.seconds))


def _why(plan: StepPlan, other: StepPlan) -> str:
    work = other.compute_seconds - plan.compute_seconds
    waits = other.communication_seconds - plan.communication_seconds
    parts = [
        f"{1e3 * abs(x):.3g} ms {'more' if x > 0 else 'less'} {what}"
        for x, what in ((work, "work"), (waits, "waiting for transfers"))
        if abs(x) > 0.01 * plan.seconds
    ]
    if parts:
        return ", ".join(parts)
    more = other.bytes_per_device - plan.bytes_per_device
    return "as good" if more < 0.01 * plan.bytes_per_device else "as quick, and takes more memory"
