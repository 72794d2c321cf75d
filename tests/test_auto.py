"""Plans from shapes: the peers' table with the right answers, and the laws."""

import itertools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P

import eqshard
from eqshard import DuplicateAxisError, MeshSpec, ShardingError, UnknownAxisError


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def pieces(shape, spec, mesh):
    return math.prod(shape) // math.prod(eqshard.shard_shape(shape, spec, mesh))


# --- the table of the peers ---


@pytest.mark.parametrize(
    "shape, right",
    [
        ((1024, 1024), P("tp", "dp")),
        ((1024, 4096), P("dp", "tp")),
        ((7, 16), P(None, ("tp", "dp"))),
        ((64,), P(("tp", "dp"))),
        ((6, 10), P(None, "dp")),
        ((7, 13), P()),
        ((), P()),
        ((7,), P()),
        ((0, 8), P()),
    ],
)
def test_peers_shapes_on_two_axes(m24, shape, right):
    assert eqshard.auto_spec(f32(*shape), m24, min_bytes=0) == right


def test_peers_tiny_arrays_stay_whole(m24):
    assert eqshard.auto_spec(f32(2, 4), m24) == P()
    assert eqshard.auto_spec(f32(64), m24) == P()


@pytest.mark.parametrize("shape", [(1024, 1024), (64,)])
def test_peers_three_axes_are_all_used(m222, shape):
    assert pieces(shape, eqshard.auto_spec(f32(*shape), m222, min_bytes=0), m222) == 8


def test_peers_axes_of_size_one_are_ignored(make_mesh):
    mesh = make_mesh(dp=1, fsdp=8, tp=1)
    assert eqshard.auto_spec(f32(7, 13), mesh, min_bytes=0) == P()
    assert eqshard.auto_spec(f32(1024, 1024), mesh) == P("fsdp")
    assert eqshard.auto_spec(f32(1024, 1024), mesh, names=["dp", "tp"]) == P()


def test_peers_an_axis_twice_is_an_error(m24):
    with pytest.raises(DuplicateAxisError, match="'dp' twice"):
        eqshard.auto_spec(f32(1024, 1024), m24, names=[("dp", "tp"), "dp"])


def test_peers_least_size_of_zero_is_honoured(m24):
    assert eqshard.auto_spec(f32(2, 2), m24, min_bytes=0) == P("dp")


def test_peers_unknown_name_lists_the_axes(m24):
    with pytest.raises(UnknownAxisError, match=r"'zz'.*'dp', 'tp'"):
        eqshard.auto_spec(f32(1024, 1024), m24, names=["zz"])


# --- every form of array and mesh ---


def meshes():
    devices = np.array(jax.devices()[:8]).reshape(2, 4)
    types = (jax.sharding.AxisType.Auto,) * 2
    return [
        MeshSpec(dp=2, tp=4),
        Mesh(devices, ("dp", "tp"), axis_types=types),
        AbstractMesh((2, 4), ("dp", "tp"), axis_types=types),
        jax.make_mesh((2, 4), ("dp", "tp")),  # Explicit
    ]


@pytest.mark.parametrize("mesh", meshes(), ids=lambda m: type(m).__name__)
def test_every_form(mesh):
    seen = []

    @jax.jit
    def traced(x):
        seen.append(eqshard.auto_spec(x, mesh))
        seen.append(eqshard.auto_plan({"x": x}, mesh)["['x']"].spec)
        return x

    shape = (256, 512)
    for x in (jnp.zeros(shape), np.zeros(shape, np.float32), f32(*shape)):
        seen.append(eqshard.auto_spec(x, mesh))
        seen.append(eqshard.auto_plan([x], mesh)["[0]"].spec)
    traced(jnp.zeros(shape))
    jax.vmap(lambda x: seen.append(eqshard.auto_spec(x, mesh)))(jnp.zeros((3, *shape)))
    assert len(seen) == 9 and set(seen) == {P("dp", "tp")}


def test_what_is_no_array_is_refused(m24):
    with pytest.raises(ShardingError, match="got a float"):
        eqshard.auto_spec(3.0, m24)


