"""A step as a flat program: its jaxpr, and which leaf of which argument each variable is."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.tree_util as jtu

from .._narrow import held
from .._tree import dtype_name, is_array, path_name
from .._value import digest


@dataclass(frozen=True)
class Leaf:
    """An array among the arguments or the results."""

    arg: int
    """Which argument, or which result."""
    path: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Traced:
    """A step's program."""

    jaxpr: Any
    """A closed jaxpr of the array leaves alone."""
    ins: tuple[Leaf, ...]
    outs: tuple[Leaf, ...]
    rebuild: Callable[[list[Any]], Any]
    """The step's result from its array leaves."""

    @functools.cached_property
    def kept(self) -> dict[int, int]:
        """Results that take the place of arguments: a new model for the old one."""
        pairs: dict[int, int] = {}
        groups = lambda leaves: {n: [i for i, x in enumerate(leaves) if x.arg == n] for n in {x.arg for x in leaves}}
        ins, outs, taken = groups(self.ins), groups(self.outs), set()
        same = lambda a, b: (a.path, a.shape, a.dtype) == (b.path, b.shape, b.dtype)
        for out in sorted(outs):
            for arg in sorted(ins):
                if arg in taken or len(ins[arg]) != len(outs[out]):
                    continue
                if all(same(self.ins[i], self.outs[o]) for i, o in zip(ins[arg], outs[out])):
                    taken.add(arg)
                    pairs |= dict(zip(outs[out], ins[arg]))
                    break
        return pairs

    @functools.cached_property
    def fingerprint(self) -> str:
        """What the program is: its equations and shapes, not its numbers."""
        leaves = [[(x.path, list(x.shape), x.dtype) for x in side] for side in (self.ins, self.outs)]
        return digest([leaves, _outline(self.jaxpr.jaxpr)])


def trace(fn: Callable[..., Any], args: tuple[Any, ...]) -> Traced:
    """Traces `fn` on the shapes of `args`; leaves that are no arrays are part of the program."""
    leaves, treedef = jtu.tree_flatten(args)
    dynamic = [i for i, x in enumerate(leaves) if is_array(x)]
    result: dict[str, Any] = {}

    def flat(*arrays: Any) -> list[Any]:
        filled = list(leaves)
        for i, x in zip(dynamic, arrays):
            filled[i] = x
        out = fn(*jtu.tree_unflatten(treedef, filled))
        result["leaves"], result["treedef"] = jtu.tree_flatten(out)
        result["paths"] = [path for path, _ in jtu.tree_flatten_with_path(out)[0]]
        result["tuple"] = isinstance(out, tuple) and not hasattr(out, "_fields")
        return [x for x in result["leaves"] if is_array(x)]

    shapes = [held(leaves[i]) for i in dynamic]
    jaxpr = jax.make_jaxpr(flat)(*shapes)
    numbers = [n for n, arg in enumerate(args) for _ in jtu.tree_leaves(arg)]
    paths = [path for path, _ in jtu.tree_flatten_with_path(args)[0]]
    ins = tuple(_leaf(numbers[i], paths[i][1:], leaves[i]) for i in dynamic)
    arrays = [i for i, x in enumerate(result["leaves"]) if is_array(x)]
    static = [None if is_array(x) else x for x in result["leaves"]]
    outs = []
    for i in arrays:
        path = result["paths"][i]
        number, rest = (path[0].idx, path[1:]) if result["tuple"] else (0, path)
        outs.append(_leaf(number, rest, result["leaves"][i]))
    treedef_out = result["treedef"]

    def rebuild(values: list[Any]) -> Any:
        filled = list(static)
        for i, x in zip(arrays, values):
            filled[i] = x
        return jtu.tree_unflatten(treedef_out, filled)

    return Traced(jaxpr, ins, tuple(outs), rebuild)


def _leaf(arg: int, path: Any, x: Any) -> Leaf:
    return Leaf(arg, path_name(path), tuple(x.shape), dtype_name(x))


def _outline(jaxpr: Any) -> list[Any]:
    lines = []
    for eqn in jaxpr.eqns:
        inner = [_outline(j) for v in eqn.params.values() for j in jaxprs_in(v)]
        lines.append([eqn.primitive.name, [list(getattr(v.aval, "shape", ())) for v in eqn.outvars], inner])
    return lines


CALLS = frozenset(
    """jit pjit closed_call core_call remat remat2 checkpoint custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr
    custom_lin xla_call eval_jaxpr""".split()
)
"""Primitives that only call a jaxpr."""
LOOPS = frozenset(("scan", "while"))


def scan_parts(params: Any) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried; jax 0.12 says it in another way."""
    if "ft_in" in params:
        consts, carry, _ = (len(part) for part in params["ft_in"].unpack())
        return consts, carry
    return params["num_consts"], params["num_carry"]


REMAT = frozenset(("remat2", "checkpoint", "remat"))


def recomputed(eqn: Any) -> bool:
    """Whether an equation is a block that is computed again, for the backward pass."""
    return eqn.primitive.name in REMAT and bool(eqn.params.get("differentiated", False))


def inner_jaxpr(eqn: Any) -> Any:
    """The closed or open jaxpr of an equation that only calls it, as (jaxpr, consts)."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = eqn.params.get(key)
        if inner is not None:
            return (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
    return None


def jaxprs_in(param: Any) -> list[Any]:
    """The jaxprs that a parameter of an equation holds."""
    if hasattr(param, "jaxpr") and hasattr(param, "consts"):
        return [param.jaxpr]
    if hasattr(param, "eqns") and hasattr(param, "invars"):
        return [param]
    if isinstance(param, (tuple, list)):
        return [j for p in param for j in jaxprs_in(p)]
    return []
