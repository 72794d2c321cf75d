"""Collectives: what a compiled program sends between devices, read from its text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.tree_util as jtu
from jax.sharding import NamedSharding

from .._mesh import MeshLike, MeshSpec
from .._tree import size_text
from ._groups import group_axes, Groups, replica_groups
from ._hlo import Computation, Instruction, Module, read_module, shape_bytes
from ._loops import trip_count
from ._moves import argument_of, Site


KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@jtu.register_static
@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a compiled program, with how often it runs."""

    kind: str
    """`"all-gather"`, `"all-reduce"`, `"reduce-scatter"`, `"all-to-all"`, `"collective-permute"`, …"""
    bytes: int
    """Of the whole buffer on one device, each time: what a gather gives, what any other takes."""
    wire_bytes: int
    """What one device sends each time."""
    axes: tuple[str, ...]
    """The mesh axes it runs over, in mesh order; empty if the mesh is not known."""
    group_size: int
    trips: int
    """How often it runs in one step."""
    trips_known: bool
    """Whether every loop around it says how often it runs; those that do not count once."""
    overlapped: bool
    """Whether it starts and ends apart, so that other work can run meanwhile."""
    form: str
    """`"plain"`; `"fused"` into computation; `"windowed"`: a piece of a matmul's loop."""
    type: str
    """Dtype and shape of what it takes: `bf16[256,4096]`."""
    op: str
    """The path of the operation in the program."""
    source: str
    """`file.py:12`, if the compiler kept it."""
    moves: str
    """The argument whose data it moves, if that can be told."""
    name: str
    appearances: int = 1
    """In how many instructions it stands: fusions clone it."""
    seconds: float = 0.0
    """Estimated, each time."""
    exposed_seconds: float = 0.0
    """The part of it in which nothing else runs, each time."""

    @property
    def total_bytes(self) -> int:
        """What one device sends in a step."""
        return self.wire_bytes * self.trips

    @property
    def total_seconds(self) -> float:
        """Its estimated time in a step."""
        return self.seconds * self.trips

    def __str__(self) -> str:
        over = f" over {','.join(self.axes)}" if self.axes else ""
        of = f" of {self.moves}" if self.moves else ""
        return f"{self.kind}{over}{of}: {self.type}, {size_text(self.total_bytes)} sent in {self.trips} trips"


@dataclass
class Found:
    """A collective where it stands: in which instruction it starts, and where it is waited for."""

    instruction: Instruction
    inside: Computation
    """The computation that holds the instruction itself, a fused one perhaps."""
    kind: str
    form: str
    start: str
    """The instruction of the running computation in which it begins."""
    done: str
    """And the one in which it ends; the same if nothing can run meanwhile."""
    appearances: int = 1


