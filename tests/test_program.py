"""Plans from programs: what is tied together, what is chosen, and that writing layouts in changes no value."""

import dataclasses
import gc

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from program_checks import check_equal, mesh_of, shape

import eqshard
from eqshard.program._build import build
from eqshard.program._together import reshape_dims
from eqshard.program._trace import trace


@pytest.mark.parametrize(
    "a, b, pairs",
    [
        ((4, 8, 16), (32, 16), [(0, 0), (2, 1)]),
        ((4, 8, 16), (4, 8, 4, 4), [(0, 0), (1, 1), (2, 2)]),
        ((4, 1, 8), (4, 8), [(0, 0), (2, 1)]),
        ((2, 6), (4, 3), [(0, 0)]),
        ((4, 8), (4, 8, 1, 1), [(0, 0), (1, 1)]),
        ((1, 4), (4,), [(1, 0)]),
    ],
)
def test_reshape_ties_major_factors(a, b, pairs):
    assert reshape_dims(a, b)[0] == pairs


def test_elementwise_values_share_a_cluster_and_products_part_them():
    traced = trace(lambda x, w: jnp.sin(x @ w) + 1.0, (shape(8, 4), shape(4, 16)))
    graph, ins, outs = build(traced, {})
    (dot,) = graph.ops
    assert dot.kind == "dot" and dot.flops == 2 * 8 * 4 * 16
    (made, _), (out,) = dot.outs[0], outs
    assert graph.cluster(made) == graph.cluster(out)
    assert graph.cluster(ins[0]) != graph.cluster(out)


def test_a_value_never_has_one_name_twice():
    traced = trace(lambda x: x + x.T, (shape(8, 8),))
    graph, _, _ = build(traced, {})
    assert all(len(set(d)) == len(d) for d in map(graph.dims, range(len(graph.values))) if -1 not in d)


def test_unknown_operations_are_taken_whole_and_named():
    plan = eqshard.step_plan(jnp.linalg.qr, shape(16, 16), mesh=eqshard.MeshSpec(x=8))
    assert any("householder" in note or "qr" in note for note in plan.notes)


def test_fixed_stays_fixed(axis_type):
    def step(w, x):
        return x @ w

    mesh = mesh_of(axis_type, data=2, tp=4)
    plan = eqshard.step_plan(step, shape(16, 16), shape(32, 16), mesh=mesh, fixed={"x": P("tp"), "w": P("data")})
    assert plan.args[1][""].spec == P("tp") and plan.args[0][""].spec == P("data")
    with pytest.raises(eqshard.MismatchError, match="no argument and no leaf"):
        eqshard.step_plan(step, shape(16, 16), shape(32, 16), mesh=mesh, fixed={"batch": P("tp")})
    with pytest.raises(eqshard.IndivisibleError):
        eqshard.step_plan(step, shape(6, 16), shape(32, 6), mesh=mesh, fixed={"w": P("tp")})


def test_training_step_is_the_same(axis_type):
    optim = optax.adamw(1e-2)

    def step(model, state, x):
        loss, grads = eqx.filter_value_and_grad(lambda m: jnp.mean((jax.vmap(m)(x) - x) ** 2))(model)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optim.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, loss

    model = eqx.nn.MLP(16, 16, 64, 2, key=jax.random.key(0))
    state = optim.init(eqx.filter(model, eqx.is_inexact_array))
    x = jax.random.normal(jax.random.key(1), (32, 16))
    plan, (new, new_state, _) = check_equal(step, (model, state, x), mesh_of(axis_type, data=4, tp=2))
    for arg, out in ((0, new), (1, new_state)):
        specs = eqshard.specs_of(out)
        assert jax.tree.leaves(specs) == jax.tree.leaves(plan.args[arg].specs(out))
    assert any(leaf.spec != P() for leaf in plan.args[0])


def loops(w, x):
    """Everything that control flow has: scan with remat, while, cond, nested jit, custom gradients."""
    x, ys = jax.lax.scan(jax.checkpoint(lambda c, k: (jnp.tanh(c @ k), c.sum(-1))), x, w)
    x = jax.lax.fori_loop(0, 3, lambda i, c: jnp.sin(c @ w[0]), x)
    x = jax.lax.cond(x.sum() > 0, lambda c: c @ w[1], lambda c: c * 2.0, x)
    x = jax.jit(lambda c: jax.nn.silu(c) @ w[2])(x)
    return jax.nn.softmax(x), ys


