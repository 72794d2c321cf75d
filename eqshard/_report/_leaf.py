"""One leaf, piece by piece: which devices hold which slice, for any rank."""

import html
import itertools
import math
from dataclasses import dataclass

from .._errors import ShardingError
from .._explain import layout_text
from .._leaf import LeafPlan
from .._mesh import MeshSpec
from .._pieces import dim_axes, factors, piece_numbers
from .._plan import ShardingPlan
from .._tree import shown
from ._text import elide
from ._words import mesh_text, short_type


def visualize_leaf(
    plan: ShardingPlan,
    path: str,
    *,
    format: str = "text",
    in_use: bool = False,
    width: int = 80,
    most: int = 16,
) -> str:
    """Draws which devices hold which slice of a leaf.

    Of a leaf of any rank, the dimensions that are split are drawn: the first as rows, the second as columns, and a
    panel for each slice of the others. Devices are numbered in mesh order.

    ```python
    import eqshard, jax
    from jax.sharding import PartitionSpec as P
    plan = eqshard.replicated_plan(jax.ShapeDtypeStruct((8, 6, 4), "float32"), eqshard.MeshSpec(dp=2, tp=2))
    plan = plan.at("").set(P("dp", None, "tp"))
    print(eqshard.visualize_leaf(plan, ""))
    svg = eqshard.visualize_leaf(plan, "", format="svg")
    ```

    **Arguments:**

    - `path`: the leaf's path in the plan.
    - `format`: `"text"`, or `"svg"` for a picture that is a text of SVG.
    - `in_use`: the layout in use, not that at rest.
    - `width`: letters in a line of text.
    - `most`: as many rows, columns and panels at most.

    **Raises:**

    - `MismatchError`: no such leaf.
    """
    if format not in ("text", "svg"):
        raise ShardingError(f"unknown `format` {format!r}: it is 'text' or 'svg'.")
    leaf = plan[path]
    grid = _grid(leaf, plan.mesh, in_use)
    return _svg(grid, leaf, plan.mesh, most) if format == "svg" else _text(grid, leaf, plan.mesh, width, most)


@dataclass(frozen=True)
class _Grid:
    """The pieces of a leaf as rows and columns in panels."""

    leaf: LeafPlan
    axes: tuple[tuple[str, ...], ...]
    cuts: tuple[int, ...]
    row_dim: int | None
    col_dim: int | None
    panel_dims: tuple[int, ...]
    holders: dict[tuple[int, ...], list[int]]
    """By the number of a piece in each dimension, the devices that hold it."""
    in_use: bool

    def count(self, dim: int | None) -> int:
        return 1 if dim is None else self.cuts[dim]

    def slice(self, dim: int | None, number: int) -> str:
        if dim is None:
            return ""
        n = self.leaf.shape[dim]
        piece = -(-n // self.cuts[dim])
        return f"{min(n, number * piece)}:{min(n, (number + 1) * piece)}"

    def devices(self, panel: tuple[int, ...], row: int, col: int) -> list[int]:
        number = [0] * len(self.cuts)
        for dim, at in (*zip(self.panel_dims, panel), (self.row_dim, row), (self.col_dim, col)):
            if dim is not None:
                number[dim] = at
        return self.holders.get(tuple(number), [])

    def panels(self) -> list[tuple[int, ...]]:
        return list(itertools.product(*(range(self.cuts[dim]) for dim in self.panel_dims)))

    def panel_text(self, panel: tuple[int, ...]) -> str:
        said = {dim: self.slice(dim, at) for dim, at in zip(self.panel_dims, panel)}
        return "[" + ", ".join(said.get(dim, ":") for dim in range(len(self.cuts))) + "]"

    def dim_text(self, dim: int) -> str:
        return f"dim {dim} ({self.leaf.shape[dim]}) over {', '.join(self.axes[dim])}"


def _grid(leaf: LeafPlan, mesh: MeshSpec, in_use: bool) -> _Grid:
    axes = dim_axes(leaf.shape, leaf.use if in_use else leaf.spec, mesh.shape)
    split = [dim for dim, names in enumerate(axes) if names]
    row, col = (split[0], split[1]) if len(split) > 1 else (None, split[0] if split else None)
    holders: dict[tuple[int, ...], list[int]] = {}
    numbers = [piece_numbers(names, mesh).tolist() for names in axes]
    count = len(piece_numbers((), mesh))
    for device in range(count):
        holders.setdefault(tuple(number[device] for number in numbers), []).append(device)
    return _Grid(leaf, axes, factors(axes, mesh.shape), row, col, tuple(split[2:]), holders, in_use)


def device_list(devices: list[int]) -> str:
    """`0-3,8`; evenly spaced ones as `0,4,…,60`."""
    steps = {b - a for a, b in itertools.pairwise(devices)}
    if len(devices) > 3 and len(steps) == 1:
        step = steps.pop()
        return f"{devices[0]}-{devices[-1]}" if step == 1 else f"{devices[0]},{devices[1]},…,{devices[-1]}"
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], device]
        else:
            runs.append([device])
    return ",".join("-".join(map(str, run)) for run in runs)


