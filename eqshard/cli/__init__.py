"""The command line: `eqshard plan`, `check`, `compile` and the rest, also as `python -m eqshard`."""

from ._main import main as main