def test_control_flow_is_the_same(axis_type):
    args = jax.random.normal(jax.random.key(0), (3, 16, 16)), jax.random.normal(jax.random.key(1), (8, 16))
    mesh = mesh_of(axis_type, data=4, tp=2)
    plan, _ = check_equal(loops, args, mesh)
    assert any(len(path) > 1 for path, *_ in plan.inner)  # layouts inside bodies


def test_a_body_whose_result_is_a_number(axis_type):
    inner = jax.jit(lambda w, x: (x @ w, 1.0))
    args = jax.random.normal(jax.random.key(0), (16, 16)), jax.random.normal(jax.random.key(1), (8, 16))
    check_equal(lambda w, x: inner(w, x), args, mesh_of(axis_type, data=4, tp=2))


def test_a_backward_pass_is_the_same(axis_type):
    def grads(w, x):
        body = jax.checkpoint(lambda c, k: (jnp.tanh(c @ k), None))
        return jax.grad(lambda w: jnp.sum(jax.lax.scan(body, x, w)[0] ** 2))(w)

    args = jax.random.normal(jax.random.key(0), (3, 16, 16)), jax.random.normal(jax.random.key(1), (8, 16))
    check_equal(grads, args, mesh_of(axis_type, data=4, tp=2))


def test_blocks_are_computed_again_one_after_the_other(axis_type):
    """Each waits for all gradients of the one before; else what these are made of is kept of every block."""
    block = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))

    def grads(ws, x):
        return jax.grad(lambda ws: jnp.sum(block(block(block(x, ws[0]), ws[1]), ws[2]) ** 2))(ws)

    ws = [jax.random.normal(jax.random.key(i), (16, 16)) for i in range(3)]
    plan, _ = check_equal(grads, (ws, jax.random.normal(jax.random.key(3), (8, 16))), mesh_of(axis_type, data=4, tp=2))
    text = str(jax.make_jaxpr(eqshard.constrain(plan, grads))(ws, jnp.ones((8, 16))))
    assert text.count("optimization_barrier") == 2


