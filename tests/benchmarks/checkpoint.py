"""Saving and restoring against bare Orbax, in one run: seconds and peak memory, each in a process of its own.

    python tests/benchmarks/checkpoint.py [GiB] [rounds]
    python tests/benchmarks/checkpoint.py leaves [number]

A tree of weights of 64 MiB over 8 simulated devices, split in two ways; by default 2 GiB. In each of 4 rounds a process
of each saves or restores it 4 times, below the working directory; the median counts, for disks have moods. Fails if
eqshard takes 1.1 times as long, or its process 1.1 times as much memory. The time on the processors (`cpu`) is for
machines that do other things too. `leaves`: 50,000 small arrays on one device instead, once; fails if slower.
"""

import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from statistics import median

import jax
import numpy as np
from jax.sharding import PartitionSpec as P


LIMIT = 1.1
SHAPE = (4096, 4096)
TIMES = 4


def weights(gib: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {f"w{i}": rng.standard_normal(SHAPE, dtype="f4") for i in range(int(gib * 16))}


def plan_for(shapes):
    import eqshard

    plan = eqshard.replicated_plan(shapes, eqshard.MeshSpec(x=2, y=4)).at("w").set(P("x", "y"))
    return plan.at("w.*[02468]'").set(P(("x", "y")))


def placed(plan, gib: float):
    import eqshard

    tree = weights(gib)
    for name in tree:  # one at a time: the host's copy goes as the devices' comes
        tree[name] = eqshard.apply(plan.select(f"['{name}']"), tree[name])
    return jax.block_until_ready(tree)


def save_eqshard(path, tree, plan):
    import eqshard

    eqshard.checkpoint.save(path, tree, plan=plan)


def save_orbax(path, tree, plan):
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, ocp.args.PyTreeSave(tree))


def restore_eqshard(path, like, plan):
    import eqshard

    return eqshard.checkpoint.restore(path, like, plan)


def restore_orbax(path, like, plan):
    import orbax.checkpoint as ocp

    shardings = plan.shardings()
    args = {
        name: ocp.ArrayRestoreArgs(sharding=shardings[f"['{name}']"], global_shape=x.shape, dtype=x.dtype)
        for name, x in like.items()
    }
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(path, ocp.args.PyTreeRestore(item=like, restore_args=args))


