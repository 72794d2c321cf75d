"""Nothing is global: the sources themselves hold no context manager, environment, thread-local or registry."""

import pathlib
import re

import pytest


PACKAGE = pathlib.Path(__file__).parent.parent / "eqshard"
FORBIDDEN = {
    "a context manager of our own": r"contextmanager|__enter__|__aenter__|ContextDecorator",
    "an environment read": r"os\.environ|getenv|environb",
    "a thread-local or context variable": r"ContextVar|threading\.local|contextvars",
    "an ambient mesh": r"set_mesh|use_mesh|get_mesh\b|get_abstract_mesh|thread_resources|get_concrete_mesh",
    "a global that is written": r"^\s*global ",
}
# What a file may hold all the same, and why. A child process must be told its environment by whoever starts it.
ALLOWED = {"compiler/_worker.py": ("an environment read",)}


def test_the_sources_are_found():
    assert len(list(PACKAGE.rglob("*.py"))) > 10


@pytest.mark.parametrize("what", FORBIDDEN)
def test_nothing_global(what):
    found = [
        f"{file.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if re.search(FORBIDDEN[what], line) and what not in ALLOWED.get(str(file.relative_to(PACKAGE)), ())
    ]
    assert not found, f"{what}:\n" + "\n".join(found)
