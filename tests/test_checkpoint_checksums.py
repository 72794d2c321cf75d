"""Bits that flip on disk: every one in the data of an array is noticed, and old checkpoints still load."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_trees import assert_same
from jax.sharding import PartitionSpec as P
from test_checkpoint_formats import write_orbax

import eqshard
from eqshard.checkpoint import restore, save


def tree():
    """Noise, which does not compress, beside much that does, and small leaves, which lie in the index."""
    rng = np.random.default_rng(0)
    return {
        "noise": jnp.asarray(rng.standard_normal((256, 128), dtype="f4")),
        "half": jnp.asarray(rng.standard_normal((64, 64), dtype="f4"), "bfloat16"),
        "zeros": jnp.zeros((512, 128)),
        "int4": jnp.asarray(rng.integers(-8, 8, (64, 32)), "int4"),
        "small": jnp.arange(5.0),
        "key": jax.random.key(3),
    }


def flip_bits(folder, n, seed):
    """Flips a bit at a time in the files of the arrays; returns how many were noticed, and the files flipped."""
    like = tree()
    files = [p for p in sorted((folder / "state").rglob("*")) if p.is_file() and p.parent.name == "d"]
    sizes = [p.stat().st_size for p in files]
    rng, noticed = random.Random(seed), 0
    for _ in range(n):
        file = rng.choices(files, sizes)[0]
        good = file.read_bytes()
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        file.write_bytes(bytes(bad))
        try:
            restored = restore(folder, like)
        except eqshard.FormatError:
            noticed += 1
        else:
            assert_same(like, restored)  # a byte that nothing refers to
        file.write_bytes(good)
    assert_same(like, restore(folder, like))
    return noticed


@pytest.mark.parametrize("n", [pytest.param(30, id="some"), pytest.param(300, id="many", marks=pytest.mark.slow)])
def test_flipped_bits_are_noticed(n, tmp_path):
    mesh = eqshard.MeshSpec(x=8)
    plan = eqshard.replicated_plan(tree(), mesh).at("noise|half").set(P("x"))
    save(tmp_path / "a", eqshard.apply(plan, tree()))
    noticed = flip_bits(tmp_path / "a", n, n)
    print(f"{noticed} of {n} flips noticed; the others changed nothing")
    assert noticed > 0.9 * n


def test_the_error_says_which_leaf_and_why(tmp_path):
    save(tmp_path / "a", {"noise": tree()["noise"]})
    (file,) = (p for p in (tmp_path / "a" / "state" / "d").iterdir() if p.stat().st_size > 2**16)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(eqshard.FormatError, match=r"\['noise'\].*checksum does not fit") as raised:
        restore(tmp_path / "a", {"noise": tree()["noise"]})
    assert raised.value.__cause__ is not None


@pytest.mark.parametrize("zarr3", [False, True])
def test_checkpoints_without_checksums_still_load(zarr3, tmp_path):
    """As they were saved before there were checksums: the arrays by Orbax, the plan beside."""
    values = {f"['{name}']": x for name, x in tree().items() if name != "key"}
    save(tmp_path / "new", {name: x for name, x in tree().items() if name != "key"})
    (tmp_path / "old" / "plan").mkdir(parents=True)
    (tmp_path / "old" / "plan" / "plan.json").write_bytes((tmp_path / "new" / "plan" / "plan.json").read_bytes())
    write_orbax(tmp_path / "old" / "state", values, use_zarr3=zarr3)
    like = {name: x for name, x in tree().items() if name != "key"}
    assert_same(like, restore(tmp_path / "old", like))
