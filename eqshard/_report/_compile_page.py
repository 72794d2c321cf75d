"""A CompileReport as one HTML page: a timeline, memory against HBM, the collectives by cost."""

import html
from collections.abc import Iterator

from .._tree import size_text
from ..compiler import Collective, CompileReport, Segment
from ._compile_text import collective_rows, place_text, seconds_text, TITLES
from ._page import _page
from ._words import mesh_text


_WIDTH, _LEFT, _ROW, _TOP = 1400, 130, 34, 26
_LANES = {"compute": "computation", "wait": "waiting", "network": "network"}
_COLOURS = {
    "compute": "var(--one)",
    "wait": "var(--all)",
    "all-gather": "var(--axis0)",
    "reduce-scatter": "var(--axis2)",
    "all-reduce": "var(--axis1)",
    "all-to-all": "var(--axis3)",
    "collective-permute": "var(--axis4)",
}
_OTHER = "var(--axis5)"
_STYLE = """<style>
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 600; font-size: 12px; border-bottom: 1px solid var(--line); }
th, td { padding: 4px 10px 4px 0; vertical-align: top; }
td { border-bottom: 1px solid var(--line); }
td.n, th.n { text-align: right; white-space: nowrap; }
td.of { overflow-wrap: anywhere; color: var(--soft); font-size: 12.5px; }
.time svg { width: 100%; height: auto; display: block; }
.time text { font: 12px system-ui, sans-serif; fill: var(--soft); }
.time .inside { fill: var(--piece-ink); font-size: 11px; pointer-events: none; }
.bars { display: flex; height: 30px; border-radius: 6px; overflow: hidden; background: var(--empty); }
.bars { position: relative; }
.bars i { display: block; height: 100%; }
.wide { margin-bottom: 12px; }
</style>"""
_MEMORY = (
    ("arguments", "var(--axis0)"),
    ("outputs", "var(--axis2)"),
    ("temporary", "var(--axis1)"),
)


def compile_page(r: CompileReport) -> str:
    """The page of a report."""
    parts = [_STYLE, "<main>", *_head(r)]
    if not r.refused:
        parts += [
            '<div class="card wide time"><h2>One step, as it is scheduled</h2>',
            timeline(r),
            _legend(r),
            "</div>",
        ]
    parts += ['<div class="card wide"><h2>Memory of one device</h2>', _memory(r), "</div>"]
    if r.collectives:
        parts += ['<div class="card wide"><h2>Collectives, the dearest first</h2>', _table(r), "</div>"]
    if r.refused:
        parts += [
            '<div class="card wide"><h2>The compiler\'s words</h2><pre>',
            html.escape(r.refused[:8000]),
            "</pre></div>",
        ]
    parts.append("</main>")
    return _page(f"Compiled for {r.target}", "".join(parts))


def _head(r: CompileReport) -> Iterator[str]:
    yield f"<h1>Compiled for {html.escape(r.target)}</h1>"
    yield f'<div class="sub">{html.escape(mesh_text(r.mesh))}; times of a {html.escape(r.chip.name)}; estimates</div>'
    numbers = [
        (seconds_text(r.step_seconds) if not r.refused else "refused", f"a step, bound by {r.bound}"),
        (f"{r.mfu:.1%}", "of the peak (MFU)"),
        (seconds_text(r.compute_seconds), f"computes, {seconds_text(r.product_seconds)} of it products"),
        (seconds_text(r.exposed_seconds), f"waits; {seconds_text(r.hidden_seconds)} of communication is hidden"),
        (size_text(r.wire_bytes), "sent by each device"),
        (size_text(r.memory.peak), f"of {size_text(r.memory.limit)}: {'fits' if r.fits else 'does not fit'}"),
    ]
    yield '<div class="numbers">'
    for value, what in numbers:
        yield f'<div class="card number"><b>{html.escape(value)}</b><span>{html.escape(what)}</span></div>'
    yield "</div>"
    if r.hints:
        yield '<div class="card issues">'
        for hint in r.hints[:20]:
            yield (
                f'<div class="issue" style="--c:var(--{hint.severity})"><span class="tag">{hint.severity}</span><span>'
                f"<b>{html.escape(hint.path)}</b> {html.escape(hint.message)} "
                f'<span class="remedy">{html.escape(hint.remedy)}</span></span></div>'
            )
        yield "</div>"


