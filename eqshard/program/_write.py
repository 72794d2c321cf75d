"""Writes a choice down: a plan for each argument, and where in the program layouts are put."""

from collections.abc import Callable, Sequence

from jax.sharding import PartitionSpec

from .._plan import LeafPlan, ShardingPlan
from .._spec import fit_spec, spec_text
from .._tree import path_name, type_text
from ._cost import State
from ._graph import Place
from ._names import costs_of, dims_of
from ._order import Orders
from ._outline import Outline, versions
from ._places import Places
from ._price import busy_seconds, move_states, moved, state_of
from ._problem import Problem, require
from ._solve import Choice
from ._step import Point, StepPlan
from ._study import Chosen, Study
from ._together import reshape_mixed


ROOM = 0.75
"""How much of the memory a plan may take that keeps more than it must: it is not known exactly."""
LARGE = 1e6
"""From how many bytes on a result that replaces no argument is noted."""
MOST_RESULTS = 8
"""How many of these results are noted one by one."""


def written(study: Study, chosen: Chosen) -> StepPlan:
    """The plan of a choice."""
    traced, ins, p, choice = study.traced, study.ins, chosen.p, chosen.choice
    args: list[list[LeafPlan]] = [[] for _ in range(1 + max((leaf.arg for leaf in traced.ins), default=-1))]
    orders = Orders(p, choice, {v: spec for i, spec in chosen.given.items() if (v := ins[i]) is not None})
    spec_of = lambda v: PartitionSpec() if v is None else orders.spec(v, state_of(p, choice, v))
    rests = [spec_of(v) for v in ins]
    rests = [chosen.given.get(i, rest) for i, rest in enumerate(rests)]
    uses = _uses(p, choice, orders)
    for leaf, v, rest in zip(traced.ins, ins, rests):
        use = rest if v is None else uses.get(v, rest)
        why = "too small to cut" if v is None else "planned" if use == rest else "stored apart from how it is used"
        args[leaf.arg].append(LeafPlan(leaf.path, leaf.shape, leaf.dtype, rest, use, None, why))
    notes = [f"{n} of `{name}` are taken as they are: whole" for name, n in p.graph.unknown.items()]
    if choice.gap > 0.01:
        notes.append(f"the solver stopped {100 * choice.gap:.0f} % from what it could prove best")
    results = _results(study, rests, spec_of)
    notes += _new_results(study, results)
    busy = busy_seconds(p, chosen.own, choice)
    kept = _kept(p, choice)
    once = study.objective == "time" and (study.limit is None or chosen.held + kept <= ROOM * study.limit)
    places = Places(traced.jaxpr.jaxpr)
    points = [*_points(p, choice, orders, ins, rests, once), *_result_points(results)]
    return StepPlan(
        mesh=study.mesh,
        args=tuple(ShardingPlan(study.mesh, tuple(rows)) for rows in args),
        inner=tuple((places.canonical(path), side, slot, spec) for path, side, slot, spec in points),
        program=traced.fingerprint,
        outline=Outline.of(traced),
        versions=versions(),
        seconds=busy + sum((m.exposed for m in moved(p, choice)), 0.0),
        compute_seconds=busy,
        bytes_per_device=chosen.held + (kept if once else 0.0),
        notes=tuple(notes),
        costs=costs_of(study, chosen),
        dims=dims_of(study, chosen),
    )


Reader = tuple[tuple[int, ...], State]
"""The names of the dims of a value that a product reads, and how the product wants it."""


def _readers(p: Problem, choice: Choice) -> dict[int, Reader]:
    """For each cluster, who is first of the products that read it or a copy of it."""
    sources: dict[int, set[int]] = {}
    for move in p.graph.moves:
        sources.setdefault(p.graph.cluster(move.target), set()).add(p.graph.cluster(move.source))
    first: dict[int, Reader] = {}
    for op, way in zip(p.graph.ops, choice.ways):
        if op.kind in ("dot", "conv", "gather"):
            for v, letters in op.operands:
                c = p.graph.cluster(v)
                for read in {c, *sources.get(c, ())}:
                    first.setdefault(read, (p.graph.dims(v), require(way, letters)))
    return first


def _uses(p: Problem, choice: Choice, orders: Orders) -> dict[int, PartitionSpec]:
    """How the products that read an argument want it: by the names of its copies."""
    found: dict[int, PartitionSpec] = {}
    readers = _readers(p, choice)
    for move in p.graph.moves:
        reader = readers.get(p.graph.cluster(move.target))
        if not move.path or move.source in found or reader is None:
            continue
        names, want = reader
        cut = [names[d] if d >= 0 else -1 for d in want]
        dims = p.graph.dims(move.target)
        state = tuple(dims.index(name) if name >= 0 and name in dims else -1 for name in cut)
        found[move.source] = orders.spec(move.target, state)
    return found


