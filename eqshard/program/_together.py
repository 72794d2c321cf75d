"""Rules for equations whose operands and results lie together: elementwise work, sums, reshapes, slices, sorts."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

from ._graph import Equation, Graph, Reduction


ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex
    conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt
    igamma igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul mul_no_nan ne
    neg nextafter not one_minus_square or pcast polygamma population_count pow pvary real reduce_precision
    regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign
    sin sinh sqrt square stop_gradient sub tan tanh threefry2x32 xor bitcast_convert_type random_gamma random_unwrap
    random_wrap zeta log2 mulhi polynomial""".split()
)
FREE = frozenset("iota rng_bit_generator random_bits random_seed random_fold_in random_split rng_uniform empty".split())
"""Made anew wherever they are read, in whatever layout."""

PINNED = frozenset(
    """pad concatenate slice dynamic_slice dynamic_update_slice split sort top_k rev cumsum cumprod cummax cummin
    cumlogsumexp reduce_window reduce_window_sum reduce_window_max reduce_window_min select_and_scatter
    select_and_scatter_add select_and_gather_add stack unstack""".split()
)
"""Along some of their dimensions they are not to be cut. Left to itself, XLA does so all the same, and some of what it
then makes is wrong (seen: gradients of associative scans, by both of its partitioners, and of convolutions, by one)."""

SPREAD = 16
"""What is spread over so many times its size need not lie as what it is spread over: to move it costs little."""

Rule = Callable[[Graph, Equation], None]


def elementwise(graph: Graph, at: Equation) -> None:
    for out in at.outs:
        if out is None:
            continue
        for a in at.ins:
            if a is not None and len(graph.shape(a)) == len(graph.shape(out)):
                pairs = [(d, d) for d, (n, m) in enumerate(zip(graph.shape(a), graph.shape(out))) if n == m]
                _spread(graph, at, a, out, pairs)


def one_by_one(graph: Graph, at: Equation) -> None:
    """Each result is one operand."""
    for a, out in zip(at.ins, at.outs):
        graph.tied(a, out, None, at.times, at.path)


def free(graph: Graph, at: Equation) -> None:
    """Nothing to tie."""


def reduction(graph: Graph, at: Equation, whole: bool = False) -> None:
    a, out, axes = at.ins[0], at.outs[0], [int(x) for x in at.params["axes"]]
    if a is None:
        return
    for d in axes if whole else ():
        graph.whole(a, d)
    names = tuple(graph.values[a].dims[d] for d in axes)
    kept = [d for d in range(len(graph.shape(a))) if d not in axes]
    if out is not None:
        graph.tie(a, out, list(zip(kept, range(len(kept)))))
    graph.reductions.append(Reduction(a, names, -1 if out is None else out, at.times))


def along(graph: Graph, at: Equation) -> None:
    """Cumulative sums and the like: the dimension along which they run is whole."""
    axes = [int(d) for d in (at.params["dimensions"] if at.name == "rev" else (at.params["axis"],))]
    for a, out in zip(at.ins, at.outs):
        graph.same(a, out, skip=axes)


def windowed(graph: Graph, at: Equation) -> None:
    moved = [d for d, n in enumerate(at.params.get("window_dimensions", ())) if n != 1]
    for a in at.ins:
        graph.same(a, at.outs[0], skip=moved)


def transpose(graph: Graph, at: Equation) -> None:
    pairs = [(int(d), i) for i, d in enumerate(at.params["permutation"])]
    graph.tied(at.ins[0], at.outs[0], pairs, at.times, at.path)


def broadcast_in_dim(graph: Graph, at: Equation) -> None:
    a, out = at.ins[0], at.outs[0]
    if a is not None and out is not None:
        there = [(i, int(d)) for i, d in enumerate(at.params["broadcast_dimensions"])]
        pairs = [(i, d) for i, d in there if graph.shape(a)[i] == graph.shape(out)[d]]
        _spread(graph, at, a, out, pairs)


