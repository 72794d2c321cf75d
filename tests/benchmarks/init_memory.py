"""Peak resident memory of `init`, over what the process had before, as a multiple of the model's bytes.

    python tests/benchmarks/init_memory.py [init | plain] [GiB]

`plain` makes the model first, under jit, and then moves it. The model is a list of weights of 16 MiB over 8 simulated
devices. Without arguments: both, for 2 GiB.
"""

import resource
import subprocess
import sys

import equinox as eqx
import jax

import eqshard


WIDTH = 2048


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(mode: str, gib: float) -> float:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    count = int(gib * 2**30) // (4 * WIDTH**2)

    def make(key, width=WIDTH, count=count):
        return [eqx.nn.Linear(width, width, use_bias=False, key=k) for k in jax.random.split(key, count)]

    mesh, key = eqshard.MeshSpec(fsdp=8), jax.random.key(0)
    eqshard.init(lambda key: make(key, 8, 2), key, mesh=mesh)  # what any use of JAX takes
    plan = eqshard.fsdp_plan(eqx.filter_eval_shape(make, key), mesh)
    before = peak()
    model = eqshard.init(plan, make, key) if mode == "init" else eqshard.apply(plan, eqx.filter_jit(make)(key))
    jax.block_until_ready([layer.weight for layer in model])
    return (peak() - before) / sum(leaf.nbytes for leaf in plan)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(f"{sys.argv[1]:>5} of {sys.argv[2]} GiB: {measure(sys.argv[1], float(sys.argv[2])):.3f}")
    else:
        for mode in ("init", "plain"):
            subprocess.run([sys.executable, __file__, mode, "2"], check=True)
