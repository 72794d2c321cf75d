"""A plan knows its program: equal ids for the same program in a wrapper, other ids for all others."""

import functools
import json
import subprocess
import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from program_checks import check_equal, mesh_of, shape

import eqshard
from eqshard.program._outline import MOST_EQUATIONS
from eqshard.program._places import Places
from eqshard.program._trace import trace


X = shape(8, 8)


def name(fn, *args):
    return trace(fn, args).fingerprint


def scan_of(body, **options):
    return lambda x, y: jax.lax.scan(body, x[0], y, **options)


@jax.custom_jvp
def bent(x):
    return jnp.sin(x)


bent.defjvps(lambda t, out, x: t)


@jax.custom_jvp
def bent_more(x):
    return jnp.sin(x) * 2


bent_more.defjvps(lambda t, out, x: t)
TABLE = np.arange(64, dtype="float32").reshape(8, 8)
dot = lambda dims: lambda x, y: jax.lax.dot_general(x, y, ((dims[:1], dims[1:]), ((), ())))
within = lambda dtype: lambda x, y: (x.astype(dtype) + 1).astype("float32") + y
OTHERS = {
    "contracting dimension": (dot((0, 0)), dot((1, 0))),
    "data flow": (lambda x, y: jnp.sin(x) - y, lambda x, y: jnp.sin(y) - x),
    "operands": (lambda x, y: x - y, lambda x, y: y - x),
    "results": (lambda x, y: (x, y), lambda x, y: (y, x)),
    "dtype inside": (within("bfloat16"), within("float16")),
    "literal": (lambda x, y: x * 0.1 + y, lambda x, y: x * 0.2 + y),
    "sign of zero": (lambda x, y: jnp.maximum(x, 0.0) + y, lambda x, y: jnp.maximum(x, -0.0) + y),
    "constant": (lambda x, y: x + TABLE + y, lambda x, y: x + TABLE.T + y),
    "short constant": (lambda x, y: x + TABLE[:1] + y, lambda x, y: x + TABLE[1:2] + y),
    "constant of jax": (lambda x, y: x @ jnp.asarray(TABLE), lambda x, y: x @ jnp.asarray(TABLE + 1)),
    "axis": (lambda x, y: jnp.cumsum(x, 0) + y, lambda x, y: jnp.cumsum(x, 1) + y),
    "precision": (lambda x, y: x @ y, lambda x, y: jnp.matmul(x, y, precision="highest")),
    "body of a scan": (scan_of(lambda c, r: (c + r, c)), scan_of(lambda c, r: (c * r, c))),
    "flow in a scan": (scan_of(lambda c, r: (c - r, c)), scan_of(lambda c, r: (r - c, c))),
    "direction": (scan_of(lambda c, r: (c + r, c)), scan_of(lambda c, r: (c + r, c), reverse=True)),
    "order of branches": (
        lambda x, y: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, y),
        lambda x, y: jax.lax.cond(x[0, 0] > 0, jnp.cos, jnp.sin, y),
    ),
    "loop": (
        lambda x, y: jax.lax.while_loop(lambda c: c.sum() < 3, lambda c: c + y, x),
        lambda x, y: jax.lax.while_loop(lambda c: c.sum() < 4, lambda c: c + y, x),
    ),
    "remat": (lambda x, y: jnp.sin(x @ y), jax.checkpoint(lambda x, y: jnp.sin(x @ y))),
    "custom gradients": (lambda x, y: bent(x @ y), lambda x, y: bent_more(x @ y)),
    "random numbers": (
        lambda x, y: x + y + jax.random.normal(jax.random.key(0), (8, 8)),
        lambda x, y: x + y + jax.random.normal(jax.random.key(1), (8, 8)),
    ),
    "names of results": (lambda x, y: {"a": x + y}, lambda x, y: {"b": x + y}),
    "effects": (lambda x, y: x @ y, lambda x, y: (jax.debug.print("{}", x[0, 0]), x @ y)[1]),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_programs_have_other_ids(kind):
    one, other = OTHERS[kind]
    assert name(one, X, X) != name(other, X, X)
    assert name(one, X, X) == name(lambda x, y: one(x, y), X, X)


