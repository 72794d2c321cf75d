"""`plan`, `explain`, `check`: a plan for a model, made or read."""

import argparse
import pathlib
from typing import Any

from .._auto import auto_plan
from .._check import validate
from .._explain import explain
from .._fsdp import fsdp_plan
from .._memory import memory_plan
from .._mesh import MeshSpec
from .._plan import replicated_plan, ShardingPlan
from .._presets import tp_rules
from .._report import report
from .._report._words import counts
from .._rules import rule_plan
from .._tree import did_you_mean
from ._load import load_shapes
from ._output import put, show, width
from ._rules_file import plan_by_file
from ._words import add_mesh, add_outputs, bytes_from_text, Commands, given_mesh, UsageError


_SOURCE = "FILE.py:NAME, a model or a function that makes one (it is traced, not run)"
_HOW = ("auto", "fsdp", "tp", "replicated")


def add_commands(commands: Commands) -> None:
    """Adds the three."""
    plan = commands.add(
        "plan",
        "lay a model out over a mesh",
        "Nothing is allocated, so a model of any size and a mesh of any size will do.\n"
        "Without more, the largest dimensions are split as far as they divide.",
        "  eqshard plan my_model.py:make --mesh fsdp=4,tp=2 --html plan.html",
        _plan,
    )
    plan.add_argument("source", metavar="MODEL", help=_SOURCE)
    _add_makers(plan)
    add_outputs(plan, html=True)

    why = commands.add(
        "explain",
        "say for each leaf how it lies, and why",
        "",
        "  eqshard explain my_model.py:make --mesh fsdp=4,tp=2 --leaf embed",
        _explain,
    )
    why.add_argument("source", metavar="MODEL", help=f"{_SOURCE}; or a plan.json")
    why.add_argument("--leaf", metavar="PATTERN", help="only leaves whose path it finds (a regular expression)")
    _add_makers(why)

    check = commands.add(
        "check",
        "say what is wrong with a plan",
        "Exit code 1 if there is an error, for your CI: does the plan still fit?",
        "  eqshard check my_model.py:make --plan plan.json",
        _check,
    )
    check.add_argument("source", metavar="MODEL", help=f"{_SOURCE}; or a plan.json alone")
    check.add_argument("--plan", metavar="FILE", help="the plan to check the model against")
    check.add_argument("--strict", action="store_true", help="exit code 1 on warnings too")
    _add_makers(check)
    add_outputs(check)


def _add_makers(parser: argparse.ArgumentParser) -> None:
    add_mesh(parser)
    parser.add_argument("--memory", type=bytes_from_text, metavar="BYTES", help="the least sharding that fits, as 16GB")
    parser.add_argument("--rules", metavar="FILE", help="rules.toml, or rules written out: 'weight->tp.fsdp, bias->'")
    parser.add_argument("--how", choices=_HOW, help="another way: fsdp and tp take the axes of these names")


def _made_plan(a: argparse.Namespace, tree: Any) -> ShardingPlan:
    ways = [f"--{name}" for name in ("memory", "rules", "how") if getattr(a, name) is not None]
    if len(ways) > 1:
        raise UsageError(f"{' and '.join(ways)} are ways to choose the layout: give one of them.")
    mesh = given_mesh(a)
    if a.rules is not None:
        return plan_by_file(tree, mesh, a.rules)
    if a.memory is not None:
        return memory_plan(tree, mesh, a.memory)
    return _by_name(a.how or "auto", tree, mesh)


def _by_name(how: str, tree: Any, mesh: MeshSpec) -> ShardingPlan:
    if how == "fsdp":
        return fsdp_plan(tree, mesh)
    if how == "tp":
        return rule_plan(tree, mesh, tp_rules(tree), strict=False)
    return auto_plan(tree, mesh) if how == "auto" else replicated_plan(tree, mesh)


def read_plan(file: str) -> ShardingPlan:
    """A plan from a file that `--json` wrote."""
    path = pathlib.Path(file)
    if not path.is_file():
        near = [p.name for p in path.parent.glob("*.json")] if path.parent.is_dir() else []
        raise UsageError(f"no file {file}." + did_you_mean(path.name, near))
    try:
        return ShardingPlan.from_json(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise UsageError(f"{file} is no text.") from None


def _asked(a: argparse.Namespace) -> tuple[ShardingPlan, Any]:
    """The plan that the arguments mean, and the model where they name one."""
    given = getattr(a, "plan", None)
    if a.source.endswith(".json"):
        if given is not None or a.mesh is not None:
            raise UsageError(f"{a.source} is a plan already: --mesh and --plan go with a model, as my_model.py:make.")
        return read_plan(a.source), None
    if given is not None:
        return read_plan(given), load_shapes(a.source)
    tree = load_shapes(a.source)
    return _made_plan(a, tree), tree


def _plan(a: argparse.Namespace) -> int:
    tree = load_shapes(a.source)
    plan = _made_plan(a, tree)
    show(lambda: report(plan, tree, width=width()), plan.to_dict, a.json)
    if a.html is not None:
        put(report(plan, tree, format="html"), a.html)
    return 0


def _explain(a: argparse.Namespace) -> int:
    print(explain(_asked(a)[0], a.leaf))
    return 0


def _check(a: argparse.Namespace) -> int:
    plan, tree = _asked(a)
    issues = validate(plan, tree)
    bad = ("error", "warning") if a.strict else ("error",)

    def text() -> str:
        return report(issues, width=width()) + (f"\n{counts(issues)}" if issues else "")

    show(
        text,
        lambda: {"ok": not any(i.severity in bad for i in issues), "issues": [i.to_dict() for i in issues]},
        a.json,
    )
    return int(any(issue.severity in bad for issue in issues))
