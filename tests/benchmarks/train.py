"""A training step with plans against the same step with shardings written by hand, in one run on 8 simulated devices.

    python tests/benchmarks/train.py

Prints two ratios: the time of a step, and the time that `filter_jit` with plans takes to start one against
`eqx.filter_jit` (a step of nothing, so that only the start counts). The two sides take turns; the ratio is of medians.
"""

import statistics
import time

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

import eqshard


WIDTH, LAYERS, BATCH = 256, 8, 64


def make(key):
    return [eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, key=k) for k in jax.random.split(key, LAYERS)]


def forward(layers, x):
    for layer in layers:
        x = x + jax.vmap(layer)(x)
    return (x**2).mean()


def descend(layers, grads):
    return jax.tree.map(lambda x, g: x - 1e-3 * g, layers, grads)


def compare(ours, theirs, rounds):
    """The median of the time of `ours` over that of `theirs`, each step fed with the result of the one before."""
    times = {ours: [], theirs: []}
    state = {ours: ours(None), theirs: theirs(None)}
    for _ in range(rounds):
        for run in (ours, theirs):
            start = time.perf_counter()
            state[run] = run(state[run])
            times[run].append(time.perf_counter() - start)
    medians = [statistics.median(times[run][rounds // 10 :]) for run in (ours, theirs)]
    return medians[0] / medians[1], medians


def steps(mesh, rounds=60):
    model, plan = eqshard.init(make, jax.random.key(0), mesh=mesh, planner=eqshard.fsdp_plan)
    arrays, static = eqx.partition(model, eqx.is_array)
    x = eqshard.shard(jnp.ones((BATCH, WIDTH)), (eqshard.BATCH,), mesh)
    built = mesh.build()
    rest, whole = plan.shardings(arrays), NamedSharding(built, P())

    def planned(layers, x):
        grads = eqx.filter_grad(lambda m: forward(eqshard.use(plan, m), x))(layers)
        return eqx.combine(descend(*(eqx.filter(t, eqx.is_array) for t in (layers, grads))), static)

    def by_hand(arrays, x):
        def loss(arrays):
            gathered = jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, whole), arrays)
            return forward(eqx.combine(gathered, static), x)

        return descend(arrays, jax.grad(loss)(arrays))

    planned = eqshard.filter_jit(planned, in_plans=plan, out_plans=plan, donate="none")
    hand = jax.jit(by_hand, in_shardings=(rest, NamedSharding(built, P("fsdp"))), out_shardings=rest)
    ours = lambda m: jax.block_until_ready(planned(model if m is None else m, x))
    theirs = lambda a: jax.block_until_ready(hand(arrays if a is None else a, x))
    return compare(ours, theirs, rounds)


def dispatch(mesh, rounds=400):
    model, plan = eqshard.init(make, jax.random.key(0), mesh=mesh, planner=eqshard.fsdp_plan)
    ours = eqshard.filter_jit(lambda m: m, in_plans=plan, out_plans=plan)
    theirs = eqx.filter_jit(lambda m: eqshard.apply(plan, m))
    return compare(lambda m: ours(model if m is None else m), lambda m: theirs(model if m is None else m), rounds)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = eqshard.MeshSpec(fsdp=8)
    for name, measure in (("step", steps), ("dispatch", dispatch)):
        ratio, (ours, theirs) = measure(mesh)
        print(f"{name:>8}: {ratio:.3f}   ({ours * 1e3:.3f} ms with plans, {theirs * 1e3:.3f} ms without)")
