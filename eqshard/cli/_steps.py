"""`compile`, `verify` and `best-mesh`: what becomes of a step."""

import argparse
from collections.abc import Callable
from typing import Any

from .._auto import auto_plan
from .._chip import CHIPS
from .._mesh import MeshSpec
from .._plan import replicated_plan
from .._report import report
from .._verify import RUNS, verify
from ..compiler import compile_report
from ..compiler._targets import as_target, check_available, Target
from ..program import best_mesh, constrain, step_plan
from ._load import load_step, Step
from ._output import put, say, show, simulate, wait_for, width
from ._words import (
    add_mesh,
    add_outputs,
    bytes_from_text,
    chip_name,
    Commands,
    donated_from_text,
    filled,
    given_mesh,
    UsageError,
)


_SOURCE = "FILE.py:NAME, a function that returns (function, arguments); the arguments may be shapes"


def add_commands(commands: Commands) -> None:
    """Adds them."""
    parser = commands.add(
        "compile",
        "say what the compiler makes of a step: collectives, memory, time",
        "Nothing runs, and the devices need not be there. Plans that NAME returns as a\n"
        "third value are used; else the step is planned from its own program.\n"
        "Exit code 1 if it does not fit the memory.",
        "  eqshard compile my_train.py:step --target v5e:4x4 --mesh data=4,tp=4",
        _compile,
    )
    parser.add_argument("source", metavar="STEP", help=_SOURCE)
    parser.add_argument("--target", required=True, help='"v5e:4x4", "v5p:8x8x8", … (needs eqshard[tpu]), or "cpu:64"')
    add_mesh(parser, help="the mesh; by default one axis, data, of all devices")
    parser.add_argument("--how", choices=("program", "auto", "replicated"), help="how to plan (default: program)")
    parser.add_argument("--memory", type=bytes_from_text, metavar="BYTES", help="what the plan may take, as 14GB")
    parser.add_argument("--donate", type=donated_from_text, default="none", help="all, none, or arguments as 0,1")
    add_outputs(parser, html=True)

    check = commands.add(
        "verify",
        "run a step as planned and as it is, and compare the results",
        "It runs on simulated devices, so let NAME return a step of a reduced size, with\n"
        "arrays; shapes are filled with drawn values. Plans that NAME returns as a third\n"
        "value are used (give their --mesh too, so that its devices are simulated); else\n"
        "the step is planned from its own program. Exit code 1 if a result differs by\n"
        "more than rounding.",
        "  eqshard verify my_train.py:small_step --mesh data=4,tp=2",
        _verify,
    )
    check.add_argument("source", metavar="STEP", help=_SOURCE)
    add_mesh(check, help="the mesh; its devices are simulated")
    check.add_argument("--how", choices=("program", "auto", "replicated"), help="how to plan (default: program)")
    check.add_argument("--memory", type=bytes_from_text, metavar="BYTES", help="what the plan may take, as 14GB")
    check.add_argument("--runs", type=int, default=RUNS, help="runs that measure the noise (default: %(default)s)")
    check.add_argument("--seed", type=int, default=0, help="of the noise and of drawn values (default: %(default)s)")
    add_outputs(check)

    best = commands.add(
        "best-mesh",
        "find the quickest way to arrange so many devices for a step",
        "The step is planned from its own program on every mesh of that many devices.",
        "  eqshard best-mesh my_train.py:step --devices 64 --chip v5e",
        _best_mesh,
    )
    best.add_argument("source", metavar="STEP", help=_SOURCE)
    best.add_argument("--devices", type=int, required=True, metavar="N", help="how many there are")
    best.add_argument("--chip", type=chip_name, default="v5e", help=f"what they are: {', '.join(CHIPS)} (%(default)s)")
    best.add_argument("--axes", default="data,tp", help="names of mesh axes, as many as a mesh may have (%(default)s)")
    best.add_argument(
        "--memory", type=bytes_from_text, metavar="BYTES", help="what a step may take; default: the chip's"
    )
    add_outputs(best)


def _best_mesh(a: argparse.Namespace) -> int:
    if a.devices < 2:
        raise UsageError(f"--devices {a.devices}: there is nothing to arrange; at least 2.")
    axes = [name.strip() for name in a.axes.split(",")]
    if not all(axes) or len(set(axes)) < len(axes):
        raise UsageError(f"--axes {a.axes}: write different names, as data,tp.")
    step = load_step(a.source)
    found = best_mesh(
        step.fn, *step.args, devices=a.devices, chip=a.chip, max_bytes=a.memory, axes=axes, progress=_say_candidate
    )
    show(found.table, found.to_dict, a.json)
    return 0


def _say_candidate(text: str) -> None:
    say(filled(text))


def _compile(a: argparse.Namespace) -> int:
    target = as_target(a.target)
    check_available(target)
    mesh = _mesh(a, target)
    step = load_step(a.source)
    fn, plans = _planned(a, step, mesh)
    found = wait_for(
        f"compiling for {target}",
        lambda: compile_report(fn, *step.args, plans=plans, target=target, donate=a.donate, chip=a.chip),
    )
    show(lambda: report(found, width=width()), found.to_dict, a.json)
    if a.html is not None:
        put(report(found, format="html"), a.html)
    return int(not found.fits)


def _verify(a: argparse.Namespace) -> int:
    if a.mesh is not None:
        simulate(a.mesh.size())
    step = load_step(a.source, shapes=False)
    plan = step.plans
    if plan is None or a.how is not None:
        mesh = given_mesh(a)
        if a.how in ("auto", "replicated"):
            make = auto_plan if a.how == "auto" else replicated_plan
            plan = tuple(make(arg, mesh) for arg in step.args)
        else:
            plan = wait_for("planning", lambda: step_plan(step.fn, *step.args, mesh=mesh, max_bytes=a.memory))
    run = lambda: verify(plan, step.fn, *step.args, runs=a.runs, seed=a.seed)
    found = wait_for("running the planned and the plain step", run)
    show(lambda: report(found, width=width()), found.to_dict, a.json)
    return int(not found.ok)


def _mesh(a: argparse.Namespace, target: Target) -> MeshSpec:
    mesh = given_mesh(a) if a.mesh is not None else MeshSpec(data=target.size, chip=a.chip)
    if mesh.size() != target.size:
        raise UsageError(f"--mesh has {mesh.size()} devices, --target {target} has {target.size}.")
    return mesh if mesh.chip is not None or target.platform == "cpu" else mesh.replace(chip=target.chip)


def _planned(a: argparse.Namespace, step: Step, mesh: MeshSpec) -> tuple[Callable[..., Any], Any]:
    if step.plans is not None and a.how is None:
        return step.fn, step.plans
    if a.how in ("auto", "replicated"):
        make = auto_plan if a.how == "auto" else replicated_plan
        return step.fn, tuple(make(arg, mesh) for arg in step.args)
    plan = wait_for("planning", lambda: step_plan(step.fn, *step.args, mesh=mesh, max_bytes=a.memory))
    return constrain(plan, step.fn), plan
