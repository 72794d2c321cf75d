"""Which values are in memory at one time, where that is most.

What XLA fuses into its readers takes no memory of its own, but what it is made of must stay as long as it is read.
"""

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jax.extend.core import Literal

from ._graph import Graph
from ._ops import CONSTRAINTS, PRODUCTS
from ._together import ELEMENTWISE, SPREAD
from ._trace import CALLS, inner_jaxpr, LOOPS


# What XLA fuses into its readers, or does without a copy.
_FUSED_AWAY = (
    ELEMENTWISE
    | CONSTRAINTS
    | frozenset("reshape squeeze expand_dims transpose broadcast_in_dim iota slice optimization_barrier".split())
)
MOMENTS = 2
"""How many of the worst moments are looked at."""

Alive = dict[int, float]
"""Values in memory at one time, and how much of each: less than 1 if it is kept in a narrower type."""


def worst_moments(
    graph: Graph,
    jaxpr: Any,
    env: dict[Any, int | None],
    inside: Sequence[list[Alive]],
    late: dict[Any, bool],
    in_place: Container[Any] = (),
    copies: Mapping[Any, int] = MappingProxyType({}),
    returned: Container[Any] = (),
) -> list[Alive]:
    """The few worst moments of a jaxpr, the worst first.

    **Arguments:**

    - `inside`: the worst moments inside each equation.
    - `late`: variables that no product reads any more; their equations run as soon as they can.
    - `in_place`: results that take the memory of arguments.
    - `copies`: of variables that several products read, what they read: kept from the first to the last of them.
    - `returned`: results that need memory of their own, until the end.
    """
    order = _order(jaxpr, late)
    made, held = _held(graph, jaxpr, env, order, in_place, copies, returned)
    ends: dict[int, list[int]] = {}
    for v, place in held.items():
        ends.setdefault(place, []).append(v)
    share = _narrowed(jaxpr, env)
    alive: Alive = {}
    nbytes, worst = 0.0, []
    for place, i in enumerate(order):
        for v in made[place]:
            if v not in alive:
                alive[v] = share.get(v, 1.0)
                nbytes += alive[v] * graph.values[v].nbytes
        within = inside[i][0] if inside[i] else {}
        total = nbytes + sum(n * graph.values[v].nbytes for v, n in within.items() if v not in alive)
        if len(worst) < MOMENTS or total > worst[-1][0]:
            worst = sorted([*worst, (total, place, within | alive)], key=lambda m: (-m[0], m[1]))[:MOMENTS]
        for v in ends.get(place, ()):
            if v in alive:
                nbytes -= alive.pop(v) * graph.values[v].nbytes
    return [alive for _, _, alive in worst]


def _held(
    graph: Graph,
    jaxpr: Any,
    env: dict[Any, int | None],
    order: list[int],
    in_place: Container[Any],
    copies: Mapping[Any, int],
    returned: Container[Any],
) -> tuple[list[list[int]], dict[int, int]]:
    """For each place the values that begin to take memory there, and for each such value where it ends."""
    readers, products, joined = readers_of(jaxpr), products_of(jaxpr), _joined(jaxpr)
    looped = {v for eqn in jaxpr.eqns if eqn.primitive.name in LOOPS for v in eqn.invars if not isinstance(v, Literal)}
    of: dict[Any, frozenset[int]] = {}
    """For each variable the values in memory that it is made of."""
    dear: set[Any] = set()
    """Variables that are made of those by more than a few additions: they are not made twice."""
    made: list[list[int]] = []
    last: dict[int, int] = {}
    for place, i in enumerate(order):
        eqn = jaxpr.eqns[i]
        ins = [v for v in eqn.invars if not isinstance(v, Literal)]
        from_ = frozenset[int]().union(*(of.get(v, frozenset()) for v in ins))
        begin = []
        long = takes_long(eqn, dear)
        for v in eqn.outvars:
            value = env.get(v)
            if value is None or v not in readers or (v in in_place and eqn.primitive.name != "scan"):
                of[v] = frozenset()
            elif v in returned:
                of[v] = frozenset((value,))
                begin.append(value)
            elif eqn.primitive.name in CALLS and v in joined:
                of[v] = from_
            elif (
                fused(eqn)
                and v not in looped
                and not kept_apart(graph, from_, value, long, readers.get(v, 0), products.get(v, 0))
            ):
                of[v] = from_
                dear |= {v} if long else set()
            else:
                of[v] = frozenset((value,))
                begin.append(value)
        if eqn.primitive.name in PRODUCTS:
            for v in ins:
                if v in copies:
                    begin.append(copies[v])
                    last[copies[v]] = place
        last.update((value, place) for v in ins for value in of.get(v, ()))
        made.append(begin)
    last.update((value, len(order)) for v in jaxpr.outvars if not isinstance(v, Literal) for value in of.get(v, ()))
    return made, last


_DEAR = frozenset("div erf erfc erf_inv exp exp2 expm1 log log1p logistic pow rsqrt sin cos sqrt tan tanh".split())


