"""Laws of plans, over random trees, meshes and layouts. `nox -s nightly` runs them with many more examples."""

import functools
import itertools

import equinox as eqx
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from jax.sharding import NamedSharding, PartitionSpec as P

import eqshard
from eqshard import MeshSpec, ShardingPlan


# The type checker that the tests run under picks the items that it looks at by `random`, also inside strategies.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")


# Meshes: one to three axes over at most 8 devices, sizes of 1 included, Auto and Explicit axes in every mixture.

SIZES = [s for n in (3, 2, 1) for s in itertools.product((2, 4, 1, 3, 8), repeat=n) if np.prod(s) <= 8]


@st.composite
def meshes(draw):
    sizes = draw(st.sampled_from(SIZES))
    names = draw(st.permutations(["x", "y", "z"]))[: len(sizes)]
    kinds = draw(st.one_of(st.just(["auto"] * 3), st.just(["explicit"] * 3), st.lists(KIND, min_size=3, max_size=3)))
    return MeshSpec(list(zip(names, sizes)), axis_type=dict(zip(names, kinds)))


KIND = st.sampled_from(["auto", "explicit"])


@functools.cache
def build(mesh):
    return mesh.build()


# Trees: nested containers and modules over a pool of leaves, so that one leaf may stand in several places.

DTYPES = [
    np.dtype(d)
    for d in (
        "bool uint8 int8 int16 int32 uint32 float16 float32 complex64".split()
        + [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4, ml_dtypes.uint4]
    )
]
DIM = st.sampled_from([8, 16, 4, 24, 2, 6, 12, 3, 1, 0])
SHAPES = st.sampled_from([2, 1, 3, 2, 1, 0]).flatmap(lambda rank: st.tuples(*[DIM] * rank))
OTHERS = st.sampled_from([None, "text", len, 3, 2.5, np.array(["a"]), np.float32(2.0)])


class Node(eqx.Module):
    a: object
    b: object
    fixed: str = eqx.field(static=True, default="static")


@st.composite
def arrays(draw):
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(SHAPES)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if dtype.name in ("bool", "int4", "uint4"):
        whole = rng.integers(0, 2 if dtype.name == "bool" else 8, shape).astype(dtype)
    else:  # any bits: NaNs and infinities too
        whole = np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)
    return whole if draw(st.booleans()) else jnp.asarray(whole)


@st.composite
def keys(draw):
    impl, width = draw(st.sampled_from([("threefry2x32", 2), ("rbg", 4)]))
    shape = draw(st.sampled_from([(), (2,), (4, 2)]))
    return jax.random.wrap_key_data(
        np.arange(np.prod((*shape, width)), dtype=np.uint32).reshape(*shape, width), impl=impl
    )


def trees():
    pool = st.lists(st.one_of(arrays(), arrays(), arrays(), keys()), min_size=1, max_size=4)

    def over(leaves):
        leaf = st.one_of(st.sampled_from(leaves), st.sampled_from(leaves), st.sampled_from(leaves), OTHERS)
        part = st.recursive(
            leaf,
            lambda inner: st.one_of(
                st.lists(inner, max_size=3),
                st.lists(inner, max_size=2).map(tuple),
                st.dictionaries(st.sampled_from(["w", "b", "a.b", "['q']", "layers"]), inner, max_size=3),
                st.builds(Node, inner, inner),
            ),
            max_leaves=4,
        )
        whole = st.fixed_dictionaries({"first": st.sampled_from(leaves)}, optional={"second": part, "third": part})
        return st.one_of(whole, st.lists(part, min_size=1, max_size=3), st.builds(Node, whole, part), part)

    return pool.flatmap(over)


# Layouts


@st.composite
def specs(draw, mesh, rank):
    """A spec whose axes may or may not divide."""
    axes = draw(st.permutations(mesh.names))
    entries = [[] for _ in range(rank)]
    for axis in axes if rank else ():
        if draw(st.sampled_from([True, True, True, False])):
            entries[draw(st.integers(0, rank - 1))].append(axis)
    return P(*(tuple(e) if len(e) != 1 else e[0] for e in entries))