def timeline(r: CompileReport, least: float = 0.0005) -> str:
    """The lanes of one step as SVG. A loop is drawn once, as wide as all its trips; slivers are left out."""
    total = r.seconds or 1.0
    rows = {lane: _TOP + k * _ROW for k, lane in enumerate(_LANES)}
    height = _TOP + len(rows) * _ROW + 24
    out = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="timeline of one step">']
    for lane, y in rows.items():
        out.append(f'<text x="0" y="{y + 18}">{_LANES[lane]}</text>')
        out.append(f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT}" height="{_ROW - 8}" fill="var(--empty)"/>')
    for segment in r.segments:
        if segment.end - segment.begin >= least * total:
            out.append(_bar(segment, rows[segment.lane], total, r.collectives))
    for k in range(6):
        x = _LEFT + (_WIDTH - _LEFT) * k / 5
        anchor = "end" if k == 5 else "start" if k == 0 else "middle"
        y = height - 6
        out.append(f'<text x="{x:.0f}" y="{y}" text-anchor="{anchor}">{seconds_text(total * k / 5)}</text>')
    return "".join([*out, "</svg>"])


def _bar(s: Segment, y: int, total: float, collectives: tuple[Collective, ...]) -> str:
    scale = (_WIDTH - _LEFT) / total
    x, width = _LEFT + s.begin * scale, max((s.end - s.begin) * scale, 0.5)
    c = collectives[s.collective] if 0 <= s.collective < len(collectives) else None
    colour = _COLOURS.get(s.label if s.lane == "network" else s.lane, _OTHER)
    times = f" × {s.trips}" if s.trips > 1 else ""
    what = f"{s.label} over {','.join(c.axes)}: {place_text(c)}" if c is not None else s.label
    tip = html.escape(f"{what}{times}, {seconds_text(s.end - s.begin)}")
    bar = (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 8}" fill="{colour}" stroke="var(--card)" '
        f'stroke-width="0.6"><title>{tip}</title></rect>'
    )
    word = f"{s.label if s.lane != 'compute' else s.label.rpartition('/')[2]}{times}"
    if width > 7.5 * len(word) and s.lane != "wait":
        style = ' style="fill:var(--card)"' if s.lane == "network" else ""
        bar += f'<text class="inside" x="{x + 5:.1f}" y="{y + 17}"{style}>{html.escape(word)}</text>'
    return bar


def _legend(r: CompileReport) -> str:
    kinds = dict.fromkeys(["compute", "wait", *(c.kind for c in r.collectives)])
    names = {"compute": "computation", "wait": "waiting for the network"}
    items = [
        f'<span><i style="background:{_COLOURS.get(kind, _OTHER)}"></i>{html.escape(names.get(kind, kind))}</span>'
        for kind in kinds
    ]
    note = "<span>A loop is drawn once, stretched over all its trips.</span>"
    return f'<div class="legend">{"".join(items)}{note}</div>'


def _memory(r: CompileReport) -> str:
    m = r.memory
    whole = max(m.limit, m.peak, 1)
    sizes = {"arguments": m.arguments, "outputs": max(0, m.outputs - m.aliased), "temporary": m.temporary}
    bars = "".join(
        f'<i style="width:{100 * sizes[name] / whole:.2f}%;background:{colour}" title="{name}"></i>'
        for name, colour in _MEMORY
    )
    limit = ""
    if m.peak > m.limit:
        at = 100 * m.limit / whole
        limit = f'<i style="position:absolute;left:{at:.2f}%;width:3px;background:var(--error)" title="limit"></i>'
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{name} {size_text(sizes[name])}</span>' for name, colour in _MEMORY
    )
    extra = f"<span>outputs in the place of arguments {size_text(m.aliased)}</span>" if m.aliased else ""
    ends = f"<span>{size_text(m.peak)} of {size_text(m.limit)}</span>"
    return (
        f'<div class="bars">{bars}{limit}</div><div class="legend" style="margin-top:8px">{legend}{extra}{ends}</div>'
    )


def _table(r: CompileReport) -> str:
    numeric = ("trips", "sent", "time", "exposed")
    head = "".join(f'<th class="{"n" if t in numeric else ""}">{t}</th>' for t in TITLES)
    rows = []
    for row in collective_rows(r.collectives)[:200]:
        c = row.first
        trips = f"{row.trips}" if row.count == 1 else f"{row.trips} in {row.count}"
        colour = _COLOURS.get(c.kind, _OTHER)
        axes = "".join(f'<span class="axis" style="--c:{colour}">{html.escape(a)}</span> ' for a in c.axes)
        of = html.escape(place_text(c))
        rows.append(
            f'<tr><td><b style="color:{colour}">{html.escape(c.kind)}</b>'
            f'<div class="soft mono">{html.escape(c.type[:80])}</div></td>'
            f"<td>{axes or c.group_size}</td>"
            f'<td class="n">{trips}</td><td>{"beside" if c.overlapped else "alone"}'
            f"{'' if c.form == 'plain' else ', ' + c.form}</td>"
            f'<td class="of" title="{html.escape(c.op)}">{of}</td><td class="n">{size_text(row.bytes)}</td>'
            f'<td class="n">{seconds_text(row.seconds)}</td><td class="n">{seconds_text(row.exposed)}</td></tr>'
        )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
