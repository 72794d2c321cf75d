"""shard_batch, padding, and what it tells."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P

import eqshard
from eqshard import BATCH, EMBED, LENGTH, LogicalAxes, MeshSpec, PartitionAxis


def batch(n=16):
    return {
        "tokens": np.arange(n * 8, dtype="int32").reshape(n, 8),
        "image": np.arange(n * 12, dtype="float32").reshape(n, 2, 2, 3),
        "weight": np.arange(n, dtype="float32"),
        "step": np.ones((), "float32"),
        "text": "a batch",
        "ids": np.array(["a"] * n),
        "size": 3,
        "fn": len,
        "none": None,
    }


def assert_same(placed, given):
    host = eqshard.gather(placed)
    for a, b in zip(jax.tree.leaves(host), jax.tree.leaves(given), strict=True):
        assert np.array_equal(a, b) if isinstance(b, np.ndarray) else a is b


# One sharding for all leaves, scalars and mixed ranks, numpy and jax, Auto and Explicit: each raises elsewhere.
@pytest.mark.parametrize("as_jax", [False, True])
def test_mixed_ranks_and_other_leaves(m24, as_jax):
    given = batch()
    if as_jax:
        given = {k: jnp.asarray(v) if eqshard.is_array(v) else v for k, v in given.items()}
    specs = {k: P("dp", "tp") if k == "tokens" else P("dp") for k in given if k != "none"} | {"none": None}
    placed = eqshard.shard_batch(given, m24, specs)
    assert placed["tokens"].sharding.spec == P("dp", "tp")
    assert placed["image"].sharding.spec == placed["weight"].sharding.spec == P("dp")
    assert placed["step"].sharding.spec == P() and len(placed["step"].devices()) == 8
    assert all(placed[k] is given[k] for k in ("text", "ids", "size", "fn", "none"))
    assert_same(placed, batch())


def test_one_spec_is_cut_to_each_rank(m24):
    given = {"a": np.ones((4, 8, 3), "float32"), "b": np.ones((4, 8), "float32"), "c": np.ones(4, "float32")}
    placed = eqshard.shard_batch(given, m24, P("dp", "tp"))
    assert [x.sharding.spec for x in placed.values()] == [P("dp", "tp"), P("dp", "tp"), P("dp")]


def test_what_lies_right_stays(m24):
    placed = eqshard.shard_batch(batch(), m24, P("dp"))
    again = eqshard.shard_batch(placed, m24, P("dp"))
    assert all(a is b for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(again)))
    moved = eqshard.shard_batch(placed, m24, P(("dp", "tp")))
    assert moved["tokens"].sharding.spec == P(("dp", "tp"))
    assert_same(moved, batch())


def test_any_mesh(m24):
    x = np.ones((8, 2), "float32")
    for mesh in (m24, m24.build(), m24.abstract()):
        assert eqshard.shard_batch(x, mesh, P("dp")).sharding == NamedSharding(m24.build(), P("dp"))


def test_in_jit(m24):
    @eqx.filter_jit
    def f(x):
        return eqshard.shard_batch({"x": x * 2, "name": "a"}, m24, P("dp"))

    placed = f(eqshard.shard_batch(np.ones((8, 2), "float32"), m24, P()))
    assert eqshard.specs_of(placed)["x"] == P("dp") and placed["name"] == "a"


def test_shapes_get_shardings(m24):
    placed = eqshard.shard_batch(jax.ShapeDtypeStruct((8, 2), "float32"), m24, P("dp"), local=True)
    assert placed.shape == (8, 2) and placed.sharding.spec == P("dp")


def test_a_module_as_batch(m24):
    class Example(eqx.Module):
        x: jax.Array | np.ndarray
        name: str = eqx.field(static=True)

    placed = eqshard.shard_batch(Example(np.ones((8, 3), "float32"), "a"), m24, P("dp"))
    assert placed.x.sharding.spec == P("dp") and placed.name == "a"


def test_typed_keys(m24):
    keys = jax.random.split(jax.random.key(0), 8)
    placed = eqshard.shard_batch({"keys": keys}, m24, P("dp"))
    assert (jax.random.key_data(placed["keys"]) == jax.random.key_data(keys)).all()
    _, mask = eqshard.shard_batch({"keys": keys[:5]}, m24, P(("dp", "tp")), pad=0)
    assert mask.sum() == 5


# Integers: 2**40 becomes 0 elsewhere.
def test_integers_never_change(m24):
    small = eqshard.shard_batch(np.array([2**31 - 1, -(2**31)]), m24, P("dp"))
    assert small.dtype == "int32" and small.tolist() == [2**31 - 1, -(2**31)]
    assert eqshard.shard_batch(np.array([2**32 - 1, 0], "uint64"), m24, P("dp")).tolist() == [2**32 - 1, 0]
    for wrong in (2**40, -(2**31) - 1):
        with pytest.raises(eqshard.MismatchError, match=rf"`\['x'\]` is int64 and holds {wrong}"):
            eqshard.shard_batch({"x": np.array([wrong, 1])}, m24, P("dp"))
    with jax.enable_x64(True):
        assert eqshard.shard_batch(np.array([2**40, 1]), m24, P("dp")).tolist() == [2**40, 1]


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-(2**31) - 2, 2**31 + 1), min_size=1, max_size=4))
def test_an_integer_is_kept_or_refused(values):
    given = np.array(values * 2, "int64")
    fits = all(-(2**31) <= v < 2**31 for v in values)
    for x in (given, np.stack([given, given], axis=1)[:, 0]):  # also where it is not contiguous
        if fits:
            assert eqshard.shard_batch(x, MeshSpec(dp=2, tp=4), P("dp")).tolist() == values * 2
        else:
            with pytest.raises(eqshard.MismatchError, match="does not fit the int32"):
                eqshard.shard_batch(x, MeshSpec(dp=2, tp=4), P("dp"))


def test_a_transfer_that_was_asked_for(m24):
    """To place a batch is to move it: JAX's guard against moves that nobody asked for lets it pass."""
    given = {"x": np.ones((8, 2), "float32"), "n": np.ones((), "int32"), "y": jnp.ones(8)}
    with jax.transfer_guard_host_to_device("disallow"):
        placed = eqshard.shard_batch(given, m24, P("dp"))
    assert_same(placed, jax.tree.map(np.asarray, given))
    with jax.transfer_guard_host_to_device("disallow_explicit"), pytest.raises(jax.errors.JaxRuntimeError):
        eqshard.shard_batch(given, m24, P("dp"))