@st.composite
def planned(draw):
    """A tree, and a plan for it whose specs all fit."""
    mesh, tree = draw(meshes()), draw(trees())
    plan = eqshard.replicated_plan(tree, mesh)
    rows = []
    for leaf in plan:
        spec = eqshard.fit_spec(draw(specs(mesh, len(leaf.shape))), leaf.shape, mesh).spec
        rows.append(eqshard.LeafPlan(leaf.path, leaf.shape, leaf.dtype, spec, spec, None, draw(st.text(max_size=3))))
    return tree, ShardingPlan(mesh, rows)


def bits(x):
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return str(x.dtype), x.shape, np.asarray(jax.random.key_data(x)).tobytes()
    return str(x.dtype), x.shape, np.asarray(x).tobytes()


def assert_same_bits(found, tree):
    assert jtu.tree_structure(found) == jtu.tree_structure(tree)
    for a, b in zip(jtu.tree_leaves(found), jtu.tree_leaves(tree)):
        assert bits(a) == bits(b) if eqshard.is_array(b) else a is b


# The laws


@given(planned())
def test_nothing_is_lost(case):
    tree, plan = case
    placed = eqshard.apply(plan, tree)
    for (path, x), leaf in zip(eqshard._tree.array_leaves(placed), plan):
        assert path == leaf.path
        assert isinstance(x, jax.Array) and x.sharding.is_equivalent_to(
            NamedSharding(build(plan.mesh), leaf.spec), x.ndim
        )
        assert x.sharding.shard_shape(x.shape) == eqshard.shard_shape(x.shape, leaf.spec, plan.mesh)
    assert_same_bits(eqshard.gather(placed), tree)


@given(planned())
def test_apply_twice_is_apply_once(case):
    tree, plan = case
    once = eqshard.apply(plan, tree)
    twice = eqshard.apply(plan, once)
    assert jtu.tree_structure(once) == jtu.tree_structure(twice)
    assert all(a is b for a, b in zip(jtu.tree_leaves(once), jtu.tree_leaves(twice)))


@given(planned())
def test_shared_leaves_with_one_layout_stay_shared(case):
    tree, plan = case
    placed = [x for x in jtu.tree_leaves(eqshard.apply(plan, tree)) if eqshard.is_array(x)]
    leaves = [x for x in jtu.tree_leaves(tree) if eqshard.is_array(x)]
    for (x, a, i), (y, b, j) in itertools.combinations(zip(leaves, placed, plan), 2):
        if x is y and i.spec == j.spec:
            assert a is b


@given(planned())
def test_the_plan_of_what_was_applied_is_the_plan(case):
    tree, plan = case
    assume(len(plan))
    found = eqshard.plan_of(eqshard.apply(plan, tree))
    assert found == plan and hash(found) == hash(plan)


@given(planned())
def test_structs_lie_as_the_arrays_would(case):
    tree, plan = case
    structs = jtu.tree_map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if eqshard.is_array(x) else x, tree)
    described, placed = eqshard.apply(plan, structs), eqshard.apply(plan, tree)
    for a, b in zip(jtu.tree_leaves(described), jtu.tree_leaves(placed)):
        if eqshard.is_array(b):
            assert (a.shape, a.dtype) == (b.shape, b.dtype) and a.sharding.is_equivalent_to(b.sharding, b.ndim)
        else:
            assert a is b


def mixes_kinds(spec, mesh):
    kinds = dict(zip(mesh.names, mesh.axis_types))
    return any(len({kinds[a] for a in e}) > 1 for e in spec if isinstance(e, tuple))