def test_leaves_that_are_no_arrays_are_not_planned(m24):
    tree = {"f": jnp.tanh, "n": None, "s": "text", "i": 3, "x": f32(8)}
    assert [leaf.path for leaf in eqshard.auto_plan(tree, m24)] == ["['x']"]


def test_dtypes(m24):
    tree = {
        "key": jax.random.key(0),
        "keys": jax.random.split(jax.random.key(0), 64),
        "bf16": jax.ShapeDtypeStruct((64, 64), jnp.bfloat16),
        "fp8": jax.ShapeDtypeStruct((64, 64), jnp.float8_e4m3fn),
        "int4": jax.ShapeDtypeStruct((64, 64), jnp.int4),
        "bool": jax.ShapeDtypeStruct((64, 64), jnp.bool_),
    }
    plan = eqshard.auto_plan(tree, m24, min_bytes=64 * 64)
    sharded = {leaf.path for leaf in plan if leaf.spec != P()}
    assert sharded == {"['bf16']", "['fp8']", "['int4']", "['bool']"}
    assert "PRNG key" in plan["['keys']"].why


# --- arguments ---


def test_names_choose_axes_and_their_order(m24):
    x = f32(1024, 512)
    assert eqshard.auto_spec(x, m24, names=["tp"]) == P("tp")
    assert eqshard.auto_spec(x, m24, names="tp") == P("tp")
    assert eqshard.auto_spec(x, m24, names=["dp", "tp"]) == P("dp", "tp")
    assert eqshard.auto_spec(x, m24, names=[("dp", "tp")]) == P(("dp", "tp"))
    assert eqshard.auto_spec(f32(1020, 500), m24, names=[("dp", "tp")]) == P()  # 8 divides neither
    assert eqshard.auto_spec(x, m24, names=[]) == P()


def test_reverse_takes_the_smallest_dimensions(m24):
    assert eqshard.auto_spec(f32(1024, 64), m24, reverse=True) == P(None, ("tp", "dp"))


def test_min_bytes_counts_bytes_not_elements(m24):
    assert eqshard.auto_spec(f32(128), m24, min_bytes=512) != P()
    assert eqshard.auto_spec(jax.ShapeDtypeStruct((128,), jnp.bfloat16), m24, min_bytes=512) == P()


def test_every_leaf_says_why(m24):
    plan = eqshard.auto_plan({"a": f32(1024, 1024), "b": f32(8), "c": f32(7, 131, 999), "d": f32(4, 16383)}, m24)
    why = [leaf.why for leaf in plan]
    assert why[0] == "largest dims over tp, dp"
    assert why[1].startswith("small: 32 B")
    assert why[2] == "no dim divides over tp, dp"
    assert why[3] == "largest dims over tp; dp left out: the pieces do not divide further"


def test_an_open_axis_is_filled_in():
    assert eqshard.auto_plan(f32(1024, 1024), MeshSpec(x=-1)).mesh == MeshSpec(x=8)


# --- the rows of the seeds ---


def test_auto_partition_spec(m24):
    """`auto_spec`, from outside and under a trace."""
    assert eqshard.auto_spec(jnp.zeros((256, 256)), m24) == P("tp", "dp")


def test_auto_namedsharding(m24):
    sharding = eqshard.auto_sharding(f32(256, 256), m24)
    assert sharding == NamedSharding(m24.build(), P("tp", "dp"))
    abstract = eqshard.auto_sharding(f32(256, 256), m24.abstract())
    assert abstract.mesh == m24.abstract() and abstract.spec == P("tp", "dp")


def test_auto_shard_array(m24):
    x = jax.random.normal(jax.random.key(0), (256, 256))
    y = eqshard.apply(eqshard.auto_plan(x, m24), x)
    assert y.sharding.shard_shape(y.shape) == (64, 128) and (np.asarray(y) == np.asarray(x)).all()


# --- laws ---

