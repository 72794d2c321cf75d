"""Hints: what in a compiled program costs more than it should, with the way out."""

from collections.abc import Iterator, Sequence

from .._chip import Chip
from .._issue import Issue
from .._tree import size_text
from ._collectives import Collective, found_in, runs
from ._flops import Flops
from ._hlo import Computation, Instruction, Module, shape_arrays, shape_bytes
from ._loops import trip_count
from ._memory import Memory
from ._program import Flat
from ._work import work_of


# Below these nobody would change a program.
LEAST_BYTES = 100_000
LEAST_SHARE = 1.5

_Hint = tuple[float, Issue]


def find_hints(
    module: Module, flat: Flat, collectives: Sequence[Collective], flops: Flops, chip: Chip
) -> tuple[Issue, ...]:
    """What could be better, the dearest first."""
    found = [
        *_gathered_outside(module, flat, collectives),
        *_resharded(collectives),
        *_not_scattered(module, collectives),
        *_computed_again(module, flat, flops, chip),
        *_padded(module, chip),
        *_unknown_trips(collectives),
    ]
    return tuple(issue for _, issue in sorted(found, key=lambda hint: -hint[0]))


def refusal_hint(memory: Memory) -> Issue:
    """What a program that does not fit is told."""
    return Issue(
        "error",
        "out_of_memory",
        "",
        f"The program needs {size_text(memory.peak)} a device, of which arguments take {size_text(memory.arguments)}; "
        f"the compiler allows {size_text(memory.limit)}.",
        "Split more arguments over the mesh, donate those that are returned, pin activations to the batch axes, "
        "or compute them again with `jax.checkpoint`.",
    )


def _gathered_outside(module: Module, flat: Flat, collectives: Sequence[Collective]) -> Iterator[_Hint]:
    """Weights of all layers gathered at once, before the loop that needs one at a time."""
    inside = module.computations.values()
    loops = {trip_count(module, i, where) for where in inside for i in where.instructions if i.opcode == "while"}
    shapes = dict(zip(flat.names, (leaf.shape for leaf in flat.leaves)))
    for c in collectives:
        shape = shapes.get(c.moves, ())
        if c.kind != "all-gather" or c.trips != 1 or len(shape) < 2 or shape[0] < 2 or shape[0] not in loops:
            continue
        if c.bytes < LEAST_BYTES or _first_dim(c) not in (shape[0], 0):
            continue
        yield (
            c.seconds + c.bytes / 1e12,
            Issue(
                "warning",
                "gathered_outside_loop",
                c.moves,
                f"All {shape[0]} layers are gathered over {_over(c)} before the loop that uses one at a time: "
                f"{size_text(c.bytes)} of memory, {size_text(c.total_bytes)} on the wire.",
                "Gather inside the scan's body: `eqshard.use(plan.layer(), layer)`.",
            ),
        )


def _first_dim(c: Collective) -> int:
    dims = shape_arrays(c.type)
    return dims[0][1][0] if dims and dims[0][1] else 0


def _over(c: Collective) -> str:
    return ", ".join(c.axes) or f"{c.group_size} devices"


def _resharded(collectives: Sequence[Collective]) -> Iterator[_Hint]:
    """Arguments that are stored in one layout and used in another."""
    by_argument: dict[str, list[Collective]] = {}
    for c in collectives:
        written = c.op.rpartition("/")[2] in ("all_to_all", "ppermute", "ragged_all_to_all")
        if c.moves and c.form == "plain" and not written and c.kind in ("all-to-all", "collective-permute"):
            by_argument.setdefault(c.moves, []).append(c)
    for path, found in by_argument.items():
        total = sum(c.total_bytes for c in found)
        if total < LEAST_BYTES:
            continue
        axes = ", ".join(dict.fromkeys(a for c in found for a in c.axes)) or "the mesh"
        yield (
            sum(c.total_seconds for c in found),
            Issue(
                "warning",
                "resharded",
                path,
                f"Moved between two layouts over {axes} each step: {size_text(total)} on the wire, "
                f"{sum(c.total_seconds for c in found) * 1e3:.3g} ms.",
                "Store it as it is used: `plan.at(...).set(...)`; or pin the value it meets.",
            ),
        )


def _not_scattered(module: Module, collectives: Sequence[Collective]) -> Iterator[_Hint]:
    """Sums that every device gets whole and of which it keeps a slice."""
    sliced = {
        f.instruction.name
        for computation, _ in executed(module)
        for f in found_in(module, computation)
        if f.kind == "all-reduce" and f.form == "plain" and _only_sliced(module, computation, f.done)
    }
    for c in collectives:
        if c.name not in sliced or c.bytes < LEAST_BYTES:
            continue
        what = "gradient" if "transpose(" in c.op else "sum"
        yield (
            c.total_seconds / 2,
            Issue(
                "warning",
                "all_reduce_not_scattered",
                c.moves,
                f"A {what} is summed whole on every device over {_over(c)} and then cut ({c.source or c.op}): "
                f"{size_text(c.total_bytes)} on the wire, where a reduce-scatter sends {size_text(c.total_bytes / 2)}.",
                "Let it arrive at rest: `eqshard.use` where the weight is needed. (On CPU, XLA always sums so.)",
            ),
        )


def _only_sliced(module: Module, where: Computation, name: str) -> bool:
    readers = [i for i in where.instructions if name in i.operands]
    return bool(readers) and all(_slices(module, where, i, name) for i in readers)