@given(planned())
def test_inside_and_outside_jit(case):
    tree, plan = case
    outside = eqshard.apply(plan, tree)
    dynamic, static = eqx.partition(tree, eqshard.is_array)
    place = jax.jit(lambda dynamic: eqx.filter(eqshard.apply(plan, eqx.combine(dynamic, static)), eqshard.is_array))
    if any(mixes_kinds(leaf.spec, plan.mesh) for leaf in plan):  # not to be had in jit: never silently other
        with pytest.raises(eqshard.ShardingError, match="different dimensions"):
            place(dynamic)
        return
    for start in (dynamic, eqx.filter(outside, eqshard.is_array)):
        inside = eqx.combine(place(start), static)
        assert_same_bits(eqshard.gather(inside), eqshard.gather(outside))
        for a, b in zip(jtu.tree_leaves(inside), jtu.tree_leaves(outside)):
            if eqshard.is_array(b) and b.size:  # XLA forgets the layout of nothing
                assert a.sharding.is_equivalent_to(b.sharding, b.ndim), (a.sharding, b.sharding)


@given(st.data())
def test_fit_agrees_with_jax(data):
    mesh, shape = data.draw(meshes()), data.draw(SHAPES)
    spec = data.draw(specs(mesh, len(shape)))
    sharding = NamedSharding(build(mesh), spec)
    try:
        pieces = sharding.shard_shape(shape)
    except ValueError:
        pieces = None
    fit = eqshard.fit_spec(spec, shape, mesh)
    assert (pieces is None) == bool(eqshard.misfits(shape, spec, mesh.shape)) == bool(fit.given_up)
    fitted = NamedSharding(build(mesh), fit.spec)
    assert fitted.shard_shape(shape) == eqshard.shard_shape(shape, fit.spec, mesh)
    assert fitted.num_devices // np.prod([1, *mesh.sizes]) * eqshard.shard_factor(fit.spec, mesh) == len(
        {str(i) for i in fitted.devices_indices_map((840,) * len(shape)).values()}
    )
    if pieces is not None:
        assert eqshard.shard_shape(shape, spec, mesh) == pieces and fitted.is_equivalent_to(sharding, len(shape))
    # What was given up cannot be had: the next axis of that dimension would not divide.
    for lost in fit.given_up:
        entry = fit.spec[lost.dim] if lost.dim < len(fit.spec) else None
        kept = () if entry is None else (entry,) if isinstance(entry, str) else entry
        assert shape[lost.dim] % mesh.size((*kept, lost.axes[0]))


@given(st.data())
def test_canonical_never_changes_the_layout(data):
    mesh, shape = data.draw(meshes()), data.draw(SHAPES)
    spec = data.draw(specs(mesh, len(shape)))
    short = eqshard.canonical(spec, mesh.shape)
    assert eqshard.canonical(short, mesh.shape) == short and len(short) <= len(spec)
    a, b = NamedSharding(build(mesh), spec), NamedSharding(build(mesh), short)
    whole = tuple(840 for _ in shape)
    assert a.is_equivalent_to(b, len(shape)) and a.devices_indices_map(whole) == b.devices_indices_map(whole)


@given(planned())
def test_json_round_trip(case):
    _, plan = case
    again = ShardingPlan.from_json(plan.to_json())
    assert again == plan and hash(again) == hash(plan) and again.fingerprint() == plan.fingerprint()
    assert again.to_dict() == plan.to_dict() and [r.why for r in again] == [r.why for r in plan]
    assert MeshSpec.from_json(plan.mesh.to_json()) == plan.mesh


@given(planned())
def test_select_and_merge(case):
    tree, plan = case
    children = jtu.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)[0]
    rebuilt = ShardingPlan(plan.mesh, [])
    placed = dict(jtu.tree_flatten_with_path(eqshard.apply(plan, tree), is_leaf=lambda x: x is not None)[0])
    for path, child in children:
        at = jtu.keystr(path)
        if not eqshard._tree.array_leaves(child):
            continue
        part = plan.select(at)
        assert eqshard.replicated_plan(child, plan.mesh).specs().keys() == part.specs().keys()
        assert plan.merge(part, at=at) == plan
        for inner, x in jtu.tree_flatten_with_path(eqshard.apply(part, child))[0]:
            whole = placed.get((*path, *inner))
            assert whole is None or not eqshard.is_array(x) or x.sharding == whole.sharding
        rebuilt = rebuilt.merge(part, at=at)
    assert rebuilt == plan and plan.select("") == plan if len(plan) else rebuilt == plan
