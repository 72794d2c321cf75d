"""Which values are in memory at one time, where that is most."""

from collections.abc import Container, Sequence
from typing import Any

from jax.extend.core import Literal

from ._graph import Graph
from ._together import ELEMENTWISE


# What XLA fuses into its readers, or does without a copy.
_FUSED_AWAY = ELEMENTWISE | {"broadcast_in_dim", "iota", "reshape", "squeeze", "expand_dims", "slice"}
MOMENTS = 2
"""How many of the worst moments are looked at."""

Alive = dict[int, float]
"""Values in memory at one time, and how many of each."""


def worst_moments(
    graph: Graph,
    jaxpr: Any,
    env: dict[Any, int | None],
    inside: Sequence[list[Alive]],
    late: dict[Any, bool],
    in_place: Container[Any] = (),
) -> list[Alive]:
    """The few worst moments of a jaxpr, the worst first.

    **Arguments:**

    - `inside`: the worst moments inside each equation.
    - `late`: variables that no product reads any more; their equations run as soon as they can.
    - `in_place`: results that take the memory of arguments.
    """
    order = _order(jaxpr, late)
    last = _last(jaxpr, order)
    ends: dict[int, list[Any]] = {}
    for v, place in last.items():
        ends.setdefault(place, []).append(v)
    alive: Alive = {}
    nbytes, worst = 0.0, []
    for place, i in enumerate(order):
        eqn = jaxpr.eqns[i]
        if eqn.primitive.name not in _FUSED_AWAY:
            for v in (env.get(v) for v in eqn.outvars if v in last and v not in in_place):
                if v is not None and v not in alive:
                    alive[v] = 1.0
                    nbytes += graph.values[v].nbytes
        within = inside[i][0] if inside[i] else {}
        total = nbytes + sum(n * graph.values[v].nbytes for v, n in within.items())
        if len(worst) < MOMENTS or total > worst[-1][0]:
            worst = sorted([*worst, (total, place, alive | within)], key=lambda m: (-m[0], m[1]))[:MOMENTS]
        for v in ends.get(place, ()):
            gone = env.get(v)
            if gone is not None and gone in alive:
                del alive[gone]
                nbytes -= graph.values[gone].nbytes
    return [alive for _, _, alive in worst]


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


def _last(jaxpr: Any, order: list[int]) -> dict[Any, int]:
    """For each variable that is read, where for the last time."""
    last: dict[Any, int] = {}
    for place, i in enumerate(order):
        last.update((v, place) for v in jaxpr.eqns[i].invars if not isinstance(v, Literal))
    return last | {v: len(order) for v in jaxpr.outvars if not isinstance(v, Literal)}
