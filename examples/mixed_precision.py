"""float32 at rest, bfloat16 in use: cast in pieces, then gathered. Tied weights, remat, and moments on the host."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqshard


class Tied(eqx.Module):
    """Embeds tokens and names them again with the same weights."""

    shared: eqx.nn.Shared
    mlp: eqx.nn.MLP

    def __init__(self, key, dim=32):
        k1, k2, k3 = jax.random.split(key, 3)
        parts = eqx.nn.Embedding(64, dim, key=k1), eqx.nn.Linear(dim, 64, use_bias=False, key=k2)
        self.shared = eqx.nn.Shared(parts, where=lambda pair: pair[1].weight, get=lambda pair: pair[0].weight)
        self.mlp = eqx.nn.MLP(dim, dim, 4 * dim, 2, key=k3)

    def __call__(self, token):
        embed, name = self.shared()
        return name(eqx.filter_checkpoint(self.mlp)(embed(token)))


def fsdp(shape, mesh):
    return eqshard.fsdp_plan(shape, mesh, min_bytes=1000)


def train(mesh, planner=fsdp, steps=30, dtype=jnp.bfloat16):
    model, plan = eqshard.init(Tied, jax.random.key(0), mesh=mesh, planner=planner)
    optim = optax.adam(1e-2)
    state_plan = eqshard.plan_like(plan, optim.init).at("mu|nu").set(memory_kind="pinned_host")
    state = eqshard.init(state_plan, optim.init, eqx.filter(model, eqx.is_array))

    def step(model, state, tokens):
        tokens = eqshard.shard(tokens, (eqshard.BATCH,), mesh)

        def loss_fn(model):
            logits = jax.vmap(eqshard.use(plan, model, dtype=dtype))(tokens).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, (tokens + 1) % 64).mean()

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        updates, state = optim.update(grads, eqshard.use(state_plan, state))  # the moments come to the device
        return eqx.apply_updates(model, updates), state, loss  # and go back by their plan

    step = eqshard.filter_jit(step, in_plans=(plan, state_plan), out_plans=(plan, state_plan, None), donate="all")
    losses, rng = [], np.random.default_rng(0)
    for _ in range(steps):
        model, state, loss = step(model, state, rng.integers(64, size=64).astype("int32"))
        losses.append(float(loss))
    return losses, model, state


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    losses, model, state = train(eqshard.MeshSpec(fsdp=8))
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    weight, moment = model.mlp.layers[1].weight, optax.tree_utils.tree_get(state, "mu").mlp.layers[1].weight
    assert losses[-1] < losses[0] / 2 and weight.dtype == jnp.float32 and not weight.is_fully_replicated
    assert moment.sharding.memory_kind == "pinned_host" and moment.sharding.spec == weight.sharding.spec
    exact, *_ = train(eqshard.MeshSpec(fsdp=8), steps=5, dtype=None)
    assert 1e-6 < np.abs(np.subtract(exact, losses[:5])).max() < 0.05  # it did compute in bfloat16
