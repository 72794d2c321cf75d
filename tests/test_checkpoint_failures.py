"""Saves that fail: a clear error with its cause, nothing left behind, a program that ends; writers side by side."""

import os
import pathlib
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from checkpoint_trees import assert_same

import eqshard
from eqshard.checkpoint import (
    Checkpoints,
    load_safetensors,
    plan_from_index,
    read_plan,
    remove,
    restore,
    save,
    save_safetensors,
)


HERE = pathlib.Path(__file__).parent


def tree(value=1.0):
    return {"w": jnp.full((64, 64), float(value)), "b": [jnp.arange(8), jax.random.key(0)]}


@pytest.fixture
def unchecked():
    """Arguments of any type reach the function."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize(
    "step", [3, np.int64(3), np.uint8(3), jnp.int32(3), np.array(3)], ids=lambda s: type(s).__name__
)
def test_integers_of_any_kind_are_steps(step, tmp_path):
    save(tmp_path, tree(), step=step)
    checkpoints = Checkpoints(tmp_path, every=np.int64(3))
    assert checkpoints.steps() == (3,) and checkpoints.latest() == 3
    assert_same(tree(), restore(tmp_path, tree(), step=step))
    plan = plan_from_index(tmp_path, eqshard.MeshSpec(x=8), step=step)
    assert plan.specs() == read_plan(tmp_path, step=step).specs()
    writer = checkpoints.open()
    assert writer.save(2 * step, tree()) and not writer.save(step + 1, tree())
    writer.close()
    remove(tmp_path, step)
    assert checkpoints.steps() == (6,)


@pytest.mark.parametrize(
    "step", [1.5, 2.0, np.float32(2), jnp.float32(2), "2", True, np.True_, jnp.array(True), -1, 10**18]
)
def test_what_is_not_an_integer_is_not_a_step(step, unchecked, tmp_path):
    save(tmp_path, tree(), step=2)
    calls = (
        lambda: save(tmp_path, tree(), step=step),
        lambda: restore(tmp_path, tree(), step=step),
        lambda: read_plan(tmp_path, step=step),
        lambda: remove(tmp_path, step),
        lambda: Checkpoints(tmp_path).open().save(step, tree()),
    )
    for call in calls:
        with pytest.raises(eqshard.ShardingError, match="is not a step"):
            call()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2"]


def test_counts_are_integers(unchecked, tmp_path):
    for wrong in (1.5, 2.0, True, "2", 0):
        for name in ("every", "keep", "keep_every"):
            with pytest.raises(eqshard.ShardingError, match=rf"`{name}=.*counts from 1"):
                Checkpoints(tmp_path, **{name: wrong})


# Saves to a place that cannot be written, in every way there is; says what was raised, and must then end by itself.
PROGRAM = """
import jax, sys
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
import eqshard
from eqshard.checkpoint import Checkpoints, save, save_safetensors
tree = {"w": jax.random.normal(jax.random.key(0), (1024, 2048))}
where = sys.argv[1]
def background():
    save(where, tree, wait=False).wait()
def steps():
    writer = Checkpoints(where).open()
    writer.save(1, tree)
    writer.save(2, tree)
for call in (lambda: save(where, tree), background, steps, lambda: save_safetensors(where + "_st", tree)):
    try:
        call()
    except eqshard.ShardingError as error:
        assert "cannot save" in str(error) and isinstance(error.__cause__, (OSError, ValueError)), error
        print(type(error.__cause__).__name__, str(error), flush=True)
    else:
        sys.exit("no error")
