import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import eqshard


WIDTH, LAYERS = 32, 4


@pytest.fixture
def mesh(make_mesh):
    return make_mesh(fsdp=8)


def stacked():
    return eqx.filter_vmap(lambda k: eqx.nn.Linear(WIDTH, WIDTH, key=k))(jax.random.split(jax.random.key(0), LAYERS))


def plan_for(mesh):
    return eqshard.fsdp_plan(stacked(), mesh, min_bytes=0)


def loss(layers, x, plan=None, dtype=None, wrap=lambda f: f):
    arrays, static = eqx.partition(layers, eqx.is_array)

    def body(x, layer):
        layer = eqx.combine(layer, static)
        if plan is not None:
            layer = eqshard.use(plan.layer(), layer, dtype=dtype)
        y = jnp.tanh(jax.vmap(layer)(x if dtype is None else x.astype(dtype)))
        return y.astype(jnp.float32), None

    return (jax.lax.scan(wrap(body), x, arrays)[0] ** 2).mean()


def batch(mesh):
    return eqshard.shard(jax.random.normal(jax.random.key(1), (16, WIDTH)), (eqshard.BATCH,), mesh)


def reference():
    return eqx.filter_grad(loss)(stacked(), jax.random.normal(jax.random.key(1), (16, WIDTH)))


@pytest.mark.parametrize(
    "wrap, gathers",  # remat gathers again on the way back, instead of keeping whole layers
    [(lambda f: f, 1), (jax.checkpoint, 2), (eqx.filter_checkpoint, 2)],
    ids=["plain", "remat", "filter_remat"],
)
def test_gradients_in_a_scan_come_back_at_rest(mesh, wrap, gathers):
    plan = plan_for(mesh)
    step = jax.jit(jax.grad(lambda layers, x: loss(layers, x, plan, wrap=wrap)))
    layers = eqshard.apply(plan, stacked())
    compiled = step.lower(layers, batch(mesh)).compile()
    grads = compiled(layers, batch(mesh))
    assert eqshard.plan_of(grads).specs() == plan.specs()
    np.testing.assert_allclose(grads.weight, reference().weight, atol=1e-7)
    weight = [c for c in eqshard.collectives(compiled) if c.kind == "all-gather" and c.bytes == 4 * WIDTH * WIDTH]
    assert len(weight) == gathers and all(c.trips == LAYERS for c in weight)  # in the loop, one layer at a time


def test_mixed_precision(mesh):
    plan = plan_for(mesh)
    layers = eqshard.apply(plan, stacked())
    step = jax.jit(jax.grad(lambda layers, x: loss(layers, x, plan, jnp.bfloat16)))
    grads = step(layers, batch(mesh))
    assert grads.weight.dtype == jnp.float32 and eqshard.plan_of(grads).specs() == plan.specs()
    np.testing.assert_allclose(grads.weight, reference().weight, atol=5e-5)
    assert np.abs(np.asarray(grads.weight) - np.asarray(reference().weight)).max() > 1e-8  # it did compute in bfloat16
    jaxpr = str(jax.make_jaxpr(lambda x: eqshard.use(plan, x, dtype=jnp.bfloat16))(layers))
    cast = jaxpr.index("convert_element_type")
    gather = max(jaxpr.rfind("with_sharding_constraint"), jaxpr.rfind("reshard"), jaxpr.rfind("sharding_constraint"))
    assert cast < gather  # the cast comes first, so the gather moves half the bytes


def test_forward_lays_out_and_changes_nothing(mesh):
    plan, layers = plan_for(mesh), stacked()
    for used in (
        eqshard.use(plan, layers),
        eqx.filter_jit(lambda t: eqshard.use(plan, t))(eqshard.apply(plan, layers)),
    ):
        assert eqshard.specs_of(used).weight == P() and len(used.weight.devices()) == 8
        assert (np.asarray(used.weight) == np.asarray(layers.weight)).all()
    assert eqshard.use(plan, layers, dtype=jnp.bfloat16).weight.dtype == jnp.bfloat16
    struct = eqshard.use(plan, eqx.filter_eval_shape(stacked), dtype=jnp.bfloat16).weight
    assert struct.dtype == jnp.bfloat16 and struct.sharding.spec == P()


def test_eager_gradients_on_auto_axes():
    plan = plan_for(eqshard.MeshSpec(fsdp=8))
    grads = eqx.filter_grad(lambda t: (eqshard.use(plan, t).weight ** 2).sum())(eqshard.apply(plan, stacked()))
    assert grads.weight.sharding.spec == plan[".weight"].spec
    np.testing.assert_allclose(grads.weight, 2 * stacked().weight, rtol=1e-6)


