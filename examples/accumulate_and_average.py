"""Gradient accumulation over micro-batches and a moving average of the weights: both lie as the parameters do."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqshard


def make_model(key):
    return eqx.nn.MLP(16, 16, 64, 2, key=key)


def fsdp(shape, mesh):
    return eqshard.fsdp_plan(shape, mesh, min_bytes=0)


def train(mesh, planner=fsdp, steps=20, micro=4):
    model, plan = eqshard.init(make_model, jax.random.key(0), mesh=mesh, planner=planner)
    average = eqshard.apply(plan, jax.tree.map(lambda x: jnp.copy(x) if eqx.is_array(x) else x, model))
    optim = optax.sgd(0.5)

    def step(model, average, x):
        params, static = eqx.partition(model, eqx.is_array)

        def loss_fn(params, x):
            model = eqshard.use(plan, eqx.combine(params, static))
            return ((jax.vmap(model)(x) - x) ** 2).mean()

        def add(total, x):  # one micro-batch; the sum stays in the layout at rest
            x = eqshard.shard(x, (eqshard.BATCH,), mesh)
            new = eqx.filter_value_and_grad(loss_fn)(params, x)
            return jax.tree.map(jnp.add, total, new), None

        zeros = jnp.zeros(()), eqshard.apply(plan, jax.tree.map(jnp.zeros_like, params))
        (loss, grads), _ = jax.lax.scan(add, zeros, x.reshape(micro, -1, *x.shape[1:]))
        grads = jax.tree.map(lambda g: g / micro, grads)
        updates, _ = optim.update(grads, optim.init(params))
        model = eqx.apply_updates(model, updates)
        follow = lambda old, new: 0.9 * old + 0.1 * new if eqx.is_array(old) else old
        return model, jax.tree.map(follow, average, model), loss / micro

    step = eqshard.filter_jit(step, in_plans=(plan, plan), out_plans=(plan, plan, None), donate="all")
    losses, rng = [], np.random.default_rng(0)
    for _ in range(steps):
        model, average, loss = step(model, average, rng.normal(size=(64, 16)).astype("float32"))
        losses.append(float(loss))
    return losses, model, average


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    losses, model, average = train(eqshard.MeshSpec(fsdp=8))
    whole, same, _ = train(eqshard.MeshSpec(fsdp=8), micro=1)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(losses, whole, rtol=1e-4)  # four quarters are one whole
    np.testing.assert_allclose(model.layers[1].weight, same.layers[1].weight, rtol=1e-3, atol=1e-5)
    weight, mean = model.layers[1].weight, average.layers[1].weight
    assert mean.sharding == weight.sharding and not np.allclose(mean, weight) and not weight.is_fully_replicated
