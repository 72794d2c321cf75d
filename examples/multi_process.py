"""Two processes train one model: `python multi_process.py` starts both on this machine, over loopback.

On a cluster, let its launcher start the same script once on each host: `srun python multi_process.py --cluster`.
"""

import socket
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import eqshard


def batches(steps: int, rows: int):
    """This process's rows of each batch: no process reads what another one does."""
    rng = np.random.default_rng(jax.process_index())
    for _ in range(steps):
        x = rng.normal(size=(rows, 16)).astype("float32")
        yield {"x": x, "y": np.tanh(x.sum(axis=1, keepdims=True) / 4)}


def train(steps: int = 60) -> list[float]:
    # `data` crosses processes, `fsdp` stays inside one
    mesh = eqshard.MeshSpec(data=jax.process_count(), fsdp=jax.local_device_count(), dcn="data")
    make = lambda key: eqx.nn.MLP(16, 1, 64, 2, key=key)
    plan = eqshard.fsdp_plan(eqx.filter_eval_shape(make, jax.random.key(0)), mesh, min_bytes=0)
    eqshard.check_processes(plan)  # else: an error in every process, that says who differs
    model = eqshard.init(plan, make, jax.random.key(0))  # no process ever holds all of it

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model):
        loss = lambda m: jnp.mean((jax.vmap(m)(batch["x"]) - batch["y"]) ** 2)
        value, grads = eqx.filter_value_and_grad(loss)(model)
        model = eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))
        return eqshard.apply(plan, model), value

    place = lambda batch: eqshard.shard_batch(batch, mesh, P(("data", "fsdp")), local=True)
    losses = []
    for batch in eqshard.prefetch(batches(steps, rows=64), place):
        model, loss = step(batch, model)
        losses.append(float(loss))
    whole = eqshard.gather(model, to=0)  # in process 0 numpy arrays, elsewhere their shapes
    if jax.process_index() == 0:
        print(f"{jax.process_count()} processes, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(eqx.filter(whole, eqshard.is_array)))
    return losses


def main(args: list[str]) -> None:
    if args == ["--cluster"]:
        jax.distributed.initialize(heartbeat_timeout_seconds=30)
    else:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 4)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(args[0], 2, int(args[1]), heartbeat_timeout_seconds=30)
    losses = train()
    assert np.mean(losses[-5:]) < 0.5 * losses[0], losses


if __name__ == "__main__":
    if sys.argv[1:]:
        main(sys.argv[1:])
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        both = [subprocess.Popen([sys.executable, __file__, address, str(i)]) for i in range(2)]
        codes = [process.wait(timeout=240) for process in both]
        assert codes == [0, 0], codes
