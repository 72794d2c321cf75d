"""Where equations are, whether or not `jit` calls stand around them.

A plan counts the equations of a body as if all `jit` calls in it were inlined: it fits the same program in a wrapper.
"""

import bisect
from typing import Any

from ._identity import transparent
from ._trace import inner_jaxpr


Path = tuple[int, ...]


class Places:
    """The places of the equations of one program."""

    def __init__(self, jaxpr: Any):
        self.jaxpr = jaxpr
        self.starts: dict[int, list[int]] = {}
        """For each jaxpr, by object, how many equations come before each of its own, and how many there are."""

    def canonical(self, path: Path) -> Path:
        """From a path through this program to one that counts through `jit` calls."""
        found: list[int] = []
        jaxpr: Any = self.jaxpr
        offset, left = 0, list(path)
        while left:
            i = left.pop(0)
            eqn, offset = jaxpr.eqns[i], offset + self._starts(jaxpr)[i]
            if transparent(eqn):
                jaxpr = eqn.params["jaxpr"].jaxpr
                continue
            found.append(offset)
            offset = 0
            if left and eqn.primitive.name == "cond":
                found.append(left.pop(0))
            jaxpr = _body(eqn, found[-1]) if left else jaxpr
        return tuple(found)

    def actual(self, path: Path) -> Path | None:
        """The reverse; None if this program does not have such a place."""
        found: list[int] = []
        jaxpr: Any = self.jaxpr
        left = list(path)
        while left:
            n = left.pop(0)
            while True:
                starts = self._starts(jaxpr)
                if not 0 <= n < starts[-1]:
                    return None
                i = bisect.bisect_right(starts, n) - 1
                eqn = jaxpr.eqns[i]
                found.append(i)
                if not transparent(eqn):
                    break
                jaxpr, n = eqn.params["jaxpr"].jaxpr, n - starts[i]
            if left and eqn.primitive.name == "cond":
                found.append(left.pop(0))
            jaxpr = _body(eqn, found[-1]) if left else jaxpr
            if jaxpr is None:
                return None
        return tuple(found)

    def _starts(self, jaxpr: Any) -> list[int]:
        known = self.starts.get(id(jaxpr))
        if known is None:
            known = [0]
            for eqn in jaxpr.eqns:
                inside = self._starts(eqn.params["jaxpr"].jaxpr)[-1] if transparent(eqn) else 1
                known.append(known[-1] + inside)
            self.starts[id(jaxpr)] = known
        return known


def _body(eqn: Any, branch: int) -> Any:
    """The jaxpr inside an equation in which a plan has places; None if there is none."""
    name, p = eqn.primitive.name, eqn.params
    if name == "while":
        return p["body_jaxpr"].jaxpr
    if name == "cond":
        return p["branches"][branch].jaxpr if 0 <= branch < len(p["branches"]) else None
    inner = inner_jaxpr(eqn)
    return None if inner is None else inner[0]