def test_under_vmap(mesh):
    plan, weights = plan_for(mesh).select(".weight"), eqshard.apply(plan_for(mesh), stacked()).weight
    grad = jax.vmap(jax.grad(lambda w: (eqshard.use(plan.layer(), w) ** 2).sum()))
    np.testing.assert_allclose(jax.jit(grad)(weights), 2 * stacked().weight, rtol=1e-6)


def test_leaves_without_a_gradient_are_laid_out_too(mesh):
    tree = {"ids": jnp.arange(8), "key": jax.random.key(0), "name": "a", "complex": jnp.ones(8, complex)}
    plan = eqshard.replicated_plan(tree, mesh).at("ids").set(P("fsdp"), use=P())
    used = eqx.filter_jit(lambda t: eqshard.use(plan, t, dtype=jnp.bfloat16))(eqshard.apply(plan, tree))
    assert used["name"] == "a" and used["complex"].dtype == jnp.complex64 and eqshard.specs_of(used)["ids"] == P()
    assert used["ids"].dtype == jnp.int32 and (np.asarray(used["ids"]) == np.arange(8)).all()


def test_frozen_leaves_get_no_gradient(mesh):
    plan = plan_for(mesh)
    layers = eqshard.apply(plan, stacked())

    def f(weight):
        return (eqshard.use(plan, eqx.tree_at(lambda m: m.weight, layers, weight)).weight ** 2).sum()

    np.testing.assert_allclose(jax.jit(jax.grad(f))(layers.weight), 2 * stacked().weight, rtol=1e-6)


def test_offloaded_leaves_come_to_the_device_and_their_gradients_go_back(mesh):
    plan = plan_for(mesh).at(".").set(memory_kind="pinned_host")
    layers = eqshard.apply(plan, stacked())
    assert layers.weight.sharding.memory_kind == "pinned_host"
    for dtype in (None, jnp.bfloat16):
        f = lambda t, dtype=dtype: (eqshard.use(plan, t, dtype=dtype).weight.astype(jnp.float32) ** 2).sum()
        grads = eqx.filter_jit(eqx.filter_grad(f))(layers)
        assert grads.weight.sharding.memory_kind == "pinned_host"
        assert eqshard.specs_of(grads).weight == plan[".weight"].spec
        np.testing.assert_allclose(grads.weight, 2 * stacked().weight, rtol=1e-2)
    assert eqshard.use(plan, layers).weight.sharding.memory_kind == "device"


def test_tensor_parallel_and_fsdp_together(m222):
    base = eqshard.rule_plan(stacked(), m222, [("weight", P(None, "tp")), ("bias", P(None, "tp"))])
    plan = eqshard.fsdp_plan(stacked(), m222, min_bytes=0, base=base)
    used = jax.jit(lambda t: eqshard.use(plan, t))(eqshard.apply(plan, stacked()))
    assert eqshard.specs_of(used).weight == P(None, "tp")


def test_another_tree_is_refused(mesh):
    with pytest.raises(eqshard.MismatchError, match=r"`\.weight`"):
        eqshard.use(plan_for(mesh), {"a": jnp.ones(3)})
    with pytest.raises(eqshard.ShardingError, match="floating-point dtype; got int32"):
        eqshard.use(plan_for(mesh), stacked(), dtype=jnp.int32)


def test_layer_and_stack_are_inverse(mesh):
    plan = plan_for(mesh)
    assert plan[".weight"].spec == P(None, "fsdp") and plan.layer()[".weight"].spec == P("fsdp")
    assert plan.layer()[".weight"].shape == (WIDTH, WIDTH) and plan.layer().stack(LAYERS) == plan
    assert plan.in_use()[".weight"].spec == P() == plan.in_use()[".weight"].use
    assert plan.layer() is plan.layer()


def test_a_stack_cut_along_its_layers_is_refused(mesh):
    tree = {"w": jax.ShapeDtypeStruct((8, 4), "float32"), "n": jax.ShapeDtypeStruct((), "int32")}
    plan = eqshard.replicated_plan(tree, mesh)
    with pytest.raises(eqshard.ShardingError, match=r"`\['w'\]` float32\[8,4\] lies over P\('fsdp'\) at rest"):
        eqshard.replicated_plan({"w": tree["w"]}, mesh).at("w").set(P("fsdp"), use=P()).layer()
    with pytest.raises(eqshard.ShardingError, match=r"`\['n'\]` is a scalar"):
        plan.layer()
    uneven = {"a": jax.ShapeDtypeStruct((8, 4), "int32"), "b": jax.ShapeDtypeStruct((4, 4), "int32")}
    with pytest.raises(eqshard.ShardingError, match=r"`\['a'\]` holds 8, `\['b'\]` holds 4"):
        eqshard.replicated_plan(uneven, mesh).layer()
