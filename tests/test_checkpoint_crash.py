"""Saves killed at any moment: the last complete step is whole, and nothing torn is listed."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from processes import run_outcomes

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


def check_steps(folder, promised):
    """Every step that is listed is whole, and no step that was said to be complete is lost; returns the latest."""
    checkpoints = Checkpoints(folder)
    steps = checkpoints.steps()
    assert promised in (0, *steps) or checkpoints.latest() > promised
    for step in steps:  # also those that were about to be removed
        restored = restore(folder, SHAPES, step=step)
        assert all((np.asarray(x) == step).all() for x in restored.values())
    return max(promised, checkpoints.latest() or 0)


@pytest.mark.parametrize("kills", [pytest.param(3, id="some"), pytest.param(30, id="many", marks=pytest.mark.slow)])
def test_killed_saves_lose_nothing(kills, tmp_path):
    rng = random.Random(0)
    promised, leftovers = 0, 0
    for number in range(kills):
        promised = max(promised, killed_run(tmp_path, saves=(1, 0, 3, 2)[number % 4], part=rng.uniform(0, 1.2)))
        leftovers += any("." in path.name for path in tmp_path.iterdir())
        promised = check_steps(tmp_path, promised)
    print("steps:", Checkpoints(tmp_path).steps(), "runs that left something behind:", leftovers)
    assert len(Checkpoints(tmp_path).steps()) > 0
    if kills > 10:
        assert leftovers > 5  # or the kills came at no interesting moment


def save_until_killed(folder, seed):
    """Saves steps with another process; one of the two is killed at a random moment, from within."""
    import eqshard

    host = {"w": np.zeros((1024, 512), "f4"), "v": np.zeros((512, 512), "f4"), "step": np.zeros((), "i4")}
    plan = eqshard.replicated_plan(host, eqshard.MeshSpec(x=4)).at("'[vw]'").set(P("x"))
    writer = eqshard.checkpoint.Checkpoints(folder, keep=2).open()
    start, _ = writer.resume(host, plan)
    rng = random.Random(seed)
    after, victim = rng.randrange(1, 3), rng.randrange(2)
    for step in range(start + 1, start + 10):
        if step == start + after and jax.process_index() == victim:
            threading.Timer(rng.uniform(0, 0.1), os.kill, (os.getpid(), signal.SIGKILL)).start()
        filled = {name: np.full(x.shape, step, x.dtype) for name, x in host.items()}
        writer.save(step, eqshard.apply(plan, filled))
        writer.wait()
        (pathlib.Path(folder) / f"said_{jax.process_index()}").write_text(str(step))


@pytest.mark.parametrize("kills", [pytest.param(1, id="some"), pytest.param(30, id="many", marks=pytest.mark.slow)])
def test_killed_saves_of_two_processes_lose_nothing(kills, tmp_path):
    promised = 0
    for number in range(kills):
        outcomes = run_outcomes(save_until_killed, 2, 2, args=(str(tmp_path), number), together=True, checked=False)
        assert any(o.returncode == -signal.SIGKILL for o in outcomes), "\n".join(map(str, outcomes))
        said = [file.read_text() for file in tmp_path.glob("said_*")]
        promised = check_steps(tmp_path, max([promised, *(int(text) for text in said if text)]))
    print("steps:", Checkpoints(tmp_path).steps())


def test_a_save_that_was_cut_short_can_be_made_again(tmp_path):
    import orbax.checkpoint as ocp

    from eqshard.checkpoint import save

    (tmp_path / "a.orbax-checkpoint-tmp").mkdir()  # where Orbax writes before it renames
    (tmp_path / "a.orbax-checkpoint-tmp" / "rubbish").write_text("x")
    assert ocp.path.step.is_tmp_checkpoint(tmp_path / "a.orbax-checkpoint-tmp")
    save(tmp_path / "a", {"w": jnp.ones(3)})
    assert (restore(tmp_path / "a", {"w": jnp.zeros(3)})["w"] == 1).all()
