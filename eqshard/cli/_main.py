"""One entry for all commands: reads the arguments, runs one, and says what went wrong in a few lines."""

import argparse
import sys
from collections.abc import Sequence

import jax

from .._errors import ShardingError
from . import _demo, _files, _plans, _steps
from ._output import say
from ._words import Commands, filled, FORMATTER, Parser, UsageError


_ABOUT = "Shard any Equinox model, or any PyTree, over any JAX mesh: the plan is a value."
_EXAMPLES = """exit codes: 0 fine; 1 an error was found, or something failed; 2 wrong usage

examples:
  eqshard demo
  eqshard plan my_model.py:make --mesh fsdp=4,tp=2 --html plan.html
  eqshard compile my_train.py:step --target v5e:4x4

`eqshard COMMAND --help` says more of one."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    ```python
    from eqshard.cli import main
    assert main(["plan", "--help"]) == 0
    ```

    **Arguments:**

    - `argv`: the words after `eqshard`; default: those of this process.

    **Returns:**

    The exit code: 0 fine, 1 an error was found or something failed, 2 wrong usage.
    """
    parser = _parser()
    try:
        a = parser.parse_args(argv)
    except SystemExit as end:  # argparse has said why
        return end.code if isinstance(end.code, int) else 2
    if a.command is None:
        parser.print_help()
        return 2
    jax.config.update("jax_platforms", "cpu")  # plans need no accelerator, and must not take one
    try:
        return a.run(a)
    except ShardingError as error:
        if a.debug:
            raise
        say(filled(f"eqshard {a.command}: {error}"))
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader has seen enough
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser("eqshard", description=_ABOUT, epilog=_EXAMPLES, formatter_class=FORMATTER)
    commands = Commands(parser)
    for module in (_plans, _files, _steps, _demo):
        module.add_commands(commands)
    return parser
