"""Checkpoints that others wrote, Orbax and eformer: planned without reading an array, restored onto 8 devices."""

import functools
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from checkpoint_trees import assert_same, shapes, spread
from jax.sharding import NamedSharding, PartitionSpec as P

import eqshard
from eqshard.checkpoint import plan_from_index, read_plan, restore, save


MESH = eqshard.MeshSpec(dp=2, tp=4)


def model():
    return eqx.nn.MLP(8, 8, 16, 2, key=jax.random.key(0))


def laid_out():
    tree = eqshard.gather(eqx.filter(model(), eqx.is_array))
    plan = eqshard.replicated_plan(tree, eqshard.MeshSpec(dp=4, tp=2)).at("weight").set(P("dp", "tp"))
    return eqshard.apply(plan, tree)


def write_orbax(path, tree, **options):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(path.absolute(), ocp.args.PyTreeSave(tree))


def write_manager(path, tree):
    with ocp.CheckpointManager(
        path.absolute(), options=ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    ) as m:
        m.save(3, args=ocp.args.StandardSave(jax.tree.map(lambda x: x + 1, tree)))
        m.save(11, args=ocp.args.StandardSave(tree))


def write_composite(path, tree):
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(tree), config=ocp.args.JsonSave({"a": 1}))
        checkpointer.save(path.absolute(), args)


ORBAX = {
    "ocdbt zarr2": functools.partial(write_orbax, use_ocdbt=True, use_zarr3=False),
    "ocdbt zarr3": functools.partial(write_orbax, use_ocdbt=True, use_zarr3=True),
    "folders zarr2": functools.partial(write_orbax, use_ocdbt=False, use_zarr3=False),
    "folders zarr3": functools.partial(write_orbax, use_ocdbt=False, use_zarr3=True),
    "STEP/default": write_manager,
    "state": write_composite,
}


@pytest.mark.parametrize("layout", ORBAX)
def test_orbax(layout, make_mesh, tmp_path):
    ORBAX[layout](tmp_path / "a", laid_out())
    mesh = make_mesh(dp=2, tp=4)
    saved = plan_from_index(tmp_path / "a", mesh, default="saved")
    assert saved["['layers'][0]['weight']"].spec == P("dp", "tp") and saved["['layers'][0]['bias']"].spec == P()
    assert saved["['layers'][2]['weight']"].shape == (8, 16) and len(saved) == 6
    plan = spread(shapes(model()), mesh)
    assert_same(model(), restore(tmp_path / "a", shapes(model()), plan), plan)
    with pytest.raises(eqshard.MismatchError, match="holds no plan"):
        read_plan(tmp_path / "a")


def test_orbax_steps(tmp_path):
    write_manager(tmp_path / "a", laid_out())
    assert eqshard.checkpoint.Checkpoints(tmp_path / "a").steps() == (3, 11)
    older = restore(tmp_path / "a", shapes(model()), step=3)
    assert (older.layers[0].weight == model().layers[0].weight + 1).all()
    with pytest.raises(eqshard.ShardingError, match=r"no complete checkpoint of step 4 .* 3, 11"):
        restore(tmp_path / "a", shapes(model()), step=4)


def test_orbax_keys_scalars_and_text(tmp_path):
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 4)
    write_orbax(tmp_path / "a", {"k": keys, "n": 3, "s": "text", "none": None, "np": np.arange(3), "f": jnp.ones(())})
    plan = plan_from_index(tmp_path / "a", MESH)
    assert {leaf.path: leaf.type for leaf in plan} == {
        "['k']": "key<rbg>[4]", "['n']": "int32[]", "['np']": "int32[3]", "['f']": "float32[]",
    }  # fmt: skip
    like = {"k": keys, "n": jnp.int32(0), "np": jnp.zeros(3, int), "f": jnp.zeros(())}
    want = {"k": keys, "n": jnp.int32(3), "np": jnp.arange(3), "f": jnp.ones(())}
    assert_same(want, restore(tmp_path / "a", like))


def test_several_checkpoints_in_one_folder(tmp_path):
    for name in ("params", "ema"):
        write_orbax(tmp_path / name, {"w": jnp.ones(3)})
    with pytest.raises(eqshard.ShardingError, match="several checkpoints: ema, params"):
        plan_from_index(tmp_path, MESH)
    assert len(plan_from_index(tmp_path / "ema", MESH)) == 1


