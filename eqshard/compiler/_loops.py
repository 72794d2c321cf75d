"""How often a loop runs, read from its condition and body."""

import math
import operator
import re
from collections.abc import Callable

from ._hlo import Computation, Instruction, Module


_KNOWN = re.compile(r'known_trip_count"?:\s*\{"?n"?:"?(\d+)')
_PASS = {"copy", "bitcast", "convert", "reshape", "copy-done", "copy-start", "optimization-barrier", "broadcast"}
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "maximum": max,
    "minimum": min,
}
_COUNTER = re.compile(r"[su]\d+\[\]|pred\[\]|\(")  # a counter is a scalar, alone or in a tuple
_NEGATED = {"LT": "GE", "GE": "LT", "GT": "LE", "LE": "GT", "EQ": "NE", "NE": "EQ"}

# What is known of the values that a computation is given: a number, or for a tuple its elements' numbers.
Known = dict[int, int | None] | int | None


def trip_count(module: Module, loop: Instruction, around: Computation) -> int | None:
    """The number of times the body of `loop` runs; None if it depends on data."""
    known = _KNOWN.search(loop.config) or _KNOWN.search(loop.attributes)
    if known:
        return int(known.group(1))
    body, condition = (module.computations.get(loop.attribute(n) or "") for n in ("body", "condition"))
    if body is None or condition is None or body.root is None or condition.root is None:
        return None
    start = _initial(module, loop, around)
    found = _compared(module, condition, condition.root)
    if found is None:
        return None
    index, bound_at, direction = found
    first = start.get(index)
    if first is None:
        return None
    unchanged: Known = {i: v for i, v in start.items() if _passes(body, i)}
    bound = _value(module, condition, bound_at, [unchanged])
    steps = [_next(module, body, index, unchanged, v) for v in (first, first + 1)]
    if bound is None or steps[0] is None or steps[1] is None or steps[1] - steps[0] != 1:
        return None
    return _trips(first, bound, steps[0] - first, direction)


def _trips(first: int, bound: int, step: int, direction: str) -> int | None:
    if step == 0:
        return None
    if direction == "NE":
        return (bound - first) // step if (bound - first) % step == 0 and (bound - first) / step >= 0 else None
    if direction in ("LE", "GE"):
        bound += 1 if direction == "LE" else -1
        direction = "LT" if direction == "LE" else "GT"
    if (direction == "LT") != (step > 0) or direction not in ("LT", "GT"):
        return None
    return max(0, math.ceil((bound - first) / step))


def _initial(module: Module, loop: Instruction, around: Computation) -> dict[int, int | None]:
    given = around.by_name.get(loop.operands[0]) if loop.operands else None
    while given is not None and given.opcode in _PASS and given.operands:
        given = around.by_name.get(given.operands[0])
    if given is not None and given.opcode == "parameter":  # the loop is all that a called computation does
        callers = module.callers.get(around.name, [])
        if len(callers) == 1 and callers[0][1].opcode == "call":
            return _initial(module, callers[0][1], callers[0][0])
    if given is None or given.opcode != "tuple":
        return {}
    return {i: _value(module, around, name, []) for i, name in enumerate(given.operands)}


def _compared(module: Module, where: Computation, at: Instruction) -> tuple[int, str, str] | None:
    """The tuple element that a condition compares, the instruction it compares it with, and how."""
    negated = False
    while at.opcode in ("not", *_PASS) and at.operands:
        negated ^= at.opcode == "not"
        at = where.by_name[at.operands[0]]
    names = at.operands
    direction = at.attribute("direction")
    if at.opcode == "fusion":  # a fused compare: its parameters are this fusion's operands
        inner = module.computations.get(next(iter(at.called()), ""))
        root = inner.root if inner else None
        if inner is None or root is None or root.opcode != "compare":
            return None
        direction = root.attribute("direction")
        names = tuple(_outside(inner, n, at) or "" for n in root.operands)
    elif at.opcode != "compare":
        return None
    if len(names) != 2 or direction is None or "" in names:
        return None
    direction = _NEGATED[direction] if negated else direction
    left, right = (_element(where, n) for n in names)
    if left is not None and (right is None or direction in ("LT", "LE", "NE")):
        return left, names[1], direction
    if right is not None:
        return right, names[0], {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, direction)
    return None


