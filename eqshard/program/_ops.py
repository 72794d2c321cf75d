"""Rules for operations between clusters: products, convolutions, gathers, scatters, and what is not understood.

Each is written as letters, like an einsum: a letter for each dimension of its iteration space, `-` for a dimension that
must be whole.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from .._errors import ShardingError
from .._spec import entry_axes
from ._graph import Equation, Graph, Op
from ._rows import row_by_row, row_dims, windows


Named = tuple[int | None, Sequence[str]]
"""A value, and the letter of each of its dimensions."""
OpRules = Mapping[str, str | Callable[[Any], str | None]]
"""For primitives that no rule knows: letters as in `"b q d, b k d -> b q d"`, or a function of the equation that gives
them, or None."""


def op(
    graph: Graph,
    at: Equation,
    kind: str,
    letters: Mapping[str, int],
    operands: Sequence[Named],
    outs: Sequence[Named],
    reduced: set[str] = frozenset(),  # pyright: ignore[reportArgumentType]
    flops: float = 0.0,
) -> None:
    order = {name: i for i, name in enumerate(letters)}
    number = lambda side: [(v, tuple(order.get(n, -1) for n in names)) for v, names in side if v is not None]
    slots = lambda side: tuple(i for i, (v, _) in enumerate(side) if v is not None)
    sums = frozenset(order[n] for n in reduced if n in order)
    ends: list[Any] = [number(operands), number(outs)]
    sizes = list(letters.values())
    graph.ops.append(Op(kind, at.times, sizes, ends[0], ends[1], sums, flops, at.path, slots(operands), slots(outs)))


def dot_general(graph: Graph, at: Equation) -> None:
    (lc, rc), (lb, rb) = at.params["dimension_numbers"]
    lhs, rhs = (tuple(v.aval.shape) for v in at.eqn.invars)
    names_l, names_r, letters = [""] * len(lhs), [""] * len(rhs), {}
    for kind, left, right in (("b", lb, rb), ("k", lc, rc)):
        for i, (a, b) in enumerate(zip(left, right)):
            names_l[a] = names_r[b] = f"{kind}{i}"
            letters[f"{kind}{i}"] = lhs[a]
    out = [f"b{i}" for i in range(len(lb))]
    for side, names, shape in (("m", names_l, lhs), ("n", names_r, rhs)):
        for d, name in enumerate(names):
            if not name:
                names[d] = f"{side}{d}"
                letters[names[d]] = shape[d]
                out.append(names[d])
    reduced = {n for n in letters if n[0] == "k"}
    flops = 2.0 * math.prod(letters.values())
    op(graph, at, "dot", letters, list(zip(at.ins, (names_l, names_r))), [(at.outs[0], out)], reduced, flops)


def conv(graph: Graph, at: Equation) -> None:
    dn = at.params["dimension_numbers"]
    lhs, rhs, out = (tuple(v.aval.shape) for v in (*at.eqn.invars, at.eqn.outvars[0]))
    groups = at.params["feature_group_count"] * at.params["batch_group_count"]
    names = [["-"] * len(lhs), ["-"] * len(rhs), ["-"] * len(out)]
    letters = {}
    if at.params["batch_group_count"] == 1:
        letters["batch"] = lhs[dn.lhs_spec[0]]
        names[0][dn.lhs_spec[0]] = names[2][dn.out_spec[0]] = "batch"
    if groups == 1:
        letters |= {"in": lhs[dn.lhs_spec[1]], "out": out[dn.out_spec[1]]}
        names[0][dn.lhs_spec[1]] = names[1][dn.rhs_spec[1]] = "in"
        names[1][dn.rhs_spec[0]] = names[2][dn.out_spec[1]] = "out"
    window = math.prod(rhs[d] for d in dn.rhs_spec[2:])
    if window < math.prod(out[d] for d in dn.out_spec[2:]):  # not the gradient of a kernel, whose result is the window
        for v, dims in ((at.ins[0], dn.lhs_spec[2:]), (at.outs[0], dn.out_spec[2:])):
            graph.spatial |= {graph.values[v].dims[d] for d in dims} - {-1} if v is not None else set()
    flops = 2.0 * math.prod(out) * rhs[dn.rhs_spec[1]] * window
    op(graph, at, "conv", letters, list(zip(at.ins, names)), [(at.outs[0], names[2])], {"in"}, flops)


def gather(graph: Graph, at: Equation) -> None:
    dn = at.params["dimension_numbers"]
    table, index = (tuple(v.aval.shape) for v in at.eqn.invars[:2])
    out = tuple(at.eqn.outvars[0].aval.shape)
    letters, names_t, names_i, names_o = {}, ["-"] * len(table), ["-"] * len(index), ["-"] * len(out)
    for i, d in enumerate(d for d in range(len(out)) if d not in dn.offset_dims):
        letters[f"i{i}"] = out[d]
        names_o[d] = names_i[i] = f"i{i}"
    for d, (o, size) in windows(at.eqn).items():
        if size == table[d]:
            letters[f"t{d}"] = table[d]
            names_t[d] = names_o[o] = f"t{d}"
    for d, i in zip(dn.operand_batching_dims, dn.start_indices_batching_dims):
        names_t[d] = names_i[i]
    if len(row_dims(at.eqn)) == 1:  # a cut table: each device looks up its part, and the parts are summed
        (d,) = row_dims(at.eqn)
        letters[f"v{d}"] = table[d]
        names_t[d] = f"v{d}"
    reduced = {n for n in letters if n[0] == "v"}
    op(graph, at, "gather", letters, list(zip(at.ins, (names_t, names_i))), [(at.outs[0], names_o)], reduced)


def scatter(graph: Graph, at: Equation) -> None:
    dn = at.params["dimension_numbers"]
    table, index, update = (tuple(v.aval.shape) for v in at.eqn.invars[:3])
    letters, names_t, names_u, names_i = {}, ["-"] * len(table), ["-"] * len(update), ["-"] * len(index)
    for i, d in enumerate(d for d in range(len(update)) if d not in dn.update_window_dims):
        letters[f"i{i}"] = update[d]
        names_u[d] = names_i[i] = f"i{i}"
    for d, (u, size) in windows(at.eqn).items():
        if size == table[d]:
            letters[f"t{d}"] = table[d]
            names_t[d] = names_u[u] = f"t{d}"
    batched = set()
    for d, i in zip(dn.operand_batching_dims, dn.scatter_indices_batching_dims):
        names_t[d] = names_i[i]
        batched.add(names_i[i])
    adds = "add" in at.name
    for d in row_dims(at.eqn) if adds else ():
        letters[f"v{d}"] = table[d]
        names_t[d] = f"v{d}"
    reduced = {n for n in letters if n[0] == "i" and n not in batched}
    if not adds:
        letters = {n: size for n, size in letters.items() if n not in reduced}
        reduced = set()
    ends = list(zip(at.ins, (names_t, names_i, names_u)))
    op(graph, at, "scatter", letters, ends, [(at.outs[0], names_t)], reduced)
    made = graph.ops[-1]
    made.by_rows = names_t[-1:] != ["-"] and names_t[-1][0] == "t"
    if row_by_row(at.eqn, graph.as_written):
        made.rows = frozenset(n for n, letter in enumerate(letters) if letter[0] == "i")
        made.row_count = math.prod(update) / math.prod(update[d] for d in dn.update_window_dims)


def opaque(graph: Graph, at: Equation) -> None:
    """Not understood: everything whole."""
    graph.unknown[at.name] = graph.unknown.get(at.name, 0) + 1
    whole = lambda side: [(v, ["-"] * len(graph.shape(v)) if v is not None else []) for v in side]
    op(graph, at, "opaque", {}, whole(at.ins), whole(at.outs))


def told(graph: Graph, at: Equation, rules: OpRules) -> bool:
    """An operation whose letters the caller gave; False if there are none for it."""
    rule = rules.get(at.name)
    text = rule(at.eqn) if callable(rule) else rule
    if text is None:
        return False
    sides = [[part.split() for part in side.split(",")] for side in text.split("->")]
    shapes: list[list[tuple[int, ...]]]
    shapes = [[tuple(getattr(v.aval, "shape", ())) for v in vs] for vs in (at.eqn.invars, at.eqn.outvars)]
    if len(sides) != 2 or [[len(x) for x in side] for side in sides] != [[len(x) for x in side] for side in shapes]:
        raise ShardingError(
            f"the rule {text!r} for `{at.name}` does not fit it: its operands are {shapes[0]}, its results "
            f"{shapes[1]}. Write a letter for each dimension, with spaces between, `-` for one that must be whole."
        )
    letters: dict[str, int] = {}
    for names, shape in zip([*sides[0], *sides[1]], [*shapes[0], *shapes[1]]):
        for n, size in zip(names, shape):
            if re.fullmatch(r"\w+", n):
                letters[n] = math.gcd(letters.get(n, size), size)
    operands, outs = list(zip(at.ins, sides[0])), list(zip(at.outs, sides[1]))
    made = {n for names in sides[1] for n in names}
    whole = {n for n in letters if n not in made}  # what would leave partial sums, if it is a sum at all
    op(graph, at, "told", {n: s for n, s in letters.items() if n not in whole}, operands, outs)
    return True


def given_specs(eqn: Any) -> tuple[Sequence[PartitionSpec], Sequence[PartitionSpec]] | None:
    """The layouts of operands and results that an equation itself says; None if it says none, or not all of it."""
    if eqn.primitive.name == "shard_map":
        return eqn.params["in_specs"], eqn.params["out_specs"]
    sharding = eqn.params.get("sharding") or eqn.params.get("dst_sharding")
    if eqn.primitive.name not in CONSTRAINTS or not isinstance(sharding, NamedSharding):
        return None
    if PartitionSpec.UNCONSTRAINED in tuple(sharding.spec):
        return None
    return (sharding.spec,), (sharding.spec,)


def given(graph: Graph, at: Equation, specs: Sequence[PartitionSpec], outs: Sequence[PartitionSpec]) -> None:
    """An operation that says itself how its operands and results lie: a constraint, or a `shard_map`."""
    entries = [entry_axes(entry) for spec in (*specs, *outs) for entry in spec]
    axes = tuple(dict.fromkeys(axis for entry in entries for axis in entry))
    number = {axis: i for i, axis in enumerate(axes)}

    def ends(values: Sequence[int | None], specs: Sequence[PartitionSpec]) -> list[Any]:
        found = []
        for v, spec in zip(values, specs):
            if v is not None:
                entries = [*spec, *[None] * (len(graph.shape(v)) - len(spec))]
                found.append((v, tuple(tuple(number[a] for a in entry_axes(e)) or -1 for e in entries)))
        return found

    for v in at.ins if graph.as_written and at.name in CONSTRAINTS else ():
        if v is not None and v in graph.fresh and "reduce-scatter" in graph.values[v].hides:
            graph.same(v, at.outs[0])  # XLA makes a gradient as the constraint on it says
    slots = [tuple(i for i, v in enumerate(side) if v is not None) for side in (at.ins, at.outs)]
    sizes = [0] * len(axes)
    flops = _flops(at.params["jaxpr"]) if "jaxpr" in at.params else 0.0
    left, right = ends(at.ins, specs), ends(at.outs, outs)
    graph.ops.append(Op("given", at.times, sizes, left, right, frozenset(), flops, at.path, slots[0], slots[1], axes))


def _flops(jaxpr: Any) -> float:
    """Of the products in the body of a `shard_map`, which are those of one device."""
    total = 0.0
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name == "dot_general":
            contracted, _ = eqn.params["dimension_numbers"]
            summed = math.prod(eqn.invars[0].aval.shape[d] for d in contracted[0])
            total += 2.0 * math.prod(eqn.outvars[0].aval.shape) * summed
        for key in ("jaxpr", "call_jaxpr", "body_jaxpr"):
            if key in eqn.params:
                total += eqn.params.get("length", 1) * _flops(eqn.params[key])
    return total


OPERATIONS: dict[str, Callable[[Graph, Equation], None]] = {
    "dot_general": dot_general,
    "conv_general_dilated": conv,
    "gather": gather,
    "scatter": scatter,
    **dict.fromkeys((f"scatter-{n}" for n in "add sub mul min max".split()), scatter),
    **dict.fromkeys((f"scatter_{n}" for n in "add sub mul min max".split()), scatter),
}
CONSTRAINTS = frozenset(("sharding_constraint", "reshard"))
PRODUCTS = frozenset(("dot_general", "conv_general_dilated"))
