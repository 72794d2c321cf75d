"""What notebooks show of a compile report."""

from .._tree import size_text
from ..compiler import CompileReport
from ._compile_text import collective_rows, headline, place_text, seconds_text
from ._notebook import _bar, _lines, _table


_MOST = 12


def compile_html(r: CompileReport) -> str:
    """A compile report: what matters most, and the dearest collectives."""
    rows = collective_rows(r.collectives)
    most = max((row.seconds for row in rows), default=0.0) or 1.0
    cells = [
        [
            row.first.kind,
            ", ".join(row.first.axes) or str(row.first.group_size),
            str(row.trips),
            place_text(row.first),
            size_text(row.bytes),
            _bar(row.seconds / most, seconds_text(row.seconds)),
            seconds_text(row.exposed),
        ]
        for row in rows[:_MOST]
    ]
    titles = ["collective", "over", "trips", "of", "sent", "time", "exposed"]
    more = f"<div>… and {len(rows) - _MOST} cheaper rows</div>" if len(rows) > _MOST else ""
    hints = _lines("\n".join(f"{hint.severity}: {hint.message} {hint.remedy}" for hint in r.hints))
    return f"<div>{_lines(chr(10).join(headline(r)))}{_table(titles, cells) if cells else ''}{more}{hints}</div>"
