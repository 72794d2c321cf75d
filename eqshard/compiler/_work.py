"""What one instruction computes: FLOPs, bytes touched, and how long that takes."""

import math
import re
from dataclasses import dataclass

import numpy as np

from .._chip import Chip
from ._hlo import Computation, Instruction, Module, shape_arrays, shape_bytes


_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
# These cost nothing by themselves: names for data, or waits for what runs beside.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast copy-start copy-done slice-start slice-done async-start "
    "async-done async-update after-all add-dependency partition-id replica-id optimization-barrier while conditional "
    "call domain get-dimension-size send send-done recv recv-done infeed outfeed iota".split()
)
_FREE_CALLS = ("AllocateBuffer", "ConcatBitcast", "Sharding", "annotate_device_placement", "AsyncCollective")
_DTYPES = {"bf16": "bfloat16", "f16": "bfloat16", "f32": "float32", "f64": "float64", "s8": "int8", "u8": "int8"}


@dataclass(frozen=True)
class Work:
    """What an instruction does, and its estimated time."""

    seconds: float
    flops: float
    bytes: int
    products: bool
    """Whether its time is that of matrix products rather than of memory."""


NOTHING = Work(0.0, 0.0, 0, False)


def work_of(module: Module, where: Computation, at: Instruction, chip: Chip) -> Work:
    """The work of one instruction: the compiler's own cycles where it wrote them, else the chip's peaks."""
    if at.opcode in _FREE or (at.opcode == "custom-call" and any(n in at.attributes for n in _FREE_CALLS)):
        return NOTHING
    flops, dtype = _flops(module, where, at)
    touched = _touched(module, where, at)
    by_flops, by_bytes = flops / chip.peak(dtype), touched / chip.hbm_bandwidth
    cycles = _CYCLES.search(at.config) if chip.clock else None
    if cycles:
        return Work(int(cycles.group(1)) / chip.clock, flops, touched, flops > 0)
    return Work(max(by_flops, by_bytes), flops, touched, by_flops > by_bytes)


def _flops(
    module: Module, where: Computation, at: Instruction, inside: frozenset[str] = frozenset()
) -> tuple[float, str]:
    """FLOPs of the matrix products in an instruction, and their dtype."""
    if at.opcode == "dot":
        return _dot(where, at)
    if at.opcode == "convolution":
        return _convolution(where, at)
    if at.opcode == "custom-call" and re.search(r"matmul|gemm", at.attributes, re.IGNORECASE):
        return _matmul_call(where, at)
    total, kind = 0.0, "bfloat16"
    for name in at.called() if at.opcode == "fusion" else ():
        inner = module.computations.get(name)
        if inner is None or name in inside:
            continue
        for instruction in inner.instructions:
            flops, dtype = _flops(module, inner, instruction, inside | {name})
            total, kind = total + flops, dtype if flops else kind
    return total, kind


def _array(where: Computation, at: Instruction, number: int) -> tuple[str, tuple[int, ...]]:
    operand = where.by_name.get(at.operands[number]) if number < len(at.operands) else None
    arrays = shape_arrays(operand.shape) if operand else []
    return arrays[0] if arrays else ("bf16", ())


def _dot(where: Computation, at: Instruction) -> tuple[float, str]:
    dtype, left = _array(where, at, 0)
    found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", at.attributes)
    dims = [int(d) for d in found.group(1).split(",") if d] if found else []
    out = math.prod(shape_arrays(at.shape)[0][1]) if shape_arrays(at.shape) else 0
    return 2.0 * out * math.prod(left[d] for d in dims if d < len(left)), _dtype(dtype)


def _convolution(where: Computation, at: Instruction) -> tuple[float, str]:
    """Only what meets data counts: TPUs write batched matmuls as convolutions over padding and dilation."""
    dtype, kernel = _array(where, at, 1)
    _, taken = _array(where, at, 0)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", at.attributes)
    arrays = shape_arrays(at.shape)
    if labels is None or not arrays:
        return 0.0, _dtype(dtype)
    size_in, size_kernel, size_out = (
        dict(zip(n, dims)) for n, dims in zip(labels.groups(), (taken, kernel, arrays[0][1]))
    )
    spatial = sorted(label for label in labels.group(3) if label.isdigit())
    meets = math.prod(_meets(at.attributes, k, size_in.get(d, 1), size_out.get(d, 1)) for k, d in enumerate(spatial))
    return 2.0 * meets * size_out.get("b", 1) * size_out.get("f", 1) * size_kernel.get("i", 1), _dtype(dtype)


