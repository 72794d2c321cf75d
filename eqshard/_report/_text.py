"""Reports as plain text."""

import textwrap
from collections.abc import Sequence

from .._analyze import Analysis
from .._diff import Diff, Move
from .._fold import fold
from .._issue import Issue
from .._leaf_check import LeafCheck, Verification
from .._plan import ShardingPlan
from .._tree import is_dtype_name, shown, size_text, type_text
from ._words import count_text, fold_issues, largest, mesh_text, ratio_text, Row, rows_of, short_type, spec_words


def plan_text(plan: ShardingPlan, analysis: Analysis, issues: Sequence[Issue], width: int, most: int) -> str:
    """A plan as a table: what it is, its rows, its issues."""
    parts = [headline(analysis, width), rows_text(plan, width, most)]
    return "\n\n".join([*parts, issues_text(issues, width)] if issues else parts)


def headline(analysis: Analysis, width: int) -> str:
    """The two lines that matter most."""
    held = analysis.bytes_per_device
    most, least = max(held, default=0), min(held, default=0)
    each = size_text(most) if most == least else f"{size_text(least)} to {size_text(most)}"
    leaves = f"{analysis.leaves} lea{'f' if analysis.leaves == 1 else 'ves'}"
    params = f"{count_text(analysis.params)} parameters"
    lines = [
        f"{leaves}, {params}, {size_text(analysis.nbytes)} on {mesh_text(analysis.mesh)}",
        f"each device holds {each}; {copies_text(analysis.replication)} of a byte on average",
    ]
    if analysis.use_bytes_per_device != held:
        lines.append(f"all in use at once: {size_text(max(analysis.use_bytes_per_device))} a device")
    return "\n".join(textwrap.fill(line, width, subsequent_indent="  ") for line in lines)


def copies_text(replication: int | float) -> str:
    text = ratio_text(replication)
    return "1 copy" if text == "1" else f"{text} copies"


def rows_text(plan: ShardingPlan, width: int, most: int) -> str:
    rows, rest = largest(rows_of(plan), most)
    table = [row_cells(row) for row in rows]
    titles = ["leaf", "type", "at rest", "in use", "a device"]
    if all(row.leaf.use == row.leaf.spec for row in rows):
        table, titles = [[*cells[:3], cells[4]] for cells in table], [*titles[:3], titles[4]]
    text = columns(titles, table, width)
    if rest:
        more = sum(row.bytes_per_device for row in rest)
        text += f"\n… and {len(rest)} smaller rows, {size_text(more)} a device"
    return text


def row_cells(row: Row) -> list[str]:
    """Leaf, type, at rest, in use, bytes a device."""
    kind = f" ({row.leaf.memory_kind})" if row.leaf.memory_kind else ""
    use = "" if row.leaf.use == row.leaf.spec else spec_words(row.leaf.use)
    spec = spec_words(row.leaf.spec) + kind
    return [row.path or "(the array)", short_type(row.leaf), spec, use, size_text(row.bytes_per_device)]


def columns(titles: list[str], table: list[list[str]], width: int) -> str:
    """A table with its last column to the right; long first cells lose their middle so that lines fit."""
    widths = [max(len(row[i]) for row in (titles, *table)) for i in range(len(titles))]
    over = sum(widths) + 2 * (len(widths) - 1) - width
    if over > 0:
        widths[0] = max(widths[0] - over, min(widths[0], 20))

    def line(cells: list[str]) -> str:
        first = elide(cells[0], widths[0]).ljust(widths[0])
        middle = [cell.ljust(n) for cell, n in zip(cells[1:-1], widths[1:-1])]
        return "  ".join([first, *middle, cells[-1].rjust(widths[-1])]).rstrip()

    return "\n".join([line(titles), "  ".join("-" * n for n in widths), *map(line, table)])


def elide(text: str, width: int) -> str:
    """`text` in `width` letters: its end says more than its middle."""
    if len(text) <= width:
        return text
    tail = (width - 1) * 2 // 3
    return text[: width - 1 - tail] + "…" + text[len(text) - tail :]


def issues_text(issues: Sequence[Issue], width: int) -> str:
    """Issues, those with the same words once."""
    lines = []
    for issue, path, times in fold_issues(issues):
        many = f" ({times} leaves)" if times > 1 else ""
        where = f" {path}{many}:" if path else ":"
        text = f"{issue.severity} {issue.code}{where} {issue.message} {issue.remedy}"
        lines.append(textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False))
    return "\n".join(lines) if lines else "no issues"


