"""The compiler decides: candidates are compiled for the target, and the quickest that fits is taken."""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from .._errors import ShardingError
from ..compiler import as_target, compile_reports, CompileReport, Program, Target
from ._candidates import candidates, Said
from ._constrain import constrain
from ._step import Alternative, StepPlan
from ._study import Study


WHOLE_GATHERS = (("xla_jf_spmd_threshold_for_windowed_einsum_mib", "1000000"),)
"""Turns off the TPU compiler's loops of permutes for products of a cut operand: gathers stay whole. Worth 1.6 times on
some steps, and a loss on others."""


@dataclass(frozen=True)
class _Tried:
    name: str
    plan: StepPlan
    report: CompileReport

    @property
    def seconds(self) -> float:
        return self.report.step_seconds if self.report.fits else math.inf


def tuned(
    study: Study,
    said: Said,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    most: int,
    target: str | Target | None,
    cache: str | os.PathLike[str] | None,
    say: Callable[[str], None],
) -> StepPlan:
    """The best of the first `most` candidates by the compiler."""
    where = None if target is None else as_target(target)
    kept = sorted({study.traced.ins[i].arg for i in study.traced.kept.values()})
    tried: list[_Tried] = []
    for name, plan in _distinct(study, said, where):
        if len(tried) == most:
            break
        say(f"compiling candidate {len(tried) + 1} of at most {most}: {name}")
        program = Program(constrain(plan, fn), args, plan.args, tuple(kept), dict(plan.options))
        report = compile_reports([program], target=where, cache=cache)[0]
        tried.append(_Tried(name, plan, report))
        say(f"  {_verdict(tried[-1])}")
    best = min(tried, key=lambda t: (t.seconds, t.report.bytes_per_device))
    if not best.report.fits:
        raise ShardingError(
            f"none of {len(tried)} candidates fits by the compiler: "
            + "; ".join(f"{t.name}: {_verdict(t)}" for t in tried)
            + ". Try `max_bytes` below what the chip has, or a larger mesh."
        )
    others = tuple(
        Alternative(
            t.name,
            t.seconds if t.report.fits else None,
            float(t.report.bytes_per_device),
            f"by the compiler, {_verdict(t)}",
        )
        for t in sorted(tried, key=lambda t: t.seconds)
        if t is not best
    )
    note = (
        f"{best.name} was the best of {len(tried)} by the compiler: {1e3 * best.seconds:.3g} ms, "
        f"{best.report.bytes_per_device / 1e9:.3g} GB a device"
    )
    return replace(best.plan, notes=(*best.plan.notes, note), alternatives=others)


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
    return f"{1e3 * tried.seconds:.3g} ms, {size}" if report.fits else f"does not fit: {size}"
