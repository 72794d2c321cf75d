"""The compiler decides: candidates are compiled for the target, and the quickest that fits is taken."""

import itertools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from .._memory import BudgetError
from .._tree import size_text
from ..compiler import as_target, compile_reports, CompileReport, Program, Target
from ._candidates import candidates, Said
from ._constrain import constrain
from ._step import Alternative, StepPlan
from ._study import Study
from ._write import written


WHOLE_GATHERS = (("xla_jf_spmd_threshold_for_windowed_einsum_mib", "1000000"),)
"""Turns off the TPU compiler's loops of permutes for products of a cut operand: gathers stay whole. Worth 1.6 times on
some steps, and a loss on others."""


AGAIN = 3
"""How often plans that take more than they may, by the compiler's count, are made again with less room."""


@dataclass(frozen=True)
class _Tried:
    name: str
    plan: StepPlan
    report: CompileReport
    limit: float | None

    @property
    def fits(self) -> bool:
        return self.report.fits and (self.limit is None or self.report.bytes_per_device <= self.limit)

    @property
    def seconds(self) -> float:
        return self.report.step_seconds if self.fits else math.inf


@dataclass(frozen=True)
class Tuning:
    """What is compiled, how much of it, and for what."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    most: int
    """How many candidates are compiled."""
    target: str | Target | None
    cache: str | os.PathLike[str] | None
    say: Callable[[str], None]

    def best(self, study: Study, said: Said) -> StepPlan:
        """The best of the first candidates by the compiler; made again with less room if none fits by its count.

        If by the planner's count there is nothing smaller, the compiler has the last word on what takes least.
        """
        tried: list[_Tried] = []
        room = study.limit
        for _ in range(AGAIN):
            try:
                found = list(self._compiled(_distinct(replace(study, limit=room), said, self._where), study))
            except BudgetError:
                break
            tried += found
            if any(t.fits for t in found) or study.limit is None or room is None:
                break
            least = min(t.report.bytes_per_device for t in found)
            room *= 0.95 * study.limit / max(least, study.limit)
            self.say(f"  none fits: planned again for {size_text(room)}, as the compiler takes more than was predicted")
        if not any(t.fits for t in tried):
            smallest = replace(study, limit=None, objective="memory")
            plan = written(smallest, smallest.choose(said))
            tried += self._compiled(iter([("the plan that takes least", plan)]), study)
        best = min(tried, key=lambda t: (t.seconds, t.report.bytes_per_device))
        if not best.fits:
            raise BudgetError(
                f"of {len(tried)} candidates none fits by the compiler: "
                + "; ".join(f"{t.name}: {_verdict(t)}" for t in tried)
                + ".\n  Ways out: a larger mesh, remat, a smaller batch, or optimizer state on the host."
            )
        others = (t for t in sorted(tried, key=lambda t: t.seconds) if t is not best)
        note = (
            f"{best.name} was the best of {len(tried)} by the compiler: {1e3 * best.seconds:.3g} ms, "
            f"{best.report.bytes_per_device / 1e9:.3g} GB a device"
        )
        return replace(best.plan, notes=(*best.plan.notes, note), alternatives=tuple(map(_alternative, others)))

    @property
    def _where(self) -> Target | None:
        return None if self.target is None else as_target(self.target)

    def _compiled(self, plans: Iterator[tuple[str, StepPlan]], study: Study) -> Iterator[_Tried]:
        kept = sorted(study.traced.replaced)
        for n, (name, plan) in enumerate(itertools.islice(plans, self.most), 1):
            self.say(f"compiling candidate {n} of at most {self.most}: {name}")
            program = Program(constrain(plan, self.fn), self.args, plan.args, tuple(kept), dict(plan.options))
            report = compile_reports([program], target=self._where, cache=self.cache)[0]
            one = _Tried(name, plan, report, study.limit)
            self.say(f"  {_verdict(one)}")
            yield one


def _alternative(tried: _Tried) -> Alternative:
    seconds, nbytes = tried.seconds if tried.fits else None, float(tried.report.bytes_per_device)
    return Alternative(tried.name, seconds, nbytes, f"by the compiler, {_verdict(tried)}")


def _distinct(study: Study, said: Said, where: Target | None) -> Iterator[tuple[str, StepPlan]]:
    """Candidates that differ, each on a TPU also with gathers that stay whole."""
    seen: set[Any] = set()
    for name, plan in candidates(study, said):
        if plan is None or (plan.args, plan.inner) in seen:
            continue
        seen.add((plan.args, plan.inner))
        yield name, plan
        if where is not None and where.platform == "tpu":
            yield f"{name}, gathers whole", replace(plan, options=WHOLE_GATHERS)


def _verdict(tried: _Tried) -> str:
    report = tried.report
    size = f"{report.bytes_per_device / 1e9:.3g} GB a device"
    return f"{1e3 * tried.seconds:.3g} ms, {size}" if tried.fits else f"does not fit: {size}"
