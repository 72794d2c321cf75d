"""Which values nobody waits for: weights before any data, gradients after the last product.

A transfer of such a value can run beside other work. Early values depend on no data; late ones are read by no product
any more, only by what makes the results.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from ._ops import CONSTRAINTS
from ._together import TOGETHER
from ._trace import inner_jaxpr, scan_parts


Flags = list[bool]
Found = dict[Any, bool]
ROUNDS = 3
"""How often a loop's body is gone through until what it carries is settled."""


def flow(jaxpr: Any, early: Sequence[bool], late: Sequence[bool]) -> tuple[Found, Found]:
    """Which variables are early, and which are late, of a jaxpr and of all inside it.

    **Arguments:**

    - `early`: which arguments are not data.
    - `late`: which results take the place of arguments.
    """
    before: Found = {}
    after: Found = {}
    _forward(jaxpr, list(early), before)
    _backward(jaxpr, list(late), after)
    return before, after


def _note(found: Found, var: Any, flag: bool) -> None:
    """What is called from several places is so only if it is so in all."""
    found[var] = found.get(var, True) and flag


def _forward(jaxpr: Any, flags: Flags, found: Found) -> Flags:
    here: Found = dict(zip(jaxpr.invars, flags)) | dict.fromkeys(jaxpr.constvars, True)
    read = lambda v: isinstance(v, Literal) or here.get(v, True)
    for eqn in jaxpr.eqns:
        ins = [read(v) for v in eqn.invars]
        here.update(zip(eqn.outvars, _forward_through(eqn, ins, found)))
    for var, flag in here.items():
        _note(found, var, flag)
    return [read(v) for v in jaxpr.outvars]


def _forward_through(eqn: Any, ins: Flags, found: Found) -> Flags:
    name, p = eqn.primitive.name, eqn.params
    if name == "scan":
        consts, carried = scan_parts(p)
        outs: Flags = []
        for _ in range(ROUNDS):
            outs = _forward(p["jaxpr"].jaxpr, ins, found)
            settled = [a and b for a, b in zip(ins[consts : consts + carried], outs)]
            if settled == ins[consts : consts + carried]:
                break
            ins = [*ins[:consts], *settled, *ins[consts + carried :]]
        return outs
    inner = inner_jaxpr(eqn)
    if inner is not None and name not in ("while", "cond", "shard_map"):
        return _forward(inner[0], ins[len(ins) - len(inner[0].invars) :], found)
    return [all(ins)] * len(eqn.outvars)


def _backward(jaxpr: Any, flags: Flags, found: Found) -> Flags:
    here: Found = {}
    for v, flag in zip(jaxpr.outvars, flags):
        if not isinstance(v, Literal):
            _note(here, v, flag)
    for eqn in reversed(jaxpr.eqns):
        outs = [here.get(v, True) for v in eqn.outvars]
        for v, flag in zip(eqn.invars, _backward_through(eqn, outs, found)):
            if not isinstance(v, Literal):
                _note(here, v, flag)
    for var, flag in here.items():
        _note(found, var, flag)
    return [here.get(v, True) for v in jaxpr.invars]


def _backward_through(eqn: Any, outs: Flags, found: Found) -> Flags:
    name, p = eqn.primitive.name, eqn.params
    if name == "scan":
        consts, carried = scan_parts(p)
        ins: Flags = []
        for _ in range(ROUNDS):
            ins = _backward(p["jaxpr"].jaxpr, outs, found)
            settled = [a and b for a, b in zip(outs[:carried], ins[consts : consts + carried])]
            if settled == outs[:carried]:
                break
            outs = [*settled, *outs[carried:]]
        return ins
    inner = inner_jaxpr(eqn)
    if inner is not None and name not in ("while", "cond", "shard_map"):
        missing = len(eqn.invars) - len(inner[0].invars)
        return [False] * missing + _backward(inner[0], outs, found)
    return [all(outs) and (name in TOGETHER or name in CONSTRAINTS)] * len(eqn.invars)
