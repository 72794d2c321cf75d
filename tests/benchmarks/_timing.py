"""Times as ratios: what is compared runs in turns, in one process, and the middle ratio counts."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


def in_turns(cases: Mapping[str, Callable[[], Any]], rounds: int = 15, best_of: int = 3) -> dict[str, list[float]]:
    """Seconds of each case in each round: the best of a few calls. Every round begins with another case."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    names = list(cases)
    for name in names:  # compile, fill caches
        jax.block_until_ready(cases[name]())
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            seconds[name].append(min(_seconds(cases[name]) for _ in range(best_of)))
    return seconds


def _seconds(case: Callable[[], Any]) -> float:
    start = time.perf_counter()
    out = jax.block_until_ready(case())
    seconds = time.perf_counter() - start
    del out
    return seconds


def ratio(seconds: Mapping[str, list[float]], ours: str, theirs: str) -> float:
    """The median over the rounds of our time over theirs."""
    return statistics.median(a / b for a, b in zip(seconds[ours], seconds[theirs]))


def machine() -> str:
    """Where and with what these numbers were measured."""
    versions = f"Python {platform.python_version()}, jax {jax.__version__}"
    devices = f"{jax.device_count()} {jax.devices()[0].platform} devices"
    return f"{os.cpu_count()} cores, {platform.machine()}, {versions}, {devices}"


def table(title: str, header: list[str], rows: list[list[Any]]) -> None:
    """Prints one table, as markdown."""
    texts = [[f"{x:.3g}" if isinstance(x, float) else str(x) for x in row] for row in rows]
    widths = [max(len(row[i]) for row in [header, *texts]) for i in range(len(header))]
    print(f"\n{title} ({machine()})\n")
    for row in [header, ["-" * w for w in widths], *texts]:
        print("| " + " | ".join(text.ljust(w) for text, w in zip(row, widths)) + " |")
