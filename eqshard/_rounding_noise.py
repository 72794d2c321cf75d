"""A step with other rounding: evaluates its jaxpr with the last bits of arguments and of sums changed."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .program._trace import CALLS, inner_jaxpr, jaxprs_in, LOOPS, scan_parts, trace


# Results of these depend on the order of a sum, which a layout changes. Noise elsewhere takes long to compile, and a
# changed maximum would no longer equal the element that it is of.
_INEXACT = frozenset(
    """dot_general ragged_dot ragged_dot_general conv_general_dilated reduce_sum reduce_prod cumsum cumprod cumlogsumexp
    reduce_window_sum reduce_window scatter-add scatter_add scatter-mul scatter_mul select_and_scatter_add add_any psum
    psum_invariant reduce_scatter fft cholesky triangular_solve lu qr svd eigh eig tridiagonal_solve""".split()
)


def noisy_step(fn: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[int, bool], Any]:
    """Returns a function of a seed that runs `fn` on `args` with other rounding, compiled once.

    Its second argument is whether the noise is wide: 16 units in the last place of float32 instead of one, so that what
    could just about have flipped does flip.
    """
    traced = trace(fn, args)
    arrays = [x for x in jax.tree.leaves(args) if hasattr(x, "shape") and hasattr(x, "dtype")]

    @jax.jit
    def run(seed: Any, wide: Any, arrays: list[Any]) -> list[Any]:
        noise = _Noise(seed, wide)
        consts = [noise.add(x) for x in traced.jaxpr.consts]
        return noise.evaluate(traced.jaxpr.jaxpr, consts, [noise.add(x) for x in arrays])

    return lambda seed, wide: traced.rebuild(run(np.uint32(seed), np.bool_(wide), arrays))


class _Noise:
    """Evaluates jaxprs with noise. Each place has a number of its own, so that equal values differ in their noise."""

    def __init__(self, seed: Any, wide: Any):
        self.seed, self.wide, self.place = seed, wide, 0

    def add(self, x: Any) -> Any:
        """`x` with its last bits changed; integers and what holds whole numbers stay."""
        if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.inexact) or x.size == 0:
            return x
        x = jnp.asarray(x)
        info = jnp.finfo(x.dtype)
        wider = x.dtype if info.bits >= 32 else jnp.dtype(jnp.float32)
        real = jnp.finfo(wider).dtype.type
        eps = float(info.eps)
        most = jnp.where(self.wide, real(eps * _wide(eps)), real(eps))
        exact = x.astype(wider)
        moved = (exact + exact * (most * self.draw(x, real)).astype(wider)).astype(x.dtype)
        return jnp.where(_is_whole(exact, eps) | ~jnp.isfinite(moved), x, moved)

    def draw(self, x: Any, dtype: Any) -> Any:
        """Numbers from -1 to 1, that depend on the seed, the place, the element, and its value (which loops change)."""
        self.place += 1
        value = jnp.abs(x) if jnp.iscomplexobj(x) else x
        bits = jax.lax.bitcast_convert_type(value.astype(jnp.float32), jnp.uint32)
        index = jax.lax.iota(jnp.uint32, math.prod(x.shape)).reshape(x.shape)
        salt = (self.seed * np.uint32(0x27D4EB2F)) ^ np.uint32(self.place * 0x165667B1 % 2**32)
        h = index * np.uint32(0x9E3779B1) + bits * np.uint32(0x85EBCA6B) + salt
        for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
            h = (h ^ (h >> np.uint32(shift))) * np.uint32(factor)
        h = h ^ (h >> np.uint32(15))
        return (h >> np.uint32(8)).astype(dtype) * dtype(2**-23) - dtype(1)

    def evaluate(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, args))
        read = lambda v: v.val if isinstance(v, core.Literal) else env[v]
        for eqn in jaxpr.eqns:
            out = self.equation(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, out))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, ins: list[Any]) -> list[Any]:
        name, params = eqn.primitive.name, eqn.params
        inner = inner_jaxpr(eqn) if name in CALLS else None
        if inner is not None:
            return self.evaluate(inner[0], inner[1], ins)
        if name == "scan":
            return self.scan(params, ins)
        if name == "while":
            return self.loop(params, ins)
        if name == "cond":
            branches = [lambda *xs, b=b: self.evaluate(b.jaxpr, b.consts, xs) for b in params["branches"]]
            return jax.lax.switch(ins[0], branches, *ins[1:])
        out = eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(params))
        out = list(out) if eqn.primitive.multiple_results else [out]
        opaque = any(jaxprs_in(value) for value in params.values()) and name not in LOOPS
        return [self.add(x) for x in out] if name in _INEXACT or opaque else out

    def scan(self, params: Any, ins: list[Any]) -> list[Any]:
        body, (first, carried) = params["jaxpr"], scan_parts(params)
        consts, init, xs = ins[:first], ins[first : first + carried], ins[first + carried :]

        def once(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            out = self.evaluate(body.jaxpr, body.consts, [*consts, *carry, *x])
            return out[:carried], out[carried:]

        keep = {name: params[name] for name in ("length", "reverse", "unroll")}
        carry, ys = jax.lax.scan(once, init, xs, **keep)
        return [*carry, *ys]

    def loop(self, params: Any, ins: list[Any]) -> list[Any]:
        test, body = params["cond_jaxpr"], params["body_jaxpr"]
        a, b = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        plain = lambda carry: core.jaxpr_as_fun(test)(*ins[:a], *carry)[0]
        once = lambda carry: self.evaluate(body.jaxpr, body.consts, [*ins[a:b], *carry])
        return jax.lax.while_loop(plain, once, ins[b:])


def _wide(eps: float) -> float:
    """Units in the last place: 16 of float32, 2 of bfloat16, whose units are large."""
    return min(16.0, max(1.0, 2**-6 / eps))


def _is_whole(x: Any, eps: float) -> Any:
    """Whether `x` is a small whole number, which rounding did not make: a count, a mask, a weight that was set to 1."""
    if jnp.iscomplexobj(x):
        return jnp.zeros(x.shape, bool)
    return (x == jnp.round(x)) & (jnp.abs(x) < 1 / (16 * eps))
