"""Exact counts on programs with a known answer."""

import gzip
import pathlib

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


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_known_answers_in_texts_of_the_tpu_compiler(program):
    """As `make_hlo_samples.py` wrote them."""
    mesh = eqshard.MeshSpec(dp=4, tp=4)
    file = pathlib.Path(__file__).parent / "hlo_samples" / f"{program.__name__}.txt.gz"
    found = eqshard.collectives(gzip.decompress(file.read_bytes()).decode(), mesh=mesh)
    assert sorted((c.kind, c.bytes, c.axes, c.trips) for c in found) == sorted(program(mesh, "bfloat16").answer)
    assert all(c.trips_known for c in found)
