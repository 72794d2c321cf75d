import re
from fractions import Fraction

import jax
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P

import eqshard


S = jax.ShapeDtypeStruct
U = P.UNCONSTRAINED


def one(shape, spec, mesh, **fields):
    row = eqshard.LeafPlan("['w']", shape, "float32", spec, spec, **fields)
    return eqshard.ShardingPlan(mesh, (row,))


def moved(shape, before, after, mesh, other=None):
    return eqshard.diff(one(shape, before, mesh), one(shape, after, other or mesh))


def counted(shape, before, after, mesh, other=None):
    """By brute force: for each element who has it, who needs it, and who shares in giving it; in bytes of float32."""
    other = other or mesh
    has = NamedSharding(mesh.build(), before).devices_indices_map(shape)
    needs = NamedSharding(other.build(), after).devices_indices_map(shape)
    devices = list(dict.fromkeys([*mesh.build().devices.flat, *other.build().devices.flat]))

    def mask(index):
        held = np.zeros(shape, bool)
        if index is not None:
            held[index] = True
        return held

    masks = {d: (mask(has.get(d)), mask(needs.get(d))) for d in devices}
    holders = sum(held.astype(int) for held, _ in masks.values())
    receives = {d: int((need & ~held).sum()) * 4 for d, (held, need) in masks.items()}
    sends = dict.fromkeys(devices, Fraction(0))
    for held, need in masks.values():
        for at in np.argwhere(need & ~held):
            for d in devices:
                if masks[d][0][tuple(at)]:
                    sends[d] += Fraction(4, int(holders[tuple(at)]))
    return tuple(receives.values()), tuple(sends.values())


SPECS = st.lists(
    st.sampled_from([None, "dp", "fsdp", "tp", ("dp", "tp"), ("tp", "dp"), ("fsdp", "tp")]), min_size=2, max_size=2
)


def distinct(entries):
    seen, spec = set(), []
    for entry in entries:
        axes = (entry,) if isinstance(entry, str) else entry or ()
        spec.append(None if seen & set(axes) else entry)
        seen |= set(axes)
    return P(*spec)


@given(SPECS.map(distinct), SPECS.map(distinct), st.sampled_from([(8, 8), (4, 16), (16, 4)]))
def test_bytes_are_those_that_devices_lack(m222, before, after, shape):
    found = moved(shape, before, after, m222)
    receives, sends = counted(shape, before, after, m222)
    assert found.receives_per_device == receives
    assert found.sends_per_device == tuple(round(n) for n in sends)
    assert sum(found.sends_per_device) == pytest.approx(sum(receives), abs=8)
    assert bool(found.moves) == (eqshard.canonical(before) != eqshard.canonical(after))


@pytest.mark.parametrize(
    "before, after", [(P("x"), P("x")), (P("x"), P()), (P(), P(None, "x")), (P("x"), P(None, "y"))]
)
def test_between_meshes_of_other_devices(before, after):
    small = eqshard.MeshSpec(x=2, y=2, devices=jax.devices()[:4])
    large = eqshard.MeshSpec(x=4, y=2, devices=jax.devices())
    for a, b in ((small, large), (large, small)):
        found = moved((8, 8), before, after, a, b)
        receives, sends = counted((8, 8), before, after, a, b)
        assert found.receives_per_device == receives
        assert found.sends_per_device == tuple(round(n) for n in sends)
        assert found.moves[0].how == "copy"


def test_scalars_move_between_devices_too():
    a = eqshard.MeshSpec(x=4, devices=jax.devices()[:4])
    b = eqshard.MeshSpec(x=4, devices=jax.devices()[2:6])
    found = moved((), P(), P(), a, b)
    assert found.receives_per_device == counted((), P(), P(), a, b)[0] == (0, 0, 0, 0, 4, 4)
    assert found.devices == (0, 1, 2, 3, 4, 5)


# ---- which collective: XLA is the oracle

HLO = {"all-gather": "all-gather", "all-to-all": "all-to-all", "collective-permute": "collective-permute"}


