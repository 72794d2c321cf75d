"""A step as a flat program: its jaxpr, and which leaf of which argument each variable is."""

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.tree_util as jtu
from jax.extend.core import ClosedJaxpr, Literal

from .._tree import dtype_name, is_array, itemsize, path_name, struct_of
from ._identity import identify, Identity, transparent, type_of


@dataclass(frozen=True)
class Leaf:
    """An array among the arguments or the results."""

    arg: int
    """Which argument, or which result."""
    path: str
    shape: tuple[int, ...]
    dtype: str
    keys: tuple[Any, ...] = ()
    """Of an argument the keys of its path; of a result also the key of the result in the tuple of results."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True)
class Traced:
    """A step's program."""

    jaxpr: Any
    """A closed jaxpr of the array leaves alone."""
    ins: tuple[Leaf, ...]
    outs: tuple[Leaf, ...]
    rebuild: Callable[[list[Any]], Any]
    """The step's result from its array leaves."""
    names: tuple[str, ...] = ()
    """The names of the parameters, where they are known."""
    static: tuple[tuple[str, Any], ...] = ()
    """Leaves of the arguments that are no arrays, with their paths among all arguments."""

    @functools.cached_property
    def kept(self) -> dict[int, int]:
        """Results that replace arguments, as a new model the old one: the number of each such result's argument."""
        from ._pairing import paired  # noqa: PLC0415 (which reads this module)

        return paired(self.ins, self.outs, self.names, self.jaxpr.jaxpr)

    @functools.cached_property
    def replaced(self) -> frozenset[int]:
        """The arguments of whose bytes results replace at least half."""
        stays = set(self.kept.values())
        total: dict[int, float] = {}
        for i, leaf in enumerate(self.ins):
            total[leaf.arg] = total.get(leaf.arg, 0.0) + (leaf.nbytes if i in stays else -leaf.nbytes)
        return frozenset(arg for arg, nbytes in total.items() if nbytes >= 0)

    @functools.cached_property
    def identity(self) -> Identity:
        """Which program this is."""
        leaves = [f"{x.arg}{x.path}" for x in self.ins]
        outs = [f"{x.arg}{x.path}: {type_of(aval)}" for x, aval in zip(self.outs, self.jaxpr.out_avals)]
        return identify(self.jaxpr, [*leaves, "->", *outs])

    @property
    def fingerprint(self) -> str:
        """A hash of the program: primitives, parameters, types and data flow."""
        return self.identity.digest


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
        found, result["treedef"] = jtu.tree_flatten(out)
        # Shapes only: tracers that outlive the trace are leaks.
        result["leaves"] = [struct_of(x) if is_array(x) else x for x in found]
        result["paths"] = [path for path, _ in jtu.tree_flatten_with_path(out)[0]]
        result["tuple"] = isinstance(out, tuple) and not hasattr(out, "_fields")
        return [x for x in found if is_array(x)]

    jaxpr = _unwrapped(jax.make_jaxpr(flat)(*(struct_of(leaves[i]) for i in dynamic)))
    numbers = [n for n, arg in enumerate(args) for _ in jtu.tree_leaves(arg)]
    paths = [path for path, _ in jtu.tree_flatten_with_path(args)[0]]
    ins = tuple(_leaf(numbers[i], paths[i][1:], leaves[i], paths[i][1:]) for i in dynamic)
    arrays = [i for i, x in enumerate(result["leaves"]) if is_array(x)]
    constant = tuple((path_name(paths[i]), x) for i, x in enumerate(leaves) if not is_array(x))
    static = [None if is_array(x) else x for x in result["leaves"]]
    outs = []
    for i in arrays:
        path = result["paths"][i]
        number, rest = (path[0].idx, path[1:]) if result["tuple"] else (0, path)
        outs.append(_leaf(number, rest, result["leaves"][i], path))
    treedef_out = result["treedef"]

    def rebuild(values: list[Any]) -> Any:
        filled = list(static)
        for i, x in zip(arrays, values):
            filled[i] = x
        return jtu.tree_unflatten(treedef_out, filled)

    return Traced(jaxpr, ins, tuple(outs), rebuild, tuple(parameters(fn)), constant)


def parameters(fn: Callable[..., Any]) -> list[str]:
    """The names of a function's parameters; none if it does not tell them."""
    try:
        return list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        return []


def _leaf(arg: int, path: Any, x: Any, keys: tuple[Any, ...]) -> Leaf:
    return Leaf(arg, path_name(path), tuple(x.shape), dtype_name(x), keys)


def _unwrapped(closed: Any) -> Any:
    """A step in `jit` wrappers, without them: planned as it is without them."""
    jaxpr = closed.jaxpr
    if len(jaxpr.eqns) != 1 or not transparent(jaxpr.eqns[0]):
        return closed
    (eqn,), inner = jaxpr.eqns, jaxpr.eqns[0].params["jaxpr"]
    if any(isinstance(v, Literal) for v in eqn.invars) or len(set(eqn.invars)) < len(eqn.invars):
        return closed
    known = dict(zip(eqn.invars, inner.jaxpr.invars)) | dict(zip(eqn.outvars, inner.jaxpr.outvars))
    names = lambda side: [v if isinstance(v, Literal) else known.get(v, v) for v in side]
    new = jaxpr.replace(
        constvars=[*names(jaxpr.constvars), *inner.jaxpr.constvars],
        invars=names(jaxpr.invars),
        outvars=names(jaxpr.outvars),
        eqns=inner.jaxpr.eqns,
    )
    return _unwrapped(ClosedJaxpr(new, [*closed.consts, *inner.consts]))


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