def measure(what: str, who: str, path: str, gib: float) -> dict[str, list[float]]:
    """A few saves or restores, in this process."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    where = pathlib.Path(path)
    run = globals()[f"{what}_{who}"]
    small = {"w0": np.zeros((8, 8), "f4")}
    save_orbax(where.with_name("warm"), small, None)  # what any use of JAX and Orbax takes
    save_eqshard(where.with_name("warm2"), small, None)
    like = {f"w{i}": jax.ShapeDtypeStruct(SHAPE, "f4") for i in range(int(gib * 16))}
    plan = plan_for(like)
    argument = placed(plan, gib) if what == "save" else like
    seconds, cpu = [], []
    for _ in range(TIMES):
        if what == "save":
            shutil.rmtree(where, ignore_errors=True)
        result = None
        os.sync()  # nobody waits for what another has left to write
        started, used = time.perf_counter(), time.process_time()
        result = jax.block_until_ready(run(where, argument, plan))
        seconds.append(time.perf_counter() - started)
        cpu.append(time.process_time() - used)
    if what == "restore":
        rng = np.random.default_rng(0)
        assert all((np.asarray(x) == rng.standard_normal(SHAPE, dtype="f4")).all() for x in list(result.values())[:2])
    return {"seconds": seconds, "cpu": cpu, "peak": [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]}


def measure_leaves(who: str, path: str, number: int) -> dict[str, float]:
    """One save and one restore of many small arrays, in this process."""
    import eqshard

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    where = pathlib.Path(path)
    save_orbax(where.with_name("warm"), {"w0": np.zeros((8, 8), "f4")}, None)
    save_eqshard(where.with_name("warm2"), {"w0": np.zeros((8, 8), "f4")}, None)
    like = {f"w{i}": jax.ShapeDtypeStruct((8, 4), "f4") for i in range(number)}
    plan = eqshard.replicated_plan(like, eqshard.MeshSpec(x=1))
    tree = jax.block_until_ready(eqshard.apply(plan, {name: np.full((8, 4), i, "f4") for i, name in enumerate(like)}))
    found = {}
    for what, argument in (("save", tree), ("restore", like)):
        started, used = time.perf_counter(), time.process_time()
        result = jax.block_until_ready(globals()[f"{what}_{who}"](where, argument, plan))
        found[what] = time.perf_counter() - started
        found[f"{what} cpu"] = time.process_time() - used
    assert all((np.asarray(result[f"w{i}"]) == i).all() for i in (0, 7, number - 1))
    return found


def main_leaves(number: int) -> None:
    found = {}
    with tempfile.TemporaryDirectory(dir=pathlib.Path.cwd()) as folder:
        for who in ("orbax", "eqshard"):
            for warm in ("warm", "warm2"):
                shutil.rmtree(f"{folder}/{warm}", ignore_errors=True)
            command = [sys.executable, __file__, "leaves", who, f"{folder}/{who}", str(number), "measure"]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found[who] = json.loads(done.stdout.splitlines()[-1])
    for what in found["orbax"]:
        ours, theirs = found["eqshard"][what], found["orbax"][what]
        text = f"eqshard {ours:.2f} s, Orbax {theirs:.2f} s: {ours / theirs:.2f}x"
        print(f"{what:>11} {number} leaves: {text}")
    slower = [what for what in ("save", "restore") if found["eqshard"][what] > found["orbax"][what]]
    if slower:
        sys.exit(f"slower than Orbax: {', '.join(slower)}")


def main(gib: float, rounds: int) -> None:
    found: dict[tuple[str, str], list[dict[str, list[float]]]] = {}
    for number in range(rounds):
        with tempfile.TemporaryDirectory(dir=pathlib.Path.cwd()) as folder:
            for what in ("save", "restore"):
                for who in ("eqshard", "orbax") if number % 2 else ("orbax", "eqshard"):
                    for warm in ("warm", "warm2"):
                        shutil.rmtree(f"{folder}/{warm}", ignore_errors=True)
                    command = [sys.executable, __file__, what, who, f"{folder}/{who}", str(gib)]
                    done = subprocess.run(command, check=True, capture_output=True, text=True)
                    found.setdefault((what, who), []).append(json.loads(done.stdout.splitlines()[-1]))
    failed = []
    for what in ("save", "restore"):
        for measure_of, unit, scale in (("seconds", "s", 1), ("cpu", "s", 1), ("peak", "GiB", 2**30)):
            ours, theirs = (median(x for m in found[what, who] for x in m[measure_of]) for who in ("eqshard", "orbax"))
            ratio = ours / theirs
            text = f"eqshard {ours / scale:.2f} {unit}, Orbax {theirs / scale:.2f} {unit}: {ratio:.2f}x"
            print(f"{what:>8} {gib:g} GiB, {measure_of:>7}: {text}")
            failed += [f"{what} {measure_of}"] if ratio > LIMIT and measure_of != "cpu" else []
    if failed:
        sys.exit(f"more than {LIMIT} times as much: {', '.join(failed)}")


if __name__ == "__main__":
    if len(sys.argv) == 6:
        print(json.dumps(measure_leaves(sys.argv[2], sys.argv[3], int(sys.argv[4]))))
    elif sys.argv[1:2] == ["leaves"]:
        main_leaves(int(sys.argv[2]) if len(sys.argv) > 2 else 50_000)
    elif len(sys.argv) == 5:
        print(json.dumps(measure(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]))))
    else:
        main(float(sys.argv[1]) if len(sys.argv) > 1 else 2, int(sys.argv[2]) if len(sys.argv) > 2 else 4)