@pytest.mark.parametrize(
    "before, after, how",
    [
        (P(), P("tp"), "slice"),
        (P("dp"), P("dp", "tp"), "slice"),
        (P("tp"), P(("tp", "dp")), "slice"),
        (P("tp"), P(), "all-gather"),
        (P(("tp", "dp")), P("tp"), "all-gather"),
        (P("dp", "tp"), P("dp"), "all-gather"),
        (P("tp", None), P(None, "tp"), "all-to-all"),
        (P("dp", "tp"), P("tp", "dp"), "collective-permute"),
        (P(("dp", "tp")), P(("tp", "dp")), "collective-permute"),
    ],
)
def test_how_is_what_xla_does(before, after, how):
    mesh = eqshard.MeshSpec(dp=2, tp=2)
    found = moved((8, 8), before, after, mesh)
    assert found.moves[0].how == how
    built = mesh.build()
    program = jax.jit(lambda x: x, in_shardings=NamedSharding(built, before), out_shardings=NamedSharding(built, after))
    text = program.lower(S((8, 8), "float32")).compile().as_text()
    used = set(re.findall(r"(all-gather|all-to-all|collective-permute|all-reduce)(?:-start)?\(", text))
    assert used == ({how} if how in HLO else set())


@pytest.mark.parametrize(
    "before, after, how",
    [
        (P("dp"), P(None, ("dp", "tp")), "slice + all-to-all"),
        (P(None, ("dp", "tp")), P("dp"), "all-to-all + all-gather"),
        (P("dp"), P("tp"), "all-gather + slice"),
    ],
)
def test_how_in_two_steps(m24, before, after, how):
    assert moved((8, 8), before, after, m24).moves[0].how == how


def test_memory_kinds_are_copies(m24):
    found = eqshard.diff(one((8,), P("dp"), m24), one((8,), P("dp"), m24, memory_kind="pinned_host"))
    assert found.moves[0].how == "copy" and found.receives_per_device == (0,) * 8


def test_unconstrained_stays():
    mesh = eqshard.MeshSpec(dp=2, tp=4)
    assert len(moved((8, 8), P("dp", "tp"), P(U, "tp"), mesh)) == 0
    assert moved((8, 8), P("dp", "tp"), P(U), mesh).moves[0].how == "all-gather"


def test_the_same_plan_moves_nothing(m24):
    tree = [{"w": S((64, 64), "float32")} for _ in range(5)]
    plan = eqshard.auto_plan(tree, m24, min_bytes=0)
    found = eqshard.diff(plan, plan)
    assert len(found) == 0 and found.receives_per_device == (0,) * 8 and not found.added and not found.removed


def test_leaves_come_and_go(m24):
    a = eqshard.replicated_plan({"a": S((8,), "float32"), "b": S((8,), "float32"), "c": S((8,), "float32")}, m24)
    b = eqshard.replicated_plan({"b": S((8,), "int32"), "c": S((8,), "float32"), "d": S((8,), "float32")}, m24)
    found = eqshard.diff(a, b)
    assert found.removed == ("['a']", "['b']") and found.added == ("['b']", "['d']") and len(found) == 0


def test_moves_add_up(m24):
    tree = [S((64, 64), "float32") for _ in range(10)]
    split = eqshard.auto_plan(tree, m24, min_bytes=0)
    found = eqshard.diff(split, eqshard.replicated_plan(tree, m24))
    assert [move.how for move in found.moves] == ["all-gather"] * 10
    assert found.receives_per_device == (10 * 64 * 64 * 4 * 7 // 8,) * 8 == found.sends_per_device


def test_a_diff_is_a_value(m24):
    a, b = one((8, 8), P("dp"), m24), one((8, 8), P("tp"), m24)
    assert eqshard.diff(a, b) == eqshard.diff(a, b) != eqshard.diff(b, a)
    assert jax.tree.leaves(eqshard.diff(a, b)) == []
    data = eqshard.diff(a, b).to_dict()
    assert data["moves"][0]["before"] == "P('dp')" and data["moves"][0]["how"] == "all-gather + slice"
    assert "1 leaves move" in repr(eqshard.diff(a, b))
