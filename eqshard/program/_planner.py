"""`step_plan`: trace, read, price, solve, and say what came out."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from .._axes import PartitionAxis
from .._memory import BudgetError
from .._mesh import MeshLike, MeshSpec
from .._plan import LeafPlan, ShardingPlan
from .._spec import canonical, entry_axes
from .._tree import size_text
from ._build import build
from ._cost import Machine, State
from ._fixed import Fixed, fixed_specs
from ._fold import Fold, fold_alike
from ._ops import OpRules
from ._price import busy_seconds, in_flight, state_of
from ._solve import Choice, Layout, own_seconds, Problem, problem, project, require, solve
from ._step import Point, StepPlan
from ._trace import trace, Traced


HOST_BANDWIDTH = 10e9
"""Bytes a second from the host to a device."""
TRIES = 4
"""How often a choice that does not fit with what is in flight is made again with less room."""

Bytes = dict[int, np.ndarray]
"""For each cluster the bytes on a device in each of its layouts."""


def step_plan(
    fn: Callable[..., Any],
    *args: Any,
    mesh: MeshLike,
    max_bytes: int | float | None = None,
    fixed: Mapping[str, Fixed] | Sequence[ShardingPlan | None] | None = None,
    names: PartitionAxis | None = None,
    rules: OpRules | None = None,
    time_limit: int | float = 30.0,
) -> StepPlan:
    """Plans a step from its own program: the layouts of its arguments and of the values inside that make it fastest.

    The step is traced, not run, and nothing is allocated. Values that lie together are found in its jaxpr; each matrix
    product, convolution, gather and the like is priced for every way to cut it, with what it takes to bring its
    operands there; and an integer program picks the cheapest that fits the memory.

    ```python
    import equinox as eqx, eqshard, jax, optax
    optim = optax.adamw(1e-3)

    def step(model, state, x):
        grads = eqx.filter_grad(lambda m: (jax.vmap(m)(x) ** 2).mean())(model)
        updates, state = optim.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state

    model = eqx.filter_eval_shape(eqx.nn.MLP, 256, 256, 1024, 2, key=jax.random.key(0))
    state = eqx.filter_eval_shape(lambda m: optim.init(eqx.filter(m, eqx.is_array)), model)
    x = jax.ShapeDtypeStruct((512, 256), "float32")
    plan = eqshard.step_plan(step, model, state, x, mesh=eqshard.MeshSpec(data=4, tp=2))
    model_plan, state_plan, batch_plan = plan.args
    ```

    **Arguments:**

    - `args`: arrays or shapes; leaves that are no arrays are part of the program.
    - `mesh`: its `chip`, where known, gives the costs and the memory; else those of a TPU v5e.
    - `max_bytes`: what a step may take on each device; by default the memory of `mesh.chip`, if it has one.
    - `fixed`: layouts that are given: the name of an argument, or a regular expression on the paths of leaves, to a
        PartitionSpec (which is cut to the rank of each leaf), to logical names such as `("batch", "length")`, or, for
        an argument, to a plan of some of its leaves. Or a plan, or None, for each argument.
    - `names`: what logical names in `fixed` mean; by default those of `PartitionAxis()`.
    - `rules`: for operations that eqshard does not know, such as Pallas and other opaque calls, by the name of their
        primitive: which dimensions may be cut together, as `"b q d, b k d -> b q d"` (`-`: must be whole), or a
        function of the equation that gives that, or None. Without a rule they are taken whole, and named in `notes`.
    - `time_limit`: seconds that the solver may take; then the best so far is taken, and its gap said.

    **Returns:**

    A `StepPlan`: `plan.args` to lay the arguments out, `constrain(plan, fn)` to write the rest into the program.

    **Raises:**

    - `BudgetError`: nothing fits `max_bytes`.
    """
    described = MeshSpec.of(mesh)
    described.size()
    traced = trace(fn, args)
    machine = Machine.of(described)
    graph, ins, _ = build(traced, rules or {})
    said = fixed_specs(fn, traced, fixed or {}, described, names or PartitionAxis())
    anchored = {graph.cluster(v): _as_layout(said[i], graph.dims(v), machine)
                for i, v in enumerate(ins) if v is not None and i in said}  # fmt: skip
    p = problem(graph, machine, ins, anchored)
    own = own_seconds(p)
    _add_reading(p, own, ins, set(traced.kept.values()))
    limit = described.chip.hbm_bytes if max_bytes is None and described.chip is not None else max_bytes
    rows = _memory_rows(p, ins)
    fold = fold_alike(graph, p.layouts, anchored)
    choice = _fitting(p, fold, own, rows, None if limit is None else float(limit), float(time_limit))
    return _written(traced, described, p, own, rows, choice, ins)


def _fitting(
    p: Problem, fold: Fold, own: dict[int, np.ndarray], rows: list[Bytes], limit: float | None, seconds: float
) -> Choice:
    """The cheapest choice that fits, with what is in flight, which is known only of a choice."""
    if limit is None:
        choice = solve(p, fold, own, [], seconds=seconds)
        assert choice is not None
        return choice
    room = limit
    for _ in range(TRIES):
        choice = solve(p, fold, own, [(row, room) for row in rows], seconds=seconds)
        if choice is None:
            break
        over = held_bytes(p, rows, choice) - limit
        if over <= 0:
            return choice
        room -= over
    raise BudgetError(_infeasible(p, rows, limit))


def held_bytes(p: Problem, rows: list[Bytes], choice: Choice) -> float:
    """Bytes on a device at the worst moment."""
    index = {c: p.layouts[c].index(choice.layouts[c]) for c in p.layouts}
    kept = max((sum((float(values[index[c]]) for c, values in row.items()), 0.0) for row in rows), default=0.0)
    return kept + in_flight(p, choice)


def _as_layout(spec: PartitionSpec, dims: tuple[int, ...], machine: Machine) -> Layout:
    where = {axis: dims[d] for d, entry in enumerate(spec) for axis in entry_axes(entry)}
    return tuple(where.get(axis, -1) for axis in machine.names)


def _as_spec(state: State, machine: Machine, rank: int) -> PartitionSpec:
    entries: list[tuple[str, ...]] = [()] * rank
    for axis, dim in zip(machine.names, state):
        if dim >= 0:
            entries[dim] = (*entries[dim], axis)
    return canonical(PartitionSpec(*entries))


def _add_reading(p: Problem, own: dict[int, np.ndarray], ins: list[int | None], stay: set[int]) -> None:
    """Arguments are read once; those that do not stay on the devices, such as batches, come from the host first."""
    for i, v in enumerate(ins):
        if v is not None:
            c, dims, nbytes = p.graph.cluster(v), p.graph.dims(v), p.graph.values[v].nbytes
            seconds = p.machine.stream(nbytes) + (0.0 if i in stay else nbytes / HOST_BANDWIDTH)
            own[c] = own[c] + [seconds / p.machine.factor(project(lay, dims)) for lay in p.layouts[c]]


def _memory_rows(p: Problem, ins: list[int | None]) -> list[Bytes]:
    """Bytes on a device for each cluster and layout: the arguments, and what is alive at the worst times."""
    rest = _bytes_of(p, {v: 1.0 for v in ins if v is not None})
    args = {v for v in ins if v is not None}
    rows = []
    for live in p.graph.live[:2] or [{}]:
        here = _bytes_of(p, {v: n for v, n in live.items() if v not in args})
        rows.append({c: rest.get(c, 0.0) + here.get(c, 0.0) for c in rest.keys() | here.keys()})
    return rows


def _bytes_of(p: Problem, values: dict[int, float]) -> Bytes:
    found: Bytes = {}
    for v, n in values.items():
        c = p.graph.cluster(v)
        if c in p.layouts:
            dims, nbytes = p.graph.dims(v), n * p.graph.values[v].nbytes
            here = np.array([nbytes / p.machine.factor(project(lay, dims)) for lay in p.layouts[c]])
            found[c] = found.get(c, 0.0) + here
    return found


def _infeasible(p: Problem, rows: list[Bytes], limit: float) -> str:
    least = max(sum(float(values.min()) for values in row.values()) for row in rows)
    return (
        f"no layout of this step fits {size_text(limit)} a device: by the planner's count at least {size_text(least)} "
        "is needed.\n  Ways out: a larger mesh, remat, a smaller batch, or optimizer state on the host."
    )


def _written(
    traced: Traced,
    mesh: MeshSpec,
    p: Problem,
    own: dict[int, np.ndarray],
    rows: list[Bytes],
    choice: Choice,
    ins: list[int | None],
) -> StepPlan:
    args: list[list[LeafPlan]] = [[] for _ in range(1 + max((leaf.arg for leaf in traced.ins), default=-1))]
    for leaf, v in zip(traced.ins, ins):
        rest = PartitionSpec() if v is None else _spec_of(p, choice, v)
        use = rest if v is None else _use_of(p, choice, v, rest)
        why = "too small to cut" if v is None else "planned" if use == rest else "stored apart from how it is used"
        args[leaf.arg].append(LeafPlan(leaf.path, leaf.shape, leaf.dtype, rest, use, None, why))
    notes = [f"{n} of `{name}` are taken as they are: whole" for name, n in p.graph.unknown.items()]
    if choice.gap > 0.01:
        notes.append(f"the solver stopped {100 * choice.gap:.0f} % from what it could prove best")
    return StepPlan(
        mesh=mesh,
        args=tuple(ShardingPlan(mesh, tuple(rows_)) for rows_ in args),
        inner=tuple(_points(p, choice, ins)),
        program=traced.fingerprint,
        seconds=choice.seconds,
        compute_seconds=min(busy_seconds(p, own, choice), choice.seconds),
        bytes_per_device=held_bytes(p, rows, choice),
        notes=tuple(notes),
    )


def _spec_of(p: Problem, choice: Choice, v: int) -> PartitionSpec:
    return _as_spec(state_of(p, choice, v), p.machine, len(p.graph.values[v].shape))


def _use_of(p: Problem, choice: Choice, v: int, rest: PartitionSpec) -> PartitionSpec:
    """How the products that read an argument want it: by the names of its copies."""
    for move in p.graph.moves:
        if move.source != v or not move.path:
            continue
        copy = p.graph.cluster(move.target)
        for op, way in zip(p.graph.ops, choice.ways):
            for u, letters in op.operands:
                if op.kind in ("dot", "conv", "gather") and _reads(p, u, copy):
                    cut = {a: p.graph.dims(u)[d] for a, d in enumerate(require(way, letters)) if d >= 0}
                    dims = p.graph.dims(move.target)
                    state = tuple(dims.index(cut[a]) if cut.get(a, -1) in dims and cut.get(a, -1) >= 0 else -1
                                  for a in range(len(p.machine.sizes)))  # fmt: skip
                    return _as_spec(state, p.machine, len(dims))
    return rest


def _reads(p: Problem, u: int, copy: int) -> bool:
    c = p.graph.cluster(u)
    return c == copy or any(p.graph.cluster(m.target) == c and p.graph.cluster(m.source) == copy for m in p.graph.moves)


def _points(p: Problem, choice: Choice, ins: list[int | None]) -> list[Point]:
    """Where layouts are written: at arguments, results, loop carries, what operations read and make."""
    graph, machine = p.graph, p.machine
    found: dict[tuple[tuple[int, ...], str, int], PartitionSpec] = {}

    def write(path: tuple[int, ...], side: str, slot: int, state: State, v: int) -> None:
        found[path, side, slot] = _as_spec(state, machine, len(graph.values[v].shape))

    for i, v in enumerate(ins):
        if v is not None:
            write((), "arg", i, state_of(p, choice, v), v)
    for m in graph.moves:
        state = state_of(p, choice, m.target)
        if m.slot >= 0 and not m.path:
            write((), "result", m.slot, state, m.target)
        elif m.slot >= 0 and state != state_of(p, choice, m.source):
            write(m.path, "in", m.slot, state, m.target)
    for path, slot, v in graph.carries:
        write(path, "carry", slot, state_of(p, choice, v), v)
    for op, way in zip(graph.ops, choice.ways):
        for slot, (v, letters) in zip(op.slots, op.operands):
            want = require(way, letters)
            if want != state_of(p, choice, v):
                write(op.path, "way", slot, want, v)
        for slot, (v, _) in zip(op.out_slots, op.outs):
            write(op.path, "out", slot, state_of(p, choice, v), v)
    return [(path, side, slot, spec) for (path, side, slot), spec in found.items()]
