"""LoRA on a frozen base: the base is cut over devices and never changes, the adapters are small and trained."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqshard


class Adapted(eqx.Module):
    base: eqx.nn.Linear
    down: jax.Array
    up: jax.Array

    def __init__(self, base, rank, key):
        self.base = base
        self.down = jax.random.normal(key, (rank, base.in_features)) * 0.1
        self.up = jnp.zeros((base.out_features, rank))

    def __call__(self, x, *, key=None):
        return self.base(x) + self.up @ (self.down @ x)


def make_model(key):
    k1, k2 = jax.random.split(key)
    model = eqx.nn.MLP(16, 16, 64, 2, key=k1)
    layers = [Adapted(layer, 4, k) for layer, k in zip(model.layers, jax.random.split(k2, 3))]
    return eqx.tree_at(lambda m: m.layers, model, tuple(layers))


def trainable(model):
    """True where the adapters are."""
    adapters = jax.tree.map(lambda _: False, model)
    where = lambda m: [part for layer in m.layers for part in (layer.down, layer.up)]
    return eqx.tree_at(where, adapters, replace_fn=lambda _: True)


def base_over_devices(shape, mesh):
    frozen = eqshard.fsdp_plan(shape, mesh, axis=mesh.names[-1], min_bytes=0)
    adapters = eqshard.replicated_plan(eqx.filter(shape, trainable(shape)), mesh)
    return frozen.merge(adapters)


def train(mesh, planner=base_over_devices, steps=50):
    model, plan = eqshard.init(make_model, jax.random.key(0), mesh=mesh, planner=planner)
    optim = optax.sgd(0.3, momentum=0.9)
    adapters = eqx.filter(model, trainable(model))
    state_plan = eqshard.plan_like(plan, jax.eval_shape(optim.init, adapters))
    state = eqshard.init(state_plan, optim.init, adapters)  # for the adapters only

    def step(model, state, x, y):
        x, y = eqshard.shard((x, y), (eqshard.BATCH,), mesh)
        adapters, frozen = eqx.partition(model, trainable(model))

        def loss_fn(adapters):
            model = eqshard.use(plan, eqx.combine(adapters, frozen))
            return ((jax.vmap(model)(x) - y) ** 2).mean()

        loss, grads = eqx.filter_value_and_grad(loss_fn)(adapters)
        updates, state = optim.update(grads, state)
        return eqx.combine(eqx.apply_updates(adapters, updates), frozen), state, loss

    step = eqshard.filter_jit(step, in_plans=(plan, state_plan), out_plans=(plan, state_plan, None), donate="all")
    losses, x = [], np.random.default_rng(0).normal(size=(16, 16)).astype("float32")
    for _ in range(steps):
        model, state, loss = step(model, state, x, np.flip(x, axis=1))
        losses.append(float(loss))
    return losses, model


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    losses, model = train(eqshard.MeshSpec(fsdp=8))
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    before, after = make_model(jax.random.key(0)).layers[1].base.weight, model.layers[1].base.weight
    assert losses[-1] < losses[0] / 2 and np.array_equal(before, after) and not after.is_fully_replicated