def write_eformer(folder, arrays, prefix=None, version="0.0.101", index=None):
    """The format of eformer: a zarr folder for each leaf, and an index."""
    rows = []
    for name, x in arrays.items():
        path = f"{prefix}/{name}" if prefix else name
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": f"{folder}/{path}/"},
            "metadata": {
                "shape": x.shape, "chunks": [max(1, n // 2) for n in x.shape], "compressor": {"id": "zstd", "level": 1},
            },
            "dtype": x.dtype.name,
        }  # fmt: skip
        ts.open(spec, create=True, open=True).result().write(np.asarray(x)).result()
        rows.append({"path": path, "shape": list(x.shape), "dtype": x.dtype.name})
    index = index or {"format": "tensorstore", "version": version, "prefixes": {}}
    if prefix:
        index["prefixes"][prefix] = rows
        structure = {"format": "pytree-structure", "treedef_b64": "cG9pc29u", "nonarray_payload": {"0": "cG9pc29u"}}
        (folder / f"{prefix}_structure.json").write_text(json.dumps(structure))
    else:
        index["arrays"] = rows
    (folder / "tensorstore_index.json").write_text(json.dumps(index))
    return index


def flat(tree):
    parts = {}
    for i, layer in enumerate(tree.layers):
        parts |= {f"layers/{i}/weight": layer.weight, f"layers/{i}/bias": layer.bias}
    return parts


@pytest.mark.parametrize("prefix", ["model", None])
def test_eformer_as_written_by_hand(prefix, make_mesh, tmp_path):
    write_eformer(tmp_path, flat(model()), prefix)
    plan = spread(shapes(model()), make_mesh(dp=2, tp=4))
    assert_same(model(), restore(tmp_path, shapes(model()), plan, prefix=prefix), plan)
    assert_same(model(), restore(tmp_path, shapes(model()), plan), plan)
    by_spec = plan_from_index(tmp_path, MESH, prefix=prefix, default=P("tp"))
    assert by_spec["['layers']['1']['weight']"].spec == P("tp") and len(by_spec) == 6


def test_eformer_itself(tmp_path):
    pytest.importorskip("eformer", reason="eformer is not installed: the format written by hand is tested above")
    from eformer.serialization.async_manager import AsyncCheckpointManager

    tree = {"layers": [{"weight": x.weight, "bias": x.bias} for x in model().layers]}
    AsyncCheckpointManager().save_pytree(tree | {"name": "text"}, str(tmp_path), prefix="model")
    plan = spread(shapes(model()), MESH)
    assert_same(model(), restore(tmp_path, shapes(model()), plan, prefix="model"), plan)


def test_eformer_prefixes(tmp_path):
    index = write_eformer(tmp_path, {"w": jnp.ones((4, 2))}, "model")
    write_eformer(tmp_path, {"w": jnp.zeros((4, 2))}, "ema", index=index)
    with pytest.raises(eqshard.MismatchError, match=r"pass `prefix`.*'model', 'ema'"):
        plan_from_index(tmp_path, MESH)
    with pytest.raises(eqshard.MismatchError, match=r"no prefix 'modle'.*Did you mean 'model'"):
        plan_from_index(tmp_path, MESH, prefix="modle")
    assert (restore(tmp_path, {"w": jnp.ones((4, 2))}, prefix="ema")["w"] == 0).all()


@pytest.mark.parametrize("version", ["3.0", "next", 2, None])
def test_a_foreign_version_is_an_error(version, tmp_path):
    write_eformer(tmp_path, {"w": jnp.ones(3)}, version=version)
    with pytest.raises(eqshard.FormatError, match="version"):
        plan_from_index(tmp_path, MESH)
    (tmp_path / "tensorstore_index.json").unlink()
    with pytest.raises(eqshard.FormatError, match="is no checkpoint"):
        plan_from_index(tmp_path, MESH)
    with pytest.raises(eqshard.ShardingError, match="no such file"):
        plan_from_index(tmp_path / "b", MESH)


def test_a_chunk_that_is_missing_is_no_zeros(tmp_path):
    write_eformer(tmp_path, {"w": jnp.ones((4, 2))})
    (tmp_path / "w" / "1.0").unlink()
    with pytest.raises(eqshard.FormatError, match=r"cannot read `\['w'\]`"):
        restore(tmp_path, {"w": jnp.ones((4, 2))})


def test_an_index_that_disagrees_with_its_arrays(tmp_path):
    write_eformer(tmp_path, {"w": jnp.ones((4, 2))})
    text = (tmp_path / "tensorstore_index.json").read_text()
    (tmp_path / "tensorstore_index.json").write_text(text.replace("[4, 2]", "[4, 3]"))
    with pytest.raises(eqshard.FormatError, match=r"the index says float32\[4,3\], the array itself is float32\[4,2\]"):
        restore(tmp_path, {"w": jnp.ones((4, 3))})


def defaults():
    whole = eqshard.replicated_plan
    yield "none", None, P()
    yield "spec", P("tp"), P("tp")
    yield "sharding", NamedSharding(MESH.build(), P(None, "tp"), memory_kind="pinned_host"), P(None, "tp")
    yield "leaf", lambda leaf: P("dp") if leaf.shape == (8, 4) and leaf.dtype == "float32" else None, P("dp")
    yield "leaf with saved", lambda leaf: leaf.spec, P("tp")
    yield "maker", lambda tree, mesh: whole(tree, mesh).at(r"^\['w'\]$").set(P("tp", "dp")), P("tp", "dp")
    yield "partial", functools.partial(eqshard.auto_plan, min_bytes=0), None
    yield "saved", "saved", P("tp")


@pytest.mark.parametrize("default, spec", [pytest.param(d, s, id=name) for name, d, s in defaults()])
def test_defaults(default, spec, tmp_path):
    tree = {"w": jnp.ones((8, 4))}
    save(tmp_path / "a", eqshard.apply(eqshard.replicated_plan(tree, MESH).at("w").set(P("tp")), tree))
    plan = plan_from_index(tmp_path / "a", MESH, default=default)
    assert [leaf.path for leaf in plan] == ["['w']"] and plan.mesh == MESH
    if spec is not None:
        assert plan["['w']"].spec == spec
    restored = restore(tmp_path / "a", tree, plan)
    assert_same(tree, restored, plan)
    if isinstance(default, NamedSharding):
        assert restored["w"].sharding.memory_kind == "pinned_host"


def test_defaults_that_do_not_fit(tmp_path):
    save(tmp_path / "a", {"w": jnp.ones((6, 4))})
    with pytest.raises(eqshard.IndivisibleError, match=r"\['w'\]"):
        plan_from_index(tmp_path / "a", MESH, default=P("tp"))
    assert plan_from_index(tmp_path / "a", MESH, default=P("tp"), strict=False)["['w']"].given_up
    with pytest.raises(eqshard.UnknownAxisError):
        plan_from_index(tmp_path / "a", MESH, default=P("typo"))
    with pytest.raises(eqshard.ShardingError, match="'saved'"):
        plan_from_index(tmp_path / "a", MESH, default="save")
    with pytest.raises(eqshard.ShardingError, match="says no layout"):
        plan_from_index(tmp_path / "a", MESH, default=lambda leaf: "tp")
    with pytest.raises(eqshard.MeshError, match=r"\['w'\]"):
        plan_from_index(tmp_path / "a", MESH, default=NamedSharding(eqshard.MeshSpec(x=8).build(), P()))


@pytest.mark.parametrize("prefix", ["['layers'][1]", "layers.1", "layers/1"])
def test_a_prefix_selects_a_subtree(prefix, tmp_path):
    write_orbax(tmp_path / "a", laid_out())
    plan = plan_from_index(tmp_path / "a", MESH, prefix=prefix)
    assert sorted(leaf.path for leaf in plan) == ["['bias']", "['weight']"]
    restored = restore(tmp_path / "a", shapes(model().layers[1]), prefix=prefix)
    assert_same(model().layers[1], restored)
    with pytest.raises(eqshard.MismatchError, match="no leaf below"):
        plan_from_index(tmp_path / "a", MESH, prefix="layer")


def test_a_saved_layout_on_another_mesh(tmp_path):
    save(tmp_path / "a", laid_out())
    with pytest.raises(eqshard.UnknownAxisError, match="dp"):
        plan_from_index(tmp_path / "a", eqshard.MeshSpec(x=8), default="saved")
    saved = read_plan(tmp_path / "a")
    assert saved.mesh.shape == {"dp": 4, "tp": 2}
    plan = eqshard.convert_plan(saved, eqshard.MeshSpec(dp=8))
    assert_same(eqx.filter(model(), eqx.is_array), restore(tmp_path / "a", laid_out(), plan), plan)
