"""Weights in safetensors files: read in slices, written in parts, under other names."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from checkpoint_trees import assert_same, MESHES, shapes, spread
from jax.sharding import PartitionSpec as P

import eqshard
from eqshard.checkpoint import load_safetensors, plan_from_index, restore, save_safetensors


def model():
    return eqx.nn.MLP(8, 8, 16, 2, key=jax.random.key(0))


@pytest.mark.parametrize("max_bytes", [10**9, 700])
def test_every_mesh(max_bytes, make_mesh, tmp_path):
    files = save_safetensors(tmp_path, model(), max_bytes=max_bytes)
    assert (tmp_path / "model.safetensors.index.json").exists() == (len(files) > 1) == (max_bytes == 700)
    assert sorted(p.name for p in tmp_path.glob("*.safetensors")) == sorted(f.name for f in files)
    for sizes in MESHES:
        plan = spread(shapes(model()), make_mesh(**sizes))
        for where in (tmp_path, files):
            assert_same(model(), load_safetensors(where, shapes(model()), plan), plan)
    assert_same(model(), restore(tmp_path, shapes(model()), plan), plan)
    assert plan_from_index(tmp_path, make_mesh(x=8), default=P("x"))["layers.0.weight"].spec == P("x")


def test_safetensors_itself_reads_and_writes_the_same(tmp_path):
    save_safetensors(tmp_path / "a.safetensors", model(), metadata={"format": "np"})
    found = safetensors.numpy.load_file(tmp_path / "a.safetensors")
    assert (found["layers.1.bias"] == model().layers[1].bias).all() and len(found) == 6
    safetensors.numpy.save_file({"x.y": np.arange(6, dtype="f4").reshape(2, 3)}, tmp_path / "b.safetensors")
    assert (load_safetensors(tmp_path / "b.safetensors", {"x": {"y": jnp.ones((2, 3))}})["x"]["y"][1, 2] == 5).all()


NAMES = (
    "bool uint8 int8 int16 uint32 float16 bfloat16 float32 complex64 float8_e4m3fn float8_e5m2 float8_e8m0fnu".split()
)


def test_dtypes(tmp_path):
    bits = jax.random.bits(jax.random.key(2), (8, 4), "uint8")
    tree = {n: bits > 99 if n == "bool" else (bits % 8).astype(n) for n in NAMES}
    tree |= {"scalar": jnp.float32(2), "empty": jnp.zeros((0, 3)), "host": np.arange(4, dtype="i4")}
    save_safetensors(tmp_path / "a.safetensors", tree)
    plan = spread(shapes(tree), eqshard.MeshSpec(x=2, y=4))
    assert_same(tree, load_safetensors(tmp_path / "a.safetensors", shapes(tree), plan), plan)
    half = load_safetensors(tmp_path / "a.safetensors", {"float32": jnp.zeros((8, 4), "bfloat16")}, extra=[*tree])
    assert (half["float32"] == tree["float32"].astype("bfloat16")).all()


@pytest.mark.parametrize("leaf", [jax.random.key(0), np.zeros(3, "int4"), jax.ShapeDtypeStruct((3,), "f4")])
def test_what_safetensors_cannot_hold(leaf, tmp_path):
    leaf = jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf
    with pytest.raises(eqshard.ShardingError, match=r"\['a'\]"):
        save_safetensors(tmp_path / "a.safetensors", {"a": leaf})
    assert list(tmp_path.iterdir()) == []


def test_names(tmp_path):
    tied = jnp.arange(8.0).reshape(4, 2)
    tree = {"embed": tied, "head": tied, "layers": [{"w": jnp.ones(2)}]}
    rename = {"['embed']": "embed_tokens.weight", "['head']": "embed_tokens.weight", "['layers']": "model.layers"}
    save_safetensors(tmp_path / "a.safetensors", tree, rename=rename)
    assert sorted(safetensors.numpy.load_file(tmp_path / "a.safetensors")) == [
        "embed_tokens.weight",
        "model.layers.0.w",
    ]
    assert_same(tree, load_safetensors(tmp_path / "a.safetensors", shapes(tree), rename=rename))
    with pytest.raises(eqshard.MismatchError) as error:
        load_safetensors(tmp_path / "a.safetensors", shapes(tree))
    assert "`model.layers.0.w`" in str(error.value) and "`['head']`" in str(error.value)
    with pytest.raises(eqshard.ShardingError, match=r"two leaves would be called 'same'"):
        save_safetensors(tmp_path / "b.safetensors", [jnp.ones(2), jnp.zeros(2)], rename=lambda path: "same")


def test_an_index_that_does_not_fit_its_files(tmp_path):
    save_safetensors(tmp_path, model(), max_bytes=700)
    index = tmp_path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    for name, file in [("layers.0.weight", "../x.safetensors"), ("layers.0.weight", "model-00009-of-00009.safetensors"),
                       ("layers.9.weight", "model-00001-of-00002.safetensors"), ("layers.0.weight", 3)]:  # fmt: skip
        index.write_text(json.dumps(good | {"weight_map": good["weight_map"] | {name: file}}))
        with pytest.raises(eqshard.FormatError):
            load_safetensors(tmp_path, shapes(model()))
    with pytest.raises(eqshard.ShardingError, match="no safetensors at"):
        load_safetensors(tmp_path / "nowhere", shapes(model()))


def test_files_in_a_cache_are_links(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for file in save_safetensors(tmp_path / "blobs", model(), max_bytes=700):
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    index = "model.safetensors.index.json"
    (tmp_path / "snapshot" / index).symlink_to(tmp_path / "blobs" / index)
    assert_same(model(), load_safetensors(tmp_path / "snapshot", shapes(model())))


def test_only_slices_are_read(tmp_path, monkeypatch):
    from eqshard.checkpoint._safetensors_contents import FileSource

    tree = {"w": np.arange(4096 * 64, dtype="f4").reshape(4096, 64)}
    save_safetensors(tmp_path / "a.safetensors", tree)
    taken = []

    class View(np.ndarray):
        def __getitem__(self, index):
            part = np.asarray(self)[index]
            taken.append(part.nbytes)
            return part

    view = FileSource.view
    monkeypatch.setattr(FileSource, "view", lambda self, path: view(self, path).view(View))
    mesh = eqshard.MeshSpec({"x": 2}, devices=jax.devices()[:2])
    plan = eqshard.replicated_plan(tree, mesh).at("w").set(P("x"))
    load_safetensors(tmp_path / "a.safetensors", shapes(tree), plan)
    assert taken == [tree["w"].nbytes // 2] * 2
