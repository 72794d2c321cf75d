"""The algebra of specs, with JAX as the oracle."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P

import eqshard
from eqshard._spec import spec_from_list, spec_text, spec_to_list


U = P.UNCONSTRAINED


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (P(), ()),
        (P(None, None), ()),
        (P("x", None), ("x",)),
        (P(None, "x", None), (None, "x")),
        (P(("x",)), ("x",)),
        (P(("x", "y")), (("x", "y"),)),
        (P(("x", "one")), ("x",)),
        (P(("one", "x", "y")), (("x", "y"),)),
        (P("one"), ()),
        (P(("one",), "x"), (None, "x")),
        (P(()), ()),
        (P(U), (U,)),
        (P(None, U, None), (None, U)),
        (P("unknown"), ("unknown",)),
    ],
    ids=str,
)
def test_canonical(spec, expected):
    found = eqshard.canonical(spec, {"x": 2, "y": 4, "one": 1})
    assert tuple(found) == expected and eqshard.canonical(found, {"x": 2, "y": 4, "one": 1}) == found


def test_canonical_without_sizes_keeps_axes_of_one():
    assert tuple(eqshard.canonical(P("one", None))) == ("one",)


def test_canonical_keeps_unreduced_axes():
    spec = eqshard.canonical(P("x", None, unreduced={"y"}), {"x": 2, "y": 4})
    assert spec.partitions == ("x",) and spec.unreduced == {"y"}
    with pytest.raises(eqshard.ShardingError, match="unreduced"):
        eqshard.shard_shape((8,), spec, eqshard.MeshSpec(x=2, y=4))


def test_names_in_anything(m24):
    tree = {"w": P(("tp", "dp"), U), "b": P("tp")}
    assert eqshard.axis_names(P("dp", None, ("tp",))) == ("dp", "tp")
    assert eqshard.axis_names(tree) == ("tp", "dp")
    assert eqshard.axis_names(NamedSharding(m24.build(), P("tp"))) == ("tp",)
    plan = eqshard.replicated_plan({"a": jnp.ones((8, 8))}, m24).at("a").set(P("tp", "dp"))
    assert eqshard.axis_names(plan) == ("tp", "dp")
    assert eqshard.axis_names(P()) == () and eqshard.axis_names([None]) == ()
    with pytest.raises(TypeError, match="str"):
        eqshard.axis_names(["dp"])


def test_shard_factor(m24):
    assert eqshard.shard_factor(P(), m24) == 1
    assert eqshard.shard_factor(P("tp", U), m24) == 4
    assert eqshard.shard_factor(P(("dp", "tp")), m24.abstract()) == 8
    with pytest.raises(eqshard.UnknownAxisError, match=r"'pt'.*'dp', 'tp'"):
        eqshard.shard_factor(P("pt"), m24)


ENTRIES = [None, "dp", "tp", "one", ("dp", "tp"), ("tp", "dp"), ("one", "tp"), ("tp", "one", "dp"), U]
SHAPES = [(8, 8), (4, 6), (2, 1), (0, 3), (1, 1), (6, 12)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fit_agrees_with_jax_on_every_case(shape):
    """Every spec of two entries: what divides, what each device holds, what is refused."""
    mesh = eqshard.MeshSpec(dp=2, tp=4, one=1)
    sizes = mesh.shape
    for entries in [(), *((e,) for e in ENTRIES), *itertools.product(ENTRIES, ENTRIES)]:
        spec = P(*entries)
        names = [a for e in entries if e is not None and e is not U for a in ((e,) if isinstance(e, str) else e)]
        if len(set(names)) < len(names):
            with pytest.raises(eqshard.DuplicateAxisError):
                eqshard.misfits(shape, spec, sizes)
            with pytest.raises(Exception, match="duplicate"):
                NamedSharding(mesh.build(), spec)
            continue
        sharding = NamedSharding(mesh.build(), spec)
        try:
            expected = sharding.shard_shape(shape)
        except ValueError:
            expected = None
        assert (eqshard.misfits(shape, spec, sizes) == []) == (expected is not None), spec
        if expected is not None:
            assert eqshard.shard_shape(shape, spec, mesh) == expected
        else:
            with pytest.raises(eqshard.IndivisibleError):
                eqshard.shard_shape(shape, spec, mesh)
        fit = eqshard.fit_spec(spec, shape, mesh)
        NamedSharding(mesh.build(), fit.spec).shard_shape(shape)
        assert (expected is None) == bool(fit.given_up)
        if expected is not None:
            assert sharding.is_equivalent_to(NamedSharding(mesh.build(), fit.spec), 2) or U in entries


@pytest.mark.parametrize(
    ("spec", "shape", "expected", "lost"),
    [
        (P(("dp", "tp")), (8,), P(("dp", "tp")), []),
        (P(("dp", "tp")), (6,), P("dp"), [(0, ("tp",))]),
        (P(("tp", "dp")), (4,), P("tp"), [(0, ("dp",))]),
        (P(("tp", "dp")), (6,), P(), [(0, ("tp", "dp"))]),  # the longest prefix: none of it, though dp alone would fit
        (P("dp", "tp"), (7, 8), P(None, "tp"), [(0, ("dp",))]),
        (P("dp", "tp"), (7, 7), P(), [(0, ("dp",)), (1, ("tp",))]),
        (P("tp", U), (6, 6), P(None, U), [(0, ("tp",))]),
        (P(None, "dp"), (7, 0), P(None, "dp"), []),
        (P(), (), P(), []),
    ],
    ids=str,
)
def test_fit_keeps_the_longest_prefix_and_records_the_rest(m24, spec, shape, expected, lost):
    fit = eqshard.fit_spec(spec, shape, m24)
    assert fit.spec == expected
    assert [(g.dim, g.axes) for g in fit.given_up] == lost
    assert all(g.size == shape[g.dim] and str(g.size) in str(g) and g.axes[0] in str(g) for g in fit.given_up)


@pytest.mark.parametrize("call", [eqshard.fit_spec, eqshard.fit_sharding, lambda s, d, m: eqshard.shard_shape(d, s, m)])
def test_typos_are_never_corrected(m24, call):
    with pytest.raises(
        eqshard.UnknownAxisError, match=r"P\('dpp'\).*'dpp'; the mesh has 'dp', 'tp'. Did you mean 'dp'"
    ):
        call(P("dpp"), (8, 8), m24)
    with pytest.raises(eqshard.DuplicateAxisError, match="'dp' twice, in dims 0 and 1"):
        call(P("dp", "dp"), (8, 8), m24)
    with pytest.raises(eqshard.DuplicateAxisError, match="'dp' twice, in dim 0"):
        call(P(("dp", "dp")), (8, 8), m24)
    with pytest.raises(eqshard.RankError, match="3 entries for 2 dimensions"):
        call(P(None, None, "dp"), (8, 8), m24)
    with pytest.raises(eqshard.RankError, match="1 entries for 0 dimensions"):
        call(P("dp"), (), m24)
    call(P("dp", None, None), (8, 8), m24)  # asks for nothing that is not there


def test_the_error_says_what_where_the_arithmetic_and_the_ways_out():
    mesh = eqshard.MeshSpec(fsdp=8)
    tree = {"embed": jax.ShapeDtypeStruct((50257, 768), jnp.float32)}
    with pytest.raises(eqshard.IndivisibleError) as error:
        eqshard.replicated_plan(tree, mesh).at("embed").set(P("fsdp", None))
    assert str(error.value).splitlines() == [
        "cannot lay P('fsdp', None) over `['embed']` float32[50257,768].",
        "  dim 0: 50257 % 8 (mesh axis 'fsdp') = 1",
        "  Ways out: shard dim 1 instead (768 = 8 x 96); pad dim 0 to 50264; strict=False to make it P() "
        "(+135.1 MB per device).",
    ]
    with pytest.raises(eqshard.IndivisibleError, match=r"6 % 8 \(mesh axes 'a' 2 x 'b' 4\) = 6"):
        eqshard.shard_shape((6,), P(("a", "b")), eqshard.MeshSpec(a=2, b=4))


def test_fit_sharding(m24):
    sharding = eqshard.fit_sharding(P("dp", "tp"), (6, 7), m24, memory_kind="pinned_host")
    assert sharding == NamedSharding(m24.build(), P("dp"), memory_kind="pinned_host")
    assert eqshard.fit_sharding(P("dp"), (8,), m24.build()).mesh == m24.build()
    assert isinstance(eqshard.fit_sharding(P("dp"), (8,), m24.abstract()).mesh, AbstractMesh)
    auto = eqshard.MeshSpec(dp=2, tp=4)
    assert tuple(eqshard.fit_sharding(P("tp", U), (6, 6), auto).spec) == (None, U)
    placed = jax.device_put(np.ones((6, 7), np.float32), sharding)
    assert placed.sharding.memory_kind == "pinned_host"


def test_sizes_too_large_to_allocate():
    mesh = eqshard.MeshSpec(x=2**20)
    assert eqshard.shard_shape((2**40, 2**40), P("x"), mesh) == (2**20, 2**40)


@pytest.mark.parametrize("spec", [P(), P("x"), P(None, ("x", "y"), U), P(("x",), None)], ids=str)
def test_spec_as_a_list(spec):
    assert spec_from_list(spec_to_list(spec), "here") == spec


@pytest.mark.parametrize("data", ["x", [1], [["x", 1]], [[]], [{"unconstrained": False}], [[["x"]]], {"a": 1}, None])
def test_hostile_lists(data):
    with pytest.raises(eqshard.FormatError, match="here"):
        spec_from_list(data, "here")


def test_unreduced_specs_have_no_json():
    with pytest.raises(eqshard.FormatError, match="unreduced"):
        spec_to_list(P("x", unreduced={"y"}))


def test_spec_text():
    assert spec_text(P("x", None, ("y", "z"), U)) == "P('x', None, ('y', 'z'), UNCONSTRAINED)"
