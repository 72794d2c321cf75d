"""`verify` passes correct plans, whatever rounding makes of them, and finds faults."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from result_forms import FORMS, make_args, make_step
from test_program_random import EAGER, random_program

import eqshard
from eqshard import _verify
from eqshard._leaf_check import compare
from eqshard._rounding_noise import noisy_step


MESH = eqshard.MeshSpec(data=4, tp=2, chip=EAGER)
OPTIMIZERS = {"sgd": optax.sgd(0.1), "adam": optax.adam(1e-3)}


def updated(optim, grads, state):
    with jax.numpy_dtype_promotion("standard"):  # optax is not strict
        return optim.update(grads, state)


def mlp_step(optimizer):
    """A step of an MLP, with its arguments."""
    optim = OPTIMIZERS[optimizer]

    def step(model, state, x):
        loss, grads = eqx.filter_value_and_grad(lambda m: jnp.mean((jax.vmap(m)(x) - x) ** 2))(model)
        updates, state = updated(optim, grads, state)
        return eqx.apply_updates(model, updates), state, loss

    model = eqx.nn.MLP(16, 16, 32, 2, key=jax.random.key(0))
    state = optim.init(eqx.filter(model, eqx.is_inexact_array))
    return step, (model, state, jax.random.normal(jax.random.key(1), (32, 16)))


def gpt_steps(dtype, steps, width=32, length=16, layers=2, vocab=64):
    """Some steps of Adam on a small GPT, with its arguments."""
    optim, heads = optax.adam(1e-3), 4
    keys = iter(jax.random.split(jax.random.key(0), 4 * layers + 2))
    draw = lambda *shape: (jax.random.normal(next(keys), shape) * 0.1).astype(dtype)
    block = lambda: {
        "qkv": draw(width, 3 * width),
        "qkv_bias": jnp.zeros(3 * width, dtype),  # of the keys the gradient is rounding and nothing else
        "out": draw(width, width),
        "up": draw(width, 4 * width),
        "down": draw(4 * width, width),
    }
    params = {"embed": draw(vocab, width), "places": draw(length, width), "blocks": [block() for _ in range(layers)]}

    def norm(x):
        x = x - jnp.mean(x, -1, keepdims=True)
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + jnp.asarray(1e-5, x.dtype))

    def forward(params, tokens):
        x = params["embed"][tokens] + params["places"][None]
        mask = jnp.tril(jnp.ones((length, length), bool))[None, None]
        for b in params["blocks"]:
            qkv = norm(x) @ b["qkv"] + b["qkv_bias"][None, None]
            q, k, v = (a.reshape(*tokens.shape, heads, -1) for a in jnp.split(qkv, 3, axis=-1))
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * jnp.asarray(heads / width, x.dtype) ** 0.5
            weights = jax.nn.softmax(jnp.where(mask, scores, jnp.asarray(-1e9, x.dtype)))
            x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ b["out"]
            x = x + jax.nn.gelu(norm(x) @ b["up"]) @ b["down"]
        return norm(x) @ params["embed"].T

    def loss(params, tokens):
        logits = forward(params, tokens).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

    def train(params, state, tokens):
        def once(carry, _):
            value, grads = jax.value_and_grad(loss)(carry[0], tokens)
            updates, state = updated(optim, grads, carry[1])
            return (optax.apply_updates(carry[0], updates), state), value

        return jax.lax.scan(once, (params, state), None, length=steps)

    return train, (params, optim.init(params), jax.random.randint(jax.random.key(9), (8, length), 0, vocab))


def checked(fn, args, mesh=MESH, **options):
    return eqshard.verify(eqshard.step_plan(fn, *args, mesh=mesh), fn, *args, **options)


def broken(monkeypatch, corrupt):
    """Lets the planned step's result be corrupted: `corrupt(result)` inside the jit."""
    real = eqshard.constrain

    def constrain(plan, fn):
        good = real(plan, fn)
        return lambda *args: corrupt(good(*args))

    monkeypatch.setattr(_verify, "constrain", constrain)


