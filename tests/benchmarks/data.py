"""Batches against the bare JAX calls, in one run, as ratios: `python tests/benchmarks/data.py [rounds]`.

- `shard_batch` against `jax.device_put` with shardings made beforehand; in two processes, against
  `jax.make_array_from_process_local_data`; where integers of 64 bits become narrower, after a check that they fit,
  with the ratio to the call that does not look beside it;
- the second call of `parallel_map` against a jitted `jax.shard_map`;
- a step that is fed by `prefetch` against the same step on a batch that is on the devices: once from a source that
  takes half as long as the step, as reading a disk or the network does, and once from memory, where on a CPU there is
  nothing to hide.

Contenders take turns, and the best of all rounds counts, as other programs only ever add to the time. Fails if a ratio
is over 1.1.
"""

import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P


sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
LIMIT = 1.1
ROUNDS = 2000


def best(rounds, **contenders):
    """The least seconds of each, all taking turns, in either order."""
    seconds = dict.fromkeys(contenders, float("inf"))
    orders = list(contenders.items()), list(contenders.items())[::-1]
    for number in range(rounds):
        for name, fn in orders[number % 2]:
            started = time.perf_counter()
            jax.block_until_ready(fn())
            seconds[name] = min(seconds[name], time.perf_counter() - started)
    return seconds


def batches():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50_000, (64, 1024), dtype="int32")
    yield "4 small arrays", {k: np.ones((16, 8), "float32") for k in "abcd"}
    yield "tokens, 256 KiB", {"tokens": tokens, "weight": np.ones(64, "float32"), "step": np.ones((), "int32")}
    yield "tokens of 64 bits", {"tokens": tokens.astype("int64")}
    yield "images, 36 MiB", {"image": rng.integers(0, 255, (256, 224, 224, 3), dtype="uint8")}


def check_fits(x):
    """What JAX leaves to its caller: to 32 bits it wraps values round, and says nothing."""
    limits = np.iinfo("int32")
    if x.min() < limits.min or x.max() > limits.max:
        raise ValueError("does not fit")


def compare_batches(rounds, local):
    import eqshard

    mesh, spec = eqshard.MeshSpec(data=8), P("data")
    rows = []
    for name, batch in batches():
        leaves, treedef = jax.tree.flatten(batch)
        shardings = [NamedSharding(mesh.build(), P("data") if x.ndim else P()) for x in leaves]
        if local:
            bare = lambda: treedef.unflatten(jax.make_array_from_process_local_data(shardings, leaves))  # noqa: B023
        else:
            bare = lambda: treedef.unflatten(jax.device_put(leaves, shardings))  # noqa: B023
        ours = lambda: eqshard.shard_batch(batch, mesh, spec, local=local)  # noqa: B023
        jax.block_until_ready((bare(), ours()))
        n = rounds if leaves[0].nbytes < 2**22 else max(rounds // 20, 10)
        if leaves[0].itemsize == 8:
            checked = lambda: check_fits(leaves[0]) or bare()  # noqa: B023
            seconds = best(n, eqshard=ours, jax=checked, unchecked=bare)
            ratio = seconds["eqshard"] / seconds.pop("unchecked")
            rows.append((f"shard_batch, {name} ({ratio:.2f}x of it unchecked)", seconds))
        else:
            rows.append((f"shard_batch, {name}", best(n, eqshard=ours, jax=bare)))
    return rows


def in_processes(rounds):
    rows = compare_batches(rounds, local=True)
    return [(f"{name}, 2 processes", seconds) for name, seconds in rows]


def compare_parallel_map(rounds):
    import eqshard

    mesh, spec = eqshard.MeshSpec(data=8), P("data")
    fn = lambda b: {"x": jnp.tanh(b["x"]), "y": b["y"] + b["x"].sum(axis=1)}
    mapped = jax.jit(jax.shard_map(fn, mesh=mesh.build(), in_specs=P("data"), out_specs=P("data")))
    rows = []
    for name, width in (("64 KiB", 256), ("4 MiB", 16384)):
        batch = {"x": np.ones((64, width), "float32"), "y": np.ones(64, "float32")}
        batch = eqshard.shard_batch(batch, mesh, spec)
        ours = lambda: eqshard.parallel_map(fn, batch, mesh, spec)  # noqa: B023
        bare = lambda: mapped(batch)  # noqa: B023
        jax.block_until_ready((ours(), bare()))
        rows.append((f"parallel_map, second call, {name}", best(rounds, eqshard=ours, jax=bare)))
    return rows


def compare_prefetch(steps, rounds=7):
    import eqshard

    mesh = eqshard.MeshSpec(data=8)
    host = [np.random.default_rng(i).random((512, 1024), dtype="float32") for i in range(4)]
    weight = eqshard.replicate(np.ones((1024, 1024), "float32") / 1024, mesh)

    @jax.jit
    def step(weight, x):
        for _ in range(8):
            x = jnp.tanh(x @ weight)
        return x.mean()

    place = lambda x: eqshard.shard_batch(x, mesh, P("data"))
    resident = place(host[0])

    def run(source):
        started = time.perf_counter()
        for x in source:
            float(step(weight, x))  # a loop that looks at its loss waits for each step
        return (time.perf_counter() - started) / steps

    def read(pause):
        for i in range(steps):
            time.sleep(pause)
            yield host[i % 4]

    run([resident])
    rows = []
    for name, part in (("a source of half its time", 0.5), ("memory", 0.0)):
        seconds = dict.fromkeys(("eqshard", "jax", "unhidden"), float("inf"))
        for _ in range(rounds):
            here = run(resident for _ in range(steps))
            found = {
                "eqshard": run(eqshard.prefetch(read(part * here), place)),
                "jax": min(here, run(resident for _ in range(steps))),
                "unhidden": run(map(place, read(part * here))),
            }
            seconds = {k: min(v, seconds[k]) for k, v in found.items()}
        ratio = seconds.pop("unhidden") / seconds["jax"]
        rows.append((f"a step fed from {name} ({ratio:.2f}x without prefetch)", seconds))
    return rows


def main(rounds=ROUNDS):
    from processes import run_processes

    rows = compare_batches(rounds, local=False) + compare_parallel_map(rounds) + compare_prefetch(20)
    rows += run_processes(in_processes, 2, 4, args=(rounds,), timeout=600, checked=False)[0]
    slow = []
    for name, seconds in rows:
        ratio = seconds["eqshard"] / seconds["jax"]
        slow += [name] if ratio > LIMIT else []
        print(f"{name:<70} {seconds['eqshard'] * 1e6:10.0f} us {seconds['jax'] * 1e6:10.0f} us {ratio:6.2f}x")
    if slow:
        sys.exit(f"over {LIMIT}x: {', '.join(slow)}")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    main(*map(int, sys.argv[1:]))
