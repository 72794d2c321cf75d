"""Exact counts on programs with a known answer."""

import pytest
from compiler_programs import PROGRAMS

import eqshard


# With Explicit axes JAX wants to be told where a sum over devices goes; these have none.
NO_SUMS = [p for p in PROGRAMS if p.__name__ not in ("matmul_pair", "megatron_block")]


def check(mesh, programs, dtype, target):
    known = [program(mesh, dtype) for program in programs]
    reports = eqshard.compile_reports([eqshard.Program(k.fn, k.args, k.plans) for k in known], target=target)
    for program, k, report in zip(programs, known, reports):
        counted = sorted((c.kind, c.bytes, c.axes, c.trips) for c in report.collectives)
        assert counted == sorted(k.answer), program.__name__
        assert not report.unread and all(c.trips_known for c in report.collectives)
        assert all(c.group_size == mesh.size(c.axes) for c in report.collectives)
        assert report.wire_bytes > 0 and report.step_seconds > 0 and report.fits


def test_known_answers(m24, axis_type):
    check(m24, PROGRAMS if axis_type == "auto" else NO_SUMS, "float32", "cpu:8")


@pytest.mark.tpu
def test_known_answers_on_tpu():
    pytest.importorskip("libtpu")
    check(eqshard.MeshSpec(dp=4, tp=4), PROGRAMS, "bfloat16", "v5e:4x4")
