"""Programs whose collectives are known by hand, for any mesh with the axes `dp` and `tp`."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import eqshard


S = jax.ShapeDtypeStruct
LAYERS, WIDTH, ROWS = 6, 256, 64


@dataclass
class Known:
    """A program, its plans, and for each collective: kind, bytes, axes, trips."""

    fn: Any
    args: tuple[Any, ...]
    plans: tuple[Any, ...]
    answer: list[tuple[str, int, tuple[str, ...], int]]


def laid(mesh, *pairs):
    args = tuple(struct for struct, _ in pairs)
    return args, tuple(eqshard.replicated_plan(x, mesh).at("").set(spec) for x, spec in pairs)


def matmul_pair(mesh, dtype):
    """Megatron's pair: one sum over `tp` of what one device has of the batch."""
    dp, size = mesh.shape["dp"], jnp.dtype(dtype).itemsize

    def fn(up, down, x):
        return eqshard.constrain_to(jnp.tanh(x @ up) @ down, P("dp"), mesh)

    args, plans = laid(
        mesh,
        (S((WIDTH, 1024), dtype), P(None, "tp")),
        (S((1024, WIDTH), dtype), P("tp")),
        (S((ROWS, WIDTH), dtype), P("dp")),
    )
    return Known(fn, args, plans, [("all-reduce", ROWS // dp * WIDTH * size, ("tp",), 1)])


def megatron_block(mesh, dtype):
    """The pair in a scan: one sum a layer."""
    pair = matmul_pair(mesh, dtype)

    def fn(ups, downs, x):
        return jax.lax.scan(lambda x, w: (x + pair.fn(*w, x), None), x, (ups, downs))[0]

    args, plans = laid(
        mesh,
        (S((LAYERS, WIDTH, 1024), dtype), P(None, None, "tp")),
        (S((LAYERS, 1024, WIDTH), dtype), P(None, "tp")),
        (S((ROWS, WIDTH), dtype), P("dp")),
    )
    [(kind, nbytes, axes, _)] = pair.answer
    return Known(fn, args, plans, [(kind, nbytes, axes, LAYERS)])


def fsdp_scan(mesh, dtype):
    """Weights split over both axes, gathered whole one layer at a time."""
    size = jnp.dtype(dtype).itemsize
    whole = (S((LAYERS, WIDTH, WIDTH), dtype), P(None, ("dp", "tp")))
    args, plans = laid(mesh, whole, (S((ROWS, WIDTH), dtype), P(("dp", "tp"))))
    layer = plans[0].at("").set(use=P()).layer()

    def fn(w, x):
        def body(x, w):
            x = eqshard.constrain_to(jnp.tanh(x @ eqshard.use(layer, w)), P(("dp", "tp")), mesh)
            return x, None

        return jax.lax.scan(body, x, w)[0]

    return Known(fn, args, plans, [("all-gather", WIDTH * WIDTH * size, ("dp", "tp"), LAYERS)])


def ring(mesh, dtype):
    """A piece passed on to the neighbour, as often as there are neighbours."""
    n, size = mesh.shape["tp"], jnp.dtype(dtype).itemsize
    pairs = [(i, (i + 1) % n) for i in range(n)]

    def local(x):
        def body(_, carry):
            x, total = carry
            x = jax.lax.ppermute(x, "tp", pairs)
            return x, total + jnp.tanh(x)

        return jax.lax.fori_loop(0, n, body, (x, x))[1]

    def fn(x):
        return jax.shard_map(local, in_specs=P("dp", "tp"), out_specs=P("dp", "tp"))(x)

    args, plans = laid(mesh, (S((ROWS, WIDTH), dtype), P("dp", "tp")))
    piece = ROWS // mesh.shape["dp"] * WIDTH // n * size
    return Known(fn, args, plans, [("collective-permute", piece, ("tp",), n)])


def moe(mesh, dtype):
    """Tokens to their experts and back: two all-to-alls."""
    n, size = mesh.shape["tp"], jnp.dtype(dtype).itemsize
    experts, tokens = 2 * n, 32

    def local(x, w):
        y = jax.lax.all_to_all(x, "tp", 0, 1, tiled=True)
        y = jnp.einsum("ecd,edf->ecf", y, w)
        return jax.lax.all_to_all(y, "tp", 1, 0, tiled=True)

    both = P(None, ("dp", "tp"))

    def fn(x, w):
        return jax.shard_map(local, in_specs=(both, P("tp")), out_specs=both)(x, w)

    per_device = tokens * mesh.size()
    args, plans = laid(
        mesh, (S((experts, per_device, WIDTH), dtype), both), (S((experts, WIDTH, 2 * WIDTH), dtype), P("tp"))
    )
    there, back = (experts * tokens * width * size for width in (WIDTH, 2 * WIDTH))
    return Known(fn, args, plans, [("all-to-all", there, ("tp",), 1), ("all-to-all", back, ("tp",), 1)])


def nested_scans(mesh, dtype):
    """A scan in a scan: trips multiply."""
    size, outer, inner = jnp.dtype(dtype).itemsize, 3, 5

    def step(x, w):
        w = eqshard.constrain_to(w, P(None, "tp"), mesh)  # split over dp at rest: gathered over dp
        return eqshard.constrain_to(jnp.tanh(x @ w), P("dp", "tp"), mesh)

    def fn(w, x):
        def run(x, ws):
            # The square keeps the contraction whole on each device.
            return jax.lax.scan(lambda x, w: (step(eqshard.constrain_to(x, P("dp"), mesh), w), None), x, ws)[0], None

        return jax.lax.scan(run, x, w)[0]

    n, dp = mesh.shape["tp"], mesh.shape["dp"]
    args, plans = laid(
        mesh,
        (S((outer, inner, WIDTH, WIDTH), dtype), P(None, None, "dp", "tp")),
        (S((ROWS, WIDTH), dtype), P("dp", "tp")),
    )
    weights = WIDTH * WIDTH // n * size
    rows = ROWS // dp * WIDTH * size
    trips = outer * inner
    return Known(fn, args, plans, [("all-gather", weights, ("dp",), trips), ("all-gather", rows, ("tp",), trips)])


PROGRAMS = [matmul_pair, megatron_block, fsdp_scan, ring, moe, nested_scans]