def test_floats_are_narrowed(m24):
    assert eqshard.shard_batch(np.array([0.1, np.inf]), m24, P("dp")).tolist() == [float(np.float32(0.1)), np.inf]
    assert eqshard.shard_batch(np.array([1e300, 1.0]), m24, P("dp")).tolist() == [np.inf, 1.0]


@pytest.mark.parametrize("axes", [(BATCH, LENGTH), [BATCH, LENGTH], LogicalAxes((BATCH, LENGTH))])
def test_logical_names(make_mesh, axes):
    mesh = make_mesh(dp=4, sp=2)
    placed = eqshard.shard_batch(batch(), mesh, {"tokens": axes, **dict.fromkeys(set(batch()) - {"tokens"}, (BATCH,))})
    assert placed["tokens"].sharding.spec == P("dp", "sp") and placed["weight"].sharding.spec == P("dp")


def test_logical_names_follow_the_table_and_the_mode(make_mesh):
    mesh = make_mesh(data=4, model=2)
    x = np.ones((8, 1, 4), "float32")
    names = PartitionAxis(data_parallel_axis="data", fully_sharded_data_parallel_axis=None, sequence_axis="model")
    axes = (BATCH, eqshard.QUERY_LENGTH, None)
    assert eqshard.shard_batch(x, mesh, axes, names=names, mode="decode").sharding.spec == P("data")
    assert eqshard.shard_batch(x, mesh, axes, names=names, mode=1).sharding.spec == P("data")
    with pytest.raises(eqshard.IndivisibleError, match="1 % 2"):
        eqshard.shard_batch(x, mesh, axes, names=names)