def test_gradients_through_a_constrained_function():
    args = jax.random.normal(jax.random.key(0), (3, 16, 16)), jax.random.normal(jax.random.key(1), (8, 16))

    def loss(w, x):
        return jnp.sum(jax.lax.scan(jax.checkpoint(lambda c, k: (jnp.tanh(c @ k), None)), x, w)[0] ** 2)

    plan = eqshard.step_plan(loss, *args, mesh=mesh_of("auto", data=4, tp=2))
    want = jax.jit(jax.grad(loss))(*args)
    got = jax.jit(jax.grad(eqshard.constrain(plan, loss)))(*args)
    np.testing.assert_allclose(want, got, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_layouts_inside_custom_gradients(kind, axis_type):
    """The body gets its layouts; the rule, which is not the body's gradient here, stays the rule."""
    if kind == "jvp":
        mlp = jax.custom_jvp(lambda x, w: jnp.tanh(x @ w) @ w.T)
        mlp.defjvp(lambda p, t: (mlp(*p), 3.0 * t[0] + (p[0] @ t[1] @ p[1].T)))
    else:
        mlp = jax.custom_vjp(lambda x, w: jnp.tanh(x @ w) @ w.T)
        mlp.defvjp(lambda x, w: (mlp(x, w), (x, w)), lambda r, g: (3.0 * g, r[0].T @ g @ r[1]))
    loss = lambda w, x: mlp(x * 2.0, w).sum()
    args = jax.random.normal(jax.random.key(0), (16, 32)), jax.random.normal(jax.random.key(1), (8, 16))
    plan, _ = check_equal(loss, args, mesh_of(axis_type, data=4, tp=2))
    assert any(len(path) > 1 for path, *_ in plan.inner)
    constrained = eqshard.constrain(plan, loss)
    (call,) = [e for e in jax.make_jaxpr(constrained)(*args).eqns if e.primitive.name == f"custom_{kind}_call"] or [
        None
    ]
    if axis_type == "auto":
        assert "sharding_constraint" in str(call.params["call_jaxpr"])
    want, got = (jax.jit(jax.grad(f))(*args) for f in (loss, constrained))
    np.testing.assert_allclose(want, got, rtol=1e-4, atol=1e-5)


def test_on_one_device_bit_for_bit():
    args = jax.random.normal(jax.random.key(0), (3, 16, 16)), jax.random.normal(jax.random.key(1), (8, 16))
    plan = eqshard.step_plan(loops, *args, mesh=eqshard.MeshSpec(data=1))
    for a, b in zip(jax.jit(loops)(*args), jax.jit(eqshard.constrain(plan, loops))(*args)):
        assert (np.asarray(a) == np.asarray(b)).all()


def test_another_program_is_refused():
    mesh = eqshard.MeshSpec(x=8)
    plan = eqshard.step_plan(lambda w: w * 2.0, shape(8, 8), mesh=mesh)
    with pytest.raises(eqshard.MismatchError, match="not the program"):
        eqshard.constrain(plan, lambda w: w @ w)(jnp.ones((8, 8)))


def test_json():
    plan = eqshard.step_plan(lambda w, x: x @ w, shape(64, 64), shape(64, 64), mesh=mesh_of("auto", x=8))
    again = eqshard.StepPlan.from_json(plan.to_json())
    assert again == plan and hash(again) == hash(plan)
    with pytest.raises(eqshard.FormatError):
        eqshard.StepPlan.from_json('{"format": "eqshard.step", "version": 1}')


def test_a_shard_map_is_taken_as_it_is():
    mesh = mesh_of("auto", a=4, b=2)

    def step(x, w):
        inner = jax.shard_map(
            lambda x, w: jax.lax.psum(x @ w, "b"),
            mesh=mesh.build(),
            in_specs=(P("a", "b"), P("b", None)),
            out_specs=P("a", None),
        )
        return jnp.tanh(inner(jnp.sin(x), w))

    keys = jax.random.split(jax.random.key(0))
    args = jax.random.normal(keys[0], (512, 256)) / 16, jax.random.normal(keys[1], (256, 256)) / 16
    plan, _ = check_equal(step, args, mesh)
    assert plan.args[0][""].spec == P("a", "b")
    assert "b" in eqshard.axis_names(plan.args[1][""].spec)
    assert not any("shard_map" in note for note in plan.notes)


def test_an_opaque_call_is_whole_or_as_told():
    def step(x):
        return jax.pure_callback(lambda y: np.sort(y, axis=1), shape(64, 64), jnp.sin(x)) * 2.0

    mesh = mesh_of("auto", a=8)
    plan = eqshard.step_plan(step, shape(64, 64), mesh=mesh)
    assert any("pure_callback" in note for note in plan.notes)
    told = eqshard.step_plan(step, shape(64, 64), mesh=mesh, rules={"pure_callback": "row - -> row -"})
    assert not told.notes
    assert told.args[0][""].spec == P("a")
    with pytest.raises(eqshard.ShardingError, match=r"the rule 'row -> row' for `pure_callback` does not fit"):
        eqshard.step_plan(step, shape(64, 64), mesh=mesh, rules={"pure_callback": "row -> row"})


@pytest.mark.parametrize("on", [True, False])
def test_garbage_is_collected_after_as_before(on):
    step, mesh = lambda x: x * 2.0, eqshard.MeshSpec(a=2, chip="v5e")
    (gc.enable if on else gc.disable)()
    try:
        eqshard.step_plan(step, shape(16, 16), mesh=mesh)
        assert gc.isenabled() == on
        with pytest.raises(eqshard.BudgetError):
            eqshard.step_plan(step, shape(16, 16), mesh=mesh, max_bytes=1)
        assert gc.isenabled() == on
    finally:
        gc.enable()


def test_fixed_takes_logical_names_and_partial_plans():
    def step(model, batch):
        return jax.vmap(model)(batch).sum()

    mesh = eqshard.MeshSpec(dp=4, tp=2, chip="v5e")
    model = eqx.filter_eval_shape(eqx.nn.MLP, 64, 64, 256, 2, key=jax.random.key(0))
    batch = shape(128, 64)
    part = eqshard.ShardingPlan(mesh, [eqshard.LeafPlan(".layers[1].weight", (256, 256), "float32", P("tp"), P("tp"))])
    plan = eqshard.step_plan(step, model, batch, mesh=mesh, fixed={"model": part, "batch": (eqshard.BATCH, None)})
    assert plan.args[0][".layers[1].weight"].spec == P("tp")
    assert plan.args[1][""].spec == P("dp")
    assert eqshard.step_plan(step, model, batch, mesh=mesh, fixed=[part, None]).args[0][".layers[1].weight"].spec == P(
        "tp"
    )
    with pytest.raises(eqshard.MismatchError, match="leaves that it has not"):
        eqshard.step_plan(step, model, batch, mesh=mesh, fixed={"batch": part})
    with pytest.raises(eqshard.MismatchError, match="but the step is planned on"):
        eqshard.step_plan(step, model, batch, mesh=eqshard.MeshSpec(dp=8), fixed=[part])


def test_lines_of_the_program_are_kept():
    def step(w, x):
        with jax.named_scope("my_layer"):
            return jnp.tanh(x @ w)

    args = shape(64, 64), shape(64, 64)
    plan = eqshard.step_plan(step, *args, mesh=mesh_of("auto", a=8))
    lowered = jax.jit(eqshard.constrain(plan, step)).lower(*args)
    text = lowered.as_text(debug_info=True)
    assert "my_layer" in text and "test_program.py" in text


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.cumsum(x, axis=0),
        lambda x: jnp.sort(x, axis=0),
        lambda x: x[::-1],
        lambda x: jnp.concatenate([x, x]),
        lambda x: jnp.pad(x, ((4, 4), (0, 0))),
        lambda x: x[8:],
    ],
)
def test_an_edited_plan_changes_no_value(fn):
    x = jax.random.normal(jax.random.key(0), (16, 8))
    plan = eqshard.step_plan(fn, x, mesh=mesh_of("auto", a=8))
    edited = [(path, side, slot, P("a") if side in ("in", "out") else spec) for path, side, slot, spec in plan.inner]
    assert any(side == "out" for _, side, _, _ in edited)
    plan = dataclasses.replace(plan, inner=tuple(edited))
    np.testing.assert_allclose(jax.jit(eqshard.constrain(plan, fn))(x), fn(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_stacks(axis, axis_type):
    def step(x, y):
        rows = jnp.stack([x, x * 2.0, y], axis)
        return jax.grad(lambda r: jnp.sum(jnp.sin(r) ** 2))(rows), [jnp.tanh(r) for r in jnp.unstack(rows, axis=axis)]

    args = jax.random.normal(jax.random.key(0), (16, 8)), jax.random.normal(jax.random.key(1), (16, 8))
    plan, _ = check_equal(step, args, mesh_of(axis_type, data=4, tp=2), fixed={"x": P("data"), "y": P(None, "tp")})
    assert plan.notes == ()


def test_nothing_common_is_unknown():
    """What JAX, old or new, makes of everyday functions and their gradients."""

    def step(w, x):
        def body(c, row):
            return jnp.tanh(c @ w) + row, jax.nn.gelu(c)

        def loss(w):
            c, ys = jax.lax.scan(jax.checkpoint(body), x, jnp.stack([x, x * 2.0]))
            return jnp.mean(jax.nn.softmax(jnp.log2(1.0 + c**2)) * ys.sum(0)) + jnp.var(jax.nn.silu(c @ w))

        return w - jax.grad(loss)(w)

    assert eqshard.step_plan(step, shape(64, 64), shape(128, 64), mesh=eqshard.MeshSpec(x=8)).notes == ()


def test_an_associative_scan_is_cut_along_its_batch():
    """It makes empty slices, which say nothing about the dimensions of what they are slices of."""
    join = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])
    step = lambda x: jax.grad(lambda x: jnp.sum(jax.lax.associative_scan(join, (x, jnp.sin(x)), axis=1)[1]))(x)
    plan = eqshard.step_plan(step, shape(64, 33, 256), mesh=eqshard.MeshSpec(x=8))
    assert plan.args[0][""].spec == P("x")
    check_equal(step, (jax.random.normal(jax.random.key(0), (16, 9, 4)),), mesh_of("auto", x=8))
