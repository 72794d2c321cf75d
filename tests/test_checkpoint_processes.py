"""Checkpoints of several processes: saved by n, restored by m; how much each of them reads."""

import importlib.util
import json
import pathlib
import time

import jax
import numpy as np
import pytest
from checkpoint_trees import thorough
from jax.sharding import PartitionSpec as P
from processes import run_processes


COUNTS = (1, 2, 4)
AXES = {1: {"x": 8}, 2: {"x": 2, "y": 4}, 4: {"x": 4, "y": 2}}


def values():
    """What every process can make for itself."""
    rng = np.random.default_rng(0)
    return {
        "rows": rng.standard_normal((32, 24), dtype="f4"),
        "half": jax.numpy.bfloat16(rng.standard_normal((16, 8))),
        "small": rng.integers(-8, 8, (8, 8)).astype("int8").astype("int4"),
        "odd": rng.standard_normal((7, 3), dtype="f4"),
        "key": jax.random.split(jax.random.key(1), 8),
        "empty": np.zeros((0, 3), "f4"),
        "count": np.int32(7) * np.ones((), "int32"),
    }


def plan_for(tree, n):
    import eqshard

    mesh = eqshard.MeshSpec(AXES[n])
    plan = eqshard.replicated_plan(tree, mesh)
    every = tuple(mesh.names)
    for name, spec in (("rows", P(None, every)), ("half", P(*every)), ("small", P(every)), ("key", P("x"))):
        plan = plan.at(f"['{name}']").set(spec)
    return plan


def save(folder, n):
    import eqshard

    path = f"{folder}/by{n}"
    tree = values()
    placed = eqshard.apply(plan_for(tree, n), tree)
    placed["count"] = jax.numpy.int32(7)  # each process has its own, as counters of optimizers are
    eqshard.checkpoint.save(path, placed, step=1)
    checkpoints = eqshard.checkpoint.Checkpoints(path, keep=1)
    writer = checkpoints.open()
    for step in (2, 3):
        writer.save(step, placed)
    writer.close()
    assert checkpoints.latest() == 3


def restore(folder, saved_by, n):
    import eqshard

    tree = values()
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    plan = plan_for(like, n)
    restored = eqshard.checkpoint.restore(f"{folder}/by{saved_by}", like, plan)
    for name, x in restored.items():
        assert x.sharding.is_equivalent_to(plan.shardings()[f"['{name}']"], x.ndim)
        have, want = x, tree[name]
        if name == "key":
            have, want = jax.random.key_data(x), jax.random.key_data(want)
        want = np.asarray(want)
        assert len(have.addressable_shards) == 8 // n
        for shard in have.addressable_shards:
            part = np.asarray(shard.data)
            assert part.dtype == want.dtype and part.tobytes() == np.ascontiguousarray(want[shard.index]).tobytes()


def save_and_restore(folder, n, saves, restores):
    """What `n` processes do; returns which checkpoints were restored."""
    if saves:
        save(folder, n)
    for saved_by in restores:
        restore(folder, saved_by, n)
    return [(saved_by, n) for saved_by in restores]


def test_saved_by_n_processes_restored_by_m(tmp_path):
    """All pairs, in as few starts of processes as there can be; one process is this one."""
    import eqshard

    folder, done = str(tmp_path), []
    done += save_and_restore(folder, 1, True, [1])
    for n, saves, restores in ((2, True, [1, 2]), (4, True, [1, 2, 4]), (2, False, [4])):
        done += run_processes(save_and_restore, n, 8 // n, args=(folder, n, saves, restores))[-1]
    done += save_and_restore(folder, 1, False, [2, 4])
    assert set(done) == {(n, m) for n in COUNTS for m in COUNTS}
    assert all(eqshard.checkpoint.Checkpoints(f"{folder}/by{n}").steps() == (3,) for n in COUNTS)


def big(mib):
    rng = np.random.default_rng(1)
    return {f"w{i}": rng.standard_normal((1024, 256 * mib), dtype="f4") for i in range(4)}


def bytes_read():
    import tensorstore as ts

    found = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in found for value in metric["values"])


def read_body(paths, mib):
    import eqshard

    tree = big(mib)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    plan = eqshard.replicated_plan(like, eqshard.MeshSpec(x=8)).at("w").set(P("x"))
    ratios = {}
    for name, path in paths.items():
        before, started = bytes_read(), time.perf_counter()
        restored = eqshard.checkpoint.restore(path, like, plan)
        jax.block_until_ready(restored)
        own = sum(s.data.nbytes for x in restored.values() for s in x.addressable_shards)
        assert own == sum(x.nbytes for x in tree.values()) // 2
        ratios[name] = (bytes_read() - before) / own, time.perf_counter() - started
        for key, x in restored.items():
            for shard in x.addressable_shards:
                assert (np.asarray(shard.data) == tree[key][shard.index]).all()
    return ratios


