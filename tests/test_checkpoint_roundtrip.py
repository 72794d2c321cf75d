"""Saved from any mesh, restored onto any other: bit for bit the same."""

import pathlib
import tempfile

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_trees import assert_same, bits, MESHES, shapes, spread, thorough, TREES
from hypothesis import given, strategies as st
from jax.sharding import PartitionSpec as P

import eqshard
from eqshard.checkpoint import read_plan, restore, save


@pytest.mark.parametrize("name", TREES)
def test_every_mesh_to_every_mesh(name, make_mesh, tmp_path):
    tree = TREES[name]()
    meshes = [make_mesh(**sizes) for sizes in MESHES]
    like, host = shapes(tree), eqshard.gather(tree)  # from the host, placing needs no compilation
    for i, source in enumerate(meshes):
        plan = spread(tree, source)
        save(tmp_path / str(i), eqshard.apply(plan, host), plan=plan)
        assert read_plan(tmp_path / str(i)) == plan
        targets = meshes if thorough() else [meshes[(i + 1) % 7], meshes[(3 * i + 3) % 7]]
        for target in targets:
            wanted = spread(like, target)
            assert_same(tree, restore(tmp_path / str(i), like, wanted), wanted)


LEAVES = st.sampled_from([jnp.arange(8.0), jnp.ones((8, 2), "bfloat16"), jnp.int32(3), None, "text"])
KEYS = st.text(max_size=8) | st.sampled_from(["a.b", "a", "b", "a/b", "%", "..", "']['", "[0]", '"'])
NESTED = st.recursive(LEAVES, lambda s: st.dictionaries(KEYS, s, max_size=3) | st.lists(s, max_size=3), max_leaves=6)


@given(NESTED)
def test_any_names(tree):
    with tempfile.TemporaryDirectory() as folder:
        plan = spread(tree, eqshard.MeshSpec(x=2, y=4))
        save(f"{folder}/a", tree)
        assert_same(tree, restore(f"{folder}/a", shapes(tree), plan), plan)


def test_a_layout_that_leaves_dimensions_open(m24, tmp_path):
    tree = {"w": jnp.arange(64.0).reshape(8, 8)}
    save(tmp_path / "a", tree)
    plan = eqshard.replicated_plan(tree, m24).at("w").set(P(P.UNCONSTRAINED, "tp"))
    restored = restore(tmp_path / "a", shapes(tree), plan)
    assert restored["w"].sharding.spec == P(None, "tp") and (restored["w"] == tree["w"]).all()


def test_without_a_plan_the_leaves_lie_as_in_like(m24, tmp_path):
    tree = {"w": jnp.arange(32.0).reshape(8, 4), "b": jnp.ones(4)}
    save(tmp_path / "a", tree)
    like = eqshard.apply(spread(tree, m24), jax.tree.map(jnp.zeros_like, tree))
    assert_same(tree, restore(tmp_path / "a", like), eqshard.plan_of(like))
    assert_same(tree, restore(tmp_path / "a", tree))


def test_the_whole_tree_may_be_one_array(tmp_path):
    save(tmp_path / "a", jnp.arange(5))
    assert_same(jnp.arange(5), restore(tmp_path / "a", jnp.zeros(5, int)))


def test_a_tree_without_arrays_or_elements(tmp_path):
    for i, tree in enumerate([{"a": None, "f": len}, {"z": jnp.zeros((3, 0), "bfloat16")}]):
        save(tmp_path / str(i), tree)
        assert_same(tree, restore(tmp_path / str(i), tree))


def test_memory_kinds_are_kept(tmp_path):
    tree = {"a": jnp.arange(8.0), "b": jnp.arange(8.0)}
    plan = eqshard.replicated_plan(tree, eqshard.MeshSpec(x=8)).at("a").set(P("x"), memory_kind="pinned_host")
    placed = eqshard.apply(plan, tree)
    assert placed["a"].sharding.memory_kind == "pinned_host"
    save(tmp_path / "a", placed)
    restored = restore(tmp_path / "a", shapes(tree), read_plan(tmp_path / "a"))
    assert restored["a"].sharding.memory_kind == "pinned_host" and restored["b"].sharding.memory_kind == "device"
    assert_same(tree, restored)


CASTS = [
    ("float32", "bfloat16"),
    ("bfloat16", "float32"),
    ("float32", "float8_e4m3fn"),
    ("int8", "int32"),
    ("int32", "int8"),
]


