"""Finds the arguments that a result is an update of: of which it is computed element by element."""

from typing import Any

from jax.extend.core import Literal

from ._ops import CONSTRAINTS
from ._together import ELEMENTWISE
from ._trace import CALLS, inner_jaxpr, scan_parts


class Lineage:
    """The arguments of a jaxpr from which its variables are computed by elementwise operations alone.

    Through calls, loops and branches too. An array of which some elements are set is computed from that array; what
    a loop carries out, from what it carries in.
    """

    def __init__(self, jaxpr: Any) -> None:
        self.jaxpr = jaxpr
        self.made = {v: (eqn, i) for eqn in jaxpr.eqns for i, v in enumerate(eqn.outvars)}
        self.numbers = {v: i for i, v in enumerate(jaxpr.invars)}
        self.inside: dict[int, Lineage] = {}

    def of_result(self, number: int) -> frozenset[int]:
        """The numbers of the arguments that a result is an update of."""
        found: set[int] = set()
        left, seen = [self.jaxpr.outvars[number]], set()
        while left:
            var = left.pop()
            if isinstance(var, Literal) or var in seen:
                continue
            seen.add(var)
            if var in self.numbers:
                found.add(self.numbers[var])
            elif var in self.made:
                left += [v for v in self._read(*self.made[var]) if v.aval.shape == var.aval.shape]
        return frozenset(found)

    def _read(self, eqn: Any, i: int) -> list[Any]:
        """The operands from which result `i` of an equation is computed element by element."""
        name, p, ins = eqn.primitive.name, eqn.params, eqn.invars
        if name == "scan":
            consts, carried = scan_parts(p)
            own = [ins[consts + i]] if i < carried else []
            return own + [ins[k] for k in self._of(p["jaxpr"].jaxpr).of_result(i)]
        if name == "while":
            return [ins[p["cond_nconsts"] + p["body_nconsts"] + i]]
        if name == "cond":
            return [ins[1 + k] for branch in p["branches"] for k in self._of(branch.jaxpr).of_result(i)]
        if (name in CALLS or name == "shard_map") and (inner := inner_jaxpr(eqn)) is not None:
            first = len(ins) - len(inner[0].invars)
            return [ins[first + k] for k in self._of(inner[0]).of_result(i)]
        if name == "optimization_barrier":
            return [ins[i]]
        if name == "dynamic_update_slice" or name.startswith("scatter"):
            return ins[:1]
        return list(ins) if name in ELEMENTWISE or name in CONSTRAINTS else []

    def _of(self, jaxpr: Any) -> "Lineage":
        return self.inside.setdefault(id(jaxpr), Lineage(jaxpr))
