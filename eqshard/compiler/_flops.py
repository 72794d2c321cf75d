"""FLOPs: what the program must compute, counted on its jaxpr before any partitioning."""

import math
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend import core


_INSIDE = tuple(str(pathlib.Path(file).parent) for file in (jax.__file__, pathlib.Path(__file__).parent))


@dataclass
class Flops:
    """FLOPs of matrix products and convolutions, over all devices."""

    model: float = 0.0
    """Without what remat computes again."""
    by_line: dict[str, float] = field(default_factory=dict)
    """Everything, by the line of the user's program that asked for it: `file.py:12`."""


def count_flops(jaxpr: core.ClosedJaxpr) -> Flops:
    """Counts a program. A loop of unknown length counts once, of branches the costliest counts."""
    total = Flops()
    for line, flops, again in _products(jaxpr, 1.0, False):
        total.model += 0.0 if again else flops
        total.by_line[line] = total.by_line.get(line, 0.0) + flops
    return total


def _products(jaxpr: Any, times: float, again: bool) -> Iterator[tuple[str, float, bool]]:
    inner = jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr
    for eqn in inner.eqns:
        yield from _equation(eqn, times, again)


def _equation(eqn: Any, times: float, again: bool) -> Iterator[tuple[str, float, bool]]:
    name = eqn.primitive.name
    again = again or "rematted_computation" in str(eqn.source_info.name_stack)
    if name == "dot_general":
        yield _line(eqn), times * _dot(eqn), again
    elif name == "conv_general_dilated":
        yield _line(eqn), times * _convolution(eqn), again
    elif name == "cond":
        branches = [list(_products(branch, times, again)) for branch in eqn.params["branches"]]
        yield from max(branches, key=lambda found: sum(flops for _, flops, _ in found), default=[])
    elif name == "pallas_call":
        estimate = eqn.params.get("cost_estimate")
        yield _line(eqn), times * float(estimate.flops) if estimate is not None else 0.0, again
    else:
        if name == "scan":
            times *= eqn.params["length"]
        elif name == "shard_map":
            times *= _manual_devices(eqn)
        for inner in _inner(eqn):
            yield from _products(inner, times, again)


def _line(eqn: Any) -> str:
    """The innermost line outside JAX and eqshard, as compiled modules name it."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith(_INSIDE):
            return f"{frame.file_name}:{frame.line_num}"
    return ""


def _inner(eqn: Any) -> list[Any]:
    found = []
    for key, value in eqn.params.items():
        if key in ("fwd_jaxpr_thunk", "bwd", "jvp_jaxpr_fun", "jvp_jaxpr_thunk", "cond_jaxpr"):
            continue
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, (core.Jaxpr, core.ClosedJaxpr)):
                found.append(item)
    return found


def _manual_devices(eqn: Any) -> int:
    mesh, manual = eqn.params["mesh"], eqn.params.get("manual_axes")
    names = manual if manual is not None else mesh.axis_names
    return math.prod(dict(mesh.shape)[name] for name in names)


def _dot(eqn: Any) -> float:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return 2.0 * math.prod(out) * math.prod(left[d] for d in contracted)


def _convolution(eqn: Any) -> float:
    numbers = eqn.params["dimension_numbers"]
    kernel, out = eqn.invars[1].aval.shape, eqn.outvars[0].aval.shape
    features_in, *spatial = numbers.rhs_spec[1:]
    return 2.0 * math.prod(out) * kernel[features_in] * math.prod(kernel[d] for d in spatial)