def _text(grid: _Grid, leaf: LeafPlan, mesh: MeshSpec, width: int, most: int) -> str:
    layout = layout_text(leaf, leaf.use if grid.in_use else leaf.spec, mesh)
    lines = [f"{shown(leaf.path)} {short_type(leaf)} on {mesh_text(mesh)}", layout]
    if grid.row_dim is not None and grid.col_dim is not None:
        lines.append(f"rows: {grid.dim_text(grid.row_dim)}; columns: {grid.dim_text(grid.col_dim)}")
    elif grid.col_dim is not None:
        lines.append(f"columns: {grid.dim_text(grid.col_dim)}")
    panels = grid.panels()
    for panel in panels[:most]:
        lines += ["", *([f"{grid.panel_text(panel)}"] if panel else []), *_panel_text(grid, panel, width, most)]
    if len(panels) > most:
        lines.append(f"… and {len(panels) - most} more panels")
    return "\n".join(lines)


def _panel_text(grid: _Grid, panel: tuple[int, ...], width: int, most: int) -> list[str]:
    """A table of device lists, with as many columns as fit a line."""
    rows, cols = grid.count(grid.row_dim), grid.count(grid.col_dim)
    shown_rows = min(rows, most)
    side = max((len(grid.slice(grid.row_dim, r)) for r in range(shown_rows)), default=0)
    cells = [[device_list(grid.devices(panel, r, c)) for c in range(min(cols, most))] for r in range(shown_rows)]
    heads = [grid.slice(grid.col_dim, c) for c in range(min(cols, most))]
    wide = min(max(len(text) for text in (*heads, *itertools.chain(*cells), "1")), 24)
    fit = max(1, min(len(heads), (width - side - 1) // (wide + 3)))
    more = " …" if fit < cols else ""
    rule = " " * side + " +" + ("-" * (wide + 2) + "+") * fit
    lines = [(" " * side + "   " + "   ".join(elide(h, wide).center(wide) for h in heads[:fit]) + more).rstrip(), rule]
    for r in range(shown_rows):
        row = " | ".join(elide(cell, wide).center(wide) for cell in cells[r][:fit])
        lines.append(f"{grid.slice(grid.row_dim, r).rjust(side)} | {row} |{more}")
    lines += [rule, *([f"{'…'.rjust(side)}   and {rows - shown_rows} more rows"] if rows > shown_rows else [])]
    return lines if grid.col_dim is not None else lines[1:]


_CELL, _TALL, _SIDE, _HEAD = 96, 30, 110, 22


def _svg(grid: _Grid, leaf: LeafPlan, mesh: MeshSpec, most: int) -> str:
    rows, cols = min(grid.count(grid.row_dim), most), min(grid.count(grid.col_dim), most)
    panels = grid.panels()[:most]
    each = _HEAD * (2 if grid.panel_dims else 1) + rows * _TALL + 14
    width, top = max(_SIDE + cols * _CELL + 10, 420), 52
    title = f"{leaf.path or '(the array)'}  {short_type(leaf)}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top + each * len(panels)}" width="{width}" '
        'class="eqshard" role="img" font-family="system-ui, sans-serif" font-size="12" style="max-width:100%">',
        "<style>.eqshard text{fill:#1a1f29}.eqshard .s{fill:#5d6675}"
        ".eqshard .d{fill:#14181f;text-anchor:middle;dominant-baseline:central;font-size:11px}"
        "@media(prefers-color-scheme:dark){.eqshard text{fill:#e7eaf0}.eqshard .s{fill:#98a2b3}"
        ".eqshard .d{fill:#14181f}}</style>",
        _label(0, 15, title, "", 'font-weight="600"'),
        _label(0, 34, layout_text(leaf, leaf.use if grid.in_use else leaf.spec, mesh), "s"),
    ]
    for i, panel in enumerate(panels):
        parts += _panel_svg(grid, panel, top + i * each, rows, cols)
    return "".join([*parts, "</svg>"])


def _panel_svg(grid: _Grid, panel: tuple[int, ...], y: int, rows: int, cols: int) -> list[str]:
    parts = []
    if grid.panel_dims:
        parts.append(_label(0, y + 14, grid.panel_text(panel), "", 'font-weight="600"'))
        y += _HEAD
    heads = [] if grid.col_dim is None else [grid.slice(grid.col_dim, c) for c in range(cols)]
    parts += [
        _label(_SIDE + (c + 0.5) * _CELL, y + 14, head, "s", 'text-anchor="middle"') for c, head in enumerate(heads)
    ]
    for r in range(rows):
        at = y + _HEAD + r * _TALL
        parts.append(_label(_SIDE - 8, at + _TALL / 2 + 4, grid.slice(grid.row_dim, r), "s", 'text-anchor="end"'))
        for c in range(cols):
            devices = device_list(grid.devices(panel, r, c))
            x, colour = _SIDE + c * _CELL, _colour(grid, r, c)
            parts.append(
                f'<rect x="{x}" y="{at}" width="{_CELL - 2}" height="{_TALL - 2}" rx="3" fill="{colour}"/>'
                f'<text class="d" x="{x + _CELL / 2 - 1}" y="{at + _TALL / 2 - 1}">{elide(devices, 15)}'
                f"<title>devices {devices}</title></text>"
            )
    return parts


def _colour(grid: _Grid, row: int, col: int) -> str:
    """Rows differ in hue and columns in lightness; a single row in hue."""
    if grid.row_dim is None:
        row, rows, col, cols = col, grid.count(grid.col_dim), 0, 1
    else:
        rows, cols = grid.count(grid.row_dim), grid.count(grid.col_dim)
    hue = 210 + 300 * row / rows if math.prod(grid.cuts) > 1 else 210
    return f"hsl({hue % 360:.0f} 62% {84 - 24 * col / cols:.0f}%)"


def _label(x: int | float, y: int | float, text: str, kind: str, more: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}"{name} {more}>{html.escape(text)}</text>'
