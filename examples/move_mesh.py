"""Moves a run from one mesh to another half way: the plan is carried over, and the losses go on as if nothing were."""

import equinox as eqx
import jax
import numpy as np
import optax

import eqshard


OPTIM = optax.sgd(0.05, momentum=0.9)


def make_model(key):
    return eqx.nn.MLP(16, 16, 64, 2, key=key)


def make_step(plan, state_plan):
    def step(model, state, x):
        x = eqshard.shard(x, (eqshard.BATCH,), plan.mesh)

        def loss_fn(model):
            return ((jax.vmap(eqshard.use(plan, model))(x) - x) ** 2).mean()

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        updates, state = OPTIM.update(grads, state)
        return eqx.apply_updates(model, updates), state, loss

    return eqshard.filter_jit(step, in_plans=(plan, state_plan), out_plans=(plan, state_plan, None), donate="all")


def fsdp(shape, mesh):
    return eqshard.fsdp_plan(shape, mesh, min_bytes=0)


def train(mesh, planner=fsdp, steps=50, then=None):
    """Trains on `mesh`, and from the middle on on the mesh `then`."""
    model, plan = eqshard.init(make_model, jax.random.key(0), mesh=mesh, planner=planner)
    state_plan = eqshard.plan_like(plan, OPTIM.init)
    state = eqshard.init(state_plan, OPTIM.init, eqx.filter(model, eqx.is_array))
    step = make_step(plan, state_plan)
    losses, rng = [], np.random.default_rng(0)
    for i in range(steps):
        if then is not None and i == steps // 2:
            plan, state_plan = eqshard.convert_plan(plan, then), eqshard.convert_plan(state_plan, then)
            model, state = eqshard.apply(plan, model, donate=True), eqshard.apply(state_plan, state, donate=True)
            step = make_step(plan, state_plan)
        model, state, loss = step(model, state, rng.normal(size=(16, 16)).astype("float32"))
        losses.append(float(loss))
    return losses, model


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    stayed, one = train(eqshard.MeshSpec(fsdp=8))
    moved, other = train(eqshard.MeshSpec(fsdp=8), then=eqshard.MeshSpec(dp=2, fsdp=2))
    print(f"loss {moved[0]:.3f} -> {moved[25]:.3f} on 8 devices -> {moved[-1]:.3f} on 4")
    np.testing.assert_allclose(stayed, moved, rtol=1e-4)
    assert len(one.layers[0].weight.devices()) == 8 and len(other.layers[0].weight.devices()) == 4
