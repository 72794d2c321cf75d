"""What a plan keeps of its program, so that another program can be refused with what differs."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
from jax.extend import source_info_util

from .._errors import FormatError
from .._tree import shown, type_text
from .._value import Reader, whole_number
from ._identity import Line, plain_text, type_of
from ._trace import Traced


MOST_EQUATIONS = 2000
"""Programs up to this length are kept equation by equation, longer ones in blocks."""
MOST_BLOCKS = 500
MOST_STATIC = 50
MOST_RESULTS = 200
LONGEST = 200
"""Characters of an equation that are kept."""


@dataclass(frozen=True)
class Outline:
    """A program in short. Argument types are not in it: the plans of the arguments have them."""

    length: int
    """How many equations there are, with those of bodies."""
    kinds: tuple[str, ...] = ()
    """The different equations: primitive, types, parameters."""
    equations: tuple[tuple[int, str], ...] = ()
    """For each equation its kind, and which values it reads; none if there are more than `MOST_EQUATIONS`."""
    blocks: tuple[str, ...] = ()
    """Else a digest for each run of equally many equations."""
    weak: tuple[int, ...] = ()
    """Which arrays among the arguments are weakly typed."""
    static: tuple[tuple[str, str], ...] = ()
    """Leaves of the arguments that are not arrays: path and text."""
    results: tuple[str, ...] = ()
    """Path and type of each array of the results."""

    @classmethod
    def of(cls, traced: Traced) -> "Outline":
        """Summarises a program; what it takes is bounded."""
        lines = traced.identity.lines
        short = len(lines) <= MOST_EQUATIONS
        numbers: dict[str, int] = {}
        equations = [
            (numbers.setdefault(_cut(line.text), len(numbers)), _cut(line.operands))
            for line in (lines if short else ())
        ]
        return cls(
            length=len(lines),
            kinds=tuple(numbers),
            equations=tuple(equations),
            blocks=() if short else _blocks(lines),
            weak=tuple(i for i, aval in enumerate(traced.jaxpr.in_avals) if getattr(aval, "weak_type", False)),
            static=_static(traced),
            results=_results(traced),
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> "Outline":
        read = Reader(data, "outline", "step: outline")
        read.only("length", "kinds", "equations", "blocks", "weak", "static", "results")
        kinds = read.strings("kinds", ())
        equations = []
        for entry in read.get("equations", (list, tuple), ()):
            if not (isinstance(entry, (list, tuple)) and len(entry) == 2 and isinstance(entry[1], str)):
                raise FormatError("step: outline: `equations` holds [kind, operands] pairs.")
            equations.append((whole_number(entry[0], "step: outline: kind", most=max(len(kinds) - 1, 0)), entry[1]))
        static = []
        for entry in read.get("static", (list, tuple), ()):
            if not (isinstance(entry, (list, tuple)) and len(entry) == 2 and all(isinstance(x, str) for x in entry)):
                raise FormatError("step: outline: `static` holds [path, text] pairs.")
            static.append((entry[0], entry[1]))
        if equations and not kinds:
            raise FormatError("step: outline: `equations` without `kinds`.")
        return cls(
            length=whole_number(read.get("length", int), "step: outline: length"),
            kinds=kinds,
            equations=tuple(equations),
            blocks=read.strings("blocks", ()),
            weak=tuple(whole_number(n, "step: outline: weak") for n in read.get("weak", (list, tuple), ())),
            static=tuple(static),
            results=read.strings("results", ()),
        )


def versions() -> tuple[tuple[str, str], ...]:
    """The versions of the packages that make a plan what it is."""
    try:
        own = version("eqshard")
    except PackageNotFoundError:  # run from a folder of sources
        own = "unknown"
    return ("eqshard", own), ("jax", jax.__version__)


def refusal(args: Sequence[Any], outline: Outline | None, made_by: Mapping[str, str], traced: Traced) -> str:
    """Says how a program differs from the one that a plan is for.

    **Arguments:**

    - `args`: the plans of the arguments.
    - `made_by`: versions of packages.
    """
    start = "this is not the program that was planned."
    fix = "To fix this, call `step_plan` with the function and the arguments that are used here."
    if outline is None:
        why = "The plan does not say which program it is for: it was made by an older eqshard."
        return f"{start} {why}\n  {fix}"
    found = [*_arguments(args, outline, traced)[:3], *_statics(outline, traced)[:3]]
    found += _equations(outline, traced.identity.lines) or _outs(outline, traced)
    now = dict(versions())
    found += [
        f"the plan was made with {name} {then}, this is {name} {now[name]}: a function may become other equations"
        for name, then in made_by.items()
        if now.get(name, then) != then
    ]
    return "\n  ".join([start, *(f"{text[0].upper()}{text[1:]}." for text in found), fix])


def _arguments(args: Sequence[Any], outline: Outline, traced: Traced) -> list[str]:
    planned = {(n, row.path): type_text(row.shape, row.dtype) for n, plan in enumerate(args) for row in plan}
    given = {(leaf.arg, leaf.path): type_text(leaf.shape, leaf.dtype) for leaf in traced.ins}
    found = []
    for n, path in {**planned, **given}:
        then, now = planned.get((n, path)), given.get((n, path))
        if then != now:
            found.append(f"{_leaf(n, path)}: {then or 'nothing'} planned, {now or 'nothing'} given")
    if found:
        return found
    strength = lambda weak: "weakly typed" if weak else "strongly typed"
    for i, (leaf, aval) in enumerate(zip(traced.ins, traced.jaxpr.in_avals)):
        then, now = i in outline.weak, bool(getattr(aval, "weak_type", False))
        if then != now:
            kind = given[leaf.arg, leaf.path]
            found.append(
                f"{_leaf(leaf.arg, leaf.path)}: {strength(then)} {kind} planned, {strength(now)} {kind} given; "
                f"`jnp.asarray(x, {leaf.dtype!r})` is strongly typed, `jnp.asarray(0.1)` weakly"
            )
    return found


def _leaf(n: int, path: str) -> str:
    return f"argument {n}" + (f", leaf {shown(path)}" if path else "")


def _statics(outline: Outline, traced: Traced) -> list[str]:
    then, now = dict(outline.static), dict(_static(traced))
    return [
        f"the static leaf {shown(path)}: {then.get(path, 'nothing')} planned, {now.get(path, 'nothing')} given"
        for path in {**then, **now}
        if then.get(path) != now.get(path)
    ]


def _equations(outline: Outline, lines: list[Line]) -> list[str]:
    """The first difference."""
    counts = f"the plan's program has {outline.length} equations, this one {len(lines)}"
    if outline.blocks:
        size = _block_size(outline.length)
        mine = _blocks(lines, size)
        n = next((i for i, (a, b) in enumerate(zip(outline.blocks, mine)) if a != b), None)
        if n is None:
            return [counts] if outline.length != len(lines) else []
        where = _where(lines, n * size)
        return [
            f"the first difference is within {size} equations from {where}",
            *([counts] if outline.length != len(lines) else []),
        ]
    planned = [(outline.kinds[k], operands) for k, operands in outline.equations]
    for n, (line, (text, operands)) in enumerate(zip(lines, planned)):
        if (_cut(line.text), _cut(line.operands)) == (text, operands):
            continue
        if _cut(line.text) == text:
            return [f"{_where(lines, n)}: it reads ({operands}) in the plan, ({line.operands}) here"]
        return [f"{_where(lines, n)}: the plan has {_parts(text, line.text)}, this program {_parts(line.text, text)}"]
    if outline.length == len(lines):
        return []
    more = lines if len(lines) > outline.length else None
    name = "" if more is None else f"; the first one more is {_where(lines, outline.length)}"
    return [counts + name]


def _parts(text: str, other: str) -> str:
    """What `text` has and `other` has not."""
    mine, others = text.split(" | "), other.split(" | ")
    if mine[0] != others[0]:
        return f"`{mine[0]}` {' '.join(mine[1:2])}".rstrip()
    left = [part for part in mine if part not in others]
    return "`" + "`, `".join(left) + "`" if left else "nothing of that"


def _where(lines: list[Line], n: int) -> str:
    line = lines[n]
    inside = "" if not line.depth else ", inside a body"
    source = source_info_util.summarize(line.eqn.source_info)
    return f"equation {n}{inside}, `{line.eqn.primitive.name}` at {source}"


def _outs(outline: Outline, traced: Traced) -> list[str]:
    mine = _results(traced)
    if mine == outline.results:
        return []
    for then, now in zip(outline.results, mine):
        if then != now:
            return [f"the results differ: {then} planned, {now} here"]
    return [f"the results differ: {len(outline.results)} arrays planned, {len(mine)} here"]


def _results(traced: Traced) -> tuple[str, ...]:
    pairs = zip(traced.outs[:MOST_RESULTS], traced.jaxpr.out_avals)
    return tuple(_cut(f"result {leaf.arg}{leaf.path}, {type_of(aval)}") for leaf, aval in pairs)


def _static(traced: Traced) -> tuple[tuple[str, str], ...]:
    return tuple((path, _cut(plain_text(x))) for path, x in traced.static[:MOST_STATIC])


def _block_size(length: int) -> int:
    return -(-length // MOST_BLOCKS)


def _blocks(lines: list[Line], size: int | None = None) -> tuple[str, ...]:
    size = _block_size(len(lines)) if size is None else size
    found = []
    for n in range(0, len(lines), size):
        text = "\n".join([part for line in lines[n : n + size] for part in (line.text, line.operands)])
        found.append(hashlib.sha256(text.encode()).hexdigest()[:8])
    return tuple(found)


def _cut(text: str) -> str:
    """A text that is too long to keep, by its start and a digest."""
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST - 13]}... {hashlib.sha256(text.encode()).hexdigest()[:8]}"
