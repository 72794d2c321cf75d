"""Dtypes and weak types: a planned step gives every result the type that the plain step gives it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from program_checks import check_equal, mesh_of, shape

import eqshard
from eqshard._tree import struct_of
from eqshard.compiler import Program
from eqshard.compiler._program import flatten, lower_for
from eqshard.compiler._targets import as_target
from eqshard.program._trace import trace


def types(tree):
    return [(x.dtype, bool(x.weak_type)) for x in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]


def check_types(fn, args, mesh, **options):
    plan, got = check_equal(fn, args, mesh, **options)
    assert types(got) == types(eqx.filter_jit(fn)(*args))
    return plan


def descend(w, x, rate):
    grad = jax.grad(lambda w: ((x @ w) ** 2).mean())(w)
    return w - rate * grad, rate * 2


def test_a_weak_learning_rate_leaves_bfloat16_weights_as_they_are(axis_type):
    w, x = jnp.ones((16, 16), "bfloat16"), jnp.ones((8, 16), "bfloat16")
    check_types(descend, (w, x, jnp.asarray(0.1)), mesh_of(axis_type, data=4, tp=2))


def test_a_loss_scale_in_a_model_of_shapes():
    def step(state, x):
        w, scale = state["w"], state["scale"]
        grad = jax.grad(lambda w: scale * (x @ w).sum())(w)
        return {"w": w - grad / scale, "scale": scale * 1.5}

    make = lambda: {"w": jnp.ones((16, 16), "bfloat16"), "scale": jnp.asarray(128.0)}
    x = jnp.ones((8, 16), "bfloat16")
    plan = eqshard.step_plan(step, jax.eval_shape(make), x, mesh=mesh_of("auto", data=8))
    state, x = (eqshard.apply(p, a) for p, a in zip(plan.args, (make(), x)))
    got = eqx.filter_jit(eqshard.constrain(plan, step))(state, x)
    assert types(got) == types(step(make(), x)) == [(jnp.float32, True), (jnp.bfloat16, False)]


def scanned(ws, x, rate):
    def body(carry, w):
        x, rate = carry
        return (rate * (x @ w), rate * 0.5), (x.sum() * rate, rate)

    return jax.lax.scan(body, (x, rate), ws)


def looped(ws, x, rate):
    body = lambda c: (c[0] + 1, c[1] @ ws[0] * rate, c[2] * rate)
    return jax.lax.while_loop(lambda c: c[0] < 3, body, (0, x, rate))


def branched(ws, x, rate):
    one, other = lambda x, r: (x @ ws[0] * r, r), lambda x, r: (x * r, r * 2)
    return jax.lax.cond(x[0, 0] > 0, one, other, x, rate)


def recomputed(ws, x, rate):
    block = jax.checkpoint(lambda w, x, r: jnp.tanh(x @ w * r))
    return jax.grad(lambda w: (rate * block(w, x, rate)).sum())(ws[0]), rate


@jax.custom_jvp
def scaled(x, rate):
    return x * rate


scaled.defjvps(lambda t, out, x, r: t * r, lambda t, out, x, r: t * x)


def custom(ws, x, rate):
    return scaled(x @ ws[0], rate) @ ws[1], rate


def nested(ws, x, rate):
    return jax.jit(lambda w, x, r: (r * (x @ w), r + 1))(ws[0], x, rate)


def numbers(ws, x, rate):
    return x @ ws[0], jnp.asarray(2.0), jnp.full((8,), 1.0), jnp.full((8,), 1.0) * rate, jnp.zeros_like(rate)


@pytest.mark.parametrize("fn", [scanned, looped, branched, recomputed, custom, nested, numbers])
def test_inside_control_flow(fn, axis_type):
    ws, x = 0.1 * jnp.ones((2, 16, 16), "bfloat16"), jnp.ones((8, 16), "bfloat16")
    check_types(fn, (ws, x, jnp.asarray(0.5)), mesh_of(axis_type, data=4, tp=2))


def test_weak_arrays_that_are_cut():
    def step(w, x):
        padded = jnp.pad(x, ((1, 1), (0, 0)))
        return (
            w.at[jnp.arange(8)].add(2.0),
            jnp.concatenate([x, padded]),
            jnp.sort(x, axis=1),
            x @ x.T,
            jnp.cumsum(x, 1),
        )

    w, x = jnp.full((16, 8), 1.0), jnp.full((8, 16), 1.0)
    assert w.weak_type and x.weak_type
    check_types(step, (w, x), mesh_of("auto", data=8))


@pytest.mark.parametrize(
    "x", [jnp.asarray(0.1), jnp.float32(0.1), np.float32([0.1]), jnp.full((3,), 1), jax.random.key(0)]
)
def test_structs_keep_the_weak_type(x):
    want = jax.eval_shape(lambda: x) if isinstance(x, np.ndarray) else jax.eval_shape(lambda x: x, x)
    assert struct_of(x) == want == struct_of(want) == struct_of(jax.typeof(x))
    assert trace(lambda x: x, (x,)).jaxpr.in_avals[0].weak_type == bool(want.weak_type)


def test_results_of_parallel_map_keep_the_weak_type():
    batch = {"x": jnp.full((8, 2), 1.0), "y": jnp.ones((8, 2), "bfloat16")}
    fn = lambda b: {"x": b["x"] * 2, "y": b["y"] * 3.0, "z": b["x"] + b["y"]}
    assert types(eqshard.parallel_map(fn, batch, eqshard.MeshSpec(data=8), P("data"))) == types(fn(batch))


def test_what_is_compiled_elsewhere_has_the_weak_type():
    args = shape(16, 16, dtype="bfloat16"), shape(8, 16, dtype="bfloat16"), jnp.asarray(0.1)
    flat = flatten(Program(descend, args), None)
    structs = flat.structs(flat.mesh.abstract())
    assert [s.weak_type for s in structs] == [False, False, True]
    job, _ = lower_for(flat, as_target("cpu:1"))
    first = job.exported.out_avals[0]
    assert (first.dtype, first.weak_type) == (jnp.bfloat16, False)


def test_a_cast_shape_is_strong_as_a_cast_array():
    tree = {"x": jnp.full((8,), 1.0)}
    plan = eqshard.replicated_plan(tree, eqshard.MeshSpec(data=8))
    use = lambda tree: eqshard.use(plan, tree, dtype="bfloat16")
    assert not use(tree)["x"].weak_type and not use(jax.eval_shape(lambda: tree))["x"].weak_type
