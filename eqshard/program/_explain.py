"""A planned step in words."""

from .._fold import fold_leaves
from .._spec import spec_text
from .._tree import size_text, type_text
from ._step import StepPlan


MOST = 10
"""How many of the dearest transfers are told of."""


def explain_step(plan: StepPlan) -> str:
    """What is cut, what that costs, and what was not taken, for a terminal."""
    parts = [_head(plan), _arguments(plan), _dims(plan), _costs(plan), _others(plan)]
    parts += ["\n".join(f"note: {note}" for note in plan.notes)] if plan.notes else []
    return "\n\n".join(part for part in parts if part)


def _head(plan: StepPlan) -> str:
    chip = plan.mesh.chip
    room = f" of {size_text(chip.hbm_bytes)}" if chip is not None else ""
    hidden = sum((c.seconds - c.exposed_seconds for c in plan.costs), 0.0)
    options = "".join(f"\ncompiler option {name}={value}" for name, value in plan.options)
    return (
        f"{ms(plan.seconds)} a step on {plan.mesh}: {ms(plan.compute_seconds)} of work, "
        f"{ms(plan.communication_seconds)} of waiting for transfers, {ms(hidden)} of them hidden\n"
        f"{size_text(plan.bytes_per_device)}{room} a device at the worst moment" + options
    )


def _arguments(plan: StepPlan) -> str:
    rows = [["argument", "leaf", "type", "at rest", "in use"]]
    for number, arg in enumerate(plan.args):
        for name, leaves in fold_leaves(list(arg), words=False):
            leaf = leaves[0]
            use = "" if leaf.use == leaf.spec else spec_text(leaf.use)
            rows.append([str(number), name or "(itself)", type_text(leaf.shape, leaf.dtype), spec_text(leaf.spec), use])
    return table(rows)


def _dims(plan: StepPlan) -> str:
    if not plan.dims:
        return ""
    rows = [["what products cut", "size", "over (share of the arithmetic)"]]
    rows += [[d.what, str(d.size), ", ".join(f"{a} {100 * s:.0f} %" for a, s in d.axes)] for d in plan.dims]
    return table(rows)


def _costs(plan: StepPlan) -> str:
    shown = [c for c in plan.costs if c.seconds > 0][:MOST]
    if not shown:
        return "no transfers"
    rows = [["dearest transfers", "over", "bytes", "times", "time", "waited for"]]
    for c in shown:
        what = f"{c.kind} of {c.what}"
        times = f"{c.times:.0f}"
        rows.append([what, "+".join(c.axes), size_text(c.nbytes), times, ms(c.seconds), ms(c.exposed_seconds)])
    return table(rows)


def _others(plan: StepPlan) -> str:
    if not plan.alternatives:
        return ""
    rows = [["not taken", "a step", "a device", "why"]]
    for o in plan.alternatives:
        seconds = "" if o.seconds is None else ms(o.seconds)
        rows.append([o.name, seconds, "" if o.bytes_per_device is None else size_text(o.bytes_per_device), o.why])
    return table(rows)


def ms(seconds: float) -> str:
    """`12.3 ms`."""
    return f"{1e3 * seconds:.3g} ms"


def table(rows: list[list[str]]) -> str:
    """Columns for a terminal, under a rule."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(x.ljust(w) for x, w in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])
