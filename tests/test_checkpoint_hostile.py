"""Files that are damaged or made to harm: clear errors, nothing outside is touched, memory does not grow."""

import json
import os
import pathlib
import random
import resource
import shutil

import jax
import jax.numpy as jnp
import pytest
from checkpoint_trees import assert_same, thorough
from jax.sharding import PartitionSpec as P
from test_checkpoint_formats import write_eformer, write_orbax

import eqshard
from eqshard.checkpoint import load_safetensors, plan_from_index, restore, save, save_safetensors


MESH = eqshard.MeshSpec(x=8)


def tree():
    return {"w": jnp.arange(64.0).reshape(8, 8), "b": [jnp.ones(4, "bfloat16")], "k": jax.random.key(0)}


def plain():
    return {"w": jnp.arange(64.0).reshape(8, 8), "b": [jnp.ones(4, "bfloat16")]}


WRITERS = {
    "eqshard": lambda path: save(path, tree()),
    "orbax": lambda path: write_orbax(path, tree()),
    "orbax zarr3": lambda path: write_orbax(path, tree(), use_ocdbt=False, use_zarr3=True),
    "eformer": lambda path: (path.mkdir(), write_eformer(path, {"w": plain()["w"], "b/0": plain()["b"][0]}, "m")),
    "safetensors": lambda path: save_safetensors(path, plain(), max_bytes=100),
}


def read_all(path, like):
    """Everything that reads a checkpoint."""
    plan_from_index(path, MESH, default="saved", strict=False)
    return restore(path, like)


METADATA = ("plan.json", "_METADATA", "_sharding", "process_0", "manifest.ocdbt", ".zarray", "zarr.json")


def files_of(path):
    """The index and metadata files of a checkpoint that a reader opens."""
    found = [p for p in path.rglob("*") if p.is_file() and p.parent.name != "ocdbt.process_0"]
    return sorted(p for p in found if p.name in METADATA or p.name.endswith(("index.json", ".safetensors")))


def mutate(rng, data):
    """A file with something changed: bytes, numbers, words, length, structure."""
    kind = rng.randrange(9)
    if kind == 0:
        return data[: rng.randrange(len(data) + 1)]
    if kind == 1:
        return b"" if rng.random() < 0.2 else bytes(rng.randrange(256) for _ in range(rng.randrange(200)))
    if kind in (2, 3) and data:
        out = bytearray(data)
        for _ in range(rng.choice((1, 2, 8))):
            out[rng.randrange(len(out))] = rng.randrange(256)
        return bytes(out)
    if kind == 4:
        at = rng.randrange(len(data) + 1)
        return data[:at] + data[rng.randrange(len(data) + 1) :]
    try:
        text = json.loads(data)
    except ValueError:
        at = rng.randrange(len(data) + 1)
        return data[:at] + rng.choice(NASTY_BYTES) + data[at:]
    return json.dumps(_change(rng, text)).encode()


NASTY_BYTES = (b"\0" * 8, b"\xff" * 8, b"../../../etc/passwd", b'"', b"{" * 5000, b"9" * 400)
NASTY = (
    None, True, 0, -1, 2**31, 2**63, 10**30, 1.5, "", "..", "../../x", "/etc/passwd", "a/../../b", "\0", "x" * 5000, [],
    {}, [[]], {"a": 1}, [2**40, 2**40], [-1], "float99", "<f4", "|O", "object", "int32", "key<fry>", "zarr3", False,
)  # fmt: skip