def test_types_of_arguments_count():
    fn = lambda x, y: x * y
    args = [(X, s) for s in (shape(), jnp.asarray(0.1), shape(8, 1), shape(1, 8), X)]
    assert len({name(fn, *a) for a in args}) == len(args)
    assert name(fn, X, X) != name(lambda t: t["a"] * t["b"], {"a": X, "b": X})


def step(model, x):
    def loss(model):
        return (jax.vmap(model)(x) ** 2).mean()

    value, grads = eqx.filter_value_and_grad(loss)(model)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), value


def moved_step(m, batch):
    # The same program on other lines, with other names.

    def of(m):
        return (jax.vmap(m)(batch) ** 2).mean()

    found, slopes = eqx.filter_value_and_grad(of)(m)

    return eqx.apply_updates(m, jax.tree.map(lambda slope: -0.1 * slope, slopes)), found


class Trainer(eqx.Module):
    rate: float

    def step(self, model, x):
        return step(model, x)

    def __call__(self, model, x):
        return step(model, x)


WRAPPED = {
    "itself": step,
    "moved": moved_step,
    "filter_jit": eqx.filter_jit(step),
    "twice": eqx.filter_jit(eqx.filter_jit(step)),
    "donating": eqx.filter_jit(step, donate="all"),
    "method": Trainer(0.1).step,
    "jitted method": eqx.filter_jit(Trainer(0.1).step),
    "module": Trainer(0.1),
    "partial": functools.partial(lambda rate, m, x: step(m, x), 0.1),
    "jitted partial": eqx.filter_jit(functools.partial(lambda rate, m, x: step(m, x), 0.1)),
    "eqx.Partial": eqx.Partial(step),
}


def small():
    return eqx.nn.MLP(16, 16, 32, 1, key=jax.random.key(0)), jnp.ones((16, 16))


@pytest.mark.parametrize("kind", WRAPPED)
def test_the_same_program_in_a_wrapper_is_accepted(kind):
    args, fn, mesh = small(), WRAPPED[kind], mesh_of("auto", data=4, tp=2)
    plan = eqshard.step_plan(step, *args, mesh=mesh)
    assert eqshard.step_plan(fn, *args, mesh=mesh) == plan
    got = eqx.filter_jit(eqshard.constrain(plan, fn))(*args)
    want = step(*args)
    for a, b in zip(*(jax.tree.leaves(eqx.filter(t, eqx.is_array)) for t in (got, want))):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_jax_jit_and_closed_over_arrays():
    w, v = jnp.ones((8, 8)), jnp.ones((3, 8))
    fn = lambda x: (jnp.tanh(x @ w) @ v.T, x)
    assert name(fn, X) == name(jax.jit(fn), X) == name(jax.jit(lambda x: jax.jit(fn)(x)), X)
    assert name(lambda x, y: (x, y @ x), X, X) == name(jax.jit(lambda x, y: (x, y @ x)), X, X)
    assert name(lambda x: x * 2 + x, X) == name(jax.jit(lambda x: jax.jit(lambda a, b: a * 2 + b)(x, x)), X)


def layered(inner):
    def block(w, x):
        return jnp.tanh(x @ w)

    def fn(ws, x):
        x = inner(block)(ws[0], x + 1)
        x, ys = jax.lax.scan(lambda x, w: (inner(block)(w, x), x.sum()), x, ws)
        x = jax.lax.cond(x[0, 0] > 0, lambda x: inner(block)(ws[0], x), lambda x: x * 2, x)
        return inner(lambda x: inner(block)(ws[1], x) @ ws[0])(x), ys

    return fn