def _meets(attributes: str, k: int, size_in: int, size_out: int) -> int:
    """In how many pairs of an output and a window position an element of the input is met, along one dimension."""
    window = re.search(r"window=\{([^}]*)\}", attributes)
    said = dict(part.split("=") for part in window.group(1).split()) if window else {}

    def number(name: str, default: int) -> int:
        return int(said[name].split("x")[k]) if name in said else default

    size, stride, before = number("size", 1), number("stride", 1), 0
    if "pad" in said:
        before = int(said["pad"].split("x")[k].split("_")[0])
    spread, step = number("lhs_dilate", 1), number("rhs_dilate", 1)
    # Output o and position w meet the input at o * stride + w * step - before, if an element is there. For each w, o
    # lies between two bounds and, as every `spread`th place has an element, is one of every `every`.
    shift = np.arange(size) * step - before
    low = np.maximum(-(shift // stride), 0)
    high = np.minimum(((size_in - 1) * spread - shift) // stride, size_out - 1)
    common = math.gcd(stride, spread)
    every = spread // common
    first = (-shift // common) * pow(stride // common, -1, every) % every
    count = (high - first) // every - (low - 1 - first) // every
    return int(np.where((shift % common == 0) & (high >= low), count, 0).sum())


def _matmul_call(where: Computation, at: Instruction) -> tuple[float, str]:
    dtype, left = _array(where, at, 0)
    _, right = _array(where, at, 1)
    arrays = shape_arrays(at.shape)
    if len(left) < 2 or len(right) < 2 or not arrays or not math.prod(arrays[0][1]):
        return 0.0, _dtype(dtype)
    # m·k times k·n over m·n is k²: right for a product of any layout without batch.
    batch = math.prod(left[:-2])
    out = math.prod(arrays[0][1])
    summed = math.sqrt(math.prod(left) * math.prod(right) / (out * batch))
    return 2.0 * out * summed, _dtype(dtype)


def _dtype(name: str) -> str:
    return "float8" if name.startswith("f8") else _DTYPES.get(name, "bfloat16")


def _touched(module: Module, where: Computation, at: Instruction) -> int:
    """Bytes read and written: of an operand that is only sliced, the slice; of one updated in place, the update."""
    if at.opcode == "fusion":
        inner = module.computations.get(next(iter(at.called()), ""))
        if inner is not None:
            return _touched_inside(inner)
    read = [where.by_name[o] for o in at.operands if o in where.by_name]
    return _moved(at, [shape_bytes(i.shape) for i in read])


def _moved(at: Instruction, operands: list[int]) -> int:
    if at.opcode in ("dynamic-slice", "slice", "gather"):
        return 2 * shape_bytes(at.shape)
    if at.opcode == "dynamic-update-slice":
        return 2 * operands[1] if len(operands) > 1 else shape_bytes(at.shape)
    return sum(operands) + shape_bytes(at.shape)


def _touched_inside(inner: Computation) -> int:
    users: dict[str, list[Instruction]] = {}
    for i in inner.instructions:
        for operand in i.operands:
            users.setdefault(operand, []).append(i)
    total = 0
    for p in inner.parameters.values():
        total += _read(inner, p, users)
    root = inner.root
    parts = [inner.by_name[o] for o in root.operands] if root is not None and root.opcode == "tuple" else [root]
    for part in parts:
        while part is not None and part.opcode in ("bitcast", "copy") and part.operands:
            part = inner.by_name.get(part.operands[0])
        if part is not None and part.opcode == "dynamic-update-slice" and len(part.operands) > 1:
            part = inner.by_name.get(part.operands[1])
        total += shape_bytes(part.shape) if part is not None else 0
    return total


def _read(inner: Computation, p: Instruction, users: dict[str, list[Instruction]]) -> int:
    readers = users.get(p.name, [])
    while len(readers) == 1 and readers[0].opcode == "bitcast":
        p, readers = readers[0], users.get(readers[0].name, [])
    if readers and all(r.opcode in ("dynamic-slice", "slice", "gather") and r.operands[0] == p.name for r in readers):
        return sum(shape_bytes(r.shape) for r in readers)
    if readers and all(r.opcode == "dynamic-update-slice" and r.operands[0] == p.name for r in readers):
        return 0
    return shape_bytes(p.shape)
