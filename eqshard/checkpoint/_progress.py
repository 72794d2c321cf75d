"""A bar for what takes long: by rich or tqdm, whichever is there; else quiet."""

import sys
import time
from collections.abc import Callable
from typing import Any

from ._library import has_library, library


_PATIENCE = 1.0  # seconds before a bar that was not asked for appears


class Progress:
    """Bytes done of bytes in all.

    `show=None` draws if the work takes more than a second and somebody watches: standard error is a terminal.
    """

    def __init__(self, text: str, total: int, show: bool | None):
        self.text, self.total, self.done = text, max(total, 1), 0
        self.since = time.monotonic()
        self.patience = 0.0 if show else _PATIENCE
        self.wanted = sys.stderr.isatty() if show is None else show
        self.draw: Callable[[int], Any] | None = None
        self.end: Callable[[], Any] = lambda: None

    def add(self, nbytes: int) -> None:
        """More bytes are done."""
        self.to(self.done + nbytes)

    def to(self, nbytes: int) -> None:
        """So many bytes are done in all."""
        nbytes = min(nbytes, self.total)
        step, self.done = nbytes - self.done, nbytes
        if self.wanted and self.draw is None and time.monotonic() - self.since >= self.patience:
            self._start()
            step = nbytes
        if self.draw is not None and step:
            self.draw(step)

    def close(self) -> None:
        self.end()
        self.draw, self.wanted, self.end = None, False, lambda: None

    def _start(self) -> None:
        if has_library("rich"):
            rich = library("rich.progress")
            columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.DownloadColumn())
            bar = rich.Progress(
                *columns, rich.TimeRemainingColumn(), console=library("rich.console").Console(file=sys.stderr)
            )
            task = bar.add_task(self.text, total=self.total)
            bar.start()
            self.draw, self.end = lambda n: bar.advance(task, n), bar.stop
        elif has_library("tqdm"):
            bar = library("tqdm").tqdm(desc=self.text, total=self.total, unit="B", unit_scale=True)
            self.draw, self.end = bar.update, bar.close
        else:
            self.wanted = False
