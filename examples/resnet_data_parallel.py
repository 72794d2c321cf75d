"""A ResNet with batch normalisation over a data axis: statistics are of the whole batch, not of a device's part."""

import equinox as eqx
import jax
import numpy as np
import optax

import eqshard


class Block(eqx.Module):
    conv1: eqx.nn.Conv2d
    conv2: eqx.nn.Conv2d
    norm1: eqx.nn.BatchNorm
    norm2: eqx.nn.BatchNorm

    def __init__(self, channels, key):
        k1, k2 = jax.random.split(key)
        self.conv1, self.conv2 = (eqx.nn.Conv2d(channels, channels, 3, padding=1, key=k) for k in (k1, k2))
        self.norm1, self.norm2 = (eqx.nn.BatchNorm(channels, "batch", mode="batch") for _ in range(2))

    def __call__(self, x, state):
        h, state = self.norm1(self.conv1(x), state)
        h, state = self.norm2(self.conv2(jax.nn.relu(h)), state)
        return jax.nn.relu(x + h), state


class ResNet(eqx.Module):
    stem: eqx.nn.Conv2d
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, key, channels=8):
        keys = jax.random.split(key, 4)
        self.stem = eqx.nn.Conv2d(1, channels, 3, stride=2, padding=1, key=keys[0])
        self.blocks = [Block(channels, k) for k in keys[1:3]]
        self.head = eqx.nn.Linear(channels, 2, key=keys[3])

    def __call__(self, x, state):
        x = self.stem(x)
        for block in self.blocks:
            x, state = block(x, state)
        return self.head(x.mean(axis=(1, 2))), state


def loss_fn(model, norms, x, labels):
    logits, norms = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, norms)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), norms


def train(mesh, planner=eqshard.replicated_plan, steps=50):
    make = eqx.nn.make_with_state(ResNet)
    (model, norms), plan = eqshard.init(make, jax.random.key(0), mesh=mesh, planner=planner)
    plans, optim = (plan.select("[0]"), plan.select("[1]")), optax.sgd(0.1)

    def step(model, norms, x, labels):
        x, labels = eqshard.shard((x, labels), (eqshard.BATCH,), mesh)
        grad = eqx.filter_value_and_grad(lambda m: loss_fn(eqshard.use(plans[0], m), norms, x, labels), has_aux=True)
        (loss, norms), grads = grad(model)
        updates, _ = optim.update(grads, optim.init(eqx.filter(model, eqx.is_array)))
        return eqx.apply_updates(model, updates), norms, loss

    step = eqshard.filter_jit(step, in_plans=plans, out_plans=(*plans, None), donate="all")
    losses, rng = [], np.random.default_rng(0)
    for _ in range(steps):  # is the stripe horizontal or vertical?
        labels = rng.integers(2, size=16).astype("int32")
        images = rng.normal(size=(16, 1, 8, 8)).astype("float32")
        images[np.arange(16), 0, 3] += np.where(labels, 3.0, 0.0)[:, None].astype("float32")
        model, norms, loss = step(model, norms, images, labels)
        losses.append(float(loss))
    return losses, model


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    losses, model = train(eqshard.MeshSpec(dp=8))
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    assert losses[-1] < losses[0] / 2