def takes_long(eqn: Any, dear: set[Any]) -> bool:
    """Whether an equation, or what it reads of those in `dear`, is more than a few additions."""
    size = max((math.prod(v.aval.shape) for v in eqn.outvars), default=1)
    ins = [v for v in eqn.invars if not isinstance(v, Literal) and SPREAD * math.prod(v.aval.shape) > size]
    if eqn.primitive.name in CALLS and (inner := inner_jaxpr(eqn)) is not None:
        return any(takes_long(e, dear) for e in inner[0].eqns) or any(v in dear for v in ins)
    return eqn.primitive.name in _DEAR or any(v in dear for v in ins)


def products_of(jaxpr: Any) -> dict[Any, int]:
    """How many products read each variable, as it is or turned."""
    found: dict[Any, int] = {}
    for eqn in reversed(jaxpr.eqns):
        turned = eqn.primitive.name in ("transpose", "reshape", "squeeze") or eqn.primitive.name in CONSTRAINTS
        reads = 1 if eqn.primitive.name in PRODUCTS else found.get(eqn.outvars[0], 0) if turned else 0
        for v in eqn.invars if reads else ():
            if not isinstance(v, Literal):
                found[v] = found.get(v, 0) + reads
    return found


def kept_apart(graph: Graph, of: Iterable[int], value: int, long: bool, readers: int, products: int) -> bool:
    """Whether elementwise work is done once for all that read it: if it is made of much, or takes long and is for
    several products."""
    return readers > 1 and (_large(graph, of, value) > 1 or (long and products > 1))


def _large(graph: Graph, values: Iterable[int], value: int) -> int:
    """How many of some values are not small beside another."""
    return sum(SPREAD * graph.values[v].nbytes > graph.values[value].nbytes for v in values)


def fused(eqn: Any) -> bool:
    """Whether XLA makes what an equation makes where it is read."""
    if eqn.primitive.name in CALLS and (inner := inner_jaxpr(eqn)) is not None:
        return all(fused(e) for e in inner[0].eqns)
    strided = eqn.primitive.name == "slice" and any(n > 1 for n in eqn.params["strides"] or ())
    return eqn.primitive.name in _FUSED_AWAY and not strided


def _joined(jaxpr: Any) -> set[Any]:
    """Concatenations, and what is made of one element by element, also by a call that takes sums of it, as a variance
    does: XLA keeps the parts, and works on each."""
    found: set[Any] = set()
    for eqn in jaxpr.eqns:
        sizes = {math.prod(v.aval.shape) for v in eqn.invars if not isinstance(v, Literal) and v in found}
        if eqn.primitive.name == "concatenate":
            found.update(eqn.outvars)
        elif sizes and _sums_at_most(eqn):
            found.update(v for v in eqn.outvars if math.prod(v.aval.shape) in sizes)
    return found


def _sums_at_most(eqn: Any) -> bool:
    """Whether an equation is elementwise work, and sums of it."""
    if eqn.primitive.name in CALLS and (inner := inner_jaxpr(eqn)) is not None:
        return all(_sums_at_most(e) for e in inner[0].eqns)
    return fused(eqn) or eqn.primitive.name.startswith("reduce_")


def readers_of(jaxpr: Any) -> dict[Any, int]:
    """How many equations read each variable; a result is read once more."""
    found: dict[Any, int] = {}
    for side in (*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars):
        for v in {v for v in side if not isinstance(v, Literal)}:
            found[v] = found.get(v, 0) + 1
    return found


def _narrowed(jaxpr: Any, env: dict[Any, int | None]) -> Alive:
    """Values that are only read to be made narrower, as 32-bit results of products are: they are kept so."""
    widths: dict[Any, list[float]] = {}
    for eqn in jaxpr.eqns:
        for v in eqn.invars:
            if not isinstance(v, Literal):
                narrow = eqn.primitive.name == "convert_element_type"
                widths.setdefault(v, []).append(_width(eqn.outvars[0]) / _width(v) if narrow else 1.0)
    for v in jaxpr.outvars:
        widths.setdefault(v, []).append(1.0) if not isinstance(v, Literal) else None
    shares = ((env.get(v), max(found)) for v, found in widths.items())
    return {value: share for value, share in shares if value is not None and share < 1}


def _width(var: Any) -> float:
    return float(getattr(getattr(var.aval, "dtype", None), "itemsize", 4))


def for_loops(jaxpr: Any) -> set[Any]:
    """Variables that loops go through, and those that are only made into such: a loop waits for all of them at once."""
    found: set[Any] = set()
    for eqn in reversed(jaxpr.eqns):
        if eqn.primitive.name in LOOPS or (fused(eqn) and eqn.outvars and all(v in found for v in eqn.outvars)):
            found.update(v for v in eqn.invars if not isinstance(v, Literal))
    return found


def _order(jaxpr: Any, late: dict[Any, bool]) -> list[int]:
    """The order in which equations run: as written, but updates as soon as their gradients are there."""
    made: dict[Any, float] = {}
    places: list[tuple[float, int]] = []
    for i, eqn in enumerate(jaxpr.eqns):
        soon = eqn.outvars and all(late.get(v, False) for v in eqn.outvars)
        when = max((made.get(v, -1.0) for v in eqn.invars if not isinstance(v, Literal)), default=-1.0)
        place = when if soon else float(i)
        made.update((v, place) for v in eqn.outvars)
        places.append((place, i))
    return [i for _, i in sorted(places)]