def test_each_process_reads_its_own_part(tmp_path):
    import eqshard

    mib = 64 if thorough() else 4
    tree = big(mib)
    sources = {
        "one device": (eqshard.MeshSpec(x=1), P()),
        "rows over 8": (eqshard.MeshSpec(x=8), P("x")),
        "whole on 8": (eqshard.MeshSpec(x=8), P()),
        "2 x 4 tiles": (eqshard.MeshSpec(x=2, y=4), P("x", "y")),
        "columns over 8": (eqshard.MeshSpec(x=8), P(None, "x")),
    }
    paths = {}
    for name, (mesh, spec) in sources.items():
        paths[name] = str(tmp_path / name)
        plan = eqshard.replicated_plan(tree, mesh).at("w").set(spec)
        eqshard.checkpoint.save(paths[name], eqshard.apply(plan, tree))
    for found in run_processes(read_body, 2, 4, args=(paths, mib)):
        print(json.dumps(found))
        for name, (ratio, _) in found.items():
            # Orbax cuts chunks only along what is split: of columns, each process must read the other's rows too.
            assert 0.5 < ratio <= (2.1 if name == "columns over 8" else 1.1), name


def fail_in_one(folder):
    """The second process cannot write; returns the error of each, and the seconds it took."""
    import eqshard
    from eqshard.checkpoint import _save

    tree = values()
    placed = eqshard.apply(plan_for(tree, 2), tree)
    eqshard.checkpoint.save(f"{folder}/good", placed)
    write, started = _save.write_arrays, time.monotonic()

    def full(*args):
        raise OSError("No space left on device")

    if jax.process_index() == 1:
        _save.write_arrays = full
    errors = []
    for path in (f"{folder}/bad", f"{folder}/good", f"{folder}/steps/good/file/x"):
        try:
            eqshard.checkpoint.save(path, placed)
        except eqshard.ShardingError as error:
            errors.append(str(error))
    _save.write_arrays = write
    eqshard.checkpoint.save(f"{folder}/bad", placed)  # and then it works
    return errors, time.monotonic() - started


def test_one_process_that_cannot_write(tmp_path):
    """All processes raise, soon, and end; nothing is left behind."""
    (tmp_path / "steps").write_text("a file")
    found = run_processes(fail_in_one, 2, 4, args=(str(tmp_path),), timeout=60)
    for errors, seconds in found:
        assert "No space left on device in process 1" in errors[0] and "already" in errors[1]
        assert "in process 0" in errors[2] and seconds < 15
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad", "good", "steps"]


def example():
    """The script `examples/resume_anywhere.py` as a module."""
    path = pathlib.Path(__file__).parent.parent / "examples" / "resume_anywhere.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def resume_body(folder, axes, saves_to, plans):
    """Resumes the run in `folder` by these kinds of plans; saves one of its own from the start, if it is asked to."""
    import eqshard

    script, mesh = example(), eqshard.MeshSpec(axes)
    if saves_to is not None:
        script.train(saves_to, script.own_plan(saves_to, mesh), script.SAVED_AT, saves=True)
    return [script.train(folder, getattr(script, name)(folder, mesh)) for name in plans]


PLANS = ("converted_plan", "own_plan", "indexed_plan")
FOUR, TILES = {"fsdp": 4}, {"data": 2, "fsdp": 4}


@pytest.mark.parametrize(
    ("plans", "meshes"),
    [
        pytest.param(PLANS[:1], ((TILES, 4, True),), id="some"),
        pytest.param(PLANS, ((FOUR, 2, False), (TILES, 4, True)), id="all", marks=pytest.mark.slow),
    ],
)
def test_resume_anywhere(plans, meshes, tmp_path):
    """A run on 8 devices goes on on 4 and on 2 x 4, in one and in two processes, with the losses it would have had."""
    import eqshard

    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as optax needs it
        script, eight = example(), eqshard.MeshSpec(fsdp=8)
        whole = script.train(tmp_path / "empty", script.own_plan("", eight))
        script.train(one, script.own_plan(one, eight), script.SAVED_AT, saves=True)
        found = []
        for axes, each, saves in meshes:
            args = (one, axes, two if saves else None, plans)
            for losses in run_processes(resume_body, 2, each, args=args, timeout=300, checked=False):
                found += losses
        for axes, _, _ in meshes:  # what two processes saved, in one
            found += resume_body(two, axes, None, plans)
    assert len(found) == 3 * len(plans) * len(meshes)
    for losses in found:
        assert list(losses) == list(range(script.SAVED_AT, script.STEPS))
        np.testing.assert_allclose(list(losses.values()), [whole[i] for i in losses], rtol=1e-5)
