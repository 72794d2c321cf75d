"""HLO text as data: computations, instructions, shapes.

The text is what `Compiled.as_text()` prints, the one public view of a compiled module. jaxlib has Python objects for
instructions too, but private ones, without attributes (groups, called computations, costs), and not the same in each
version; the tests hold this reader against them.
"""

import math
import os
import pathlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from .._tree import itemsize


_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)$")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+)(?: \(.*\) -> .*)? \{\s*$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([^\]]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"\b(?:calls|body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations|called_computations|calls)=\{([^}]*)\}")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_SOURCE = re.compile(r'source_file="([^"]*)"(?:.*?source_line=(\d+))?')
_ROW = re.compile(r'^(\d+) (?:"(.*)"|\{(.*)\})$')
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
# The path that a program shipped to another process gains at its front.
_SHIPPED = re.compile(r"^jit\(call\)/(?:call_exported/)?")

_OURS = str(pathlib.Path(__file__).parent.parent) + os.sep
_BITS = {"pred": 8, "token": 0, "opaque": 0}


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    literal: str
    """What stands between the parentheses, for constants and parameters."""
    attributes: str
    config: str
    """The backend's own notes, JSON as a rule."""
    metadata: str
    root: bool

    @property
    def kind(self) -> str:
        """The opcode without `-start` or `-done`."""
        return re.sub(r"-(start|done|update)$", "", self.opcode)

    @property
    def op_name(self) -> str:
        """The path of the operation in the program: `jit(f)/while/body/dot_general`."""
        found = _OP_NAME.search(self.metadata)
        return _SHIPPED.sub("", found.group(1)) if found else ""

    def attribute(self, name: str) -> str | None:
        """The text of one attribute that is a word or a number."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return found.group(1) if found else None

    def called(self) -> tuple[str, ...]:
        """The computations that this instruction runs, `body` and `condition` of a loop among them."""
        names = _CALLED.findall(self.attributes)
        for group in _BRANCHES.findall(self.attributes):
            names += [n.strip().lstrip("%") for n in group.split(",") if n.strip()]
        return tuple(names)


@dataclass
class Computation:
    """Instructions in the order in which they run, if the module is scheduled."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {i.name: i for i in self.instructions}

    @cached_property
    def root(self) -> Instruction | None:
        return next((i for i in self.instructions if i.root), self.instructions[-1] if self.instructions else None)

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {int(i.literal): i for i in self.instructions if i.opcode == "parameter" and i.literal.isdigit()}


@dataclass
class Module:
    """A compiled module as it was printed."""

    name: str
    computations: dict[str, Computation]
    entry: str
    scheduled: bool
    partitions: int
    unread: tuple[str, ...]
    """Lines inside computations that are no instructions this reader knows."""
    tables: Mapping[str, dict[int, str]]

    @property
    def main(self) -> Computation:
        return self.computations.get(self.entry, Computation(""))

    @cached_property
    def callers(self) -> dict[str, list[tuple[Computation, Instruction]]]:
        """Where each computation is run from."""
        found: dict[str, list[tuple[Computation, Instruction]]] = {}
        for computation in self.computations.values():
            for instruction in computation.instructions:
                for name in instruction.called():
                    found.setdefault(name, []).append((computation, instruction))
        return found

    @cached_property
    def begun(self) -> dict[str, frozenset[str]]:
        """For each channel of an asynchronous collective, the fused computations in which it begins.

        A TPU carries such a collective through the fusions that run beside it, also through those of loops, and writes
        it in each of them.
        """
        found: dict[str, frozenset[str]] = {}
        for computation in self.computations.values():
            for instruction in computation.instructions:
                if instruction.opcode == "custom-call" and "AsyncCollectiveStart" in instruction.attributes:
                    for name in instruction.operands:
                        channel = (
                            computation.by_name[name].attribute("channel_id") if name in computation.by_name else None
                        )
                        if channel is not None:
                            found[channel] = found.get(channel, frozenset()) | {computation.name}
        return found

    def source(self, instruction: Instruction) -> str:
        """`file.py:12` of the user's line that this instruction comes from, if the text says."""
        direct = _SOURCE.search(instruction.metadata)
        if direct:
            return f"{direct.group(1)}:{direct.group(2) or 0}"
        frame = _FRAME.search(instruction.metadata)
        number = int(frame.group(1)) if frame else 0
        line = ""
        for _ in range(100):  # out of eqshard's own frames, to whoever called it
            entry = self.tables["StackFrames"].get(number, "")
            where = self.tables["FileLocations"].get(_number(entry, "file_location_id"), "")
            file = self.tables["FileNames"].get(_number(where, "file_name_id"), "")
            line = f"{file}:{_number(where, 'line')}" if file else line
            number = _number(entry, "parent_frame_id") - 1  # printed one too high: 1 is none
            if not file.startswith(_OURS) or number < 1:
                break
        return line


def _number(text: str, name: str) -> int:
    found = re.search(rf"\b{name}=(\d+)", text)
    return int(found.group(1)) if found else 0


def read_module(text: str) -> Module:
    """The module that `text` prints; lines it cannot read are kept in `unread`."""
    computations: dict[str, Computation] = {}
    unread: list[str] = []
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    head, entry, table = "", "", ""
    here: Computation | None = None
    for line in text.splitlines():
        if here is not None:
            if line.strip() == "}":
                here = None
            elif instruction := _instruction(line):
                here.instructions.append(instruction)
            elif line.strip():
                unread.append(line.strip())
        elif line.startswith("HloModule"):
            head = line
        elif line.strip() in _TABLES:
            table = line.strip()
        elif table and (row := _ROW.match(line)):
            tables[table][int(row.group(1))] = row.group(2) or row.group(3) or ""
        elif header := _HEADER.match(line):
            table = ""
            here = computations[header.group(2)] = Computation(header.group(2))
            entry = header.group(2) if header.group(1) else entry
        elif line.strip():
            unread.append(line.strip())
    name = re.match(r"HloModule ([\w.\-]+)", head)
    return Module(
        name=name.group(1) if name else "",
        computations=computations,
        entry=entry,
        scheduled="is_scheduled=true" in head,
        partitions=max(1, _number(head, "num_partitions")) * max(1, _number(head, "replica_count")),
        unread=tuple(unread),
        tables=tables,
    )


def _instruction(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(line)
    if found is None:
        return None
    root, name, shape, opcode, rest = found.groups()
    inside, after = _closed(rest)
    plain = opcode in ("constant", "parameter", "iota", "infeed", "outfeed") and opcode != "outfeed"
    after, _, config = after.partition(", backend_config=")
    attributes, _, metadata = after.partition(", metadata=")
    if "}" in metadata:  # attributes may follow the metadata
        metadata, _, more = metadata.partition("}")
        attributes += more
    operands = () if plain else _operands(inside)
    return Instruction(
        name, shape, opcode, operands, inside[:64] if plain else "", attributes, config, metadata, root is not None
    )


def _closed(rest: str) -> tuple[str, str]:
    """Splits at the parenthesis that closes the operands."""
    end = rest.find(")")
    if "(" in rest[:end] or '"' in rest[:end]:
        depth, quoted = 1, False
        for end, c in enumerate(rest):
            if c == '"' and rest[end - 1 : end] != "\\":
                quoted = not quoted
            elif not quoted:
                depth += (c == "(") - (c == ")")
                if depth == 0:
                    break
    return rest[:end], rest[end + 1 :]


def _operands(inside: str) -> tuple[str, ...]:
    if "%" in inside:
        return tuple(_NAME.findall(inside))
    words = [part.split()[-1] for part in re.split(r",\s+(?![^\[{(]*[\]})])", inside) if part.strip()]
    return tuple(w for w in words if re.fullmatch(r"[\w.\-]+", w))


def shape_arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """The arrays of a shape, in order: `(f32[2], s32[])` gives `[("f32", (2,)), ("s32", ())]`."""
    return [(dtype, tuple(_dim(d) for d in dims.split(",") if d)) for dtype, dims in _ARRAY.findall(shape)]


def _dim(text: str) -> int:
    return int(re.sub(r"\D", "", text) or 0)  # a bounded dynamic dimension prints as `<=8`


def shape_bytes(shape: str) -> int:
    """Bytes of all arrays of a shape."""
    return sum((math.prod(dims) * dtype_bits(dtype) + 7) // 8 for dtype, dims in shape_arrays(shape))


def dtype_bits(dtype: str) -> int:
    """Bits of one element: HLO spells the width in the name, as in `bf16`, `s4`, `f8e4m3fn`, `c64`."""
    if dtype in _BITS:
        return _BITS[dtype]
    width = re.match(r"[a-z]+(\d+)", dtype)
    return int(width.group(1)) if width else 8 * itemsize(dtype)
