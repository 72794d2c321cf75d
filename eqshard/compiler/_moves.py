"""Whose data a collective moves: back along copies and slices to an argument of the program."""

from dataclasses import dataclass

from ._hlo import Computation, Instruction, Module, shape_bytes


# These hand their first operand on: the same data, or a part of it.
_SAME = frozenset(
    "bitcast copy reshape transpose convert slice dynamic-slice optimization-barrier copy-start copy-done slice-start "
    "slice-done all-gather all-gather-start all-gather-done collective-permute-start collective-permute-done "
    "collective-permute bitcast-convert pad async-start async-done custom-call".split()
)


@dataclass(frozen=True)
class Site:
    """A computation as it is being run, and by what."""

    computation: Computation
    caller: "Site | None"
    at: Instruction | None


def argument_of(module: Module, inside: Computation, at: Instruction, site: Site, start: str) -> tuple[int, str] | None:
    """The number of the argument whose data `at` takes, and the name it has in the text; None if it is computed."""
    if not at.operands:
        return None
    if inside is not site.computation:  # inside a fusion: first out to its operands
        number = _parameter(module, inside, at.operands[0])
        call = site.computation.by_name.get(start)
        if number is None or call is None or number >= len(call.operands):
            return None
        return _trace(module, site, call.operands[number])
    return _trace(module, site, at.operands[0])


def _trace(module: Module, site: Site | None, name: str) -> tuple[int, str] | None:
    element: int | None = None
    for _ in range(200):
        at = site.computation.by_name.get(name) if site is not None else None
        if site is None or at is None:
            return None
        if at.opcode == "get-tuple-element":
            if element is not None:
                return None
            name, element = at.operands[0], int(at.attribute("index") or 0)
        elif at.opcode == "tuple" and element is not None:
            name, element = at.operands[element], None
        elif at.opcode == "while" and element is not None:
            body = module.computations.get(at.attribute("body") or "")
            if body is None or not _unchanged(body, element):
                return None
            name = at.operands[0]
        elif at.opcode == "parameter":
            if site.caller is None or site.at is None:
                number = int(at.literal) if element is None else element  # many arguments come as one tuple
                return number, at.op_name if element is None else ""
            if site.at.opcode == "while" and element is not None and not _unchanged(site.computation, element):
                return None
            operand = 0 if site.at.opcode == "while" else int(at.literal)
            if operand >= len(site.at.operands):
                return None
            name, site = site.at.operands[operand], site.caller
        elif at.opcode == "fusion":
            following = _through(module, at)
            if following is None:
                return None
            name = at.operands[following]
        elif at.opcode in _SAME and at.operands and (element is None or at.opcode == "optimization-barrier"):
            name = at.operands[0]
        else:
            return None
    return None


def _unchanged(body: Computation, element: int) -> bool:
    root = body.root
    if root is None or root.opcode != "tuple" or element >= len(root.operands):
        return False
    at = body.by_name.get(root.operands[element])
    return at is not None and at.opcode == "get-tuple-element" and at.attribute("index") == str(element)


def _through(module: Module, fusion: Instruction, depth: int = 0) -> int | None:
    """The operand that a fusion of nothing but movement hands on."""
    if depth > 20:
        return None
    inner = module.computations.get(next(iter(fusion.called()), ""))
    if inner is None or inner.root is None:
        return None
    return _parameter(module, inner, inner.root.name, depth + 1)


def _parameter(module: Module, inner: Computation, name: str, depth: int = 0) -> int | None:
    for _ in range(100):
        at = inner.by_name.get(name)
        if at is None:
            return None
        if at.opcode == "parameter":
            return int(at.literal)
        if at.opcode == "fusion":
            following = _through(module, at, depth)
            if following is None:
                return None
            name = at.operands[following]
        elif at.opcode in _SAME and at.operands:
            name = at.operands[0]
        elif at.opcode in ("concatenate", "dynamic-update-slice") and at.operands:
            # Pieces put together: all the same argument as a rule; follow the largest.
            known = [o for o in at.operands if o in inner.by_name]
            name = max(known, key=lambda o: shape_bytes(inner.by_name[o].shape)) if known else ""
        else:
            return None
    return None