def scaled(x):
    return x * jnp.asarray(1.01, x.dtype)


def swapped(x):
    return x.at[0].set(x[1]).at[1].set(x[0])


def dropped(x):
    return x.at[: max(1, x.shape[0] // 8)].set(jnp.zeros((), x.dtype))


@pytest.mark.parametrize(
    "dtype, steps", [(jnp.bfloat16, 3), pytest.param(jnp.float32, 1, marks=pytest.mark.slow)], ids=["bf16", "f32"]
)
def test_a_gpt_with_adam_passes(dtype, steps):
    fn, args = gpt_steps(dtype, steps, layers=1)
    found = checked(fn, args)
    assert found.ok, str(found)
    assert any(leaf.max_abs > 0 for leaf in found)  # there was rounding to tell


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_correct_step_passes_and_a_wrong_gradient_is_found(optimizer, monkeypatch):
    step, args = mlp_step(optimizer)
    plan = eqshard.step_plan(step, *args, mesh=MESH)
    assert eqshard.verify(plan, step, *args).ok
    optim = OPTIMIZERS[optimizer]

    def wrong(model, state, x):  # what a plan that loses a part of a gradient would compute
        loss, grads = eqx.filter_value_and_grad(lambda m: jnp.mean((jax.vmap(m)(x) - x) ** 2))(model)
        updates, state = updated(optim, jax.tree.map(scaled, grads), state)
        return eqx.apply_updates(model, updates), state, loss

    monkeypatch.setattr(_verify, "constrain", lambda plan, fn: wrong)
    found = eqshard.verify(plan, step, *args)
    assert not found.ok
    # Adam's first step has the size of the learning rate whatever the scale of a gradient: its moments tell.
    place = "[0].layers" if optimizer == "sgd" else "[1][0].mu"
    assert all(leaf.path.startswith(place) for leaf in found.faults if ".nu" not in leaf.path)
    assert {f"{place}{'' if optimizer == 'sgd' else '.layers'}[1].weight"} <= {leaf.path for leaf in found.faults}
    assert next(leaf for leaf in found if leaf.path == "[2]").ok


@pytest.mark.parametrize("corrupt", [scaled, swapped, dropped], ids=lambda f: f.__name__)
def test_one_corrupted_leaf_is_found_and_named(corrupt, monkeypatch, axis_type):
    step, args = mlp_step("sgd")
    mesh = eqshard.MeshSpec(data=4, tp=2, axis_type=axis_type, chip=EAGER)
    plan = eqshard.step_plan(step, *args, mesh=mesh)

    def corrupted(x):
        if axis_type == "auto":
            return corrupt(x)
        return jax.sharding.auto_axes(corrupt, axes=mesh.names, out_sharding=jax.typeof(x).sharding)(x)

    where = lambda result: result[0].layers[1].weight
    broken(monkeypatch, lambda result: eqx.tree_at(where, result, replace_fn=corrupted))
    found = eqshard.verify(plan, step, *args)
    assert [leaf.path for leaf in found.faults] == ["[0].layers[1].weight"]
    assert "FAULT: 1 of" in str(found) and "fault in `[0].layers[1].weight`" in str(found)


def test_a_stale_shard_is_found():
    step, (model, state, x) = mlp_step("adam")
    want = eqx.filter_jit(step)(model, state, x)
    old, new = model.layers[1].weight, want[0].layers[1].weight
    got = eqx.tree_at(lambda r: r[0].layers[1].weight, want, new.at[:4].set(old[:4]))
    noisy = noisy_step(step, (model, state, x))
    checks = compare(got, want, [noisy(i, i > 3) for i in range(8)])
    assert [c.path for c in checks if not c.ok] == ["[0].layers[1].weight"]


def test_results_of_every_kind():
    def step(w, x, key):
        y = x @ w
        return {
            "argmax": jnp.argmax(y, axis=1),
            "mask": y > 0,
            "key": jax.random.split(key)[0],
            "nan": jnp.log(y),
            "inf": jnp.where(y > 0, jnp.inf, y),
            "empty": y[:0],
            "complex": jax.lax.complex(y, -y),
            "int8": jnp.round(y * 10).astype(jnp.int8),
            "bf16": y.astype(jnp.bfloat16),
            "words": ("text", None, 3, 2.5, jax.nn.relu, lambda z: z),
        }

    w, x = (jax.random.normal(jax.random.key(i), (16, 16)) for i in range(2))
    args = w, x, jax.random.key(3)
    found = checked(step, args)
    assert found.ok, str(found)
    plain = eqx.filter_jit(step)(*args)
    noisy = [noisy_step(step, args)(i, i > 0) for i in range(2)]
    faults = {
        "argmax": (plain["argmax"] + 1) % 16,
        "mask": ~plain["mask"],
        "key": jax.random.key(4),
        "nan": jnp.nan_to_num(plain["nan"]),
        "inf": plain["inf"] * -1.0,
        "complex": plain["complex"] * jnp.complex64(1.01),
        "int8": plain["int8"].at[:2].set(0),
        "bf16": swapped(plain["bf16"]),
        "words": ("other", None, 3, 2.5, jax.nn.relu, lambda z: z),
    }
    for name, value in faults.items():
        names = {c.path.split("'")[1] for c in compare({**plain, name: value}, plain, noisy) if not c.ok}
        assert names == {name}
    assert not compare({**plain, "more": 1}, plain, noisy)[-1].ok


def test_flips_of_rounding_are_not_faults():
    plain = {"i": np.zeros(1000, np.int32), "x": np.zeros(1000, np.float32)}
    flipped = lambda i: {name: np.where(np.arange(1000) % 50 == i, 1, x).astype(x.dtype) for name, x in plain.items()}
    noisy = [flipped(i) for i in range(1, 40)]
    assert all(c.ok for c in compare(flipped(45 - 8), plain, noisy))  # seen in the noise
    assert not any(c.ok for c in compare(flipped(0), plain, []))  # nothing explains it
    assert all(c.ok for c in compare(flipped(45), plain, noisy))  # 20 elements, where noise flipped 780
    assert all(not c.ok for c in compare({n: x + 1 for n, x in plain.items()}, plain, noisy[:1]))


def test_exact_identities_survive_noise():
    """Masks, counts and maxima are exact whatever the order of sums: noise in them would hide faults."""

    def step(x):
        hits = (x == jnp.max(x, axis=1, keepdims=True)).astype(x.dtype)
        return hits, jnp.cumsum(hits, axis=0).astype(jnp.int32), jnp.sum(hits, axis=1) == 1.0

    x = jax.random.normal(jax.random.key(0), (32, 16))
    run = noisy_step(step, (x,))
    for i in range(4):
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), run(i, i > 1), step(x))


