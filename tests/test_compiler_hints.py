"""Hints: each on a program that deserves it, and none on one that does not."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

import eqshard


S = jax.ShapeDtypeStruct
FSDP = eqshard.MeshSpec(fsdp=8)
GRID = eqshard.MeshSpec(dp=2, tp=4)


def laid(x, mesh, spec):
    return eqshard.replicated_plan(x, mesh).at("").set(spec)


def hints(fn, mesh, *pairs):
    args = [x for x, _ in pairs]
    report = eqshard.compile_report(fn, *args, plans=tuple(laid(x, mesh, spec) for x, spec in pairs))
    return {hint.code: hint for hint in report.hints}


LAYERS = S((6, 512, 512), jnp.float32)
BATCH = S((64, 512), jnp.float32)


def test_weights_gathered_before_the_loop():
    def outside(w, x):
        w = eqshard.constrain_to(w, P(), FSDP)
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    layer = laid(LAYERS, FSDP, P(None, "fsdp")).at("").set(use=P()).layer()

    def inside(w, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ eqshard.use(layer, w)), None), x, w)[0]

    pairs = (LAYERS, P(None, "fsdp")), (BATCH, P("fsdp"))
    found = hints(outside, FSDP, *pairs)["gathered_outside_loop"]
    assert found.path == "[0]" and "All 6 layers" in found.message and "6.3 MB" in found.message
    assert "use(plan.layer()" in found.remedy
    assert hints(inside, FSDP, *pairs) == {}


def test_resharded_each_step():
    x = S((2048, 2048), jnp.float32)
    found = hints(lambda x: eqshard.constrain_to(x, P(None, "fsdp"), FSDP) * 2, FSDP, (x, P("fsdp")))["resharded"]
    assert found.path == "[0]" and "1.8 MB" in found.message
    assert hints(lambda x: eqshard.constrain_to(x, P("fsdp"), FSDP) * 2, FSDP, (x, P("fsdp"))) == {}


def test_gradients_summed_and_cut():
    def grads(w, x, spec):
        return eqshard.constrain_to(jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w), spec, FSDP)

    w = S((512, 512), jnp.float32)
    found = hints(lambda w, x: grads(w, x, P("fsdp")), FSDP, (w, P()), (BATCH, P("fsdp")))
    assert "A gradient is summed whole" in found["all_reduce_not_scattered"].message
    assert hints(lambda w, x: grads(w, x, P()), FSDP, (w, P()), (BATCH, P("fsdp"))) == {}


def test_products_computed_again():
    def scores(q, k):
        return jnp.sum(jnp.einsum("bth,bsh->bts", q, k))

    x = S((64, 128, 128), jnp.float32)
    found = hints(scores, GRID, (x, P("dp")), (x, P("dp")))["computed_again"]
    assert "4 times over: they are not split over tp" in found.message and __file__ in found.message
    assert hints(scores, GRID, (x, P(("dp", "tp"))), (x, P(("dp", "tp")))) == {}


def test_padded():
    mesh = GRID.build()

    def heads(n):
        def fn(x):
            x = x.reshape(4096, n, 4)
            return jnp.tanh(jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("dp", "tp"))))

        return hints(fn, GRID, (S((4096, 4 * n), jnp.float32), P("dp")))

    assert "[2048, 10, 4] does not divide" in heads(10)["padded"].message
    assert heads(12) == {}
