"""Reading HLO text: held against jaxlib, against shapes that JAX knows, and on lines that are broken."""

import jax
import jax.numpy as jnp
import pytest
from compiler_programs import fsdp_scan, matmul_pair, nested_scans
from hypothesis import given, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxlib import _hlo

import eqshard
from eqshard.compiler._groups import group_axes, replica_groups
from eqshard.compiler._hlo import dtype_bits, Instruction, read_module, shape_arrays, shape_bytes


@pytest.mark.parametrize("program", [matmul_pair, fsdp_scan, nested_scans], ids=lambda p: p.__name__)
def test_agrees_with_jaxlib(program):
    known = program(eqshard.MeshSpec(dp=2, tp=4), "float32")
    text = eqshard.compile_report(known.fn, *known.args, plans=known.plans).hlo
    ours, theirs = read_module(text), _hlo.hlo_module_from_text(text)
    assert ours.name == theirs.name and not ours.unread and ours.scheduled
    assert set(ours.computations) == {c.name for c in theirs.computations()}
    for computation in theirs.computations():
        mine = ours.computations[computation.name]
        expected = {i.name: ([o.name for o in i.operands()]) for i in computation.instructions()}
        assert {i.name: list(i.operands) for i in mine.instructions} == expected


def test_source_lines_and_paths():
    report = eqshard.compile_report(*_sum_over_tp())
    [c] = report.collectives
    assert c.source.startswith(__file__) and c.op.endswith("reduce_sum") and c.moves == ""


def _sum_over_tp():
    x = jax.ShapeDtypeStruct(
        (8, 64), jnp.float32, sharding=NamedSharding(eqshard.MeshSpec(tp=8).build(), P(None, "tp"))
    )
    return lambda x: jnp.sum(jnp.sin(x)), x


def test_what_cannot_be_read_is_kept():
    body = "  what is this\n  ROOT %p = f32[2] parameter(0)\n"
    text = "HloModule m, num_partitions=2\n\nENTRY %e (p: f32[2]) -> f32[2] {\n" + body + "}\n"
    module = read_module(text)
    assert module.unread == ("what is this",) and module.partitions == 2
    assert [i.name for i in module.main.instructions] == ["p"]


@pytest.mark.parametrize(
    "shape, size",
    [
        ("f32[2,3]{1,0}", 24),
        ("bf16[6,2048,4096]{2,1,0:T(8,128)(2,1)S(1)}", 6 * 2048 * 4096 * 2),
        ("(s32[]{:T(128)}, /*index=1*/f8e4m3fn[4,4], (pred[3]))", 4 + 16 + 3),
        ("s4[10]", 5),
        ("u2[16]", 4),
        ("c64[2]", 16),
        ("f32[<=8,4]", 128),
        ("token[]", 0),
    ],
)
def test_shape_bytes(shape, size):
    assert shape_bytes(shape) == size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint32", "bool", "float16", "complex64"])
def test_dtype_bits_agree_with_numpy(dtype):
    text = jax.jit(lambda: jnp.zeros(4, dtype)).lower().compile().as_text()
    [name] = {d for i in read_module(text).main.instructions if i.root for d, _ in shape_arrays(i.shape)}
    assert dtype_bits(name) == 8 * jnp.zeros(0, dtype).dtype.itemsize


def groups(attributes, partitions=16):
    return replica_groups(Instruction("a", "f32[]", "all-reduce", (), "", attributes, "", "", False), partitions)


@pytest.mark.parametrize(
    "text",
    [
        "replica_groups={{0,4,8,12},{1,5,9,13},{2,6,10,14},{3,7,11,15}}",
        "replica_groups=[4,4]<=[4,4]T(1,0)",
        "replica_groups=mesh['axis_0'=4,'axis_1'=4] {'axis_0'}",
        "replica_groups=mesh['axis_0'=16] {'axis_0':(1)4}",
        "replica_groups=mesh['a'=4,'b'=4], device_ids=([4,4]T(1,0)) {'b'}",
    ],
)
def test_spellings_of_groups(text):
    mesh = eqshard.MeshSpec(dp=4, tp=4)
    found = groups(f", channel_id=1, {text}, dimensions={{0}}")
    assert sorted(map(sorted, found)) == [[i, i + 4, i + 8, i + 12] for i in range(4)]
    assert group_axes(found, mesh) == ("dp",)


