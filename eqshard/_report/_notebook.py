"""What notebooks show: small tables, without scripts, in the notebook's own colours."""

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._analyze import Analysis, analyze
from .._axes import _FIELDS, PartitionAxis
from .._mesh import MeshSpec
from .._pieces import device_count
from .._plan import ShardingPlan
from .._tree import size_text
from ._text import headline, row_cells
from ._words import largest, mesh_text, rows_of


_MOST = 40
_CELL = "padding:2px 10px 2px 0;text-align:left;vertical-align:top;border:0"
_MONO = "font-family:ui-monospace,monospace;font-size:.92em"


def plan_html(plan: ShardingPlan) -> str:
    """A plan as a table; its largest rows."""
    rows, rest = largest(rows_of(plan), _MOST)
    most = max((row.bytes_per_device for row in rows), default=0) or 1
    cells = [[*row_cells(row)[:4], _bar(row.bytes_per_device / most, row_cells(row)[4])] for row in rows]
    titles = ["leaf", "type", "at rest", "in use", "a device"]
    if not any(row[3] for row in cells):
        titles.pop(3)
        cells = [[*row[:3], row[4]] for row in cells]
    more = f"<div>… and {len(rest)} smaller rows</div>" if rest else ""
    return f"<div>{_lines(headline(analyze(plan), 200))}{_table(titles, cells)}{more}</div>"


def analysis_html(analysis: Analysis) -> str:
    """An analysis: its numbers, and a bar for each device where they differ."""
    held = analysis.bytes_per_device
    most = max(held, default=0) or 1
    axes = [[a.name, str(a.size), str(a.leaves), _bar(a.share, f"{a.share:.0%}")] for a in analysis.axes]
    body = _lines(headline(analysis, 200)) + _table(["mesh axis", "size", "leaves", "of all bytes"], axes)
    if len(set(held)) > 1:
        bars = [[str(i), _bar(n / most, size_text(n))] for i, n in enumerate(held[:_MOST])]
        body += _table(["device", "at rest"], bars)
    return f"<div>{body}</div>"


def mesh_html(mesh: MeshSpec) -> str:
    """A mesh as a grid of device numbers: the last axis across, the one before it down, the others as blocks."""
    count = device_count(mesh)
    if count > 512:
        return f"<div>{html.escape(mesh_text(mesh))}</div>"
    sizes = [max(size, 1) for size in mesh.sizes]
    ids = range(count) if mesh.placement is None else mesh.placement.ids
    grid = np.array(list(ids)).reshape([1] * (2 - len(sizes)) + sizes)
    blocks = []
    for at in np.ndindex(grid.shape[:-2]):
        name = ", ".join(f"{axis} {i}" for axis, i in zip(mesh.names, at))
        rows = "".join("<tr>" + "".join(map(_device, row)) + "</tr>" for row in grid[at])
        blocks.append(
            f'<div style="display:inline-block;margin:0 14px 6px 0"><div>{html.escape(name)}</div>'
            f'<table style="border-collapse:collapse">{rows}</table></div>'
        )
    last = [html.escape(name) for name in mesh.names[-2:]]
    way = f"{last[0]} ↓ {last[1]} →" if len(last) > 1 else f"{last[0]} →"
    return f"<div><div>{html.escape(mesh_text(mesh))} ({way})</div>{''.join(blocks)}</div>"


def axes_html(names: PartitionAxis) -> str:
    """Logical axes: their mesh axes in training and in decoding."""
    tokens = [*_FIELDS, *(name for name in names.registered if name not in _FIELDS)]
    rows = [[token, *(_axis(names.resolve_axis([token], mode)[0]) for mode in ("train", "decode"))] for token in tokens]
    return _table(["logical axis", "train, prefill", "decode, insert"], rows)


def _axis(axes: Any) -> str:
    return "–" if not axes else axes if isinstance(axes, str) else " × ".join(axes)


def _device(number: Any) -> str:
    style = "border:1px solid rgba(128,128,128,.45);padding:1px 7px;text-align:right"
    return f'<td style="{style}">{int(number)}</td>'


class _Markup(str):
    """A cell that is HTML already."""


def _bar(part: int | float, text: str) -> str:
    return _Markup(
        f'<span style="display:inline-block;width:{max(0.0, min(part, 1.0)) * 70:.0f}px;height:.6em;'
        f'background:#5b8def;border-radius:2px;margin-right:6px"></span>{html.escape(text)}'
    )


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th style="{_CELL};opacity:.65;font-weight:600">{html.escape(t)}</th>' for t in titles)
    body = "".join(
        "<tr>" + "".join(f'<td style="{_CELL};{_MONO}">{_cell(cell)}</td>' for cell in row) + "</tr>" for row in rows
    )
    return f'<table style="border-collapse:collapse"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _cell(text: str) -> str:
    return text if isinstance(text, _Markup) else html.escape(text)


def _lines(text: str) -> str:
    return "".join(f"<div>{html.escape(line)}</div>" for line in text.splitlines())