def test_noise_goes_through_loops_and_branches():
    def step(x, y):
        x = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] @ y / 4), (0, x))[1]
        x = jax.lax.cond(y[0, 0] > 0, lambda: x @ y, lambda: x + y)
        x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x.sum()), x, jnp.stack([y, y]))[0]
        return jax.checkpoint(lambda x: jax.jit(jnp.dot)(x, x))(x), jax.lax.fori_loop(0, 3, lambda i, x: x @ y, x)

    args = tuple(jax.random.normal(jax.random.key(i), (16, 16)) / 4 for i in range(2))
    want, run = jax.jit(step)(*args), noisy_step(step, args)
    narrow, wide = ([float(jnp.abs(a - b).max()) for a, b in zip(run(0, w), want)] for w in (False, True))
    assert all(0 < a < b < 1e-4 for a, b in zip(narrow, wide))
    assert checked(step, args).ok


def test_arguments_in_every_form():
    step, args = mlp_step("sgd")
    plan = eqshard.step_plan(step, *args, mesh=MESH)
    placed = tuple(eqshard.apply(p, a) for p, a in zip(plan.args, args))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if eqx.is_array(x) else x, args)
    assert eqshard.verify(plan, step, *placed).ok
    assert all(not x.is_deleted() for x in jax.tree.leaves(placed) if eqx.is_array(x))
    found = eqshard.verify(plan, step, *shapes)
    assert found.ok and any(leaf.noise > 0 for leaf in found)
    weights = eqshard.auto_plan(args[0], MESH, min_bytes=0)
    assert eqshard.verify((weights, None, eqshard.replicated_plan(args[2], MESH)), step, *args).ok


