"""Resumes a run of 8 devices on 4, and on 2 x 4, by three kinds of plans: the losses are the same."""

import tempfile

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqshard
from eqshard import checkpoint


STEPS, SAVED_AT = 12, 6
OPTIMIZER = optax.adamw(1e-2)


def new_run():
    model = eqx.nn.MLP(8, 8, 64, 2, key=jax.random.key(0))
    moments = OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))
    return {"model": model, "moments": moments, "key": jax.random.key(1)}


@eqx.filter_jit
def step(state, plan):
    key, batch = jax.random.split(state["key"])
    x = eqshard.shard(jax.random.normal(batch, (32, 8)), (eqshard.BATCH,), plan.mesh)
    model = state["model"]

    def loss(model):
        return jnp.mean((jax.vmap(eqshard.use(plan.select("['model']"), model))(x) - jnp.sin(x)) ** 2)

    value, gradients = eqx.filter_value_and_grad(loss)(model)
    updates, moments = OPTIMIZER.update(gradients, state["moments"], eqx.filter(model, eqx.is_inexact_array))
    state = {"model": eqx.apply_updates(model, updates), "moments": moments, "key": key}
    return eqshard.apply(plan, state), value


def own_plan(folder, mesh):
    """The new mesh's own plan: FSDP for the whole state."""
    return eqshard.fsdp_plan(eqx.filter_eval_shape(new_run), mesh, min_bytes=0)


def converted_plan(folder, mesh):
    return eqshard.convert_plan(checkpoint.read_plan(folder), mesh)


def indexed_plan(folder, mesh):
    return checkpoint.plan_from_index(folder, mesh, default="saved", strict=False)


def train(folder, plan, until=STEPS, saves=False):
    """Trains from the last checkpoint in `folder`, or from the start; returns the losses by step."""
    writer = checkpoint.Checkpoints(folder, every=SAVED_AT).open()
    start, state = writer.resume(eqshard.init(plan, new_run), plan)
    losses = {}
    for number in range(start, until):
        state, losses[number] = step(state, plan)
        if saves:
            writer.save(number + 1, state)
    writer.close()
    return {number: float(np.asarray(loss)) for number, loss in losses.items()}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    eight = eqshard.MeshSpec(fsdp=8)
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as folder:
        uninterrupted = train(empty, own_plan(empty, eight))
        train(folder, own_plan(folder, eight), SAVED_AT, saves=True)
        for mesh in (eqshard.MeshSpec(fsdp=4), eqshard.MeshSpec(data=2, fsdp=4)):
            for make_plan in (own_plan, converted_plan, indexed_plan):
                losses = train(folder, make_plan(folder, mesh))
                assert list(losses) == list(range(SAVED_AT, STEPS))
                np.testing.assert_allclose(list(losses.values()), [uninterrupted[i] for i in losses], rtol=1e-5)
                print(f"{mesh}, {make_plan.__name__}: loss {losses[STEPS - 1]:.6f}, as without interruption")