def analysis_text(analysis: Analysis, width: int) -> str:
    """An analysis: headline, parts, axes, largest leaves."""
    part = analysis.sharded_bytes / analysis.nbytes if analysis.nbytes else 0.0
    lines = [
        headline(analysis, width),
        f"split {size_text(analysis.sharded_bytes)} ({part:.0%}), whole on every device "
        f"{size_text(analysis.replicated_bytes)}; balance {ratio_text(analysis.balance)}",
    ]
    if len(analysis.memory_kinds) > 1:
        lines.append("by memory: " + ", ".join(f"{kind} {size_text(n)}" for kind, n in analysis.memory_kinds))
    axes = [[a.name, str(a.size), str(a.leaves), f"{a.share:.0%}", size_text(a.nbytes)] for a in analysis.axes]
    top = [[leaf.path or "(the array)", leaf.type, spec_words(leaf.spec), size_text(leaf.bytes_per_device)]
           for leaf in analysis.largest]  # fmt: skip
    return "\n".join(
        [
            *lines,
            "",
            columns(["mesh axis", "size", "leaves", "of all bytes", "bytes"], axes, width),
            "",
            columns(["largest leaves", "type", "at rest", "a device"], top, width),
        ]
    )


def diff_text(found: Diff, width: int, most: int) -> str:
    """A diff: what moves, folded, and what it costs."""
    keys = [(m.type, m.before, m.after, m.how) for m in found.moves]
    rows = [(f.path, found.moves[f.members[0]], len(f.members)) for f in fold([m.path for m in found.moves], keys)]
    rows = sorted(rows, key=lambda row: -row[1].receives * row[2])
    receives, sends = max(found.receives_per_device, default=0), max(found.sends_per_device, default=0)
    lines = [f"{len(found.moves)} leaves move; a device receives {size_text(receives)} and sends {size_text(sends)}"]
    if found.before.axes != found.after.axes:
        lines.append(f"from {mesh_text(found.before)} to {mesh_text(found.after)}")
    if rows:
        titles = ["leaf", "before", "after", "how", "receives"]
        lines += ["", columns(titles, [_move_cells(*row) for row in rows[:most]], width)]
        lines += [f"… and {len(rows) - most} more rows"] if len(rows) > most else []
    for name, paths in (("only before", found.removed), ("only after", found.added)):
        lines += [f"{name}: " + ", ".join(f.path for f in fold(paths, [0] * len(paths))[:most])] if paths else []
    return "\n".join(lines)


def _move_cells(path: str, move: Move, times: int) -> list[str]:
    cells = [path or "(the array)", spec_words(move.before), spec_words(move.after), move.how]
    return [*cells, size_text(move.receives * times)]


def verification_text(found: Verification, width: int, most: int) -> str:
    """A verification: the verdict, a table of its leaves, and why some are at fault."""
    leaves = f"{len(found)} lea{'f' if len(found) == 1 else 'ves'}"
    if found.ok:
        lines = [f"ok: {leaves}, no difference beyond rounding (noise of {found.runs} runs)"]
    else:
        lines = [f"FAULT: {len(found.faults)} of {leaves} differ by more than rounding (noise of {found.runs} runs)"]
    titles = ["leaf", "type", "max abs", "max rel", "noise", "verdict"]
    # Faults first, then what differs most for its noise; those that are equal keep the order of the tree.
    order = sorted(found, key=lambda leaf: (leaf.ok, -leaf.max_abs / leaf.noise if leaf.noise else 0.0))
    if order:
        lines += ["", columns(titles, [_check_cells(leaf) for leaf in order[:most]], width)]
        lines += [f"… and {len(order) - most} more leaves"] if len(order) > most else []
    faults = [f"fault in {shown(leaf.path)}: {leaf.why}" for leaf in found.faults]
    lines += ["", *faults[:most]] if faults else []
    return "\n".join(
        line if "  " in line else textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False)
        for line in lines
    )


def _check_cells(leaf: LeafCheck) -> list[str]:
    kind = type_text(leaf.shape, leaf.dtype) if is_dtype_name(leaf.dtype) else leaf.dtype
    numbers = [f"{n:.1e}" for n in (leaf.max_abs, leaf.max_rel, leaf.noise)]
    return [leaf.path or "(the array)", kind, *numbers, leaf.verdict]