# Unknown names pass through elsewhere.
@pytest.mark.parametrize(
    ("layout", "error", "text"),
    [
        (("bach",), eqshard.UnknownAxisError, "Did you mean 'batch'"),
        (("dp_typo", "tp"), eqshard.UnknownAxisError, "unknown logical axis"),
        (P("dpp"), eqshard.UnknownAxisError, "Did you mean 'dp'"),
        (P(None, None, None, None, "zz"), eqshard.UnknownAxisError, "'zz'"),  # also in what is cut off
        (P("dp", "dp"), eqshard.DuplicateAxisError, "twice"),
        ((BATCH, BATCH), eqshard.DuplicateAxisError, "both mean"),
        (P(P.UNCONSTRAINED), eqshard.ShardingError, "must say all"),
        ({"tokens": P("dp")}, eqshard.MismatchError, "no prefix"),
        (3, eqshard.ShardingError, "expected a PartitionSpec"),
    ],
)
def test_typos_raise(m24, layout, error, text):
    with pytest.raises(error, match=text):
        eqshard.shard_batch(batch(), m24, layout)


def test_a_mesh_axis_named_by_hand_must_exist(m24):
    with pytest.raises(eqshard.UnknownAxisError, match="data"):
        eqshard.shard_batch(batch(), m24, (BATCH,), names=PartitionAxis(batch_axis="data"))


def test_a_plan(m24):
    given = {"x": np.ones((8, 4), "float32"), "name": "a"}
    plan = eqshard.replicated_plan(given, m24).at("x").set(P("dp", "tp"))
    placed = eqshard.shard_batch(given, m24, plan, local=True)
    assert placed["x"].sharding.spec == P("dp", "tp")
    with pytest.raises(eqshard.MismatchError, match=r"float32\[16,4\], planned as float32\[8,4\]"):
        eqshard.shard_batch({"x": np.ones((16, 4), "float32"), "name": "a"}, m24, plan)
    with pytest.raises(eqshard.MismatchError, match=r"float32\[8,4,1\], planned as"):
        eqshard.shard_batch({"x": np.ones((8, 4, 1), "float32"), "name": "a"}, m24, plan)
    with pytest.raises(eqshard.MismatchError, match="no leaf"):
        eqshard.shard_batch({"y": np.ones((8, 4), "float32")}, m24, plan)
    with pytest.raises(eqshard.MeshError, match="not for the mesh"):
        eqshard.shard_batch(given, MeshSpec(dp=8), plan)


def test_rows_that_do_not_divide(m24):
    with pytest.raises(eqshard.IndivisibleError, match=r"10 % 8"):
        eqshard.shard_batch(batch(10), m24, P(("dp", "tp")))
    with pytest.raises(eqshard.ShardingError, match="give `pad` too"):
        eqshard.shard_batch(batch(10), m24, P("dp"), rows=16)


def test_padding(m24):
    fill = dict.fromkeys(batch(), 0) | {"tokens": -100, "none": None}
    placed, mask, info = eqshard.shard_batch(batch(10), m24, P(("dp", "tp")), pad=fill, info=True)
    assert mask.tolist() == [True] * 10 + [False] * 6 and mask.sharding.spec == P(("dp", "tp"))
    assert placed["image"].shape == (16, 2, 2, 3) and placed["step"].shape == ()
    host = eqshard.gather(placed)
    assert (host["tokens"][10:] == -100).all() and (host["weight"][10:] == 0).all()
    assert_same({k: v[:10] if k in ("tokens", "image", "weight") else v for k, v in host.items()}, batch(10))
    assert info["['tokens']"].shape_before == (10, 8) and info["['tokens']"].shape == (16, 8)


def test_padding_to_a_number_of_rows_keeps_one_type(m24):
    types = set()
    for n in (16, 10, 1):
        placed, mask = eqshard.shard_batch(batch(n), m24, P("dp"), pad=0, rows=16)
        types.add(jax.typeof(placed["tokens"]))
        assert mask.sum() == n
    assert len(types) == 1
    for rows in (8, 17):
        with pytest.raises(eqshard.IndivisibleError, match=f"rows={rows}"):
            eqshard.shard_batch(batch(10), m24, P("dp"), pad=0, rows=rows)