def _change(rng, value):
    """A JSON value with one thing in it replaced, dropped or added."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        out = dict(value)
        choice = rng.random()
        if choice < 0.7:
            out[key] = _change(rng, value[key])
        elif choice < 0.85:
            del out[key]
        else:
            out[str(rng.choice(NASTY))] = out.pop(key)
        return out
    if isinstance(value, list) and value and rng.random() < 0.85:
        out = list(value)
        at = rng.randrange(len(out))
        if rng.random() < 0.7:
            out[at] = _change(rng, out[at])
        else:
            out[at : at + 1] = [] if rng.random() < 0.5 else [out[at], out[at]]
        return out
    return rng.choice(NASTY)


@pytest.mark.parametrize("kind", WRITERS)
def test_mutated_files(kind, tmp_path):
    """Only a ShardingError, or a checkpoint as it was; never a crash, a hang, or a file outside."""
    good, bad = tmp_path / "good", tmp_path / "box" / "bad"
    WRITERS[kind](good)
    like = tree() if kind in ("eqshard", "orbax", "orbax zarr3") else plain()
    read_all(good, like)
    shutil.copytree(good, bad)
    files = [p.relative_to(good) for p in files_of(good)]
    assert len(files) >= 2
    before = sorted(p for p in tmp_path.rglob("*"))
    rng, refused = random.Random(kind), 0
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rounds = 400 if thorough() else 40
    for _ in range(rounds):
        file = rng.choice(files)
        (bad / file).write_bytes(mutate(rng, (good / file).read_bytes()))
        try:
            restored = read_all(bad, like)
            assert jax.tree.structure(restored) == jax.tree.structure(like)
        except eqshard.ShardingError as error:
            refused += 1
            assert len(str(error)) < 5000
        (bad / file).write_bytes((good / file).read_bytes())
    assert sorted(p for p in tmp_path.rglob("*")) == before
    assert refused > rounds / 8
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 200_000  # kB


def edit(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("name", ["../outside", "/etc", "m/../../outside", "", ".", "m//w", "a\\b", "x" * 300, "m/w\0"])
def test_an_index_that_climbs_out(name, tmp_path):
    (tmp_path / "outside").mkdir()
    write_eformer(tmp_path / "outside", {"w": jnp.ones(3)})
    box = tmp_path / "box"
    box.mkdir()
    write_eformer(box, {"w": jnp.ones(3)})
    edit(box / "tensorstore_index.json", lambda data: data["arrays"][0].update(path=name))
    with pytest.raises(eqshard.FormatError, match=r"inside the checkpoint|too long"):
        plan_from_index(box, MESH)


@pytest.mark.parametrize("key", ["../../outside", "/etc", "..", ""])
def test_orbax_names_that_climb_out(key, tmp_path):
    write_orbax(tmp_path / "a", {"w": jnp.ones(3)}, use_ocdbt=False)
    edit(tmp_path / "a" / "_METADATA", lambda data: data["tree_metadata"]["('w',)"]["key_metadata"][0].update(key=key))
    with pytest.raises(eqshard.FormatError, match="inside the checkpoint"):
        plan_from_index(tmp_path / "a", MESH)


def test_links_that_lead_out_or_in_circles(tmp_path):
    (tmp_path / "secret").mkdir()
    write_eformer(tmp_path / "secret", {"w": jnp.ones(4)})
    write = {
        "eqshard": lambda p: save(p, plain()),
        "eformer": lambda p: (p.mkdir(), write_eformer(p, {"w": jnp.ones(4)})),
    }
    for kind, writer in write.items():
        box = tmp_path / kind
        writer(box)
        for target in (tmp_path / "secret", "/etc"):
            (box / "more").symlink_to(target)
            with pytest.raises(eqshard.FormatError, match="leads out of the checkpoint"):
                plan_from_index(box, MESH)
            (box / "more").unlink()
        (box / "inner").symlink_to(box / "plan")  # a link to inside does no harm
        plan_from_index(box, MESH)
        circle = next(p for p in files_of(box) if p.name in ("plan.json", "tensorstore_index.json"))
        circle.unlink()
        circle.symlink_to(circle)
        with pytest.raises(eqshard.ShardingError):
            plan_from_index(box, MESH)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for read in (
        lambda p: plan_from_index(p, MESH),
        lambda p: restore(p, plain()),
        lambda p: load_safetensors(p, plain()),
    ):
        with pytest.raises(eqshard.ShardingError):
            read(tmp_path / "loop")
    with pytest.raises(eqshard.ShardingError):
        save(tmp_path / "loop", plain())


def test_absurd_shapes_and_chunks(tmp_path):
    write_eformer(tmp_path, {"w": jnp.ones((4, 2))})
    edit(tmp_path / "tensorstore_index.json", lambda data: data["arrays"][0].update(shape=[2**40, 2**40]))
    assert plan_from_index(tmp_path, MESH, default=P("x"))["['w']"].shape == (2**40, 2**40)
    with pytest.raises(eqshard.FormatError, match="the array itself is"):
        restore(tmp_path, {"w": jax.ShapeDtypeStruct((2**40, 2**40), "f4")})
    for shape in ([-1], [1.5], [2**64], "8", [True], [[8]]):
        edit(tmp_path / "tensorstore_index.json", lambda data, shape=shape: data["arrays"][0].update(shape=shape))
        with pytest.raises(eqshard.FormatError):
            plan_from_index(tmp_path, MESH)
    edit(tmp_path / "tensorstore_index.json", lambda data: data["arrays"][0].update(shape=[4, 2]))
    edit(tmp_path / "w" / ".zarray", lambda data: data.update(chunks=[2**20, 2**20]))
    with pytest.raises(eqshard.FormatError, match="made to exhaust memory"):
        restore(tmp_path, {"w": jnp.ones((4, 2))})


@pytest.mark.parametrize("dtype", ["float99", "object", "<f4", "|S8", "f4, i4", "key<fry>", 3, None])
def test_wrong_dtypes(dtype, tmp_path):
    write_eformer(tmp_path, {"w": jnp.ones((4, 2))})
    edit(tmp_path / "tensorstore_index.json", lambda data: data["arrays"][0].update(dtype=dtype))
    with pytest.raises(eqshard.ShardingError):
        restore(tmp_path, {"w": jnp.ones((4, 2))})


@pytest.mark.parametrize("kind", WRITERS)
def test_every_file_truncated(kind, tmp_path):
    WRITERS[kind](tmp_path / "a")
    like = tree() if kind in ("eqshard", "orbax", "orbax zarr3") else plain()
    refused = 0
    for file in sorted(p for p in (tmp_path / "a").rglob("*") if p.is_file() and p.stat().st_size):
        whole = file.read_bytes()
        for size in (0, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:size])
            try:
                restored = restore(tmp_path / "a", like)
                assert_same(like, restored)
            except eqshard.ShardingError:
                refused += 1
        file.write_bytes(whole)
    assert refused >= 6


def test_pickles_are_never_read(tmp_path, monkeypatch):
    import pickle

    monkeypatch.setattr(pickle, "loads", lambda *_: pytest.fail("unpickled"))
    monkeypatch.setattr(pickle, "load", lambda *_: pytest.fail("unpickled"))
    write_eformer(tmp_path, {"w": jnp.ones(3)}, "m")
    opened = []
    read = pathlib.Path.read_bytes
    monkeypatch.setattr(pathlib.Path, "read_bytes", lambda self: opened.append(self.name) or read(self))
    restore(tmp_path, {"w": jnp.ones(3)})
    assert opened == ["tensorstore_index.json"]


def test_a_pipe_or_a_device_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "tensorstore_index.json")
    with pytest.raises(eqshard.FormatError, match="is no checkpoint"):
        plan_from_index(tmp_path, MESH)
    save(tmp_path / "a", plain())
    (tmp_path / "a" / "plan" / "plan.json").unlink()
    os.mkfifo(tmp_path / "a" / "plan" / "plan.json")
    with pytest.raises(eqshard.FormatError, match=r"plan\.json is no file"):
        plan_from_index(tmp_path / "a", MESH)


def test_names_that_collide_in_orbax_are_refused(tmp_path):
    write_orbax(tmp_path / "a", {"a.b": jnp.ones(3)})

    def twice(data):
        (entry,) = data["tree_metadata"].values()
        keys = [{"key": "a", "key_type": 2}, {"key": "b", "key_type": 2}]
        data["tree_metadata"]["('a', 'b')"] = entry | {"key_metadata": keys}

    edit(tmp_path / "a" / "_METADATA", twice)
    with pytest.raises(eqshard.FormatError, match=r"two leaves are stored as 'a\.b'"):
        plan_from_index(tmp_path / "a", MESH)