sizes = st.sampled_from([1, 2, 3, 4, 6, 8])
mesh_axes = st.lists(sizes, min_size=1, max_size=4).map(lambda s: {f"a{i}": n for i, n in enumerate(s)})
shapes = st.lists(st.sampled_from([1, 2, 3, 4, 6, 7, 8, 12, 16, 24, 30, 64, 96]), max_size=4).map(tuple)


def most_pieces(shape, factors):
    """By trying everything."""
    best = 1
    for places in itertools.product([None, *range(len(shape))], repeat=len(factors)):
        split = [math.prod(f for f, p in zip(factors, places) if p == d) for d in range(len(shape))]
        if all(n % s == 0 for n, s in zip(shape, split)):
            best = max(best, math.prod(split))
    return best


@given(mesh_axes, shapes, st.booleans())
def test_no_way_makes_more_pieces(axes, shape, reverse):
    mesh = MeshSpec(axes)
    spec = eqshard.auto_spec(f32(*shape), mesh, min_bytes=0, reverse=reverse)
    assert pieces(shape, spec, mesh) == most_pieces(shape, mesh.sizes)


@given(mesh_axes, shapes, st.data())
def test_no_way_makes_more_pieces_of_axes_used_as_one(axes, shape, data):
    mesh = MeshSpec(axes)
    cut = data.draw(st.integers(0, len(mesh.names)))
    names = [mesh.names[:cut], *mesh.names[cut:]] if cut else [*mesh.names]
    spec = eqshard.auto_spec(f32(*shape), mesh, names=names, min_bytes=0)
    factors = [mesh.size(n) for n in names]
    assert pieces(shape, spec, mesh) == most_pieces(shape, factors)
    held = [e for e in spec if isinstance(e, tuple)]
    for entry in held:  # all of the tuple, or nothing of it
        assert not cut or set(entry) >= {n for n in names[0] if mesh.size(n) > 1} or not set(entry) & set(names[0])


@given(mesh_axes, shapes)
def test_the_largest_dimension_is_cut_if_it_can_be(axes, shape):
    mesh = MeshSpec(axes)
    spec = eqshard.auto_spec(f32(*shape), mesh, min_bytes=0)
    largest = [d for d, n in enumerate(shape) if n == max(shape)]
    first = max(mesh.sizes)
    if first > 1 and pieces(shape, spec, mesh) == mesh.size() and shape and shape[largest[0]] % first == 0:
        assert eqshard.shard_shape(shape, spec, mesh)[largest[0]] < shape[largest[0]]


@given(mesh_axes, st.lists(shapes, max_size=5))
def test_plans_are_valid_canonical_and_the_same_again(axes, tree_shapes):
    mesh = MeshSpec(axes)
    tree = [f32(*s) for s in tree_shapes]
    plan = eqshard.auto_plan(tree, mesh, min_bytes=0)
    assert not [i for i in eqshard.validate(plan, tree) if i.severity == "error"]
    assert all(leaf.spec == eqshard.canonical(leaf.spec, mesh.shape) for leaf in plan)
    again = eqshard.auto_plan(tree, MeshSpec(mesh.axes), min_bytes=0)
    assert plan == again and [leaf.why for leaf in plan] == [leaf.why for leaf in again]
    assert [leaf.spec for leaf in plan] == [eqshard.auto_spec(x, mesh, min_bytes=0) for x in tree]


def test_a_mesh_of_very_many_axes():
    mesh = MeshSpec({f"a{i}": 2 for i in range(20)})
    spec = eqshard.auto_spec(f32(2**9, 3, 2**8), mesh)
    assert pieces((2**9, 3, 2**8), spec, mesh) == 2**17


def test_a_model(m24):
    model = eqx.filter_eval_shape(eqx.nn.MLP, 256, 256, 1024, 2, key=jax.random.key(0))
    plan = eqshard.auto_plan(model, m24)
    assert plan[".layers[0].weight"].spec == P("tp", "dp")  # (1024, 256)
    assert plan[".layers[0].bias"].spec == P()
    placed = eqshard.apply(plan, model)
    assert placed.layers[0].weight.sharding.spec == P("tp", "dp")
