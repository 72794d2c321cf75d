"""The zoo by the compiler: each case in each layout, compiled for a target that need not be there.

    python tests/benchmarks/zoo.py --cases llama_scan,moe --layouts dp,fsdp,planned --cache FOLDER

Prints for each the estimated time of a step, the bytes a chip sends and holds, and how long compiling took. What the
compiler said is kept in the folder, by the program it was asked about, so that only what changed is compiled again;
estimates are made anew each time. All of it together takes hours, so what comes out is also kept in `zoo_record.jsonl`
beside this file, a line for each program, target, and way to read what the compiler said. What is in there is not asked
again, unless with `--anew`. A layout with a `+` behind its name, as `fsdp+`, takes from it only how the arguments lie:
the rest is planned, and written in.

    python tests/benchmarks/zoo.py --cases mlp --order --layouts dp,zero1,fsdp,megatron,tp_fsdp,planned,dp+,fsdp+
    python tests/benchmarks/zoo.py --cases mlp --budgets 1,0.5,0.25

The first also prints how the order of predicted times agrees with that of compiled ones, the second plans for parts of
the memory that replication takes.
"""

import argparse
import functools
import hashlib
import json
import math
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax


# This file is called as the package that it is about.
sys.path[0] = str(pathlib.Path(__file__).parents[1])

import zoo  # noqa: E402

import eqshard  # noqa: E402
from eqshard.compiler import as_target, Program, Target  # noqa: E402
from eqshard.compiler._cache import compile_cached, job_key  # noqa: E402
from eqshard.compiler._compile import report_on  # noqa: E402
from eqshard.compiler._program import flatten, lower_for  # noqa: E402
from eqshard.program._fixed import fixed_specs  # noqa: E402
from eqshard.program._study import study  # noqa: E402
from eqshard.program._trace import trace  # noqa: E402
from eqshard.program._write import written  # noqa: E402


HAND_WRITTEN = ("dp", "zero1", "fsdp", "megatron", "tp_fsdp", "ep")
"""The layouts of which the best that fits is what a planner is held against."""


@dataclass(frozen=True)
class Measured:
    """What the compiler made of a program."""

    seconds: float
    """Of a step, by its estimate."""
    nbytes: int
    """Of a device."""
    wire_bytes: int
    fits: bool
    compile_seconds: float