def _outside(inner: Computation, name: str, call: Instruction) -> str | None:
    """The operand of `call` that `name` inside is, or the name of a constant inside (which `_value` finds again)."""
    at = inner.by_name.get(name)
    while at is not None and at.opcode in _PASS and at.operands:
        at = inner.by_name.get(at.operands[0])
    if at is None:
        return None
    if at.opcode == "parameter" and at.literal.isdigit() and int(at.literal) < len(call.operands):
        return call.operands[int(at.literal)]
    return f"={at.literal}" if at.opcode == "constant" else None


def _element(where: Computation, name: str) -> int | None:
    at = where.by_name.get(name)
    while at is not None and at.opcode in _PASS and at.operands:
        at = where.by_name.get(at.operands[0])
    if at is None or at.opcode != "get-tuple-element":
        return None
    source = where.by_name.get(at.operands[0])
    index = at.attribute("index")
    return int(index) if index is not None and source is not None and source.opcode == "parameter" else None


def _passes(body: Computation, index: int) -> bool:
    """Whether the body hands this element of its tuple on unchanged."""
    if body.root is None or body.root.opcode != "tuple" or index >= len(body.root.operands):
        return False
    return _element(body, body.root.operands[index]) == index


def _next(module: Module, body: Computation, index: int, unchanged: Known, value: int) -> int | None:
    if body.root is None or body.root.opcode != "tuple" or index >= len(body.root.operands):
        return None
    given: Known = {**(unchanged if isinstance(unchanged, dict) else {}), index: value}
    return _value(module, body, body.root.operands[index], [given])


def _value(module: Module, where: Computation, name: str, given: list[Known], depth: int = 0) -> int | None:
    """The integer that an instruction gives, if it follows from constants and from what is given."""
    if name.startswith("="):
        return _integer(name[1:])
    at = where.by_name.get(name)
    if at is None or depth > 40 or not _COUNTER.match(at.shape):
        return None
    if at.opcode == "constant":
        return _integer(at.literal)
    if at.opcode == "parameter":
        number = int(at.literal)
        known = given[number] if number < len(given) else None
        return known if isinstance(known, int) else None
    if at.opcode == "get-tuple-element":
        return _tuple_element(module, where, at, given, depth)
    if at.opcode not in ("fusion", "call", *_PASS, *_ARITHMETIC):
        return None
    values = [_value(module, where, n, given, depth + 1) for n in at.operands]
    if at.opcode in _PASS:
        return values[0] if values else None
    if at.opcode in ("fusion", "call"):
        inner = module.computations.get(next(iter(at.called()), ""))
        return _value(module, inner, inner.root.name, list(values), depth + 1) if inner and inner.root else None
    known = [v for v in values if v is not None]
    return _ARITHMETIC[at.opcode](*known) if len(known) == 2 == len(values) else None


def _tuple_element(module: Module, where: Computation, at: Instruction, given: list[Known], depth: int) -> int | None:
    source, index = where.by_name.get(at.operands[0]), int(at.attribute("index") or 0)
    while source is not None and source.opcode in _PASS and source.operands:
        source = where.by_name.get(source.operands[0])
    if source is None:
        return None
    if source.opcode == "tuple":
        return _value(module, where, source.operands[index], given, depth + 1)
    if source.opcode == "parameter":
        known = given[int(source.literal)] if int(source.literal) < len(given) else None
        return known.get(index) if isinstance(known, dict) else None
    inner = module.computations.get(next(iter(source.called()), "")) if source.opcode == "fusion" else None
    if inner is None or inner.root is None or inner.root.opcode != "tuple":
        return None
    values: list[Known] = [_value(module, where, n, given, depth + 1) for n in source.operands]
    return _value(module, inner, inner.root.operands[index], values, depth + 1)


def _integer(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?\d+", text.strip()) else None