@pytest.mark.parametrize("how", [(jax.jit, lambda f: f), (lambda f: f, jax.jit)])
def test_inner_jit_calls_do_not_count(how, axis_type):
    planned, used = map(layered, how)
    ws, x = 0.1 * jnp.ones((2, 16, 16)), jnp.ones((16, 16))
    mesh = mesh_of(axis_type, data=4, tp=2)
    plan = eqshard.step_plan(planned, ws, x, mesh=mesh)
    assert name(used, ws, x) == plan.program
    placed = [eqshard.apply(p, a) for p, a in zip(plan.args, (ws, x))]
    got = eqx.filter_jit(eqshard.constrain(plan, used))(*placed)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(used(ws, x))):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    text = [jax.jit(eqshard.constrain(plan, f)).lower(*placed).as_text() for f in (planned, used)]
    assert len({t.count("sharding_constraint") for t in text}) == 1 and "sharding_constraint" in text[0]


def test_places_there_and_back():
    ws, x = jnp.ones((2, 16, 16)), jnp.ones((16, 16))
    nested, flat = (trace(layered(inner), (ws, x)).jaxpr.jaxpr for inner in (jax.jit, lambda f: f))
    to, back = Places(nested), Places(flat)
    inside = [(0,), (1, 0), (2, 0), (2, 1)]
    assert all(to.actual(to.canonical(path)) == path for path in inside[:1])
    n = len(flat.eqns)
    paths = [to.actual((i,)) for i in range(n)]
    assert all(path is not None and to.canonical(path) == (i,) for i, path in enumerate(paths))
    assert [back.actual((i,)) for i in range(n)] == [(i,) for i in range(n)]
    assert max(len(path) for path in paths if path is not None) > 1
    assert to.actual((n,)) is None and to.actual((0, 5, 5)) is None and back.actual((n - 1, 0)) is None


IN_A_PROCESS = """
import sys; sys.path.insert(0, "tests")
import jax; jax.config.update("jax_num_cpu_devices", 8)
import test_program_identity as t
print([t.name(f, t.X, t.X) for pair in t.OTHERS.values() for f in pair] + [t.name(t.called, t.X)])
"""


def called(x):
    y = jax.pure_callback(lambda a: np.asarray(a), shape(8, 8), x)
    keep = jax.checkpoint_policies.dots_saveable
    return jax.checkpoint(lambda a: jnp.sin(a) @ a, policy=keep)(y)


def test_ids_are_the_same_in_every_process():
    run = lambda: (
        subprocess.run([sys.executable, "-c", IN_A_PROCESS], capture_output=True, text=True, check=True).stdout
    )
    here = [name(f, X, X) for pair in OTHERS.values() for f in pair] + [name(called, X)]
    assert run().strip() == str(here)


OPS = [jnp.sin, jnp.tanh, lambda x: x * 2.0, lambda x: x.T, lambda x: x @ x, lambda x: jnp.cumsum(x, 0)]
UNARY = st.tuples(st.integers(0, len(OPS) - 1), st.integers(0, 3))


@settings(max_examples=30, deadline=None)
@given(st.lists(UNARY, min_size=1, max_size=6), st.lists(UNARY, min_size=1, max_size=6), st.integers(0, 63))
def test_random_programs(one, other, jits):
    def program(ops, jits):
        def fn(x):
            values = [x, x + 1.0]
            for n, (op, which) in enumerate(ops):
                call = jax.jit(OPS[op]) if jits >> n & 1 else OPS[op]
                values.append(call(values[-1 - which % len(values)]))
            return values[-1]

        return fn

    assert name(program(one, 0), X) == name(program(one, jits), X) == name(jax.jit(program(one, jits)), X)
    resolve = lambda ops: [(op, which % (2 + n)) for n, (op, which) in enumerate(ops)]
    assert (name(program(one, jits), X) == name(program(other, 0), X)) == (resolve(one) == resolve(other))


def refused(plan, fn, *args):
    with pytest.raises(eqshard.MismatchError) as found:
        eqx.filter_eval_shape(eqshard.constrain(plan, fn), *args)
    return str(found.value)


def plan_of(fn, *args):
    plan = eqshard.step_plan(fn, *args, mesh=eqshard.MeshSpec(data=8))
    again = eqshard.StepPlan.from_json(plan.to_json())
    assert again == plan and again.outline == plan.outline and again.versions == plan.versions
    return again