def test_what_cannot_be_verified():
    step, args = mlp_step("sgd")
    plan = eqshard.step_plan(step, *args, mesh=MESH)
    with pytest.raises(eqshard.MismatchError, match="not the program that was planned"):
        eqshard.verify(plan, lambda m, s, x: (m, s, x), *args)
    with pytest.raises(eqshard.MismatchError, match="3 arguments, but 2"):
        eqshard.verify(plan, step, *args[:2])
    with pytest.raises(eqshard.ShardingError, match="`runs` must be at least 2, got 1"):
        eqshard.verify(plan, step, *args, runs=1)


def test_as_json_and_as_a_page():
    plain = {"a": np.ones(3, np.float32), "b": np.float32([1, np.nan])}
    got = {"a": plain["a"], "b": np.float32([1, 2])}
    found = eqshard.Verification(compare(got, plain, [plain]), 1)
    assert not found.ok and found.faults[0].max_abs == np.inf
    assert eqshard.Verification.from_json(found.to_json()) == found and len(found) == 2
    assert "FAULT" in eqshard.report(found, format="html")
    for change in ({"verdict": "fine"}, {"noise": "much"}, {"more": 1}):
        data = found.to_dict()
        data["leaves"][0] |= change
        with pytest.raises(eqshard.FormatError):
            eqshard.Verification.from_dict(data)


def random_case(seed):
    fn, mesh = random_program(seed)
    args = tuple(jax.random.normal(k, (16, 16)) for k in jax.random.split(jax.random.key(seed)))
    return fn, args, eqshard.step_plan(fn, *args, mesh=mesh)


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 103), marks=pytest.mark.slow)], ids=["3", "100"])
def test_random_programs_and_their_faults(seeds):
    """A correct program passes, and each has one seeded fault in one leaf, which is found."""
    alarms, missed, faults = [], [], 0
    for seed in seeds:
        fn, args, plan = random_case(seed)
        placed = [eqshard.apply(p, a) for p, a in zip(plan.args, args)]
        planned, plain = jax.jit(eqshard.constrain(plan, fn))(*placed), jax.jit(fn)(*args)
        run = noisy_step(fn, args)
        check = functools.partial(compare, plain=plain, noisy=[run(i, i >= 4) for i in range(8)])
        alarms += [(seed, c) for c in check(planned) if not c.ok]
        leaves, treedef = jax.tree.flatten(eqshard.gather(planned))
        good = leaves[0]
        leaves[0] = np.asarray((scaled, swapped, dropped)[seed % 3](jnp.asarray(good)))
        # The rows of some gradients are equal, or zero: then swapping or dropping them changes nothing.
        if np.abs(leaves[0] - good).max() > 1e-3 * np.abs(good).max():
            faults += 1
            missed += [seed] if all(c.ok for c in check(jax.tree.unflatten(treedef, leaves))) else []
    print(f"{len(seeds)} programs: {len(alarms)} false alarms {alarms}; {faults} faults, missed {missed}")
    assert not alarms and not missed and faults > len(seeds) // 2


@pytest.mark.parametrize(
    "name", [list(FORMS)[3], *(pytest.param(name, marks=pytest.mark.slow) for name in FORMS if name != list(FORMS)[3])]
)
def test_every_form_of_results(name):
    form = FORMS[name]
    mesh = eqshard.MeshSpec(data=2, tp=4)
    plan = eqshard.step_plan(make_step(form), *make_args(form), mesh=mesh, objective="memory")
    assert eqshard.verify(plan, make_step(form), *make_args(form), runs=4).ok
