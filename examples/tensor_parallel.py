"""Tensor parallelism for a transformer made of `eqx.nn` layers: rules that know them, and no change of the model."""

import equinox as eqx
import jax
import numpy as np
import optax

import eqshard


class Classifier(eqx.Module):
    embed: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    head: eqx.nn.Linear

    def __init__(self, key, dim=32):
        keys = jax.random.split(key, 4)
        self.embed = eqx.nn.Embedding(32, dim, key=keys[0])
        self.attention = eqx.nn.MultiheadAttention(8, dim, key=keys[1])
        self.mlp = eqx.nn.MLP(dim, dim, 4 * dim, 1, key=keys[2])
        self.head = eqx.nn.Linear(dim, 4, key=keys[3])

    def __call__(self, tokens):
        x = jax.vmap(self.embed)(tokens)
        x = x + self.attention(x, x, x)
        return self.head((x + jax.vmap(self.mlp)(x)).mean(axis=0))


def tensor_parallel(shape, mesh):
    return eqshard.rule_plan(shape, mesh, eqshard.tp_rules(shape), strict=False)


def loss_fn(model, tokens, labels):
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(tokens), labels).mean()


def train(mesh, planner=tensor_parallel, steps=50):
    model, plan = eqshard.init(Classifier, jax.random.key(0), mesh=mesh, planner=planner)
    optim = optax.sgd(0.1, momentum=0.9)
    state_plan = eqshard.plan_like(plan, optim.init)
    state = eqshard.init(state_plan, optim.init, eqx.filter(model, eqx.is_array))

    def step(model, state, batch):
        batch = eqshard.shard(batch, (eqshard.BATCH,), mesh)
        loss, grads = eqx.filter_value_and_grad(lambda m: loss_fn(eqshard.use(plan, m), *batch))(model)
        updates, state = optim.update(grads, state)
        return eqx.apply_updates(model, updates), state, loss

    step = eqshard.filter_jit(step, in_plans=(plan, state_plan), out_plans=(plan, state_plan, None), donate="all")
    losses, rng = [], np.random.default_rng(0)
    for _ in range(steps):  # which quarter of the alphabet is the most frequent?
        labels = rng.integers(4, size=16).astype("int32")
        tokens = np.where(rng.random((16, 12)) < 0.5, rng.integers(32, size=(16, 12)), 8 * labels[:, None] + 3)
        model, state, loss = step(model, state, (tokens.astype("int32"), labels))
        losses.append(float(loss))
    return losses, model


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    losses, model = train(eqshard.MeshSpec(tp=8))
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    print(eqshard.specs_of(model.attention))
    assert losses[-1] < 0.5
    assert model.attention.query_proj.weight.addressable_shards[0].data.shape == (4, 32)  # one head a device
    one, _ = train(eqshard.MeshSpec(tp=1))
    np.testing.assert_allclose(losses, one, rtol=2e-3, atol=1e-4)  # as on one device
