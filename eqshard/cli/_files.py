"""`diff`, `convert`, `inspect`: plans and checkpoints on disk."""

import argparse
import math
from typing import Any

from .._convert import convert_plan, STRATEGIES
from .._diff import diff
from .._fold import fold
from .._plan import ShardingPlan
from .._report import report
from .._report._text import columns
from .._report._words import count_text, mesh_text, spec_words
from .._spec import spec_text
from .._tree import size_text
from ..checkpoint._contents import contents, step_numbers
from ..checkpoint._files import local_path
from ..checkpoint._stored import Contents
from ._output import put, show, width
from ._plans import read_plan
from ._words import add_mesh, add_outputs, Commands, given_mesh, renames_from_text


def add_commands(commands: Commands) -> None:
    """Adds the three."""
    two = commands.add(
        "diff",
        "say what moves between two plans, and how many bytes",
        "",
        "  eqshard diff before.json after.json",
        _diff,
    )
    two.add_argument("before", metavar="A.json", help="a plan that `eqshard plan --json` wrote")
    two.add_argument("after", metavar="B.json", help="another")
    two.add_argument("--exit-code", action="store_true", help="exit code 1 if they differ")
    add_outputs(two)

    other = commands.add(
        "convert",
        "carry a plan over to another mesh",
        "",
        "  eqshard convert plan.json --mesh fsdp=8,model=4 --rename tp=model",
        _convert,
    )
    other.add_argument("plan", metavar="PLAN.json", help="a plan that `eqshard plan --json` wrote")
    add_mesh(other, required=True, help="the new mesh, as fsdp=8,tp=4")
    other.add_argument("--rename", type=renames_from_text, metavar="NAMES", help="old axes to new ones, as tp=model")
    other.add_argument(
        "--strategy", choices=STRATEGIES, default=STRATEGIES[0], help="what to keep (default: %(default)s)"
    )
    add_outputs(other, html=True)

    look = commands.add(
        "inspect",
        "say what a checkpoint holds, and how it lies",
        "Reads the index alone, no array: of eqshard, Orbax, eformer, or safetensors.",
        "  eqshard inspect runs/7b --step 1000",
        _inspect,
    )
    look.add_argument("path", metavar="CHECKPOINT", help="a checkpoint, a folder of steps, or a safetensors file")
    look.add_argument("--step", type=int, metavar="N", help="which step; by default the latest")
    look.add_argument("--prefix", metavar="NAME", help="only the part below this name")
    add_outputs(look)


def _diff(a: argparse.Namespace) -> int:
    found = diff(read_plan(a.before), read_plan(a.after))
    show(lambda: report(found, width=width()), found.to_dict, a.json)
    return int(a.exit_code and bool(found.moves or found.removed or found.added or found.before != found.after))


def _convert(a: argparse.Namespace) -> int:
    old = read_plan(a.plan)
    new = convert_plan(old, given_mesh(a), strategy=a.strategy, rename=a.rename)
    show(lambda: _converted_text(new), new.to_dict, a.json)
    if a.html is not None:
        put(report(new, format="html"), a.html)
    return 0


def _converted_text(plan: ShardingPlan) -> str:
    lost = [f"{leaf.path}: {given_up}" for leaf in plan for given_up in leaf.given_up]
    text = report(plan, width=width())
    return text if not lost else text + "\n\ngiven up:\n" + "\n".join(f"  {line}" for line in lost[:20])


def _inspect(a: argparse.Namespace) -> int:
    found = contents(a.path, step=a.step, prefix=a.prefix)
    steps = tuple(step_numbers(local_path(a.path)))
    show(lambda: _contents_text(found, steps), lambda: _contents_data(found, steps), a.json)
    return 0


def _contents_text(found: Contents, steps: tuple[int, ...]) -> str:
    lines = [f"{found.where}, written by {found.kind}"]
    if steps:
        more = f" (and {len(steps) - 10} before)" if len(steps) > 10 else ""
        lines.append(f"steps: {', '.join(map(str, steps[-10:]))}{more}")
    params = sum(math.prod(leaf.shape) for leaf in found.leaves)
    total = sum(leaf.nbytes for leaf in found.leaves)
    lines.append(f"{len(found.leaves)} arrays, {count_text(params)} numbers, {size_text(total)}")
    if found.plan is not None:
        lines.append(f"saved from {mesh_text(found.plan.mesh)}")
    keys = [(leaf.type, leaf.spec) for leaf in found.leaves]
    rows = []
    for path, members in fold([leaf.path for leaf in found.leaves], keys):
        leaf = found.leaves[members[0]]
        layout = "unknown" if leaf.spec is None else spec_words(leaf.spec)
        rows.append([path or "(the array)", leaf.type, layout, size_text(leaf.nbytes * len(members))])
    return "\n".join([*lines, "", columns(["leaf", "type", "saved from", "bytes"], rows, width())])


def _contents_data(found: Contents, steps: tuple[int, ...]) -> dict[str, Any]:
    leaves = [
        {
            "path": x.path,
            "shape": list(x.shape),
            "dtype": x.dtype,
            "spec": None if x.spec is None else spec_text(x.spec),
        }
        for x in found.leaves
    ]
    mesh = None if found.plan is None else found.plan.mesh.to_dict()
    return {"where": str(found.where), "kind": found.kind, "steps": list(steps), "mesh": mesh, "leaves": leaves}