def collectives(compiled: Any, *, mesh: MeshLike | None = None) -> tuple[Collective, ...]:
    """The collectives of any compiled JAX function, in the order in which they run.

    ```python
    import eqshard, jax, jax.numpy as jnp
    from jax.sharding import PartitionSpec as P
    mesh = eqshard.MeshSpec(tp=8)
    x = eqshard.constrain_to(jnp.ones((4, 16)), P(None, "tp"), mesh)
    found = eqshard.collectives(jax.jit(lambda x: x.sum()).lower(x).compile())
    assert [(c.kind, c.axes) for c in found] == [("all-reduce", ("tp",))]
    ```

    **Arguments:**

    - `compiled`: what `jax.jit(f).lower(...).compile()` gives, or its text, of CPU, GPU or TPU.
    - `mesh`: to name the axes; by default the mesh of the compiled function's arguments and results.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    described = MeshSpec.of(mesh) if mesh is not None else None if isinstance(compiled, str) else _mesh_of(compiled)
    module = read_module(text or "")
    return tuple(describe(module, found, site, described, trips, known) for found, site, trips, known in walk(module))


def _mesh_of(compiled: Any) -> MeshSpec | None:
    shardings = jtu.tree_leaves((compiled.input_shardings, compiled.output_shardings))
    found = [MeshSpec.of(s) for s in shardings if isinstance(s, NamedSharding) and s.mesh.axis_names]
    return found[0] if found and all(mesh == found[0] for mesh in found) else None


def walk(module: Module) -> Iterator[tuple[Found, Site, int, bool]]:
    """Every collective that runs, with the computation it runs in, how often, and whether that is sure."""
    yield from _walk(module, Site(module.main, None, None), 1, True)


def _walk(module: Module, site: Site, trips: int, known: bool) -> Iterator[tuple[Found, Site, int, bool]]:
    starts: dict[str, list[Found]] = {}
    for f in found_in(module, site.computation):
        starts.setdefault(f.start, []).append(f)
    for instruction in site.computation.instructions:
        for f in starts.get(instruction.name, ()):
            yield f, site, trips, known
        for inner, times in runs(module, instruction, site.computation):
            count = 1 if times is None else times
            yield from _walk(module, Site(inner, site, instruction), trips * count, known and times is not None)


def runs(module: Module, at: Instruction, around: Computation) -> list[tuple[Computation, int | None]]:
    """The computations that an instruction runs as such (a fusion is one kernel), and how often; None: unknown."""
    if at.opcode == "while":
        times = trip_count(module, at, around)
        names = [(at.attribute("body") or "", times)]
    elif at.opcode in ("conditional", "call"):
        names = [(name, 1) for name in at.called()]
    elif at.opcode == "async-start" and not holds(module, at):
        names = [(name, 1) for name in at.called()]
    else:
        return []
    return [(module.computations[name], times) for name, times in names if name in module.computations]


def found_in(module: Module, computation: Computation) -> list[Found]:
    """The collectives of one computation, those inside its fusions among them, in order."""
    out: list[Found] = []
    started: dict[str, Found] = {}
    chained: dict[tuple[str, str], Found] = {}
    for at in computation.instructions:
        if at.opcode.endswith(("-done", "-update")):
            begun = next((started[o] for o in at.operands if o in started), None)
            if begun is not None:
                begun.done = at.name
                started[at.name] = begun
            continue
        if at.kind in KINDS:
            windowed = "windowed" in computation.name
            found = Found(at, computation, at.kind, "windowed" if windowed else "plain", at.name, at.name)
            out.append(found)
            started[at.name] = found
        elif at.opcode == "async-start":
            for inner, instruction in holds(module, at):
                found = Found(instruction, inner, instruction.kind, "plain", at.name, at.name)
                out.append(found)
                started[at.name] = found
        elif at.opcode == "fusion":
            for inner, instruction in holds(module, at):
                key = instruction.kind, instruction.attribute("channel_id") or instruction.name
                if key in chained:  # the same collective, carried through another fusion
                    chained[key].done = at.name
                    chained[key].appearances += 1
                    continue
                begins = module.begun.get(key[1])
                if begins is not None and inner.name not in begins:  # it began outside of this loop
                    continue
                kind = "reduce-scatter" if _scatters(instruction, inner, at) else instruction.kind
                chained[key] = found = Found(instruction, inner, kind, "fused", at.name, at.name)
                out.append(found)
    return out


def holds(
    module: Module, at: Instruction, inside: frozenset[str] = frozenset()
) -> list[tuple[Computation, Instruction]]:
    """The collectives inside the computations that a fusion or an asynchronous call is made of."""
    found = []
    for name in at.called():
        inner = module.computations.get(name)
        if inner is None or name in inside:  # a text may print two computations under one name
            continue
        for instruction in inner.instructions:
            if instruction.kind in KINDS and not instruction.opcode.endswith("-done"):
                found.append((inner, instruction))
            elif instruction.opcode == "fusion":
                found += holds(module, instruction, inside | {name})
    return found


def _scatters(instruction: Instruction, inner: Computation, fusion: Instruction) -> bool:
    """TPUs write a reduce-scatter as an all-reduce fused with the slice that is kept."""
    if instruction.kind != "all-reduce":
        return False
    if "all-reduce-scatter" in fusion.name or "all-reduce-scatter" in inner.name:
        return True
    readers = [i for i in inner.instructions if instruction.name in i.operands]
    return bool(readers) and all(i.opcode == "dynamic-slice" for i in readers)


def describe(
    module: Module,
    found: Found,
    site: Site,
    mesh: MeshSpec | None,
    trips: int,
    known: bool,
    arguments: Sequence[str] = (),
) -> Collective:
    """A collective as data, without its times; `arguments` are the names of the program's arguments."""
    at = found.instruction
    groups = replica_groups(at, module.partitions)
    size = group_size(groups, found.kind, mesh, module.partitions)
    taken = operand_bytes(at, found.inside)
    permuted = found.kind == "collective-permute"
    sent = any(len(set(group)) > 1 for group in groups) if groups is not None else size > 1
    operands = [found.inside.by_name[o].shape for o in at.operands if o in found.inside.by_name]
    return Collective(
        kind=found.kind,
        bytes=taken * size if found.kind == "all-gather" else taken,
        wire_bytes=wire_bytes(found.kind, taken, size) if sent else 0,
        axes=() if mesh is None or groups is None or not sent else group_axes(groups, mesh),
        group_size=size if sent or not permuted else 1,
        trips=trips,
        trips_known=known,
        overlapped=found.start != found.done,
        form=found.form,
        type=", ".join(_plain(shape) for shape in operands) or _plain(at.shape),
        op=at.op_name,
        source=module.source(at),
        moves=_moved(argument_of(module, found.inside, at, site, found.start), arguments),
        name=at.name,
        appearances=found.appearances,
    )


def _moved(argument: tuple[int, str] | None, names: Sequence[str]) -> str:
    if argument is None:
        return ""
    number, name = argument
    return names[number] if number < len(names) else name or f"argument {number}"


def _plain(shape: str) -> str:
    return shape.partition("{")[0]


def group_size(groups: Groups | None, kind: str, mesh: MeshSpec | None, partitions: int) -> int:
    """How many devices take part together."""
    if groups is None:
        return partitions
    if kind != "collective-permute":
        return max((len(group) for group in groups), default=1)
    return mesh.size(group_axes(groups, mesh)) if mesh is not None else partitions


def operand_bytes(at: Instruction, inside: Computation) -> int:
    """Bytes that a collective takes on one device."""
    operands = at.operands[:1] if at.kind in ("ragged-all-to-all", "collective-permute") else at.operands
    shapes = [inside.by_name[o].shape for o in operands if o in inside.by_name]
    return sum(map(shape_bytes, shapes)) if shapes else shape_bytes(at.shape)


def wire_bytes(kind: str, taken: int, size: int) -> int:
    """Bytes that one device sends, by the algorithms that send the least."""
    if kind == "all-gather":
        return taken * (size - 1)
    if kind == "all-reduce":
        return 2 * taken * (size - 1) // size
    if kind in ("reduce-scatter", "all-to-all", "ragged-all-to-all"):
        return taken * (size - 1) // size
    return taken
