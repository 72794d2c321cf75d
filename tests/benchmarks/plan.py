"""`auto_plan` of a whole tree beside eformer's `auto_partition_spec` of each of its leaves, in turns, in one process.

The peer is not one of this project's dependencies. To compare, run this in an environment of its own:

    python3.11 -m venv peer
    peer/bin/pip install eformer==0.0.101 jax==0.10.2 equinox
    peer/bin/pip install --no-deps -e .
    peer/bin/python tests/benchmarks/plan.py

Without it the peer's columns stay empty, and only the growth is checked. Trees are of numpy arrays that take no memory,
since the peer refuses `jax.ShapeDtypeStruct`s.
"""

import importlib.util
import math
import time

import jax
import numpy as np


jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

from _timing import in_turns, ratio, table  # noqa: E402

import eqshard  # noqa: E402


LEAVES = (100, 1_000, 10_000, 100_000)
ROUNDS = {100: 15, 1_000: 9, 10_000: 5, 100_000: 3}
DIMS = (1, 3, 7, 64, 128, 256, 512, 768, 1024, 3072, 4096, 50257)


def array(shape):
    return np.broadcast_to(np.float32(0), shape)


def mixed(n):
    """Shapes as in models: a few hundred different ones."""
    rng = np.random.default_rng(0)
    kinds = [tuple(int(d) for d in rng.choice(DIMS, rng.integers(1, 5))) for _ in range(300)]
    return tree([kinds[int(i)] for i in rng.integers(0, len(kinds), n)])


def distinct(n):
    """No shape twice."""
    rng = np.random.default_rng(0)
    return tree([(int(rng.integers(1, 4096)), 256 + i) for i in range(n)])


def tree(shapes):
    """Blocks of ten leaves, by name."""
    blocks = [shapes[i : i + 10] for i in range(0, len(shapes), 10)]
    return {"blocks": [{f"w{j}": array(shape) for j, shape in enumerate(block)} for block in blocks]}


def peer():
    """eformer's planner for one array on a jax Mesh; None if it is not installed."""
    if importlib.util.find_spec("eformer") is None:
        return None
    from eformer.escale.partition.auto_spec import auto_partition_spec

    return auto_partition_spec


def compared(theirs):
    """A row of the table for each tree, and our time over the peer's."""
    mesh = eqshard.MeshSpec(dp=2, tp=4)
    built, rows, ratios = mesh.build(), [], []
    for make in (mixed, distinct):
        for n in LEAVES:
            leaves = make(n)
            cases = {"auto_plan": lambda leaves=leaves: eqshard.auto_plan(leaves, mesh) and None}
            if theirs is not None:
                cases["eformer"] = lambda leaves=leaves: jax.tree.map(lambda x: theirs(x, built), leaves) and None
            seconds = in_turns(cases, rounds=ROUNDS[n], best_of=1)
            each = {name: min(times) / n * 1e6 for name, times in seconds.items()}
            ratios.append(ratio(seconds, "auto_plan", "eformer") if theirs else math.nan)
            rows.append([make.__name__, n, each["auto_plan"], each.get("eformer", math.nan), ratios[-1]])
    return rows, ratios


def cpu_seconds(leaves):
    """Of this process alone, so that a busy machine does not look like growth."""
    mesh, best = eqshard.MeshSpec(dp=2, tp=4), math.inf
    for _ in range(5):
        start = time.process_time()
        eqshard.auto_plan(leaves, mesh)
        best = min(best, time.process_time() - start)
    return best


def main():
    theirs = peer()
    rows, ratios = compared(theirs)
    table("Planning", ["shapes", "leaves", "auto_plan, µs a leaf", "eformer, µs a leaf", "time / eformer's"], rows)
    print()
    for make in (mixed, distinct):
        times = cpu_seconds(make(100_000)) / cpu_seconds(make(100))
        print(f"{make.__name__}: 1000 times the leaves take {times:.0f} times the CPU time")
        assert times <= 1000, "time grows faster than the leaves"
    if theirs is None:
        print("eformer is not installed: nothing to compare with (see the top of this file).")
    else:
        assert max(ratios) <= 1, f"slower than the peer: {ratios}"


if __name__ == "__main__":
    main()
