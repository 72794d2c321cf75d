"""Saves killed at any moment: the last complete step is whole, and nothing torn is listed."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from checkpoint_trees import thorough

from eqshard.checkpoint import Checkpoints, restore


HERE = pathlib.Path(__file__).parent

# Saves steps for ever, from wherever the last run stopped. Says when a step is complete.
PROGRAM = """
import jax, sys
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
import numpy as np
import eqshard
from jax.sharding import PartitionSpec as P

host = {"w": np.zeros((1024, 512), "f4"), "v": np.zeros((512, 512), "f4"), "step": np.zeros((), "i4")}
plan = eqshard.replicated_plan(host, eqshard.MeshSpec(x=4)).at("'[vw]'").set(P("x"))
writer = eqshard.checkpoint.Checkpoints(sys.argv[1], keep=2).open()
print("ready", flush=True)
start, state = writer.resume(host, plan)
for step in range(start + 1, 10**6):
    filled = {name: np.full(x.shape, step, x.dtype) for name, x in host.items()}
    writer.save(step, eqshard.apply(plan, filled))
    writer.wait()
    print(step, flush=True)
"""

SHAPES = {
    "w": jax.ShapeDtypeStruct((1024, 512), "f4"),
    "v": jax.ShapeDtypeStruct((512, 512), "f4"),
    "step": jax.ShapeDtypeStruct((), "i4"),
}


def killed_run(folder, saves, part):
    """Starts the program, kills it some way into the save after so many; returns the last step it said is complete."""
    env = os.environ | {"PYTHONPATH": str(HERE.parent)}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(folder)], stdout=subprocess.PIPE, text=True, env=env
    )
    step = 0
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        took = 0.3
        for _ in range(saves):
            started = time.monotonic()
            step = int(process.stdout.readline())
            took = time.monotonic() - started
        time.sleep(part * took)
    finally:
        process.send_signal(signal.SIGKILL)
    said = process.communicate()[0].split("\n")[:-1]  # the last line may be cut
    return int(said[-1]) if said else step


def test_killed_saves_lose_nothing(tmp_path):
    rng = random.Random(0)
    checkpoints, promised, leftovers = Checkpoints(tmp_path), 0, 0
    for number in range(30 if thorough() else 3):
        promised = max(promised, killed_run(tmp_path, saves=(1, 0, 3, 2)[number % 4], part=rng.uniform(0, 1.2)))
        leftovers += any("." in path.name for path in tmp_path.iterdir())
        steps = checkpoints.steps()
        assert promised in (0, *steps) or checkpoints.latest() > promised
        for step in steps:  # also those that were about to be removed
            restored = restore(tmp_path, SHAPES, step=step)
            assert all((np.asarray(x) == step).all() for x in restored.values())
        promised = max(promised, checkpoints.latest() or 0)
    print("steps:", checkpoints.steps(), "runs that left something behind:", leftovers)
    assert len(checkpoints.steps()) > 0
    if thorough():
        assert leftovers > 5  # or the kills came at no interesting moment


def test_a_save_that_was_cut_short_can_be_made_again(tmp_path):
    import orbax.checkpoint as ocp

    from eqshard.checkpoint import save

    (tmp_path / "a.orbax-checkpoint-tmp").mkdir()  # where Orbax writes before it renames
    (tmp_path / "a.orbax-checkpoint-tmp" / "rubbish").write_text("x")
    assert ocp.path.step.is_tmp_checkpoint(tmp_path / "a.orbax-checkpoint-tmp")
    save(tmp_path / "a", {"w": jnp.ones(3)})
    assert (restore(tmp_path / "a", {"w": jnp.zeros(3)})["w"] == 1).all()