print("done", flush=True)
"""


def run_program(where):
    started = time.monotonic()
    env = os.environ | {"PYTHONPATH": str(HERE.parent)}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(where)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stdout + done.stderr
    return done.stdout, time.monotonic() - started


def mounted(folder, options):
    """Mounts a file system in memory; skips where that is not allowed."""
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]).returncode:
        pytest.skip("file systems cannot be mounted here")


def test_saves_that_cannot_be_written_end(tmp_path):
    """A path below a file, and a name that is too long: the program ends soon, with nothing left."""
    (tmp_path / "file").write_text("x")
    for where, text in ((tmp_path / "file" / "a", "file"), (tmp_path / ("n" * 260), "name too long")):
        said, seconds = run_program(where)
        assert text in said.lower() and seconds < 40  # of which most is the start of JAX
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("options", "text"), [("size=3m", "No space left"), ("ro", "Read-only file system")])
def test_full_and_read_only_disks(options, text, tmp_path):
    disk = tmp_path / "disk"
    mounted(disk, options)
    try:
        said, seconds = run_program(disk / "a")
        assert said.count(text) == 4 and seconds < 40
        assert [p.name for p in disk.iterdir() if p.name not in ("a", "a_st")] == []
        assert all(not any(p.iterdir()) for p in disk.iterdir())
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_directory_that_may_not_be_read(tmp_path):
    where = tmp_path / "a"
    save(where, tree())
    save_safetensors(tmp_path / "b", {"w": jnp.ones(3)})
    for path in (where, tmp_path / "b"):
        path.chmod(0)
    user = os.geteuid()
    for path in (tmp_path, *(p for p in tmp_path.parents if "pytest-" in str(p))):
        path.chmod(0o755)
    try:
        if user == 0:
            os.seteuid(65534)
        for call in (
            lambda: restore(where, tree()),
            lambda: read_plan(where),
            lambda: plan_from_index(where, eqshard.MeshSpec(x=8)),
            lambda: load_safetensors(tmp_path / "b", {"w": jnp.ones(3)}),
        ):
            with pytest.raises(eqshard.ShardingError, match="Permission denied") as raised:
                call()
            assert isinstance(raised.value.__cause__, PermissionError)
        if user == 0:
            with pytest.raises(eqshard.ShardingError, match=r"cannot save .*Permission denied"):
                save(tmp_path / "c", tree())
    finally:
        os.seteuid(user)
        for path in (where, tmp_path / "b"):
            path.chmod(0o755)
    assert_same(tree(), restore(where, tree()))


def test_very_long_names(tmp_path):
    with pytest.raises(eqshard.ShardingError, match=r"path takes 100004 bytes.*To fix this"):
        save(tmp_path / "a", {"n" * 100_000: jnp.ones(3)})
    assert not any(tmp_path.iterdir())
    long = {"n" * 50_000: jnp.ones(3)}
    save(tmp_path / "a", long)
    assert_same(long, restore(tmp_path / "a", long))


def in_threads(calls):
    """What each call raised, None if nothing; all of them at once."""
    raised = [None] * len(calls)
    start = threading.Barrier(len(calls))

    def run(number):
        start.wait()
        try:
            calls[number]()
        except eqshard.ShardingError as error:
            raised[number] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return raised


def test_threads_that_save_to_different_paths(tmp_path):
    for number in range(5):
        paths = [tmp_path / f"{number}_{i}" for i in range(4)]
        raised = in_threads([lambda i=i, p=p: save(p, tree(i)) for i, p in enumerate(paths)])
        assert raised == [None] * 4
        for i, path in enumerate(paths):
            assert_same(tree(i), restore(path, tree()))


def test_threads_that_save_to_one_path(tmp_path):
    for number in range(5):
        path = tmp_path / str(number)
        raised = in_threads([lambda i=i, path=path: save(path, tree(i)) for i in range(3)])
        (winner,) = (i for i, error in enumerate(raised) if error is None)
        assert all("already" in str(e) or "another save" in str(e) for e in raised if e is not None)
        assert_same(tree(winner), restore(path, tree()))
    assert len(list(tmp_path.iterdir())) == 5


def test_threads_that_save_safetensors_to_one_folder(tmp_path):
    trees = [{f"w{i}": jnp.full(64, float(n)) for i in range(n + 1)} for n in range(4)]
    for _ in range(5):
        raised = in_threads([lambda t=t: save_safetensors(tmp_path, t, max_bytes=300) for t in trees])
        assert raised == [None] * 4
        fits = 0
        for t in trees:
            try:
                assert_same(t, load_safetensors(tmp_path, t))
                fits += 1
            except eqshard.MismatchError:
                continue
        assert fits == 1


WRITER = """
import jax, sys
jax.config.update("jax_platforms", "cpu")
import jax.numpy as jnp, eqshard
sys.stdin.readline()
try:
    eqshard.checkpoint.save(sys.argv[1], {"w": jnp.full((512, 512), float(sys.argv[2]))})
    print("saved")
except eqshard.ShardingError as error:
    assert "already" in str(error) or "another save" in str(error), error
    print("refused")
"""


def test_programs_that_save_to_one_path(tmp_path):
    env = os.environ | {"PYTHONPATH": str(HERE.parent)}
    command = [sys.executable, "-W", "ignore", "-c", WRITER, str(tmp_path / "a")]
    running = [
        subprocess.Popen([*command, str(i)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        for i in range(2)
    ]
    said = [None, None]
    for process in running:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate(timeout=60)[0].strip() for process in running]
    assert sorted(said) == ["refused", "saved"]
    restored = restore(tmp_path / "a", {"w": jnp.zeros((512, 512))})["w"]
    assert (restored == said.index("saved")).all()


@pytest.mark.parametrize("before", [1, 2, 3, 5])
@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_safetensors_replace_an_older_save(before, after, tmp_path, monkeypatch):
    """Whatever an older save left, and wherever the new one is cut off: the old weights or the new, never a mixture."""

    def weights(value, n):
        return {f"w{i}": jnp.full(64, float(value)) for i in range(n)}

    (tmp_path / "config.json").write_text("{}")
    save_safetensors(tmp_path, weights(1, before), max_bytes=300)
    like = {1: weights(1, before), 2: weights(2, after)}
    real, calls = {"replace": os.replace, "unlink": pathlib.Path.unlink}, 0

    def cut(name, limit):
        def call(*args, **options):
            nonlocal calls
            calls += 1
            if calls > limit:
                raise KeyboardInterrupt
            return real[name](*args, **options)

        return call

    for limit in range(30):
        calls = 0
        monkeypatch.setattr(os, "replace", cut("replace", limit))
        monkeypatch.setattr(pathlib.Path, "unlink", cut("unlink", limit))
        try:
            save_safetensors(tmp_path, like[2], max_bytes=300)
            break
        except KeyboardInterrupt:
            monkeypatch.undo()
            found = []
            for value, want in like.items():
                try:
                    got = load_safetensors(tmp_path, want)
                except eqshard.MismatchError:
                    continue
                found += [value] if all((x == value).all() for x in got.values()) else []
            assert len(found) == 1
    monkeypatch.undo()
    assert 0 < limit < 29
    files = save_safetensors(tmp_path, like[2], max_bytes=300)
    assert_same(like[2], load_safetensors(tmp_path, like[2]))
    names = {p.name for p in tmp_path.iterdir() if not p.name.endswith(".tmp")}
    assert names - {"model.safetensors.index.json", "config.json"} == {f.name for f in files} and len(files) == after


def test_one_safetensors_file_over_an_older_save_of_several(tmp_path):
    save_safetensors(tmp_path, {"a": jnp.ones(64), "b": jnp.ones(64)}, max_bytes=300)
    new = {"a": jnp.zeros(64), "b": jnp.zeros(64)}
    (file,) = save_safetensors(tmp_path / "model.safetensors", new)
    assert file == tmp_path / "model.safetensors"
    assert_same(new, load_safetensors(tmp_path, new))
