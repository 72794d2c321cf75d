"""A CompileReport as text and as rich tables."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._tree import size_text
from ..compiler import Collective, CompileReport
from ._rich import _rich
from ._text import columns, elide, issues_text
from ._words import mesh_text


def seconds_text(s: float) -> str:
    """A time for people: `12.3 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if s >= scale:
            return f"{s / scale:.3g} {unit}"
    return f"{s / 1e-6:.2g} µs" if s else "0"


@dataclass(frozen=True)
class Row:
    """Collectives that differ in nothing that a reader would look at."""

    first: Collective
    count: int
    bytes: int
    seconds: float
    exposed: float
    trips: int


def collective_rows(collectives: Sequence[Collective]) -> list[Row]:
    """Collectives of one kind, type, axes and line as one row; the dearest first."""
    groups: dict[Any, list[Collective]] = {}
    for c in collectives:
        groups.setdefault((c.kind, c.type, c.axes, c.source, c.op, c.moves, c.overlapped), []).append(c)
    rows = [
        Row(
            first=found[0],
            count=len(found),
            bytes=sum(c.total_bytes for c in found),
            seconds=float(sum(c.total_seconds for c in found)),
            exposed=float(sum(c.exposed_seconds * c.trips for c in found)),
            trips=sum(c.trips for c in found),
        )
        for found in groups.values()
    ]
    return sorted(rows, key=lambda r: (-r.exposed, -r.seconds, -r.bytes))


def place_text(c: Collective) -> str:
    """Where a collective comes from: what it moves, else its line, else its operation."""
    line = c.source.rpartition("/")[2]
    return " ".join(part for part in (c.moves, f"({line})" if line else "") if part) or c.op.rpartition("/")[2]


def headline(r: CompileReport) -> list[str]:
    """The lines that matter most."""
    memory = r.memory
    fits = "fits" if r.fits else "does not fit"
    lines = [f"{r.target}, {mesh_text(r.mesh)}, times of a {r.chip.name}"]
    if r.refused:
        return [*lines, f"refused: {size_text(memory.peak)} a device, {size_text(memory.limit)} allowed"]
    return [
        *lines,
        f"step {seconds_text(r.step_seconds)}: products {seconds_text(r.product_seconds)}, other work "
        f"{seconds_text(r.memory_seconds)}, waiting for the network {seconds_text(r.exposed_seconds)}; "
        f"bound by {r.bound}, {r.mfu:.1%} of the peak",
        f"network {seconds_text(r.network_seconds)}, of which hidden {seconds_text(r.hidden_seconds)}; "
        f"{size_text(r.wire_bytes)} sent by each device",
        f"memory {size_text(memory.peak)} of {size_text(memory.limit)} a device ({fits}): arguments "
        f"{size_text(memory.arguments)}, outputs {size_text(memory.outputs)}, of which in their place "
        f"{size_text(memory.aliased)}, temporary {size_text(memory.temporary)}",
    ]


def _cells(row: Row) -> list[str]:
    c = row.first
    how = "beside" if c.overlapped else "alone"
    times = f"{row.trips}" if row.count == 1 else f"{row.trips} in {row.count}"
    over = ",".join(c.axes) or str(c.group_size)
    return [
        c.kind,
        over,
        times,
        how,
        place_text(c),
        size_text(row.bytes),
        seconds_text(row.seconds),
        seconds_text(row.exposed),
    ]


def _narrow(cells: list[str]) -> list[str]:
    """Without `runs`, which the last two say too."""
    return [*cells[:3], *cells[4:]]


def _table(rows: Sequence[Row], width: int) -> str:
    """The rows in lines of `width`: what a collective is of loses its middle first."""
    titles, table = list(TITLES), [_cells(row) for row in rows]
    if width < 100:
        titles, table = _narrow(titles), list(map(_narrow, table))
    of = titles.index("of")
    widths = [max(len(cells[i]) for cells in (titles, *table)) for i in range(len(titles))]
    room = max(width - sum(widths) - 2 * (len(widths) - 1) + widths[of], 10)
    return columns(titles, [[*cells[:of], elide(cells[of], room), *cells[of + 1 :]] for cells in table], width)


TITLES = ["collective", "over", "trips", "runs", "of", "sent", "time", "exposed"]


def compile_text(r: CompileReport, width: int, most: int) -> str:
    """A report as plain text."""
    parts = ["\n".join(textwrap.fill(line, width, subsequent_indent="  ") for line in headline(r))]
    rows = collective_rows(r.collectives)
    if rows:
        parts.append(_table(rows[:most], width))
        if len(rows) > most:
            rest = rows[most:]
            parts[-1] += f"\n… and {len(rest)} cheaper rows, {size_text(sum(row.bytes for row in rest))} sent"
    if r.hints:
        parts.append(issues_text(r.hints, width))
    if r.unread:
        parts.append(f"{len(r.unread)} lines of the module could not be read, the first: {r.unread[0][:width]}")
    return "\n\n".join(parts)


def compile_rich(r: CompileReport, most: int) -> Any:
    """A report as a rich renderable."""
    rich = _rich()
    table = rich.Table(box=rich.SIMPLE_HEAD, title="\n".join(headline(r)), title_justify="left", title_style="")
    for title in TITLES:
        table.add_column(title, justify="right" if title in ("trips", "sent", "time", "exposed") else "left")
    for row in collective_rows(r.collectives)[:most]:
        cells = _cells(row)
        style = "red" if row.exposed > 0.1 * r.seconds else ""
        table.add_row(
            *(rich.Text(cell, style=style if title == "exposed" else "") for title, cell in zip(TITLES, cells))
        )
    hints = [rich.Text(issues_text([hint], 10_000), style="yellow") for hint in r.hints[:most]]
    return rich.Group(table, *hints)
