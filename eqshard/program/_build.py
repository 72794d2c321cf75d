"""Reads a jaxpr into a graph, equation by equation."""

import math
from typing import Any

import numpy as np

from ._graph import Graph, Move, Op, Reduction


ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp complex conj
    convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
    igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul ne neg nextafter not or
    polygamma population_count pow real reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh threefry2x32 xor optimization_barrier
    bitcast_convert_type regularized_incomplete_beta random_gamma random_unwrap random_wrap clz sharding_constraint
    erf_inv zeta mul_no_nan pvary pcast pvary_p device_put""".split()
)
INLINE = frozenset(
    """jit pjit closed_call core_call remat remat2 checkpoint custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr
    custom_lin xla_call""".split()
)
SUMS = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor".split())
ALONG = frozenset("cumsum cumprod cummax cummin cumlogsumexp".split())
FREE = frozenset("iota rng_bit_generator random_bits random_seed random_fold_in random_split rng_uniform empty".split())


PRODUCTS = frozenset(("dot_general", "conv_general_dilated"))
# What XLA fuses into its readers, or does without a copy.
_FUSED_AWAY = ELEMENTWISE | {"broadcast_in_dim", "iota", "reshape", "squeeze", "expand_dims", "slice"}


def _read_often(jaxpr: Any) -> dict[Any, int | None]:
    counts: dict[Any, int] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in PRODUCTS:
            for v in eqn.invars:
                if type(v).__name__ != "Literal":
                    counts[v] = counts.get(v, 0) + 1
    return {v: None for v, n in counts.items() if n > 1}


def inner_jaxpr(eqn: Any) -> Any:
    """The closed or open jaxpr of an equation that only calls it, as (jaxpr, consts)."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = eqn.params.get(key)
        if inner is not None:
            return (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
    return None


def build(closed: Any, kept: dict[int, int]) -> tuple[Graph, list[int | None], list[int | None]]:
    """The graph of a program, and the values of its arguments and results (None for scalars).

    **Arguments:**

    - `kept`: results that take the place of arguments, and so lie as they do: {result: argument}.
    """
    builder = _Builder()
    env: dict[Any, int | None] = {}
    ins = [builder.new(env, v, 1.0) for v in closed.jaxpr.invars]
    builder.resting = {v for v in ins if v is not None}
    for v in closed.jaxpr.constvars:
        builder.new(env, v, 1.0)
    builder.graph.live = builder.walk(closed.jaxpr, env, 1.0, ())
    outs: list[int | None] = []
    for i, var in enumerate(closed.jaxpr.outvars):
        made = builder.read(env, var)
        rest = ins[kept[i]] if i in kept else None
        if made is None or rest is None or made == rest:
            outs.append(made)
            continue
        out = builder.graph.add(builder.graph.values[made].shape, builder.graph.values[made].itemsize, 1.0)
        builder.same(rest, out)
        builder.move(made, out, builder.all_dims(made), 1.0, (), i)
        outs.append(out)
    return builder.graph, ins, outs


class _Builder:
    def __init__(self) -> None:
        self.graph = Graph()
        self.resting: set[int] = set()
        """Arguments: every reader has a copy that may lie otherwise."""
        self.shared: dict[Any, int | None] = {}
        """Variables that several products read: they share one copy."""

    def new(self, env: dict[Any, int | None], var: Any, times: float) -> int | None:
        shape = getattr(var.aval, "shape", ())
        if not shape or math.prod(shape) <= 1:
            env[var] = None
        else:
            env[var] = self.graph.add(tuple(shape), _itemsize(var.aval), times)
        return env[var]

    def read(self, env: dict[Any, int | None], var: Any) -> int | None:
        return env.get(var) if type(var).__name__ != "Literal" else None

    def walk(
        self, jaxpr: Any, env: dict[Any, int | None], times: float, path: tuple[int, ...]
    ) -> list[dict[int, float]]:
        """Reads a jaxpr's equations; returns the few largest sets of values that live at one time."""
        outer, self.shared = self.shared, _read_often(jaxpr)
        last = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if type(v).__name__ != "Literal"}
        last |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if type(v).__name__ != "Literal"}
        ends: dict[int, list[Any]] = {}
        for v, i in last.items():
            ends.setdefault(i, []).append(v)
        live: dict[int, float] = {}
        now, peaks = 0.0, []
        for i, eqn in enumerate(jaxpr.eqns):
            inside = self.equation(eqn, env, times, (*path, i))
            kept = [env[v] for v in eqn.outvars if env.get(v) is not None and v in last]
            if eqn.primitive.name not in _FUSED_AWAY:
                for v in kept:
                    if v is not None and v not in live:
                        live[v] = 1.0
                        now += self.graph.values[v].nbytes
            best = inside[0] if inside else {}
            peaks.append((now + sum(self.graph.values[v].nbytes for v in best), i, best, None))
            if len(peaks) > 2 and peaks[-1][0] >= max(p[0] for p in peaks[:-1]):
                peaks[-1] = (*peaks[-1][:3], dict(live))
            elif len(peaks) <= 2:
                peaks[-1] = (*peaks[-1][:3], dict(live))
            for v in ends.get(i, ()):
                gone = env.get(v)
                if gone is not None and gone in live:
                    del live[gone]
                    now -= self.graph.values[gone].nbytes
        self.shared = outer
        ranked = sorted((p for p in peaks if p[3] is not None), key=lambda p: -p[0])
        return [p[3] | p[2] for p in ranked[:2]]

    def equation(
        self, eqn: Any, env: dict[Any, int | None], times: float, path: tuple[int, ...]
    ) -> list[dict[int, float]]:
        name = eqn.primitive.name
        if name in INLINE and (inner := inner_jaxpr(eqn)) is not None:
            return self.inline(eqn, inner, env, times, path)
        ins = self.operands(eqn, env, times, path)
        if name in ("scan", "while", "cond"):
            return getattr(self, f"on_{name}")(eqn, ins, env, times, path)
        outs = [self.new(env, v, times) for v in eqn.outvars]
        special = getattr(self, f"on_{name}", None)
        if name in ELEMENTWISE:
            self.elementwise(eqn, ins, outs, times, path)
        elif name in SUMS or name in ("argmax", "argmin"):
            self.reduction(eqn, ins, outs, times, whole=name.startswith("arg"))
        elif name in FREE:
            pass
        elif special is not None:
            special(eqn, ins, outs, times, path)
        elif name in ALONG or name == "rev":
            axes = eqn.params["dimensions"] if name == "rev" else (eqn.params["axis"],)
            self.same(ins[0], outs[0], skip=axes)
        elif name.startswith("reduce_window") or name.startswith("select_and"):
            self.windowed(eqn, ins, outs)
        elif name.startswith("scatter"):
            self.scatter(eqn, ins, outs, times, path)
        else:
            self.opaque(eqn, ins, outs, times, path)
        return []

    def operands(self, eqn: Any, env: dict[Any, int | None], times: float, path: tuple[int, ...]) -> list[int | None]:
        """The values that an equation reads: of arguments and of what several products read, copies."""
        found: list[int | None] = []
        for slot, var in enumerate(eqn.invars):
            v = self.read(env, var)
            product = eqn.primitive.name in PRODUCTS
            if v is None or not (v in self.resting or (product and var in self.shared)):
                found.append(v)
                continue
            known = self.shared.get(var) if product else None
            if known is None:
                node = self.graph.values[v]
                known = self.graph.add(node.shape, node.itemsize, times)
                self.move(v, known, self.all_dims(v), times, path, slot)
                if product and var in self.shared:
                    self.shared[var] = known
            found.append(known)
        return found

    def all_dims(self, v: int) -> list[tuple[int, int]]:
        return [(d, d) for d in range(len(self.graph.values[v].shape))]

    def inline(
        self, eqn: Any, inner: Any, env: dict[Any, int | None], times: float, path: tuple[int, ...]
    ) -> list[dict[int, float]]:
        jaxpr, _ = inner
        local: dict[Any, int | None] = {}
        for v in jaxpr.constvars:
            self.new(local, v, times)
        for v, outer in zip(jaxpr.invars, eqn.invars[len(eqn.invars) - len(jaxpr.invars) :]):
            local[v] = self.read(env, outer)
            if local[v] is None and math.prod(getattr(v.aval, "shape", ())) > 1:
                self.new(local, v, times)
        inside = self.walk(jaxpr, local, times, path)
        for v, outer in zip(eqn.outvars, jaxpr.outvars):
            env[v] = self.read(local, outer)
            if env[v] is None:
                self.new(env, v, times)
        return inside

    # Values that lie together.

    def same(self, a: int | None, b: int | None, skip: Any = ()) -> bool:
        """Ties equal dimensions of two values of one rank; those in `skip` must be whole."""
        if a is None or b is None:
            return True
        va, vb = self.graph.values[a], self.graph.values[b]
        for d in skip:
            self.graph.whole(a, int(d))
            self.graph.whole(b, int(d))
        pairs = [(d, d) for d in range(len(va.shape)) if va.shape[d] == vb.shape[d] and d not in skip]
        return self.graph.tie(a, b, pairs)

    def elementwise(self, eqn: Any, ins: list[Any], outs: list[Any], times: float, path: tuple[int, ...]) -> None:
        if eqn.primitive.name in ("optimization_barrier", "device_put"):
            for a, b in zip(ins, outs):
                self.same(a, b)
            return
        for out in outs:
            if out is None:
                continue
            rank = len(self.graph.values[out].shape)
            for a in ins:
                if a is not None and len(self.graph.values[a].shape) == rank and not self.same(a, out):
                    self.move(a, out, [(d, d) for d in range(rank)], times, path)
            self.graph.traffic.append((out, times))

    def move(
        self, a: int, out: int, pairs: list[tuple[int, int]], times: float, path: tuple[int, ...], slot: int = -1
    ) -> None:
        """Two values that are one array, or dimensions of one, but need not, or cannot, lie together."""
        self.graph.moves.append(Move(a, out, tuple(pairs), times, path, slot))

    def tied(self, a: int | None, out: int | None, pairs: list[tuple[int, int]], times: float, path: Any) -> None:
        if a is not None and out is not None and not self.graph.tie(a, out, pairs):
            self.move(a, out, pairs, times, path)

    def reduction(self, eqn: Any, ins: list[Any], outs: list[Any], times: float, whole: bool) -> None:
        a, axes = ins[0], tuple(int(x) for x in eqn.params["axes"])
        if a is None:
            return
        if whole:
            for d in axes:
                self.graph.whole(a, d)
        names = tuple(self.graph.values[a].dims[d] for d in axes)
        kept = [d for d in range(len(self.graph.values[a].shape)) if d not in axes]
        out = outs[0]
        if out is not None:
            self.graph.tie(a, out, list(zip(kept, range(len(kept)))))
        self.graph.reductions.append(Reduction(a, names, -1 if out is None else out, times))
        self.graph.traffic.append((a, times * 0.5))

    def windowed(self, eqn: Any, ins: list[Any], outs: list[Any]) -> None:
        sizes = eqn.params.get("window_dimensions", ())
        moved = [d for d, n in enumerate(sizes) if n != 1]
        for a in ins:
            if a is not None and outs[0] is not None:
                self.same(a, outs[0], skip=moved)

    def on_transpose(self, eqn: Any, ins: list[Any], outs: list[Any], times: float, path: Any) -> None:
        self.tied(ins[0], outs[0], [(int(d), i) for i, d in enumerate(eqn.params["permutation"])], times, path)

    def on_broadcast_in_dim(self, eqn: Any, ins: list[Any], outs: list[Any], times: float, path: Any) -> None:
        a, out = ins[0], outs[0]
        if a is None or out is None:
            return
        shape, target = self.graph.values[a].shape, self.graph.values[out].shape
        pairs = [(i, int(d)) for i, d in enumerate(eqn.params["broadcast_dimensions"]) if shape[i] == target[int(d)]]
        self.tied(a, out, pairs, times, path)

    def on_squeeze(self, eqn: Any, ins: list[Any], outs: list[Any], times: float, path: Any) -> None:
        a, out = ins[0], outs[0]
        if a is None or out is None:
            return
        rank = len(self.graph.values[a].shape)
        gone = {int(d) % rank for d in eqn.params["dimensions"]}
        kept = [d for d in range(rank) if d not in gone]
        self.tied(a, out, list(zip(kept, range(len(kept)))), times, path)

    def on_expand_dims(self, eqn: Any, ins: list[Any], outs: list[Any], times: float, path: Any) -> None:
        self.on_reshape(eqn, ins, outs, times, path)

    def on_reshape(self, eqn: Any, ins: list[Any], outs: list[Any], times: float, path: Any) -> None:
        a, out = ins[0], outs[0]
        if a is None or out is None:
            return
        pairs, minor_in, minor_out = reshape_dims(self.graph.values[a].shape, self.graph.values[out].shape)
        for d in minor_in:
            self.graph.whole(a, d)
        for d in minor_out:
            self.graph.whole(out, d)
        self.tied(a, out, pairs, times, path)

    def on_concatenate(self, eqn: Any, ins: list[Any], outs: list[Any], times: float, path: Any) -> None:
        for a in ins:
            if a is not None and outs[0] is not None and not self.same(a, outs[0], skip=(eqn.params["dimension"],)):
                rank = len(self.graph.values[a].shape)
                self.move(a, outs[0], [(d, d) for d in range(rank) if d != eqn.params["dimension"]], times, path)

    def on_pad(self, eqn: Any, ins: list[Any], outs: list[Any], times: float, path: Any) -> None:
        padded = [d for d, c in enumerate(eqn.params["padding_config"]) if tuple(c) != (0, 0, 0)]
        self.cut_dims(ins[0], outs[0], padded, times, path)

    def on_slice(self, eqn: Any, ins: list[Any], outs: list[Any], times: float, path: Any) -> None:
        self.cut_dims(ins[0], outs[0], (), times, path)

    on_dynamic_slice = on_slice

    def on_split(self, eqn: Any, ins: list[Any], outs: list[Any], times: float, path: Any) -> None:
        for out in outs:
            self.cut_dims(ins[0], out, (), times, path)

    def cut_dims(self, a: int | None, out: int | None, whole: Any, times: float, path: Any) -> None:
        """Ties the dimensions that are kept; one that is cut or padded is whole before, and new after."""
        if a is None:
            return
        shape = self.graph.values[a].shape
        target = self.graph.values[out].shape if out is not None else (1,) * len(shape)
        changed = [d for d in range(len(shape)) if shape[d] != target[d] or d in whole]
        for d in changed:
            self.graph.whole(a, d)
        self.tied(a, out, [(d, d) for d in range(len(shape)) if d not in changed], times, path)

    def on_dynamic_update_slice(self, eqn: Any, ins: list[Any], outs: list[Any], times: float, path: Any) -> None:
        operand, update, out = ins[0], ins[1], outs[0]
        if operand is not None:
            self.same(operand, out)
        if out is None:
            return
        shape = self.graph.values[out].shape
        part = self.graph.values[update].shape if update is not None else (1,) * len(shape)
        for d in range(len(shape)):
            if part[d] != shape[d]:
                self.graph.whole(out, d)
        if update is not None:
            self.tied(update, out, [(d, d) for d in range(len(shape)) if part[d] == shape[d]], times, path)

    def on_sort(self, eqn: Any, ins: list[Any], outs: list[Any], times: float, path: Any) -> None:
        for a, out in zip(ins, outs):
            self.same(a, out, skip=(eqn.params["dimension"],))
        for other in outs[1:]:
            self.same(outs[0], other)

    def on_top_k(self, eqn: Any, ins: list[Any], outs: list[Any], times: float, path: Any) -> None:
        if ins[0] is None:
            return
        last = len(self.graph.values[ins[0]].shape) - 1
        for out in outs:
            self.cut_dims(ins[0], out, (last,), times, path)
            if out is not None:
                self.graph.whole(out, last)

    # Operations between clusters.

    def op(
        self,
        kind: str,
        times: float,
        letters: dict[str, int],
        operands: list[tuple[int | None, list[str]]],
        outs: list[tuple[int | None, list[str]]],
        reduced: set[str],
        flops: float,
        path: tuple[int, ...],
    ) -> None:
        order = {name: i for i, name in enumerate(letters)}
        number = lambda names: tuple(order.get(n, -1) for n in names)
        self.graph.ops.append(
            Op(
                kind,
                times,
                list(letters.values()),
                [(v, number(names)) for v, names in operands if v is not None],
                [(v, number(names)) for v, names in outs if v is not None],
                frozenset(order[n] for n in reduced if n in order),
                flops,
                path,
                tuple(i for i, (v, _) in enumerate(operands) if v is not None),
                tuple(i for i, (v, _) in enumerate(outs) if v is not None),
            )
        )

    def on_dot_general(self, eqn: Any, ins: list[Any], outs: list[Any], times: float, path: Any) -> None:
        (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
        lhs, rhs = (tuple(v.aval.shape) for v in eqn.invars)
        names_l, names_r, letters = [""] * len(lhs), [""] * len(rhs), {}
        for i, (a, b) in enumerate(zip(lb, rb)):
            names_l[a] = names_r[b] = f"b{i}"
            letters[f"b{i}"] = lhs[a]
        for i, (a, b) in enumerate(zip(lc, rc)):
            names_l[a] = names_r[b] = f"k{i}"
            letters[f"k{i}"] = lhs[a]
        out = [f"b{i}" for i in range(len(lb))]
        for side, names, shape in (("m", names_l, lhs), ("n", names_r, rhs)):
            for d, name in enumerate(names):
                if not name:
                    names[d] = f"{side}{d}"
                    letters[names[d]] = shape[d]
                    out.append(names[d])
        reduced = {n for n in letters if n[0] == "k"}
        operands = [(ins[0], names_l), (ins[1], names_r)]
        self.op("dot", times, letters, operands, [(outs[0], out)], reduced, 2.0 * math.prod(letters.values()), path)

    def on_conv_general_dilated(self, eqn: Any, ins: list[Any], outs: list[Any], times: float, path: Any) -> None:
        dn = eqn.params["dimension_numbers"]
        lhs, rhs, out = (tuple(v.aval.shape) for v in (*eqn.invars, eqn.outvars[0]))
        groups = eqn.params["feature_group_count"] * eqn.params["batch_group_count"]
        names = [["-"] * len(lhs), ["-"] * len(rhs), ["-"] * len(out)]
        letters = {}
        if eqn.params["batch_group_count"] == 1:
            letters["batch"] = lhs[dn.lhs_spec[0]]
            names[0][dn.lhs_spec[0]] = names[2][dn.out_spec[0]] = "batch"
        if groups == 1:
            letters |= {"in": lhs[dn.lhs_spec[1]], "out": out[dn.out_spec[1]]}
            names[0][dn.lhs_spec[1]] = names[1][dn.rhs_spec[1]] = "in"
            names[1][dn.rhs_spec[0]] = names[2][dn.out_spec[1]] = "out"
        window = math.prod(rhs[d] for d in dn.rhs_spec[2:])
        flops = 2.0 * math.prod(out) * rhs[dn.rhs_spec[1]] * window
        operands = [(ins[0], names[0]), (ins[1], names[1])]
        self.op("conv", times, letters, operands, [(outs[0], names[2])], {"in"}, flops, path)

    def on_gather(self, eqn: Any, ins: list[Any], outs: list[Any], times: float, path: Any) -> None:
        dn, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
        table, index = (tuple(v.aval.shape) for v in eqn.invars[:2])
        out = tuple(eqn.outvars[0].aval.shape)
        letters, names_t, names_i = {}, ["-"] * len(table), ["-"] * len(index)
        names_o = ["-"] * len(out)
        batch = [d for d in range(len(out)) if d not in dn.offset_dims]
        for i, d in enumerate(batch):
            letters[f"i{i}"] = out[d]
            names_o[d] = names_i[i] = f"i{i}"
        kept = [d for d in range(len(table)) if d not in dn.collapsed_slice_dims and d not in dn.operand_batching_dims]
        for d, o in zip(kept, dn.offset_dims):
            if sizes[d] == table[d]:
                letters[f"t{d}"] = table[d]
                names_t[d] = names_o[o] = f"t{d}"
        for d, i in zip(dn.operand_batching_dims, dn.start_indices_batching_dims):
            names_t[d] = names_i[i]
        for d in dn.collapsed_slice_dims:
            if len(dn.collapsed_slice_dims) == 1:  # a cut table: each device looks up its part, and the rest is summed
                letters[f"v{d}"] = table[d]
                names_t[d] = f"v{d}"
        reduced = {n for n in letters if n[0] == "v"}
        operands = [(ins[0], names_t), (ins[1], names_i)]
        self.op("gather", times, letters, operands, [(outs[0], names_o)], reduced, 0.0, path)

    def scatter(self, eqn: Any, ins: list[Any], outs: list[Any], times: float, path: Any) -> None:
        dn = eqn.params["dimension_numbers"]
        table, index, update = (tuple(v.aval.shape) for v in eqn.invars[:3])
        letters, names_t = {}, ["-"] * len(table)
        names_u, names_i = ["-"] * len(update), ["-"] * len(index)
        batch = [d for d in range(len(update)) if d not in dn.update_window_dims]
        for i, d in enumerate(batch):
            letters[f"i{i}"] = update[d]
            names_u[d] = names_i[i] = f"i{i}"
        inserted = (*dn.inserted_window_dims, *dn.operand_batching_dims)
        kept = [d for d in range(len(table)) if d not in inserted]
        for d, u in zip(kept, dn.update_window_dims):
            if update[u] == table[d]:
                letters[f"t{d}"] = table[d]
                names_t[d] = names_u[u] = f"t{d}"
        batched = set()
        for d, i in zip(dn.operand_batching_dims, dn.scatter_indices_batching_dims):
            names_t[d] = names_i[i]
            batched.add(names_i[i])
        for d in dn.inserted_window_dims:
            letters[f"v{d}"] = table[d]
            names_t[d] = f"v{d}"
        adds = "add" in eqn.primitive.name
        reduced = {n for n in letters if n[0] == "i" and n not in batched} if adds else set()
        if not adds:
            for n in [n for n in letters if n[0] == "i" and n not in batched]:
                del letters[n]
        operands = [(ins[0], names_t), (ins[1], names_i), (ins[2], names_u)]
        self.op("scatter", times, letters, operands, [(outs[0], names_t)], reduced, 0.0, path)

    def opaque(self, eqn: Any, ins: list[Any], outs: list[Any], times: float, path: tuple[int, ...]) -> None:
        """Not understood: everything whole."""
        name = eqn.primitive.name
        self.graph.unknown[name] = self.graph.unknown.get(name, 0) + 1
        whole = lambda v: ["-"] * len(self.graph.values[v].shape) if v is not None else []
        self.op("opaque", times, {}, [(v, whole(v)) for v in ins], [(v, whole(v)) for v in outs], set(), 0.0, path)

    # Control flow.

    def on_scan(
        self, eqn: Any, outer_in: list[Any], env: dict[Any, int | None], times: float, path: tuple[int, ...]
    ) -> list[dict[int, float]]:
        p = eqn.params
        body, n_consts, n_carry = p["jaxpr"].jaxpr, p["num_consts"], p["num_carry"]
        inner = times * p["length"]
        outs = [self.new(env, v, times) for v in eqn.outvars]
        local: dict[Any, int | None] = {}
        for v in body.constvars:
            self.new(local, v, inner)
        for i, v in enumerate(body.invars):
            made = self.new(local, v, inner)
            if n_consts <= i < n_consts + n_carry and made is not None:
                self.graph.carries.append((path, i - n_consts, made))
            if i < n_consts + n_carry:
                self.same_or_move(outer_in[i], made, times, path)
            else:
                self.stacked(outer_in[i], made, inner, path)
        for i in range(n_carry):
            self.same_or_move(local[body.invars[n_consts + i]], outs[i], times, path)
        inside = self.walk(body, local, inner, path)
        for i, v in enumerate(body.outvars):
            made = self.read(local, v)
            if i < n_carry:
                self.same_or_move(made, local[body.invars[n_consts + i]], inner, path)
            else:
                self.stacked(outs[i], made, inner, path)
        return inside

    def same_or_move(self, a: int | None, b: int | None, times: float, path: tuple[int, ...]) -> None:
        if a is not None and b is not None and not self.same(a, b):
            self.move(a, b, [(d, d) for d in range(len(self.graph.values[a].shape))], times, path)

    def stacked(self, outer: int | None, inner: int | None, times: float, path: tuple[int, ...]) -> None:
        """A value and one of its slices along the first dimension, which is whole."""
        if outer is None:
            return
        self.graph.whole(outer, 0)
        if inner is not None:
            pairs = [(d + 1, d) for d in range(len(self.graph.values[inner].shape))]
            self.tied(outer, inner, pairs, times, path)

    def on_while(
        self, eqn: Any, outer_in: list[Any], env: dict[Any, int | None], times: float, path: tuple[int, ...]
    ) -> list[dict[int, float]]:
        p = eqn.params
        skip = p["cond_nconsts"]
        body, n_consts = p["body_jaxpr"].jaxpr, p["body_nconsts"]
        outs = [self.new(env, v, times) for v in eqn.outvars]
        local: dict[Any, int | None] = {}
        for v in body.constvars:
            self.new(local, v, times)
        for i, v in enumerate(body.invars):
            self.same_or_move(outer_in[skip + i], self.new(local, v, times), times, path)
        carries = body.invars[n_consts:]
        for v, out in zip(carries, outs):
            self.same_or_move(local[v], out, times, path)
        inside = self.walk(body, local, times, path)
        for v, carry in zip(body.outvars, carries):
            self.same_or_move(self.read(local, v), local[carry], times, path)
        return inside

    def on_cond(
        self, eqn: Any, ins: list[Any], env: dict[Any, int | None], times: float, path: tuple[int, ...]
    ) -> list[dict[int, float]]:
        branches, outer_in = eqn.params["branches"], ins[1:]
        inside: list[dict[int, float]] = []
        outs = [self.new(env, v, times) for v in eqn.outvars]
        for b, branch in enumerate(branches):
            local: dict[Any, int | None] = dict(zip(branch.jaxpr.invars, outer_in))
            for v in branch.jaxpr.constvars:
                self.new(local, v, times)
            inside += self.walk(branch.jaxpr, local, times / len(branches), (*path, b))
            for v, out in zip(branch.jaxpr.outvars, outs):
                self.same_or_move(self.read(local, v), out, times, path)
        return inside


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


def _done(a: tuple[int, ...], i: int, b: tuple[int, ...], j: int) -> bool:
    """Whether a group may end here: trailing ones belong to nobody."""
    return (i >= len(a)) == (j >= len(b)) or all(n == 1 for n in a[i:]) or all(n == 1 for n in b[j:])


def _itemsize(aval: Any) -> int:
    dtype = aval.dtype
    return int(getattr(dtype, "itemsize", None) or np.dtype(dtype).itemsize)