def test_a_refusal_says_which_equation_differs():
    fn = lambda dims: lambda x, y: dot(dims)(jnp.sin(x), y)
    text = refused(plan_of(fn((0, 0)), X, X), fn((1, 0)), X, X)
    assert "quation 1, `dot_general` at" in text and "test_program_identity.py" in text
    assert "the plan has `dimension_numbers=(((0), (0)), ((), ()))`" in text
    assert "this program `dimension_numbers=(((1), (0)), ((), ()))`" in text
    text = refused(plan_of(OTHERS["operands"][0], X, X), OTHERS["operands"][1], X, X)
    assert "it reads (a0 a1) in the plan, (a1 a0) here" in text
    text = refused(plan_of(OTHERS["body of a scan"][0], X, X), OTHERS["body of a scan"][1], X, X)
    assert "inside a body" in text and "`add`" in text and "`mul`" in text
    text = refused(plan_of(lambda x: x + 1, X), lambda x: jnp.sin(x + 1), X)
    assert "has 1 equations, this one 2; the first one more is equation 1, `sin` at" in text
    assert "result 0['a']" in refused(
        plan_of(*(OTHERS["names of results"][0], X, X)), OTHERS["names of results"][1], X, X
    )


def test_a_refusal_says_which_argument_differs():
    fn = lambda tree, x, y: tree["x"] * x
    plan = plan_of(fn, {"x": X}, X, "gelu")
    assert "argument 0, leaf `['x']`: float32[8,8] planned, float32[16,8] given" in (
        refused(plan, fn, {"x": shape(16, 8)}, shape(16, 8), "gelu").replace("Argument", "argument")
    )
    power = lambda x, n: x**n
    text = refused(plan_of(power, X, 2), power, X, 3)
    assert "The static leaf `[1]`: 2 planned, 3 given" in text
    scale = lambda x, rate: x * rate
    text = refused(plan_of(scale, X, jnp.float32(0.1)), scale, X, jnp.asarray(0.1))
    assert "Argument 1: strongly typed float32[] planned, weakly typed float32[] given" in text


def test_plans_of_other_versions():
    plan = plan_of(lambda x: x + 1, X)
    assert dict(plan.versions)["jax"] == jax.__version__ and "eqshard" in dict(plan.versions)
    data = json.loads(plan.to_json())
    older = eqshard.StepPlan.from_dict(data | {"versions": [["jax", "0.1"]]})
    assert "made with jax 0.1, this is jax" in refused(older, lambda x: x + 2, X)
    del data["outline"], data["versions"]
    old = eqshard.StepPlan.from_dict(data | {"program": "0" * 64})
    assert any("older eqshard" in note for note in old.notes)
    assert "older eqshard" in refused(old, lambda x: x + 1, X)
    for broken in ({"length": "a"}, {"length": 1, "equations": [[0, "a"]]}, {"length": 1, "what": 1}, 3):
        with pytest.raises(eqshard.ShardingError, match="outline"):
            eqshard.StepPlan.from_dict(data | {"outline": broken})


def deep(n, at=None):
    def fn(x):
        for i in range(n):
            x = jnp.cos(x) if i == at else jnp.sin(x)
        return x

    return fn


def test_long_programs_are_kept_in_short():
    n = 3 * MOST_EQUATIONS
    plan = plan_of(deep(n), X)
    assert len(json.dumps(plan.outline.to_dict())) < 20_000
    assert "equations from equation 4500, `sin` at" in refused(plan, deep(n, 4501), X)


def test_reading_a_long_program_is_fast():
    traced = trace(deep(20_000), (X,))
    start = time.perf_counter()
    assert len(traced.fingerprint) == 64
    assert time.perf_counter() - start < 5


def test_layouts_that_an_inner_jit_asks_for_count():
    mesh = eqshard.MeshSpec(data=8).build()
    place = lambda *spec: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    fn = lambda *spec: lambda x: jax.jit(jnp.sin, in_shardings=place(*spec))(x) * 2
    assert len({name(fn("data"), X), name(fn(None, "data"), X), name(lambda x: jnp.sin(x) * 2, X)}) == 3
    check_equal(fn("data"), (jnp.ones((8, 8)),), mesh_of("auto", data=8))
