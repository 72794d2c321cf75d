"""A run is killed and goes on on another mesh; it ends where a run that was never killed does."""

import tempfile

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import eqshard
from eqshard.checkpoint import Checkpoints


jax.config.update("jax_num_cpu_devices", 8)
optimizer = optax.adamw(1e-2)


def new_run():
    model = eqx.nn.MLP(8, 8, 64, 2, key=jax.random.key(0))
    moments = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    return {"model": model, "moments": moments, "key": jax.random.key(1)}


def plan_for(state, mesh):
    """Every matrix in the state, of the model or of the optimizer, split over the first axis of the mesh."""
    return eqshard.replicated_plan(state, mesh).at(r"layers\[\d\]\.weight").set(P(mesh.names[0]))


@eqx.filter_jit
def step(state, plan):
    key, batch = jax.random.split(state["key"])
    x = jax.random.normal(batch, (32, 8))

    def loss(model):
        return jnp.mean((jax.vmap(model)(x) - jnp.sin(x)) ** 2)

    value, gradients = eqx.filter_value_and_grad(loss)(state["model"])
    updates, moments = optimizer.update(gradients, state["moments"], eqx.filter(state["model"], eqx.is_inexact_array))
    state = {"model": eqx.apply_updates(state["model"], updates), "moments": moments, "key": key}
    return eqshard.apply(plan, state), value


def train(folder, mesh, until):
    """Three lines make a loop resume: open, resume, save."""
    state = new_run()
    plan = plan_for(state, mesh)
    writer = Checkpoints(folder, every=10, keep=2).open()
    start, state = writer.resume(eqshard.apply(plan, state), plan)
    value = jnp.inf
    for number in range(start, until):
        state, value = step(state, plan)
        writer.save(number + 1, state)
    writer.close()
    print(f"{mesh}: steps {start} to {until}, loss {value:.5f}")
    return start, state


with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
    train(folder, eqshard.MeshSpec(fsdp=2, data=4), 25)  # stops between two checkpoints
    start, resumed = train(folder, eqshard.MeshSpec(fsdp=8), 50)
    assert start == 20 and Checkpoints(folder).steps() == (40, 50)
    _, whole = train(other, eqshard.MeshSpec(fsdp=8), 50)

weights = (resumed["model"].layers[1].weight, whole["model"].layers[1].weight)
assert weights[0].sharding.spec == P("fsdp") and weights[0].addressable_shards[0].data.shape == (8, 64)
assert jnp.allclose(*map(jax.device_get, weights), atol=1e-4)
assert (jax.random.key_data(resumed["key"]) == jax.random.key_data(whole["key"])).all()
print("the run that was stopped ends where the other does")
