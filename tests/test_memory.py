"""Plans for a memory budget: the peers' table with the right answers, and the laws."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import PartitionSpec as P

import eqshard
from eqshard import BudgetError, MeshSpec, ShardingError


MIB = 2**20


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def bytes_a_device(plan):
    return sum(leaf.nbytes // eqshard.shard_factor(leaf.spec, plan.mesh) for leaf in plan)


# --- the table of the peers ---


def test_peers_no_limit_is_the_plan_by_shapes(m24):
    assert eqshard.memory_plan(f32(1024, 1024), m24, None) == eqshard.auto_plan(f32(1024, 1024), m24)


def test_peers_what_fits_stays_whole(m24):
    assert eqshard.memory_plan(f32(1024, 1024), m24, 4 * MIB)[""].spec == P()


def test_peers_the_least_sharding_that_fits(m24):
    plan = eqshard.memory_plan(f32(1024, 1024), m24, 2 * MIB)
    assert plan[""].spec == P("dp") and plan[""].why == "2-way to fit 2.1 MB"
    assert eqshard.memory_plan(f32(1024, 1024), m24, 2 * MIB - 1)[""].spec == P("tp")
    assert eqshard.shard_factor(eqshard.memory_plan(f32(1024, 1024), m24, MIB / 2)[""].spec, m24) == 8


def test_peers_one_byte_is_infeasible(m24):
    with pytest.raises(BudgetError, match=r"the least is .*\(524288 bytes\)(.|\n)*float32\[1024,1024\]: at most 8-way"):
        eqshard.memory_plan(f32(1024, 1024), m24, 1)


def test_peers_a_vector_uses_both_axes(m24):
    plan = eqshard.memory_plan(f32(MIB), m24, 600_000)
    assert eqshard.shard_shape((MIB,), plan[""].spec, m24) == (MIB // 8,)


def test_peers_the_budget_is_for_the_whole_tree(m24):
    tree = [f32(512, 512) for _ in range(10)]
    assert bytes_a_device(eqshard.memory_plan(tree, m24, 2 * MIB)) <= 2 * MIB


def test_peers_what_does_not_divide_is_infeasible(m24):
    with pytest.raises(BudgetError, match=r"float32\[1023,1023\]: cannot be cut"):
        eqshard.memory_plan(f32(1023, 1023), m24, MIB)


def test_optimize_sharding_for_memory(m24):
    """Every form of leaf and mesh."""
    seen = []
    for mesh in (m24, m24.build(), m24.abstract()):
        for x in (f32(512, 512), np.zeros((512, 512), np.float32), jnp.zeros((512, 512))):
            seen.append(eqshard.memory_plan([x], mesh, MIB // 2)["[0]"].spec)
        jax.jit(lambda x, mesh=mesh: seen.append(eqshard.memory_plan([x], mesh, MIB // 2)["[0]"].spec))(x)
    assert len(seen) == 12 and set(seen) == {P("dp")}


# --- arguments and messages ---


def test_names(m24):
    assert eqshard.memory_plan(f32(1024, 1024), m24, 2 * MIB, names=["tp"])[""].spec == P("tp")
    whole = eqshard.memory_plan(f32(1024, 1024), m24, 2 * MIB, names=[("dp", "tp")])[""].spec
    assert whole == P(("dp", "tp"))
    with pytest.raises(BudgetError):
        eqshard.memory_plan(f32(1024, 1024), m24, MIB, names=["dp"])


def test_infinity_and_not_a_number(m24):
    assert eqshard.memory_plan(f32(1024, 1024), m24, math.inf)[""].spec == P()
    with pytest.raises(ShardingError, match="not a number"):
        eqshard.memory_plan(f32(1024, 1024), m24, math.nan)


def test_leaves_that_cannot_be_cut(m24):
    tree = {"key": jax.random.key(0), "keys": jax.random.split(jax.random.key(0), 8), "none": f32(0, 8), "n": f32()}
    plan = eqshard.memory_plan(tree, m24, 100)
    assert {leaf.spec for leaf in plan} == {P()}
    with pytest.raises(BudgetError, match=r"`\['keys'\]` key<fry>\[8\]: cannot be cut, 64 B"):
        eqshard.memory_plan(tree, m24, 75)


def test_a_tree_without_leaves(m24):
    assert len(eqshard.memory_plan({}, m24, 0)) == 0


def test_the_error_names_the_worst_and_counts_the_rest(m24):
    tree = {f"k{i}": f32(1023, 101 + 2 * i) for i in range(8)}
    with pytest.raises(BudgetError, match=r"`\['k7'\]`(.|\n)*and 3 other kinds of leaves"):
        eqshard.memory_plan(tree, m24, 1)


def test_few_leaves_rather_than_many_for_nearly_the_same(m24):
    tree = {"large": f32(1010, 512), "small": [f32(64, 64) for _ in range(64)]}
    total = sum(math.prod(x.shape) * 4 for x in jax.tree.leaves(tree))
    plan = eqshard.memory_plan(tree, m24, total - 1_020_000)  # 63 small ones, or the large one for 1 % more
    assert [leaf.path for leaf in plan if leaf.spec != P()] == ["['large']"]


def test_equal_leaves_are_cut_in_tree_order(m24):
    plan = eqshard.memory_plan([f32(512, 512) for _ in range(4)], m24, 3 * MIB)
    assert [leaf.spec != P() for leaf in plan] == [True, True, False, False]


# --- laws ---

sizes = st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3)
dims = st.sampled_from([1, 2, 3, 4, 6, 8, 16, 24, 50, 96])
trees = st.lists(st.lists(dims, max_size=3).map(tuple), min_size=1, max_size=6)


def every_choice(tree, mesh):
    """For each leaf the bytes that each layout leaves on a device."""
    ways = []
    for shape in tree:
        kept = set()
        for places in itertools.product([None, *range(len(shape))], repeat=len(mesh.sizes)):
            split = [math.prod(f for f, p in zip(mesh.sizes, places) if p == d) for d in range(len(shape))]
            if all(n % s == 0 for n, s in zip(shape, split)):
                kept.add(4 * math.prod(shape) // math.prod(split))
        ways.append(kept)
    return ways


@given(sizes, trees, st.floats(0, 1))
def test_never_over_budget_and_nearly_the_least_to_communicate(mesh_sizes, tree, part):
    mesh = MeshSpec({f"a{i}": n for i, n in enumerate(mesh_sizes)})
    ways = every_choice(tree, mesh)
    total, least = sum(map(max, ways)), sum(map(min, ways))
    budget = round(least + part * (total - least))
    plan = eqshard.memory_plan([f32(*s) for s in tree], mesh, budget)
    assert bytes_a_device(plan) <= budget
    assert not [i for i in eqshard.validate(plan) if i.severity == "error"]
    reachable = {0}
    for kept in ways:
        reachable = {a + b for a in reachable for b in kept}
    best = min(total - kept for kept in reachable if kept <= budget)
    assert total - bytes_a_device(plan) <= 1.1 * best
    assert plan == eqshard.memory_plan([f32(*s) for s in tree], mesh, budget)


@given(sizes, trees)
def test_infeasible_exactly_when_the_finest_is_too_large(mesh_sizes, tree):
    mesh = MeshSpec({f"a{i}": n for i, n in enumerate(mesh_sizes)})
    least = sum(map(min, every_choice(tree, mesh)))
    assert bytes_a_device(eqshard.memory_plan([f32(*s) for s in tree], mesh, least)) == least
    with pytest.raises(BudgetError, match=rf"\({least} bytes\)"):
        eqshard.memory_plan([f32(*s) for s in tree], mesh, least - 1)


@given(st.lists(st.integers(1, 10**6), min_size=300, max_size=300), st.floats(0.0001, 0.87))
def test_large_trees_come_within_a_tenth_of_the_need(elements, part):
    """Too many leaves to enumerate: but what is saved is never far above what must be."""
    tree = [f32(8 * n) for n in elements]
    total = sum(4 * 8 * n for n in elements)
    plan = eqshard.memory_plan(tree, MeshSpec(a=2, b=4), int(total * (1 - part)))
    saved = total - bytes_a_device(plan)
    assert total * part <= saved
    smallest = min(elements) * 4 * 4  # the least that one cut saves
    assert saved <= 1.1 * total * part or saved <= total * part + smallest