def _slices(module: Module, where: Computation, reader: Instruction, name: str) -> bool:
    if reader.opcode == "dynamic-slice":
        return reader.operands[0] == name
    if reader.opcode in ("get-tuple-element", "bitcast", "copy", "convert", "reshape"):
        return _only_sliced(module, where, reader.name)
    if reader.opcode == "fusion":
        inner = module.computations.get(next(iter(reader.called()), ""))
        numbers = [n for n, operand in enumerate(reader.operands) if operand == name]
        inside = [inner.parameters[n].name for n in numbers if n in inner.parameters] if inner else []
        return inner is not None and bool(inside) and all(_only_sliced(module, inner, p) for p in inside)
    return False


def _computed_again(module: Module, flat: Flat, flops: Flops, chip: Chip) -> Iterator[_Hint]:
    """Matrix products that several devices compute alike, by the line of the program that asks for them."""
    compiled: dict[str, float] = {}
    for computation, trips in executed(module):
        for i in computation.instructions:
            for line, count in _product_lines(module, computation, i):
                compiled[line] = compiled.get(line, 0.0) + count * trips
    devices = flat.mesh.size()
    for line, count in compiled.items():
        asked = flops.by_line.get(line, 0.0)
        if not line or not asked or count * devices < LEAST_SHARE * asked:
            continue
        ratio = count * devices / asked
        lost = (count - asked / devices) / chip.flops
        if lost < 1e-6 or count < 1e6:
            continue
        yield (
            lost,
            Issue(
                "warning",
                "computed_again",
                "",
                f"The products of {line} are computed {ratio:.3g} times over{_unused_axes(flat, ratio)}: "
                f"{lost * 1e3:.3g} ms more than if each device had its part.",
                "Split its batch (or heads, or features) over that axis: pin the value with `eqshard.constrain_to`.",
            ),
        )


def _unused_axes(flat: Flat, ratio: float) -> str:
    names = [name for name, size in flat.mesh.axes if size > 1 and abs(ratio / size - 1) < 0.1]
    return f": they are not split over {' or '.join(names)}" if names else ""


def executed(module: Module) -> Iterator[tuple[Computation, int]]:
    """Every computation that runs as such, with how often; loops of unknown length once."""
    stack = [(module.main, 1)]
    while stack:
        computation, trips = stack.pop()
        yield computation, trips
        for i in computation.instructions:
            for inner, times in runs(module, i, computation):
                stack.append((inner, trips * (1 if times is None else times)))


def _product_lines(
    module: Module, where: Computation, i: Instruction, inside: frozenset[str] = frozenset()
) -> Iterator[tuple[str, float]]:
    if i.opcode in ("dot", "convolution"):
        yield module.source(i), work_of(module, where, i, _ANY).flops
    for name in i.called() if i.opcode == "fusion" else ():
        inner = module.computations.get(name)
        if inner is not None and name not in inside:
            for instruction in inner.instructions:
                yield from _product_lines(module, inner, instruction, inside | {name})


_ANY = Chip("any", 1.0, 1.0, 1.0, 1.0)


def _padded(module: Module, chip: Chip) -> Iterator[_Hint]:
    """Values whose dimension does not divide: the compiler pads them, and cuts the padding off again."""
    for computation, trips in executed(module):
        for i in computation.instructions:
            for where, pad, inside in _pads(module, computation, i):
                wasted = shape_bytes(inside.shape) - shape_bytes(pad.shape)
                bytes_moved = shape_bytes(inside.shape) * trips
                if abs(wasted) == 0 or bytes_moved < LEAST_BYTES:
                    continue
                before, after = shape_arrays(where), shape_arrays(inside.shape)
                line = module.source(inside) or module.source(pad) or inside.op_name
                yield (
                    bytes_moved / chip.hbm_bandwidth,
                    Issue(
                        "info",
                        "padded",
                        "",
                        f"A value of {_dims(before)} does not divide over the mesh and is padded to {_dims(after)} "
                        f"({line}): {size_text(bytes_moved)} moved.",
                        "Choose a size that the mesh axis divides, or another dimension to split.",
                    ),
                )


def _pads(module: Module, where: Computation, i: Instruction) -> Iterator[tuple[str, Instruction, Instruction]]:
    """Gathered values that are cut at once: what is kept, the slice, the gather."""
    if i.kind == "all-gather":
        for reader in (r for r in where.instructions if i.name in r.operands):
            cut = _cuts(module, reader)
            if cut is not None and shape_bytes(cut.shape) < shape_bytes(i.shape):
                yield cut.shape, cut, i


def _cuts(module: Module, reader: Instruction) -> Instruction | None:
    if reader.opcode == "slice":
        return reader
    if reader.opcode != "fusion":
        return None
    inner = module.computations.get(next(iter(reader.called()), ""))
    root = inner.root if inner is not None else None
    while inner is not None and root is not None and root.opcode in ("bitcast", "copy") and root.operands:
        root = inner.by_name.get(root.operands[0])
    return root if root is not None and root.opcode == "slice" else None


def _dims(arrays: list[tuple[str, tuple[int, ...]]]) -> str:
    return str(list(arrays[0][1])) if arrays else "[]"


def _unknown_trips(collectives: Sequence[Collective]) -> Iterator[_Hint]:
    unknown = [c for c in collectives if not c.trips_known]
    if unknown:
        yield (
            0.0,
            Issue(
                "info",
                "unknown_trips",
                "",
                f"{len(unknown)} collectives are in loops whose length depends on data; they are counted once.",
                "Multiply them by what you expect.",
            ),
        )
