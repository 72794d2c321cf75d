"""What is written on a command line, read: meshes, bytes, names, and the arguments that commands share."""

import argparse
import functools
import re
import sys
import textwrap
from typing import Any, NoReturn

from .._chip import CHIPS
from .._errors import ShardingError
from .._mesh import MeshSpec
from .._tree import did_you_mean


WIDTH = 80
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class UsageError(ShardingError):
    """What was asked for makes no sense, or is not there: exit code 2."""


def mesh_from_text(text: str) -> MeshSpec:
    """`fsdp=4,tp=2` as a mesh."""
    axes: list[tuple[str, int]] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*([^=\s]+)\s*=\s*(\d+)\s*", part)
        if found is None:
            raise argparse.ArgumentTypeError(f"cannot read {part!r} in {text!r}: write axes and sizes as fsdp=4,tp=2.")
        axes.append((found.group(1), int(found.group(2))))
    try:
        return MeshSpec(axes)
    except ShardingError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def bytes_from_text(text: str) -> int:
    """`16GB`, `900 MB`, `15.5GiB` as a number of bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if found is None or found.group(2) not in _UNITS:
        raise argparse.ArgumentTypeError(f"cannot read {text!r} as bytes: write 16GB, 900MB or 15.5GiB.")
    return int(float(found.group(1)) * _UNITS[found.group(2)])


def chip_name(text: str) -> str:
    """A name in `eqshard.CHIPS`."""
    if text not in CHIPS:
        raise argparse.ArgumentTypeError(f"no chip {text!r}: known are {', '.join(CHIPS)}." + did_you_mean(text, CHIPS))
    return text


def renames_from_text(text: str) -> dict[str, str]:
    """`tp=model,data=dp` as old names to new ones."""
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(old.strip() and new.strip() for old, _, new in pairs):
        raise argparse.ArgumentTypeError(f"cannot read {text!r}: write old and new names as tp=model,data=dp.")
    return {old.strip(): new.strip() for old, _, new in pairs}


def donated_from_text(text: str) -> str | tuple[int, ...]:
    """`all`, `none`, or `0,1`."""
    if text in ("all", "none"):
        return text
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"cannot read {text!r}: write all, none, or numbers of arguments as 0,1.")
    return tuple(map(int, text.split(",")))


def filled(text: str) -> str:
    """`text` in lines of 80 letters; a path or an option is never torn."""
    lines = [
        textwrap.fill(line, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    ]
    return "\n".join(lines)


class Parser(argparse.ArgumentParser):
    """argparse, with errors in lines of 80 letters."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(2, filled(f"{self.prog}: {message}") + "\n")


class Commands:
    """The commands so far; `add` gives the parser of one more."""

    def __init__(self, parser: argparse.ArgumentParser):
        self._parsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")

    def add(self, name: str, summary: str, more: str, example: str, run: Any) -> argparse.ArgumentParser:
        """A command: what it does in a line, what else to know, an example, and the function that does it."""
        parser = self._parsers.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.\n\n{more}".strip(),
            epilog=f"example:\n{example}",
            formatter_class=FORMATTER,
        )
        parser.add_argument("--debug", action="store_true", help="show the whole traceback of an error")
        parser.set_defaults(run=run)
        return parser


FORMATTER: Any = functools.partial(argparse.RawDescriptionHelpFormatter, width=WIDTH, max_help_position=24)


def add_mesh(
    parser: argparse.ArgumentParser, *, required: bool = False, help: str = "the mesh, as fsdp=4,tp=2"
) -> None:
    """`--mesh`, `--chip` and `--dcn`."""
    parser.add_argument("--mesh", type=mesh_from_text, required=required, metavar="AXES", help=help)
    parser.add_argument("--chip", type=chip_name, help=f"for memory and costs: {', '.join(CHIPS)}")
    parser.add_argument("--dcn", metavar="AXES", help="the axes between hosts or slices, as data")


def add_outputs(parser: argparse.ArgumentParser, *, html: bool = False) -> None:
    """`--json`, and `--html` where there is a page."""
    if html:
        parser.add_argument("--html", metavar="FILE", help="also write one page that needs nothing else")
    parser.add_argument("--json", metavar="FILE", help="also write it as JSON; - for standard output, and nothing else")


def given_mesh(a: argparse.Namespace) -> MeshSpec:
    """The mesh of `--mesh`, `--chip` and `--dcn`."""
    if a.mesh is None:
        raise UsageError("say which mesh, as --mesh fsdp=4,tp=2.")
    mesh: MeshSpec = a.mesh if a.chip is None else a.mesh.replace(chip=a.chip)
    return mesh if a.dcn is None else mesh.replace(dcn=tuple(name.strip() for name in a.dcn.split(",")))