@pytest.mark.parametrize("old, new", CASTS)
def test_dtypes_are_cast_on_the_way_as_jax_casts(old, new, tmp_path):
    x = (jax.random.normal(jax.random.key(0), (64, 8)) * 20).astype(old)
    save(tmp_path / "a", {"x": x})
    like = {"x": jax.ShapeDtypeStruct((64, 8), new)}
    plan = spread(like, eqshard.MeshSpec(x=8))
    assert bits(restore(tmp_path / "a", like, plan)["x"]) == bits(x.astype(new))
    with pytest.raises(eqshard.MismatchError, match=rf"is {new}, stored as {old}"):
        restore(tmp_path / "a", like, plan, cast=False)


@pytest.mark.parametrize("old, new", [("float32", "int32"), ("int32", "float32"), ("bool", "int32"), ("uint32", "key")])
def test_other_casts_are_for_the_user(old, new, tmp_path):
    save(tmp_path / "a", jnp.ones((4, 2), old))
    like = jax.random.split(jax.random.key(0), (4, 2)) if new == "key" else jnp.ones((4, 2), new)
    with pytest.raises(eqshard.MismatchError, match="dtypes differ"):
        restore(tmp_path / "a", like)


def test_an_integer_that_does_not_fit_is_an_error(tmp_path):
    save(tmp_path / "a", jnp.array([1, 300]))
    with pytest.raises(eqshard.MismatchError, match="int32 does not fit into int8"):
        restore(tmp_path / "a", jnp.zeros(2, "int8"))


def test_64_bit_integers_never_wrap(tmp_path):
    save(tmp_path / "a", np.array([2**40]))
    for dtype in ("int64", "int32"):
        with pytest.raises(eqshard.MismatchError, match=f"int64 and holds {2**40}"):
            restore(tmp_path / "a", np.zeros(1, dtype))


def model_tree():
    return {"encoder": [{"w": jnp.ones((8, 2))}, {"w": jnp.full((8, 2), 2.0)}], "decoder": {"w": jnp.full(4, 3.0)}}


def test_a_part_of_the_tree(tmp_path):
    save(tmp_path / "a", model_tree())
    zeros = jax.tree.map(jnp.zeros_like, model_tree())
    restored = restore(tmp_path / "a", zeros, only="['encoder']")
    assert_same(model_tree() | {"decoder": zeros["decoder"]}, restored)
    restored = restore(tmp_path / "a", zeros, only=["['encoder'][1]", "['decoder']"])
    assert_same(model_tree() | {"encoder": [zeros["encoder"][0], model_tree()["encoder"][1]]}, restored)
    with pytest.raises(eqshard.MismatchError, match=r"`only` names `\['enc'\]`"):
        restore(tmp_path / "a", zeros, only="['enc']")


def test_only_restores_into_shapes(tmp_path):
    save(tmp_path / "a", model_tree())
    like = shapes(model_tree())
    restored = restore(tmp_path / "a", like, only="['decoder']")
    assert (restored["decoder"]["w"] == 3).all() and isinstance(restored["encoder"][0]["w"], jax.ShapeDtypeStruct)


def test_renamed_leaves_and_subtrees(tmp_path):
    save(tmp_path / "a", model_tree())
    like = {"layers": model_tree()["encoder"], "head": jnp.zeros(4)}
    rename = {"['layers']": "['encoder']", "['head']": "['decoder']['w']"}
    wanted = {"layers": model_tree()["encoder"], "head": jnp.full(4, 3.0)}
    assert_same(wanted, restore(tmp_path / "a", like, rename=rename))
    assert_same(
        wanted,
        restore(tmp_path / "a", like, rename=lambda p: p.replace("layers", "encoder").replace("['head']", "decoder.w")),
    )
    with pytest.raises(eqshard.MismatchError, match="`rename` names"):
        restore(tmp_path / "a", like, rename=rename | {"['layer']": "x"})


