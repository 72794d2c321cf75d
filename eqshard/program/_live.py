"""Which values are in memory at one time, where that is most."""

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


class Liveness:
    """Follows the equations of one jaxpr: what each makes, and what nobody reads any more."""

    def __init__(self, graph: Graph, jaxpr: Any, env: dict[Any, int | None]):
        self.graph, self.env = graph, env
        last = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if not isinstance(v, Literal)}
        last |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if not isinstance(v, Literal)}
        self.read = frozenset(last)
        self.ends: dict[int, list[Any]] = {}
        for v, i in last.items():
            self.ends.setdefault(i, []).append(v)
        self.alive: Alive = {}
        self.nbytes = 0.0
        self.worst: list[tuple[float, int, Alive]] = []

    def after(self, i: int, eqn: Any, inside: list[Alive]) -> None:
        """Takes note of equation `i`, and of the worst moments inside it."""
        if eqn.primitive.name not in _FUSED_AWAY:
            for v in (self.env.get(v) for v in eqn.outvars if v in self.read):
                if v is not None and v not in self.alive:
                    self.alive[v] = 1.0
                    self.nbytes += self.graph.values[v].nbytes
        within = inside[0] if inside else {}
        total = self.nbytes + sum(n * self.graph.values[v].nbytes for v, n in within.items())
        if len(self.worst) < MOMENTS or total > self.worst[-1][0]:
            self.worst = sorted([*self.worst, (total, -i, self.alive | within)], key=lambda m: (-m[0], -m[1]))[:MOMENTS]
        for v in self.ends.get(i, ()):
            gone = self.env.get(v)
            if gone is not None and gone in self.alive:
                del self.alive[gone]
                self.nbytes -= self.graph.values[gone].nbytes

    def moments(self) -> list[Alive]:
        """The few worst moments, the worst first."""
        return [alive for _, _, alive in self.worst]