def _spread(graph: Graph, at: Equation, a: int, out: int, pairs: list[tuple[int, int]]) -> None:
    """Ties a value to what it becomes a part of; but a bias must not tie all that it is added to."""
    small = SPREAD * math.prod(graph.shape(a)) <= math.prod(graph.shape(out))
    if small and graph.cluster(a) != graph.cluster(out):
        graph.move(a, out, pairs, at.times, at.path)
    else:
        graph.tied(a, out, pairs, at.times, at.path)


def squeeze(graph: Graph, at: Equation) -> None:
    a, out = at.ins[0], at.outs[0]
    if a is not None and out is not None:
        gone = {int(d) % len(graph.shape(a)) for d in at.params["dimensions"]}
        kept = [d for d in range(len(graph.shape(a))) if d not in gone]
        graph.tied(a, out, list(zip(kept, range(len(kept)))), at.times, at.path)


def reshape(graph: Graph, at: Equation) -> None:
    a, out = at.ins[0], at.outs[0]
    if a is None or out is None:
        return
    pairs, minor_in, minor_out = reshape_dims(graph.shape(a), graph.shape(out))
    for d in minor_in:
        graph.whole(a, d)
    for d in minor_out:
        graph.whole(out, d)
    graph.tied(a, out, pairs, at.times, at.path)


def concatenate(graph: Graph, at: Equation) -> None:
    out, joined = at.outs[0], int(at.params["dimension"])
    for a in at.ins:
        if a is not None and out is not None and not graph.same(a, out, skip=(joined,)):
            graph.move(a, out, [(d, d) for d in range(len(graph.shape(a))) if d != joined], at.times, at.path)


def stack(graph: Graph, at: Equation) -> None:
    """Parts become rows of a whole, along a new dimension; or, unstacked, the other way round."""
    axis, joins = int(at.params["axis"]), at.name == "stack"
    whole = (at.outs if joins else at.ins)[0]
    for part in at.ins if joins else at.outs:
        if part is None or whole is None:
            continue
        inner = [(d, d + (d >= axis)) for d in range(len(graph.shape(part)))]
        ends = (part, whole, inner) if joins else (whole, part, [(b, a) for a, b in inner])
        graph.tied(*ends, at.times, at.path)
    if whole is not None:
        graph.whole(whole, axis)


def pad(graph: Graph, at: Equation) -> None:
    padded = [d for d, (low, high, inner) in enumerate(at.params["padding_config"]) if low or high or inner]
    out = at.outs[0]
    _cut(graph, at, out, padded)
    for d in padded:
        if out is not None:  # XLA does not compile every pad whose result is cut there
            graph.whole(out, d)


def cut(graph: Graph, at: Equation) -> None:
    """Slices: dimensions that are not taken whole must be whole."""
    for out, var in zip(at.outs, at.eqn.outvars):
        if not _empty(var):  # associative scans make empty slices
            _cut(graph, at, out)
    for d, stride in enumerate(at.params.get("strides") or ()):
        if stride > 1 and at.outs[0] is not None:
            graph.whole(at.outs[0], d)


def _cut(graph: Graph, at: Equation, out: int | None, whole: Iterable[int] = ()) -> None:
    a = at.ins[0]
    if a is None:
        return
    shape = graph.shape(a)
    target = graph.shape(out) if out is not None else (1,) * len(shape)
    changed = {d for d in range(len(shape)) if shape[d] != target[d]} | set(whole)
    for d in changed:
        graph.whole(a, d)
    graph.tied(a, out, [(d, d) for d in range(len(shape)) if d not in changed], at.times, at.path)


def _empty(var: Any) -> bool:
    return math.prod(var.aval.shape) == 0