@functools.cache
def reader() -> str:
    """A digest of what reads compiled programs: other estimates are other measurements."""
    root = pathlib.Path(eqshard.__file__).parent
    files = [root / "_chip.py", *sorted((root / "compiler").glob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


@dataclass(frozen=True)
class Record:
    """What was measured before, in a file of which each line is one program."""

    file: pathlib.Path
    anew: bool

    def find(self, key: str) -> Measured | None:
        if self.anew or not self.file.exists():
            return None
        lines = map(json.loads, self.file.read_text().splitlines())
        return next((Measured(**known["measured"]) for known in lines if known["key"] == key), None)

    def add(self, key: str, name: str, measured: Measured) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps({"name": name, "key": key, "measured": asdict(measured)}) + "\n")


@dataclass(frozen=True)
class Where:
    """What is compiled for, and where answers are kept."""

    target: Target
    mesh: eqshard.MeshSpec
    cache: pathlib.Path | None
    record: Record


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    case: str
    layout: str
    report: Measured | None
    planning: float = 0.0
    """Seconds to find the layout."""
    predicted: tuple[float, float] = (0.0, 0.0)
    """Seconds of a step and bytes of a device, by whoever found it."""
    failure: str = ""

    @property
    def milliseconds(self) -> float:
        return self.report.seconds * 1e3 if self.report is not None and self.report.fits else math.inf


def planned(case: zoo.Case, mesh: eqshard.MeshSpec, name: str = "planned", **options: Any) -> zoo.Layout:
    """The layout that `step_plan` finds, in the step that `constrain` makes of the plain one."""
    plan = eqshard.step_plan(case.step, *case.args, mesh=mesh, **options)
    step = eqshard.constrain(plan, case.step)
    return zoo.Layout(name, tuple(plan.args), step, dict(plan.options), plan.seconds, plan.bytes_per_device)


def found(
    case: zoo.Case, mesh: eqshard.MeshSpec, name: str, layouts: Mapping[str, zoo.Layout], priced: bool
) -> zoo.Layout:
    """A layout by its name; with what is predicted of it, of one by hand only if it is asked for."""
    if name == "planned":
        return planned(case, mesh)
    if name.endswith("+"):
        return planned(case, mesh, name, fixed=layouts[name[:-1]].plans, max_bytes=1e15)
    if not priced:
        return layouts[name]
    as_it_is = layouts[name]
    traced = trace(as_it_is.step, case.args)
    begun = study(traced, mesh, {}, 1e15, 30.0, as_written=True)
    said = fixed_specs(as_it_is.step, traced, as_it_is.plans, mesh, eqshard.PartitionAxis())
    plan = written(begun, begun.choose(said))
    return replace(as_it_is, seconds=plan.seconds, nbytes=plan.bytes_per_device)


def folder_of(case: zoo.Case, layout: str, cache: pathlib.Path | None) -> pathlib.Path | None:
    """Where what the compiler said of a layout is kept."""
    return None if cache is None else cache / f"{case.name}-{case.size}-{layout}"


def measure(case: zoo.Case, layout: zoo.Layout, where: Where) -> Measured:
    """What the compiler makes of a layout, from the record or the cache if it was asked before."""
    target = where.target
    flat = flatten(Program(layout.step, case.args, layout.plans, case.donate, layout.options), target)
    job, flops = lower_for(flat, target)
    key = f"{job_key(job, target)}-{reader()}"
    if (known := where.record.find(key)) is not None:
        return known
    answer = compile_cached([job], target, 1, folder_of(case, layout.name, where.cache))[0]
    r = report_on(flat, answer, flops, flat.mesh.chip or eqshard.CHIPS[target.chip], str(target))
    wire = 0 if r.refused else r.wire_bytes
    found = Measured(r.step_seconds, r.bytes_per_device, wire, r.fits, r.compile_seconds)
    where.record.add(key, f"{case.name}-{case.size} {layout.name} {target}", found)
    return found


def mesh_of(target: Target, axes: str | None) -> eqshard.MeshSpec:
    """The mesh of a target: as `data=4,tp=4` says, else "tp" is the last dim of its topology."""
    if axes is not None:
        sizes = {name: int(size) for name, size in (pair.split("=") for pair in axes.split(","))}
    elif target.platform == "cpu":
        sizes = {"data": target.size // 4, "tp": 4}
    else:
        sizes = dict(zip(("data", "tp") if len(target.topology) == 2 else ("data", "fsdp", "tp"), target.topology))
    return eqshard.MeshSpec(sizes, chip=target.chip)


def rows_of(case: zoo.Case, wanted: list[str], where: Where, priced: bool = False) -> Iterator[Row]:
    """A row for each wanted layout that the case has; all of them if none is named."""
    layouts = case.layouts(where.mesh)
    for name in wanted or [*layouts, "planned"]:
        if name.removesuffix("+") not in layouts and name != "planned":
            continue
        began = time.perf_counter()
        try:
            layout = found(case, where.mesh, name, layouts, priced)
            planning = time.perf_counter() - began if name == "planned" else 0.0
            predicted = layout.seconds, layout.nbytes
            yield Row(case.name, name, measure(case, layout, where), planning, predicted)
        except (ImportError, eqshard.ShardingError) as error:
            yield Row(case.name, name, None, failure=f"{type(error).__name__}: {error}".splitlines()[0][:100])


def line(row: Row, best: float | None) -> str:
    """A row as the table prints it."""
    start = f"| {row.case} | {row.layout} |"
    if row.report is None:
        return f"{start} {row.failure} |  |  |  |  |  |"
    r = row.report
    step = f"{r.seconds * 1e3:.1f}" if r.fits else "does not fit"
    ratio = f"{row.milliseconds / best:.2f}" if best and r.fits else ""
    took = f"{r.compile_seconds:.0f}" + (f" + {row.planning:.1f}" if row.planning else "")
    wire = f"{r.wire_bytes / 1e6:.0f}" if r.fits else ""
    seconds, nbytes = row.predicted
    guess = f"{seconds * 1e3:.1f} ms, {nbytes / 1e9:.2f} GB" if seconds else ""
    return f"{start} {step} | {ratio} | {wire} | {r.nbytes / 1e9:.2f} | {took} | {guess} |"


def agreement(rows: Sequence[Row]) -> str:
    """The rank correlation of predicted and compiled times, of those that fit: as they are, and with such as are
    within one per cent of each other taken as equal."""
    from scipy.stats import spearmanr  # which JAX itself requires

    known = [(r.predicted[0], r.milliseconds) for r in rows if r.predicted[0] and math.isfinite(r.milliseconds)]
    if len(known) < 3:
        return "too few layouts to compare"
    plain, rough = (float(spearmanr(*sides)[0]) for sides in (zip(*known), (in_steps(s) for s in zip(*known))))
    return f"{plain:.3f} over {len(known)} layouts, {rough:.3f} with one per cent as nothing"


def in_steps(times: Sequence[float]) -> list[int]:
    """Numbers in the order of the times, the same for those within one per cent of the least of them."""
    steps: dict[float, int] = {}
    first, step = 0.0, 0
    for t in sorted(times):
        if t > 1.01 * first:
            first, step = t, step + 1
        steps[t] = step
    return [steps[t] for t in times]


def budgets(case: zoo.Case, parts: Sequence[float], where: Where) -> Iterator[str]:
    """For parts of what replication takes by the compiler's count: what a plan for it takes, or that there is none."""
    mesh = where.mesh
    whole = measure(case, case.layouts(mesh)["dp"], where).nbytes
    yield f"| {case.name} | replicated |  |  | {whole / 1e9:.2f} |"
    for part in parts:
        room = part * whole
        options = {
            "max_bytes": room,
            "tune": 1,
            "target": where.target,
            "cache": folder_of(case, "planned", where.cache),
        }
        start = f"| {case.name} | {part:g} | {room / 1e9:.2f} |"
        try:
            layout = planned(case, mesh, **options)
        except eqshard.BudgetError as error:
            least = planned(case, mesh, "least", objective="memory", max_bytes=1e15)
            reached = f"{measure(case, least, where).nbytes / 1e9:.2f} by the plan that takes least"
            yield f"{start} {str(error).splitlines()[0][:60]} | {reached} |"
            continue
        taken = measure(case, layout, where).nbytes
        verdict = "fits" if taken <= room else "**does not fit**"
        yield f"{start} {layout.nbytes / 1e9:.2f} | {taken / 1e9:.2f}, {verdict} |"


def main() -> None:
    """Reads the command line, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(zoo.NAMES), help="names of the zoo, between commas")
    parser.add_argument("--layouts", default="", help="names of layouts, between commas; default: all, and planned")
    parser.add_argument("--size", default="bench")
    parser.add_argument("--target", default="v5e:4x4")
    parser.add_argument("--mesh", default=None, help="the mesh, as data=4,tp=4; default: by the target's topology")
    parser.add_argument("--order", action="store_true", help="say how the orders of predicted and compiled times agree")
    parser.add_argument("--budgets", default="", help="parts of the memory of replication to plan for, as 1,0.5,0.25")
    parser.add_argument("--cache", type=pathlib.Path, default=None, help="a folder for what the compiler said")
    parser.add_argument("--anew", action="store_true", help="compile also what is in the record")
    given = parser.parse_args()
    target = as_target(given.target)
    record = Record(pathlib.Path(__file__).with_name("zoo_record.jsonl"), given.anew)
    where = Where(target, mesh_of(target, given.mesh), given.cache, record)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", min(target.size, 512))
    if given.cache is not None:
        given.cache.mkdir(parents=True, exist_ok=True)
    wanted = [name for name in given.layouts.split(",") if name]
    if given.budgets:
        print("| case | part | GB | predicted | compiled |\n|---|---|---|---|---|")
        for name in given.cases.split(","):
            parts = [float(part) for part in given.budgets.split(",")]
            for text in budgets(zoo.case(name, given.size), parts, where):
                print(text, flush=True)
        return
    print(
        "| case | layout | est. step, ms | of the best by hand | wire, MB a chip | GB a chip | compile, s | predicted |"
    )
    print("|---|---|---|---|---|---|---|---|")
    ratios = []
    for name in given.cases.split(","):
        rows: list[Row] = []
        for row in rows_of(zoo.case(name, given.size), wanted, where, given.order):
            rows.append(row)
            best = min((r.milliseconds for r in rows if r.layout in HAND_WRITTEN), default=math.inf)
            by_hand = row.layout in HAND_WRITTEN  # of these the best is not known yet
            print(line(row, best if math.isfinite(best) and not by_hand else None), flush=True)
            ratios += [row.milliseconds / best] if row.layout == "planned" and math.isfinite(best) else []
        if given.order:
            print(f"| {name} | order | {agreement(rows)} |  |  |  |  |  |", flush=True)
    known = [r for r in ratios if math.isfinite(r)]
    if known:
        mean = math.exp(sum(map(math.log, known)) / len(known))
        print(f"\nplanned, of the best by hand: {mean:.3f} in the mean of {len(known)}, at most {max(ratios):.3f}")


if __name__ == "__main__":
    main()
