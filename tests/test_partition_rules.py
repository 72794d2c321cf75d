"""Each partition rule against XLA: an operation gives the same values whatever a plan says of its layouts."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from program_families import arguments, FAMILIES, program

import eqshard
from eqshard.program._ops import CONSTRAINTS, OPERATIONS
from eqshard.program._partition_rules import RULES
from eqshard.program._together import ELEMENTWISE, FREE, TOGETHER
from eqshard.program._trace import CALLS, inner_jaxpr, trace


EAGER = eqshard.Chip("eager", flops=1e6, hbm_bytes=1e12, hbm_bandwidth=1e6, link_bandwidth=1e13)
AXES = (("a",), ("b",), ("a", "b"), ("b", "a"))
IMAGE, KERNEL = (8, 8, 8, 8), (3, 3, 8, 8)
NHWC = ("NHWC", "HWIO", "NHWC")
ROWS = np.array([[3], [7], [0], [9], [-1], [3], [5], [1]], np.int32)  # twice the same, and some out of bounds


def conv(x, k, **options):
    return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=NHWC, **options)


def gather(mode):
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))
    return lambda x: lax.gather(x, ROWS, numbers, (1, 8), mode=mode, fill_value=7)


def scatter(kind, mode, rows=ROWS):
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    return lambda x, u: getattr(lax, kind)(x, jnp.asarray(rows), u, numbers, mode=mode)


UNIQUE = np.array([[3], [7], [0], [9], [-1], [2], [5], [1]], np.int32)
WINDOW = {"window_dimensions": (1, 2, 2, 1), "window_strides": (1, 2, 2, 1), "padding": "SAME"}
OPERATIONS_ALONE = {
    "pad": (lambda x: lax.pad(x, np.float32(0), ((0, 0, 0), (1, 7, 0))), (8, 8)),
    "slice": (lambda x: lax.slice(x, (0, 4), (8, 8)), (8, 8)),
    "slice strided": (lambda x: lax.slice(x, (0, 0), (8, 16), (1, 2)), (8, 16)),
    "dynamic_slice": (lambda x: lax.dynamic_slice(x, (14, 0), (8, 8)), (16, 8)),
    "dynamic_update_slice": (lambda x, u: lax.dynamic_update_slice(x, u, (14, 0)), (16, 8), (8, 8)),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 0), (8, 8), (8, 8)),
    "rev": (lambda x: lax.rev(x, (0,)), (8, 8)),
    "sort": (lambda x: lax.sort(x, dimension=0), (8, 8)),
    "cumsum": (lambda x: lax.cumsum(x, 0), (8, 8)),
    "cummax": (lambda x: lax.cummax(x, 1, reverse=True), (8, 8)),
    "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, 0), (8, 8)),
    "split": (lambda x: lax.split(x, (8, 8), 1), (8, 16)),
    "top_k": (lambda x: lax.top_k(x, 8), (8, 16)),
    "argmax": (lambda x: lax.argmax(x, 1, np.int32), (8, 8)),
    "reduce_window_max": (lambda x: lax.reduce_window(x, np.float32(-np.inf), lax.max, **WINDOW), IMAGE),
    "reduce_window_sum": (lambda x: lax.reduce_window(x, np.float32(0), lax.add, **WINDOW), IMAGE),
    "select_and_scatter_add": (
        lambda x: jax.grad(lambda x: jnp.sum(lax.reduce_window(x, -np.inf, lax.max, **WINDOW) ** 2))(x),
        IMAGE,
    ),
    "fft": (lambda x: lax.fft(x.astype(jnp.complex64), "FFT", (8,)), (8, 8)),
    "cholesky": (lambda x: lax.linalg.cholesky(x @ x.transpose(0, 2, 1) + 9 * jnp.eye(8)[None]), (8, 8, 8)),
    "qr": (lambda x: lax.linalg.qr(x, full_matrices=False), (8, 8, 8)),
    "triangular_solve": (lambda a, b: lax.linalg.triangular_solve(a + 9 * jnp.eye(8)[None], b), (8, 8, 8), (8, 8, 8)),
    "conv_general_dilated": (conv, IMAGE, KERNEL),
    "conv_general_dilated grouped": (lambda x, k: conv(x, k, feature_group_count=2), IMAGE, (3, 3, 4, 8)),
    "conv_general_dilated depthwise": (lambda x, k: conv(x, k, feature_group_count=8), IMAGE, (3, 3, 1, 8)),
    "conv_general_dilated depthwise gradient": (
        lambda x, k: jax.grad(lambda k: jnp.sum(conv(x, k, feature_group_count=8) ** 2))(k),
        IMAGE,
        (4, 4, 1, 8),
    ),
    "conv_general_dilated gradient": (
        lambda x, k: jax.grad(lambda x, k: jnp.sum(conv(x, k) ** 2), (0, 1))(x, k),
        IMAGE,
        (4, 4, 8, 8),
    ),
    "reshape": (lambda x: lax.reshape(x, (4, 4, 8)), (16, 8)),
    "reshape merging": (lambda x: lax.reshape(x, (32, 8)), (4, 8, 8)),
    "reshape uneven": (lambda x: lax.reshape(x, (8, 12)), (12, 8)),
    "bitcast_convert_type": (lambda x: lax.bitcast_convert_type(x, np.uint8), (8, 8)),
    "gather": (gather("clip"), (8, 8)),
    "gather fill": (gather("fill"), (8, 8)),
    "scatter": (scatter("scatter", "drop", UNIQUE), (8, 8), (8, 8)),
    "scatter one row": (scatter("scatter", "clip", np.array([[9]])), (8, 8), (1, 8)),
    "scatter-add": (scatter("scatter_add", "drop"), (8, 8), (8, 8)),
    "scatter-add clipped": (scatter("scatter_add", "clip"), (8, 8), (8, 8)),
    "scatter-mul": (scatter("scatter_mul", "drop"), (8, 8), (8, 8)),
    "scatter-min": (scatter("scatter_min", "clip"), (8, 8), (8, 8)),
    "scatter-max": (scatter("scatter_max", "drop"), (8, 8), (8, 8)),
    "dot_general": (lambda x, y: lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,)))), (8, 8, 8), (8, 8, 8)),
    "reduce_sum": (lambda x: lax.reduce_sum(x, (0,)), (8, 8, 8)),
    "reduce_max": (lambda x: lax.reduce_max(x, (1,)), (8, 8, 8)),
    "transpose": (lambda x: lax.transpose(x, (1, 0)), (8, 8)),
    "broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (8, 8, 8), (2,)), (8,)),
    "select_n": (lambda x, y: lax.select_n(x > y, x, y), (8, 8), (8, 8)),
}


def places(jaxpr, primitive, path=()):
    """The places of a primitive in a program."""
    for i, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name.replace("_", "-") == primitive.replace("_", "-"):
            yield (*path, i), eqn
        elif eqn.primitive.name in CALLS and (inner := inner_jaxpr(eqn)) is not None:
            yield from places(inner[0], primitive, (*path, i))


def layouts(shape):
    """Every layout of a shape that shards one dimension by some axes, evenly or not."""
    for d, axes in itertools.product(range(len(shape)), AXES):
        yield P(*[None] * d, axes if len(axes) > 1 else axes[0])


@pytest.mark.parametrize("name", OPERATIONS_ALONE)
def test_any_layout_of_an_operation_keeps_its_values(name, axis_type):
    """Of each operand and result, each dimension by each order of axes: all of them in one compiled program."""
    fn, *shapes = OPERATIONS_ALONE[name]
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes]
    mesh = eqshard.MeshSpec({"a": 2, "b": 4}, axis_type=axis_type, chip=EAGER)
    plan = eqshard.step_plan(fn, *args, mesh=mesh)
    edited = []
    for path, eqn in places(trace(fn, tuple(args)).jaxpr.jaxpr, name.split(" ")[0]):
        sides = [("in", i, v) for i, v in enumerate(eqn.invars)] + [("out", i, v) for i, v in enumerate(eqn.outvars)]
        for side, slot, v in sides:
            others = [p for p in plan.inner if p[0] != path]
            edited += [others + [(path, side, slot, s)] for s in layouts(v.aval.shape) if fits(s, v.aval.shape)]
    assert edited
    want = jax.jit(fn)(*args)
    placed = [eqshard.apply(p, x) for p, x in zip(plan.args, args)]
    plans = [dataclasses.replace(plan, inner=tuple(inner)) for inner in edited]
    every = jax.jit(lambda *args: [eqshard.constrain(p, fn)(*args) for p in plans])(*placed)
    for got, points in zip(every, edited):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-4, err_msg=str(points[-1]))


def fits(spec, shape):
    sizes = {"a": 2, "b": 4}
    axes = [(e,) if isinstance(e, str) else e or () for e in spec]
    return all(n % np.prod([sizes[a] for a in entry], dtype=int) == 0 for n, entry in zip(shape, axes))


def test_every_operation_that_the_planner_knows_has_a_rule_or_is_safe():
    """An operation is elementwise, a broadcast, a transpose, a reduction or a matmul; or it has a rule."""
    safe = {*"transpose broadcast_in_dim squeeze expand_dims optimization_barrier device_put dot_general".split()}
    safe |= {name for name in TOGETHER if name.startswith("reduce_") and "window" not in name}
    assert (
        set(TOGETHER) | set(OPERATIONS) == (set(RULES) & (set(TOGETHER) | set(OPERATIONS))) | safe | ELEMENTWISE | FREE
    )
    assert not set(RULES) & (CALLS | CONSTRAINTS)


def random_edit(rng, plan, traced):
    """A plan with some layouts changed, added or taken away."""
    points = list(plan.inner)
    axes = [None, "data", "tp", ("data", "tp"), ("tp", "data")]
    for _ in range(rng.integers(1, 6)):
        kind = rng.integers(3)
        if kind == 0 and points:
            points.pop(rng.integers(len(points)))
            continue
        if kind == 1 and points:
            path, side, slot, _ = points.pop(rng.integers(len(points)))
        else:
            path, side = (int(rng.integers(len(traced.jaxpr.jaxpr.eqns))),), ["in", "way", "out"][rng.integers(3)]
            slot = int(rng.integers(2))
        rank = int(rng.integers(1, 4))
        chosen = [axes[rng.integers(len(axes))] for _ in range(rank)]
        points = [p for p in points if p[:3] != (path, side, slot)] + [(path, side, slot, P(*chosen))]
    return dataclasses.replace(plan, inner=tuple(points))


def check_edits(seeds, names):
    refused = 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        name = names[rng.integers(len(names))]
        fn = program(name)
        with jax.enable_x64(True):
            args = arguments(seed, "float64")
            plan = eqshard.step_plan(fn, *args, mesh=eqshard.MeshSpec(data=4, tp=2, chip=EAGER))
            edited = random_edit(rng, plan, trace(fn, args))
            edited = eqshard.StepPlan.from_json(edited.to_json())
            placed = [eqshard.apply(p, a) for p, a in zip(plan.args, args)]
            try:
                got = jax.jit(eqshard.constrain(edited, fn))(*placed)
            except eqshard.ShardingError:
                refused += 1
                continue
            want = jax.jit(fn)(*args)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                a, b = np.asarray(a), np.asarray(b)
                scale = max(1.0, float(np.abs(b).max(initial=0)))
                np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9 * scale, err_msg=f"{name}, seed {seed}")
    return refused


@pytest.mark.parametrize("block", [pytest.param(0, id="12"), pytest.param(1, marks=pytest.mark.slow, id="500")])
def test_random_edits_of_plans_change_no_value(block):
    seeds = range(12) if block == 0 else range(12, 512)
    refused = check_edits(seeds, list(FAMILIES))
    assert refused < len(seeds)