def _gathered_again(p: Problem, choice: Choice) -> list[tuple[Place, int, int, State]]:
    """Where products gather weights that one before them has gathered: their place, which operand, and how."""
    found, seen = [], set()
    for op, way in zip(p.graph.ops, choice.ways):
        for slot, (v, letters) in zip(op.slots, op.operands):
            want = require(way, letters)
            dearer = p.machine.factor(want) < p.machine.factor(state_of(p, choice, v))
            if dearer and "all-gather" in p.graph.values[v].hides:
                found += [(op.path, slot, v, want)] if v in seen else []
                seen.add(v)
    return found


def _kept(p: Problem, choice: Choice) -> float:
    """Bytes of gathered weights, if those of the forward pass are kept for the backward pass."""
    graph, blocks = p.graph, {path for path, _, _ in p.graph.again}
    inside = lambda path: any(path[:n] in blocks for n in range(1, len(path) + 1))
    reads = [
        (v, state_of(p, choice, v), require(way, letters))
        for op, way in zip(graph.ops, choice.ways)
        if inside(op.path)
        for v, letters in op.operands
    ]
    reads += [(m.source, *move_states(p, choice, m)) for m in graph.moves if inside(m.path)]
    twice = {v: want for path, _, v, want in _gathered_again(p, choice) if not inside(path)}
    reads += [(v, state_of(p, choice, v), want) for v, want in twice.items()]
    gathered = (
        graph.values[v].nbytes * max(0.0, 1 / p.machine.factor(want) - 1 / p.machine.factor(have))
        for v, have, want in reads
        if "all-gather" in graph.values[v].hides
    )
    return sum(gathered, 0.0)


def _points(
    p: Problem,
    choice: Choice,
    orders: Orders,
    ins: list[int | None],
    rests: list[PartitionSpec],
    once: bool,
) -> list[Point]:
    """Where layouts are written: at arguments, loop carries, what operations read and make.

    **Arguments:**

    - `rests`: how the arguments lie.
    - `once`: weights may be gathered once for the forward and the backward pass. XLA does so unless it is kept from it.
    """
    graph = p.graph
    found: dict[tuple[tuple[int, ...], str, int], PartitionSpec] = {}

    def write(path: tuple[int, ...], side: str, slot: int, state: State, v: int) -> None:
        found[path, side, slot] = orders.spec(v, state)

    for i, (v, rest) in enumerate(zip(ins, rests)):
        if v is not None:
            found[(), "arg", i] = rest
    for m in graph.moves:
        state = state_of(p, choice, m.target)
        if m.slot >= 0 and m.path and state != state_of(p, choice, m.source):
            write(m.path, "in", m.slot, state, m.target)
    for path, slot, v, made in graph.pins:
        write(path, "out" if made else "in", slot, state_of(p, choice, v), v)
    for path, a, out in graph.splits:
        before, after = reshape_mixed(graph.shape(a), graph.shape(out))
        if set(state_of(p, choice, a)) & before or set(state_of(p, choice, out)) & after:
            write(path, "out", 0, state_of(p, choice, out), out)
    for path, slot, v in (*graph.carries, *(() if once else graph.again)):
        write(path, "carry", slot, state_of(p, choice, v), v)
    for op, way in zip(graph.ops, choice.ways):
        for slot, (v, letters) in zip(op.slots, op.operands):
            want = require(way, letters)
            if want != state_of(p, choice, v) or op.kind == "scatter":
                write(op.path, "way", slot, want, v)
        for slot, (v, _) in zip(op.out_slots, op.outs):
            write(op.path, "out", slot, state_of(p, choice, v), v)
    for path, slot, v, want in () if once else _gathered_again(p, choice):
        write(path, "again", slot, want, v)
    return [(path, side, slot, spec) for (path, side, slot), spec in found.items()]


def _results(
    study: Study, rests: Sequence[PartitionSpec], spec_of: Callable[[int | None], PartitionSpec]
) -> list[PartitionSpec]:
    """The layouts of the results: of the arguments that they replace, or else as they are computed."""
    kept, shapes = study.traced.kept, [leaf.shape for leaf in study.traced.outs]
    computed = [fit_spec(spec_of(v), shape, study.mesh).spec for v, shape in zip(study.outs, shapes)]
    return [rests[kept[i]] if i in kept else spec for i, spec in enumerate(computed)]


def _result_points(results: Sequence[PartitionSpec]) -> list[Point]:
    return [((), "result", i, spec) for i, spec in enumerate(results)]


def _new_results(study: Study, results: Sequence[PartitionSpec]) -> list[str]:
    """Notes on the large results that replace no argument."""
    found = []
    for i, (leaf, spec) in enumerate(zip(study.traced.outs, results)):
        if i not in study.traced.kept and leaf.nbytes > LARGE:
            what = f"result {path_name(leaf.keys)}" if leaf.keys else "the result"
            found.append(
                f"{what}, {type_text(leaf.shape, leaf.dtype)}, replaces no argument: it is laid out as "
                f"{spec_text(spec)} and needs memory of its own"
            )
    more = len(found) - MOST_RESULTS
    return found[:MOST_RESULTS] + ([f"so do {more} more results"] if more > 0 else [])
