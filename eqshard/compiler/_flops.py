"""Model FLOPs: what the program must compute, counted on its jaxpr before any partitioning."""

import math
from typing import Any

from jax.extend import core


def model_flops(jaxpr: core.ClosedJaxpr | core.Jaxpr, times: float = 1.0) -> float:
    """FLOPs of the matrix products and convolutions, over all devices; what remat computes again is left out.

    A loop of unknown length counts once, of branches the costliest counts.
    """
    inner: Any = jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr
    return sum(_equation(eqn, times) for eqn in inner.eqns)


def _equation(eqn: Any, times: float) -> float:
    name = eqn.primitive.name
    if "rematted_computation" in str(eqn.source_info.name_stack):
        return 0.0
    if name == "dot_general":
        return times * _dot(eqn)
    if name == "conv_general_dilated":
        return times * _convolution(eqn)
    if name == "cond":
        return max((model_flops(branch, times) for branch in eqn.params["branches"]), default=0.0)
    if name == "scan":
        times *= eqn.params["length"]
    elif name == "shard_map":
        times *= _manual_devices(eqn)
    elif name == "pallas_call":
        estimate = eqn.params.get("cost_estimate")
        return times * float(estimate.flops) if estimate is not None else 0.0
    return sum(model_flops(inner, times) for inner in _inner(eqn))


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