def test_groups_of_all_and_of_parts():
    assert groups(", replica_groups={}") == (tuple(range(16)),)
    assert groups(", replica_groups=[1,16]<=[16]") == (tuple(range(16)),)
    assert groups(", replica_groups=something new") is None
    assert groups(", replica_groups=mesh['a'=16] {'a':(4)4}")[0] == (0, 1, 2, 3)
    assert groups(", source_target_pairs={{0,1},{1,0}}") == ((0, 1), (1, 0))


@given(st.permutations(["x", "y", "z"]), st.sets(st.sampled_from("xyz"), min_size=1))
def test_axes_of_groups_agree_with_jax(order, used):
    """A sum over axes of a mesh, compiled: its groups are those axes."""
    mesh = eqshard.MeshSpec(dict.fromkeys(order, 2)).build()
    names = tuple(n for n in order if n not in used)
    f = jax.shard_map(
        lambda x: jax.lax.psum(x, tuple(used)), mesh=mesh, in_specs=P("x", "y", "z"), out_specs=P(*_left(names))
    )
    text = jax.jit(f).lower(jnp.ones((2, 2, 2))).compile()
    assert [set(c.axes) for c in eqshard.collectives(text, mesh=mesh)] == [used]


def _left(names):
    return [n if n in names else None for n in ("x", "y", "z")]


def test_two_computations_of_one_name():
    """A compiler's own dump may print a fusion's computation under the name of another: no endless walk."""
    text = (
        "HloModule m, is_scheduled=true, num_partitions=2\n\n%f (p: f32[4]) -> f32[4] {\n  %p = f32[4] parameter(0)\n"
        "  %r = f32[4] all-reduce(%p), replica_groups={{0,1}}, to_apply=%add\n"
        "  ROOT %g = f32[4] fusion(%r), kind=kLoop, calls=%f\n}\n\nENTRY %e (q: f32[4]) -> f32[4] {\n"
        "  %q = f32[4] parameter(0)\n  ROOT %h = f32[4] fusion(%q), kind=kLoop, calls=%f\n}\n"
    )
    [c] = eqshard.collectives(text, mesh=eqshard.MeshSpec(x=2))
    assert (c.kind, c.axes, c.form, c.bytes) == ("all-reduce", ("x",), "fused", 16)


CARRIED = """HloModule m, is_scheduled=true, num_partitions=4

%begin (p: f32[4]) -> (f32[4], f32[16]) {
  %p = f32[4] parameter(0)
  %g = f32[16] all-gather(%p), channel_id=7, replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %s = (f32[4], f32[16]) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%beside (p: f32[4]) -> f32[16] {
  %p.1 = f32[4] parameter(0)
  ROOT %g.1 = f32[16] all-gather(%p.1), channel_id=7, replica_groups={{0,1,2,3}}, dimensions={0}
}

%body (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %t = (s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[4] get-tuple-element(%t), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %carried = f32[16] fusion(%x), kind=kLoop, calls=%beside
  ROOT %r = (s32[], f32[4]) tuple(%next, %x)
}

%cond (t.1: (s32[], f32[4])) -> pred[] {
  %t.1 = (s32[], f32[4]) parameter(0)
  %i.1 = s32[] get-tuple-element(%t.1), index=0
  %n = s32[] constant(24)
  ROOT %less = pred[] compare(%i.1, %n), direction=LT
}

ENTRY %e (q: f32[4]) -> (s32[], f32[4]) {
  %q = f32[4] parameter(0)
  %zero = s32[] constant(0)
  %begun = (f32[4], f32[16]) fusion(%q), kind=kCustom, calls=%begin
  %init = (s32[], f32[4]) tuple(%zero, %q)
  %loop = (s32[], f32[4]) while(%init), condition=%cond, body=%body
  %ended = f32[16] fusion(%q), kind=kCustom, calls=%beside
  ROOT %out = (s32[], f32[4]) tuple(%zero, %q)
}
"""


def test_a_collective_that_loops_carry_along_runs_once():
    """One gather, from before a loop to after it: the loop's own fusions hold a copy of it, and run 24 times."""
    [c] = eqshard.collectives(CARRIED, mesh=eqshard.MeshSpec(x=4))
    assert (c.kind, c.trips, c.overlapped, c.form, c.appearances) == ("all-gather", 1, True, "fused", 2)
    within = CARRIED.replace("calls=%beside\n  ROOT %r", "calls=%begin\n  ROOT %r")  # begun anew in each turn
    assert sorted(c.trips for c in eqshard.collectives(within, mesh=eqshard.MeshSpec(x=4))) == [1, 24]
