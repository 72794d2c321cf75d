"""Two reports side by side."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax.tree_util as jtu

from .._tree import size_text


if TYPE_CHECKING:
    from ._report import CompileReport


@jtu.register_static
@dataclass(frozen=True)
class Change:
    """One number of two reports."""

    name: str
    before: float
    after: float

    @property
    def ratio(self) -> float:
        """After over before; 1 if both are 0."""
        if self.before == self.after:
            return 1.0
        return self.after / self.before if self.before else float("inf")


@jtu.register_static
@dataclass(frozen=True)
class Comparison:
    """What is different between two reports."""

    numbers: tuple[Change, ...]
    """Seconds and bytes of the whole step."""
    sent: tuple[Change, ...]
    """Bytes that a device sends, for each kind of collective and its axes; the largest difference first."""

    def __getitem__(self, name: str) -> Change:
        return next(change for change in (*self.numbers, *self.sent) if change.name == name)

    def __str__(self) -> str:
        def line(change: Change) -> str:
            show = _milliseconds if change.name.endswith("seconds") else size_text
            return f"{change.name:32} {show(change.before):>12} {show(change.after):>12}   x {change.ratio:.3g}"

        return "\n".join(line(change) for change in (*self.numbers, *self.sent))


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"


_NUMBERS = (
    "step_seconds",
    "compute_seconds",
    "exposed_seconds",
    "hidden_seconds",
    "wire_bytes",
    "bytes_per_device",
)


def compare(one: "CompileReport", two: "CompileReport") -> Comparison:
    """The second against the first."""
    numbers = tuple(Change(n, float(getattr(one, n)), float(getattr(two, n))) for n in _NUMBERS)
    before, after = one.counts(), two.counts()
    sent = [
        Change(f"{kind} over {','.join(axes) or '?'}", _sent(before, kind, axes), _sent(after, kind, axes))
        for kind, axes in dict.fromkeys([*before, *after])
    ]
    return Comparison(numbers, tuple(sorted(sent, key=lambda c: -abs(c.after - c.before))))


def _sent(counts: dict[tuple[str, tuple[str, ...]], tuple[int, int]], kind: str, axes: tuple[str, ...]) -> float:
    return float(counts.get((kind, axes), (0, 0))[1])