def test_what_is_missing_or_left_over_is_listed_unless_allowed_by_name(tmp_path):
    save(tmp_path / "a", model_tree())
    like = {"encoder": model_tree()["encoder"], "new": {"a": jnp.ones(2), "b": jnp.ones(3)}}
    with pytest.raises(eqshard.MismatchError) as error:
        restore(tmp_path / "a", like)
    for name in ("['new']['a']", "['new']['b']", "['decoder']['w']", "missing=", "extra="):
        assert name in str(error.value)
    with pytest.raises(eqshard.MismatchError, match=r"not in the checkpoint: `\['new'\]\['b'\]`\n"):
        restore(tmp_path / "a", like, missing="['new']['a']", extra=["['decoder']"])
    plan = spread(like, eqshard.MeshSpec(x=2))
    assert_same(like, restore(tmp_path / "a", like, plan, missing="['new']", extra="decoder"), plan)
    with pytest.raises(eqshard.MismatchError, match="only a shape"):
        restore(tmp_path / "a", shapes(like), missing="['new']", extra="decoder")


def test_shapes_that_differ_are_listed(tmp_path):
    save(tmp_path / "a", model_tree())
    like = model_tree() | {"decoder": {"w": jnp.zeros(5)}}
    with pytest.raises(eqshard.MismatchError, match=r"is float32\[5\], stored as float32\[4\]"):
        restore(tmp_path / "a", like)


def test_dictionaries_restore_into_modules(tmp_path):
    model = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    as_dict = {"layers": [{"weight": x.weight, "bias": x.bias} for x in model.layers]}
    save(tmp_path / "a", as_dict)
    assert_same(model, restore(tmp_path / "a", jax.tree.map(lambda x: x * 0 if eqx.is_array(x) else x, model)))


def test_a_plan_of_another_tree_is_refused(tmp_path):
    tree = model_tree()
    plan = eqshard.replicated_plan(tree["encoder"], eqshard.MeshSpec(x=8))
    with pytest.raises(eqshard.MismatchError):
        save(tmp_path / "a", tree, plan=plan)
    assert not (tmp_path / "a").exists()
    save(tmp_path / "a", tree)
    with pytest.raises(eqshard.MismatchError):
        restore(tmp_path / "a", tree, plan)


def test_nothing_is_overwritten_and_shapes_are_not_saved(tmp_path):
    save(tmp_path / "a", jnp.ones(3))
    with pytest.raises(eqshard.ShardingError, match="never overwritten"):
        save(tmp_path / "a", jnp.zeros(3))
    assert (restore(tmp_path / "a", jnp.zeros(3)) == 1).all()
    with pytest.raises(eqshard.ShardingError, match="only a shape"):
        save(tmp_path / "b", shapes({"a": jnp.ones(3)}))
    with pytest.raises(eqshard.ShardingError, match="URL"):
        save("gs://bucket/a", jnp.ones(3))


def test_saving_in_the_background_takes_a_copy(tmp_path):
    mesh = eqshard.MeshSpec(x=8)
    tree = {"device": eqshard.replicate(jnp.arange(2.0**18), mesh), "host": np.arange(2**18, dtype="f4")}
    want = {name: np.array(x) for name, x in tree.items()}
    saving = save(tmp_path / "a", tree, wait=False)
    jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(tree["device"]).block_until_ready()
    tree["host"][:] = -1
    saving.wait()
    saving.wait()
    restored = restore(tmp_path / "a", {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in want.items()})
    assert all((restored[name] == want[name]).all() for name in want)


@pytest.mark.parametrize("library", ["rich", "tqdm", None])
def test_a_bar_is_drawn_by_what_is_there(library, tmp_path, monkeypatch, capsys):
    import eqshard.checkpoint._progress as progress

    if library == "tqdm":
        pytest.importorskip("tqdm")
    monkeypatch.setattr(progress, "has_library", lambda name: name == library)
    save(tmp_path / "a", {"w": jnp.ones((512, 512))}, progress=True)
    restore(tmp_path / "a", {"w": jnp.ones((512, 512))}, progress=True)
    drawn = capsys.readouterr().err
    assert ("saving" in drawn and "restoring" in drawn) if library else drawn == ""
    save(tmp_path / "b", {"w": jnp.ones((512, 512))})
    assert capsys.readouterr().err == ""


def test_bare_orbax_reads_what_was_saved(tmp_path):
    import orbax.checkpoint as ocp

    tree = {"a": jnp.arange(4.0), "b": [jnp.ones(2)]}
    save(tmp_path / "a", tree)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        args = {
            name: ocp.ArrayRestoreArgs(sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
            for name in ("['a']", "['b'][0]")
        }
        found = checkpointer.restore(
            pathlib.Path(tmp_path / "a" / "state").absolute(), ocp.args.PyTreeRestore(restore_args=args)
        )
    assert (found["['a']"] == tree["a"]).all() and (found["['b'][0]"] == 1).all()
