"""Where answers go: text on standard output, files, JSON; and a sign of life on standard error."""

import json
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from ._words import UsageError, WIDTH


T = TypeVar("T")


def width() -> int:
    """Letters in a line: those of the terminal, if standard output is one; at least 80."""
    try:
        return max(WIDTH, os.get_terminal_size(sys.stdout.fileno()).columns)
    except (OSError, ValueError):
        return WIDTH


def simulate(devices: int) -> None:
    """Lets JAX have so many simulated devices, unless it runs already; `build` says if they are too few."""
    try:
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:
        return


def say(text: str) -> None:
    """A line for the person, not for the pipe."""
    print(text, file=sys.stderr)


def put(text: str, to: str | None, *, quiet: bool = False) -> None:
    """Writes `text` to a file, or to standard output where `to` is `-`; nothing where it is None."""
    if to is None:
        return
    if to == "-":
        print(text)
        return
    try:
        pathlib.Path(to).write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {to}: {error.strerror}.") from None
    if not quiet:
        say(f"wrote {to}")


def show(text: Callable[[], str], data: Callable[[], Any], to: str | None) -> None:
    """The text on standard output, and the data as JSON where it was asked for; with `-` the JSON alone."""
    if to != "-":
        print(text())
    if to is not None:
        put(json.dumps(data(), indent=1), to)


def wait_for(what: str, work: Callable[[], T]) -> T:
    """What `work` returns; meanwhile standard error says what goes on, and for how long."""
    if not sys.stderr.isatty():
        say(f"{what} …")
        return work()
    done, since = threading.Event(), time.monotonic()

    def draw() -> None:
        while not done.wait(0.2):
            sys.stderr.write(f"\r{what} … {time.monotonic() - since:.0f} s ")
            sys.stderr.flush()

    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    try:
        return work()
    finally:
        done.set()
        thread.join()
        sys.stderr.write(f"\r{what}: {time.monotonic() - since:.1f} s\n")