def test_padding_refuses(m24):
    with pytest.raises(eqshard.MismatchError, match="different numbers of rows"):
        eqshard.shard_batch({"a": np.ones(3, "int32"), "b": np.ones(5, "int32")}, m24, P("dp"), pad=0)
    with pytest.raises(eqshard.ShardingError, match="nothing to pad"):
        eqshard.shard_batch({"a": np.ones(3, "int32")}, m24, P(), pad=0)
    with pytest.raises(eqshard.ShardingError, match="uint8, with -1"):
        eqshard.shard_batch({"a": np.ones(3, "uint8")}, m24, P("dp"), pad=-1)
    with pytest.raises(eqshard.IndivisibleError, match="dim 1"):
        eqshard.shard_batch({"a": np.ones((3, 3), "int32")}, m24, P("dp", "tp"), pad=0)


def test_info(m24):
    placed, info = eqshard.shard_batch(batch(), m24, P("dp"), info=True)
    for path, x in jax.tree_util.tree_flatten_with_path(placed)[0]:
        if isinstance(x, jax.Array):
            leaf = info[jax.tree_util.keystr(path)]
            assert leaf.shape == x.shape and leaf.shard_shape == x.addressable_shards[0].data.shape
            assert leaf.spec == x.sharding.spec and leaf.dtype == x.dtype.name
    held = {d.id: 0 for d in m24.build().devices.flat}
    for x in jax.tree.leaves(placed):
        for shard in x.addressable_shards if isinstance(x, jax.Array) else ():
            held[shard.device.id] += shard.data.nbytes
    assert info.bytes_by_device == held
    assert "8 devices" in str(info) and hash(info) == hash(eqshard.shard_batch(batch(), m24, P("dp"), info=True)[1])
    with pytest.raises(eqshard.ShardingError, match="no array"):
        info["['nope']"]


# Operation counts stay 0 elsewhere.
def test_stats_count(m24):
    stats = eqshard.ShardStats()
    for n in (16, 8):
        placed = eqshard.shard_batch({"x": np.ones((n, 3), "float32"), "s": np.ones((), "int32")}, m24, P("dp"))
        new = stats.update(placed)
        assert new != stats
        stats = new
    assert stats == eqshard.ShardStats(2, 24, 24 * 12 + 8)
    assert stats.update(placed, examples=5).examples == 29
    assert jax.tree.leaves(stats) == [] and eqshard.ShardStats().update({}).examples == 0


def test_statistics_are_computed_where_the_shards_are(m24):
    traced = []

    def fn(b):
        traced.append(b["name"])
        return {"mean": b["x"].mean(axis=0), "n": jnp.asarray(b["x"].shape[0])}

    for i in range(3):
        x = np.arange(32, dtype="float32").reshape(8, 4) + i
        placed = eqshard.shard_batch({"x": x, "name": "a"}, m24, P("dp", "tp"))
        found = eqshard.batch_statistics(placed, fn)
        assert found["mean"].is_fully_replicated and np.array_equal(found["mean"], x.mean(axis=0)) and found["n"] == 8
    assert traced == ["a"]
    assert eqshard.batch_statistics({"x": np.ones(3, "float32")}, lambda b: b["x"].sum()) == 3


shapes = st.lists(st.integers(1, 3), max_size=3).map(tuple)
layouts = st.sampled_from([P(), P("dp"), P("tp"), P(("dp", "tp")), P("dp", "tp"), P(None, "dp"), P(None, None, "tp")])


@given(shapes, layouts, st.sampled_from(["float32", "int8", "bool", "bfloat16", "int64"]), st.booleans())
def test_a_batch_is_kept_bit_for_bit(shape, spec, dtype, explicit):
    mesh = MeshSpec(dp=2, tp=4, axis_type="explicit" if explicit else "auto")
    x = np.arange(np.prod(shape, dtype=int) * 8 ** len(shape)).reshape(tuple(8 * n for n in shape)).astype(dtype)
    placed = eqshard.shard_batch({"x": x}, mesh, spec)["x"]
    cut = P(*spec[: x.ndim])
    assert placed.sharding.is_equivalent_to(NamedSharding(mesh.build(), cut), x.ndim)
    assert np.asarray(placed).tobytes() == (x.astype("int32") if dtype == "int64" else x).tobytes()


def test_embed_on_a_mesh_without_the_parallelism():
    """Parallelisms that were not named by hand and that the mesh lacks are left out."""
    x = eqshard.shard_batch(np.ones((8, 4), "float32"), MeshSpec(dp=8), (BATCH, EMBED))
    assert x.sharding.spec == P("dp")
