"""What a choice is about, in the words of its reader: leaves, gradients, dimensions."""

from collections.abc import Callable

from .._tree import type_text
from ._order import joined, letter_name
from ._price import Moved, moved
from ._step import Cost, Dim
from ._study import Chosen, Study


MOST_COSTS = 30
"""How many of the dearest transfers are kept."""
MOST_DIMS = 12
"""How many of the dimensions that products cut are kept."""


def costs_of(study: Study, chosen: Chosen) -> tuple[Cost, ...]:
    """The dearest transfers; those of one value of one kind as one."""
    label, machine = _labels(study), chosen.p.machine
    alike: dict[tuple[str, str, float, float], list[Moved]] = {}
    for m in moved(chosen.p, chosen.choice):
        what = label(m.value, m.made)
        alike.setdefault((what, m.kind, m.times, study.graph.values[m.value].nbytes), []).append(m)
    found = [
        Cost(
            what=what,
            kind=kind,
            axes=tuple(dict.fromkeys(machine.names[a] for m in ms for a in m.axes)),
            nbytes=max(m.nbytes for m in ms),
            times=times,
            seconds=sum((m.seconds for m in ms), 0.0),
            exposed_seconds=sum((m.exposed for m in ms), 0.0),
        )
        for (what, kind, times, _), ms in alike.items()
    ]
    return tuple(sorted(found, key=lambda c: -c.exposed_seconds)[:MOST_COSTS])


def _labels(study: Study) -> Callable[[int, bool], str]:
    """What a value is: a leaf, what becomes of a leaf, or only its type."""
    graph = study.graph
    owner = {v: leaf.path or f"argument {leaf.arg}" for v, leaf in zip(study.ins, study.traced.ins) if v is not None}
    reads: dict[int, str] = {}
    makes: dict[int, str] = {}
    outs = {slot: study.traced.ins[arg] for slot, arg in study.traced.kept.items()}
    for m in graph.moves:
        if m.source in owner:
            reads.setdefault(graph.cluster(m.target), owner[m.source])
        if not m.path and m.slot in outs:
            makes.setdefault(graph.cluster(m.source), outs[m.slot].path)

    def label(v: int, made: bool) -> str:
        node, c = graph.values[v], graph.cluster(v)
        if v in owner:
            return owner[v]
        if not node.waited and c in makes and (made or c not in reads):
            return f"update of {makes[c]}"
        if not node.waited and c in reads:
            return reads[c]
        return type_text(node.shape, f"{8 * node.itemsize}-bit")

    return label


def dims_of(study: Study, chosen: Chosen) -> tuple[Dim, ...]:
    """The dimensions that products cut, and over which axes, the most work first."""
    graph, machine = study.graph, chosen.p.machine
    one = joined(graph)
    work: dict[int, dict[str, float]] = {}
    total = sum((op.flops * op.times for op in graph.ops), 0.0) or 1.0
    for op, way in zip(graph.ops, chosen.choice.ways):
        for axis, letter in zip(machine.names, way):
            if letter >= 0 and op.flops and op.axes is None:
                name = letter_name(graph, op, letter)
                if name >= 0:
                    shares = work.setdefault(one(name), {})
                    shares[axis] = shares.get(axis, 0.0) + op.flops * op.times / total
    ranked = sorted(work, key=lambda n: -max(work[n].values()))
    sizes = {n: graph.size(n) for n in ranked}
    words = _dim_words(study, one)
    return tuple(
        Dim(words.get(n, "inner"), sizes[n], tuple((a, round(share, 3)) for a, share in work[n].items()))
        for n in ranked[:MOST_DIMS]
    )


def _dim_words(study: Study, one: Callable[[int], int]) -> dict[int, str]:
    """For each dimension where a reader finds it: in the data first, then in the largest leaf that has it."""
    words: dict[int, str] = {}
    stays = set(study.traced.kept.values())
    data = lambda i: i not in stays and study.traced.ins[i].arg != 0
    order = sorted(range(len(study.ins)), key=lambda i: (not data(i), -_size(study, i)))
    for i in order:
        v, leaf = study.ins[i], study.traced.ins[i]
        if v is None:
            continue
        for d, name in enumerate(study.graph.dims(v)):
            if name >= 0:
                where = f"dim {d} of {leaf.path}" if leaf.path else f"dim {d} of argument {leaf.arg}"
                words.setdefault(one(name), f"batch ({where})" if data(i) and d == 0 else where)
    return words


def _size(study: Study, i: int) -> float:
    v = study.ins[i]
    return 0.0 if v is None else study.graph.values[v].nbytes
