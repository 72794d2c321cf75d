"""The steps of a run: which are listed, which are kept, how a run goes on."""

import importlib
import subprocess
import sys

import jax.numpy as jnp
import pytest
from checkpoint_trees import assert_same, spread

import eqshard
from eqshard.checkpoint import _save, Checkpoints, remove, restore, save


def tree(step):
    return {"w": jnp.full((8, 8), float(step)), "step": jnp.int32(step)}


def run(checkpoints, until, plan=None):
    """Trains from where the last run stopped; returns where that was."""
    writer = checkpoints.open()
    start, state = writer.resume(tree(0), plan)
    for step in range(start, until):
        state = {"w": state["w"] + 1, "step": state["step"] + 1}
        writer.save(step + 1, state)
    writer.close()
    return start


def test_a_run_goes_on_where_it_stopped(m24, tmp_path):
    checkpoints = Checkpoints(tmp_path, every=5, keep=2)
    assert checkpoints.steps() == () and checkpoints.latest() is None
    assert run(checkpoints, 12) == 0 and checkpoints.steps() == (5, 10)
    plan = spread(tree(0), m24)
    assert run(checkpoints, 21, plan) == 10 and checkpoints.steps() == (15, 20)
    assert_same(tree(20), restore(tmp_path, tree(0), plan), plan)
    assert_same(tree(15), restore(tmp_path, tree(0), step=15))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["15", "20"]


def test_retention(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2, keep_every=4)
    writer = checkpoints.open()
    assert [writer.save(step, tree(step)) for step in range(10)] == [True] * 10
    writer.close()
    assert checkpoints.steps() == (0, 4, 8, 9)
    writer = Checkpoints(tmp_path, every=100).open()
    assert not writer.save(10, tree(10)) and writer.save(11, tree(11), force=True)
    writer.close()
    assert checkpoints.steps() == (0, 4, 8, 9, 11)


def test_a_failure_in_the_background_is_raised(tmp_path, monkeypatch):
    writer = Checkpoints(tmp_path).open()
    writer.save(1, tree(1))
    writer.wait()
    with pytest.raises(eqshard.ShardingError, match="never overwritten"):
        writer.save(1, tree(1))

    def fails(*args):
        raise OSError("full")

    monkeypatch.setattr(_save, "write_arrays", fails)
    writer.save(2, tree(2))
    with pytest.raises(eqshard.ShardingError, match=r"cannot save .*2: full") as raised:
        writer.save(3, tree(3))
    assert isinstance(raised.value.__cause__, OSError)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1"]
    monkeypatch.undo()
    writer.save(3, tree(3))  # a writer goes on after a failure
    writer.close()
    assert Checkpoints(tmp_path).steps() == (1, 3)


def test_leftovers_are_not_listed_and_are_removed(tmp_path):
    save(tmp_path, tree(1), step=1)
    for name in ("2.orbax-checkpoint-tmp", "2.orbax-checkpoint-tmp-123", "0.removed", "3", "notes", "4.5", "05"):
        (tmp_path / name).mkdir()
    (tmp_path / "7").write_text("a file")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.steps() == (1,)
    checkpoints.open()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["05", "1", "3", "4.5", "7", "notes"]


def test_removing_takes_the_name_first(tmp_path, monkeypatch):
    import shutil

    save(tmp_path, tree(1), step=1)
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **more: None)  # as if killed before
    remove(tmp_path, 1)
    assert Checkpoints(tmp_path).steps() == () and (tmp_path / "1.removed").exists()
    with pytest.raises(eqshard.ShardingError, match="no complete checkpoint of step 1"):
        remove(tmp_path, 1)


def test_the_description_is_a_value(tmp_path):
    assert Checkpoints(tmp_path, keep=3) == Checkpoints(str(tmp_path), keep=3) != Checkpoints(tmp_path)
    assert hash(Checkpoints(tmp_path)) == hash(Checkpoints(tmp_path))
    for wrong in ({"keep": 0}, {"every": 0}, {"keep_every": -1}):
        with pytest.raises(eqshard.ShardingError, match="counts from 1"):
            Checkpoints(tmp_path, **wrong)
    for step in (-1, 10**18, True):
        with pytest.raises(eqshard.ShardingError, match="not a step"):
            save(tmp_path, tree(0), step=step)


def test_importing_eqshard_imports_none_of_the_libraries():
    code = (
        "import eqshard, sys; "
        "assert not {m.split('.')[0] for m in sys.modules} & {'orbax', 'tensorstore', 'safetensors', 'rich', 'tqdm'}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["tensorstore", "safetensors.numpy"])
@pytest.mark.parametrize("saves", [True, False])
def test_without_the_library_it_says_what_to_install(name, saves, tmp_path, monkeypatch):
    save(tmp_path / "a", tree(0))
    real = importlib.import_module

    def missing(wanted):
        if wanted == name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])
        return real(wanted)

    monkeypatch.setattr(importlib, "import_module", missing)
    calls = {
        "tensorstore": lambda: save(tmp_path / "b", tree(0)) if saves else restore(tmp_path / "a", tree(0)),
        "safetensors.numpy": lambda: eqshard.checkpoint.save_safetensors(tmp_path / "c", tree(0)),
    }
    with pytest.raises(eqshard.ShardingError, match=r"pip install 'eqshard\[checkpoint\]'"):
        calls[name]()
