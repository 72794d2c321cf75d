"""Reports as rich tables, if rich is installed."""

from collections.abc import Sequence
from typing import Any

from .._analyze import Analysis
from .._errors import ShardingError
from .._issue import Issue
from .._plan import ShardingPlan
from .._spec import entries, entry_axes, UNCONSTRAINED
from .._tree import size_text
from ._text import headline, issues_text
from ._words import largest, Row, rows_of, short_type


_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")
_SEVERITY = {"error": "bold red", "warning": "yellow", "info": "dim"}


def plan_rich(plan: ShardingPlan, analysis: Analysis, issues: Sequence[Issue], most: int) -> Any:
    """A plan as a rich renderable, each mesh axis in its colour."""
    rich = _rich()
    rows, rest = largest(rows_of(plan), most)
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(plan.mesh.names)}
    in_use = any(row.leaf.use != row.leaf.spec for row in rows)
    table = rich.Table(box=rich.SIMPLE_HEAD, title=headline(analysis, 200), title_justify="left", title_style="")
    for title in ("leaf", "type", "at rest", *(("in use",) if in_use else ())):
        table.add_column(title, overflow="fold")
    table.add_column("a device", justify="right")
    for row in rows:
        use = [_spec(rich, row.leaf.use, colours) if row.leaf.use != row.leaf.spec else ""] if in_use else []
        table.add_row(
            rich.Text(row.path or "(the array)"),
            rich.Text(short_type(row.leaf), style="dim"),
            _layout(rich, row, colours),
            *use,
            _bytes(rich, row, rows),
        )
    if rest:
        table.caption = f"and {len(rest)} smaller rows, {size_text(sum(r.bytes_per_device for r in rest))} a device"
    parts = [rich.Text(issues_text([issue], 10_000), style=_SEVERITY[issue.severity]) for issue in issues[:most]]
    return rich.Group(table, *parts)


def _layout(rich: Any, row: Row, colours: dict[str, str]) -> Any:
    text = _spec(rich, row.leaf.spec, colours)
    return text.append(f" ({row.leaf.memory_kind})", style="dim") if row.leaf.memory_kind else text


def _spec(rich: Any, spec: Any, colours: dict[str, str]) -> Any:
    text = rich.Text("P(")
    for i, entry in enumerate(entries(spec)):
        text.append(", " if i else "")
        axes = entry_axes(entry)
        if not axes:
            text.append("UNCONSTRAINED" if entry is UNCONSTRAINED else "None", style="dim")
        text.append("(" if len(axes) > 1 else "")
        for j, axis in enumerate(axes):
            text.append(", " if j else "").append(repr(axis), style=colours.get(axis, "bold red"))
        text.append(")" if len(axes) > 1 else "")
    return text.append(")")


def _bytes(rich: Any, row: Row, rows: list[Row]) -> Any:
    most = max(r.bytes_per_device for r in rows) or 1
    bar = "█" * round(8 * row.bytes_per_device / most)
    return rich.Text.assemble((bar, "blue"), " ", size_text(row.bytes_per_device))


class _Names:
    """What is used of rich."""

    def __init__(self, table: Any, text: Any, group: Any, box: Any):
        self.Table, self.Text, self.Group, self.SIMPLE_HEAD = table, text, group, box


def _rich() -> Any:
    try:
        from rich import box  # noqa: PLC0415  an extra: only who asks for a rich table needs it
        from rich.console import Group  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415
    except ImportError:
        raise ShardingError(
            '`format="rich"` needs the package rich: `pip install eqshard[rich]`; or use `format="text"`.'
        ) from None
    return _Names(Table, Text, Group, box.SIMPLE_HEAD)