def dynamic_update_slice(graph: Graph, at: Equation) -> None:
    (operand, update), out = at.ins[:2], at.outs[0]
    graph.same(operand, out)
    if out is None or _empty(at.eqn.invars[1]):
        return
    shape = graph.shape(out)
    part = graph.shape(update) if update is not None else (1,) * len(shape)
    for d in range(len(shape)):
        if part[d] != shape[d]:
            graph.whole(out, d)
    graph.tied(update, out, [(d, d) for d in range(len(shape)) if part[d] == shape[d]], at.times, at.path)


def sort(graph: Graph, at: Equation) -> None:
    for a, out in zip(at.ins, at.outs):
        graph.same(a, out, skip=(int(at.params["dimension"]),))
    for other in at.outs[1:]:
        graph.same(at.outs[0], other)


def top_k(graph: Graph, at: Equation) -> None:
    if at.ins[0] is None:
        return
    last = len(graph.shape(at.ins[0])) - 1
    for out in at.outs:
        _cut(graph, at, out, (last,))
        if out is not None:
            graph.whole(out, last)


def reshape_dims(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """Pairs of dimensions of a reshape that lie together, and those before and after that must be whole.

    Where dimensions are merged or split, a cut of the major factor is a cut of the whole.
    """
    pairs: list[tuple[int, int]] = []
    minor_a: list[int] = []
    minor_b: list[int] = []
    i = j = 0
    while i < len(a) or j < len(b):
        group_a, group_b = [], []
        pa = pb = 1
        while True:
            if (pa <= pb and i < len(a)) or j >= len(b):
                pa *= a[i]
                group_a.append(i)
                i += 1
            else:
                pb *= b[j]
                group_b.append(j)
                j += 1
            if pa == pb and group_a and group_b and _done(a, i, b, j):
                break
            if i >= len(a) and j >= len(b):
                break
        big_a = [d for d in group_a if a[d] > 1]
        big_b = [d for d in group_b if b[d] > 1]
        if big_a and big_b:
            pairs.append((big_a[0], big_b[0]))
            minor_a += big_a[1:]
            minor_b += big_b[1:]
    return pairs, minor_a, minor_b


def reshape_mixed(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[set[int], set[int]]:
    """The dimensions before and after a reshape that it merges or splits, that are not just passed on."""
    pairs, minor_a, minor_b = reshape_dims(a, b)
    mixed = [(d, e) for d, e in pairs if a[d] != b[e]]
    return {*minor_a, *(d for d, _ in mixed)}, {*minor_b, *(e for _, e in mixed)}


def _done(a: tuple[int, ...], i: int, b: tuple[int, ...], j: int) -> bool:
    """Whether a group may end here: trailing ones belong to nobody."""
    return (i >= len(a)) == (j >= len(b)) or all(n == 1 for n in a[i:]) or all(n == 1 for n in b[j:])


TOGETHER: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(FREE, free),
    **dict.fromkeys(("optimization_barrier", "device_put"), one_by_one),
    **dict.fromkeys((f"reduce_{n}" for n in "sum max min prod and or xor".split()), reduction),
    **dict.fromkeys(("argmax", "argmin"), functools.partial(reduction, whole=True)),
    **dict.fromkeys("cumsum cumprod cummax cummin cumlogsumexp rev".split(), along),
    **dict.fromkeys((f"reduce_window{n}" for n in ("", "_sum", "_max", "_min")), windowed),
    **dict.fromkeys("select_and_scatter select_and_scatter_add select_and_gather_add".split(), windowed),
    **dict.fromkeys(("slice", "dynamic_slice", "split"), cut),
    **dict.fromkeys(("reshape", "expand_dims"), reshape),
    "transpose": transpose,
    "broadcast_in_dim": broadcast_in_dim,
    "squeeze": squeeze,
    "concatenate": concatenate,
    **dict.fromkeys(("stack", "unstack"), stack),
    "pad": pad,
    "dynamic_update_slice": dynamic_update_slice,
    "sort": sort,
    "top_k": top_k,
}
