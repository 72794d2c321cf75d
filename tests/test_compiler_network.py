"""Times: arithmetic that can be done by hand."""

import jax.numpy as jnp
import numpy as np
import pytest
from compiler_programs import fsdp_scan

import eqshard
from eqshard.compiler._hlo import read_module
from eqshard.compiler._network import Network
from eqshard.compiler._schedule import schedule
from eqshard.compiler._work import _meets, work_of


V5E, V5P, H100 = (eqshard.CHIPS[name] for name in ("v5e", "v5p", "h100"))
MB = 1_000_000


def rows(mesh, axis):
    """The groups of one axis."""
    ids = jnp.arange(mesh.size()).reshape(mesh.sizes)
    moved = jnp.moveaxis(ids, mesh.names.index(axis), -1).reshape(-1, mesh.shape[axis])
    return tuple(tuple(row) for row in moved.tolist())


def test_a_line_and_a_ring():
    line = Network(V5E, eqshard.MeshSpec(dp=4, tp=4))
    groups = rows(line.mesh, "tp")
    assert line.seconds("all-gather", MB, groups) == pytest.approx(3 * MB / 45e9)
    assert line.seconds("reduce-scatter", 4 * MB, groups) == pytest.approx(3 * MB / 45e9)
    assert line.seconds("all-reduce", 4 * MB, groups) == pytest.approx(6 * MB / 45e9)
    assert line.seconds("all-to-all", MB, groups) == pytest.approx(MB / 45e9)
    assert line.seconds("collective-permute", MB, ((0, 1), (1, 2))) == pytest.approx(MB / 45e9)
    assert line.seconds("all-gather", 4, groups) == 3e-6  # three hops
    ring = Network(V5P, eqshard.MeshSpec(dp=4, tp=4))  # a torus dimension of 4 closes on v5p
    assert ring.seconds("all-gather", MB, groups) == pytest.approx(3 * MB / (2 * 90e9))
    assert ring.seconds("all-reduce", MB, tuple((i,) for i in range(16))) == 0


def test_coordinates_say_which_links_there_are():
    mesh = eqshard.MeshSpec(x=16)
    places = tuple((i % 4, i // 4, 0) for i in range(16))
    flat = Network(V5E, mesh, places)  # 4 x 4: two lines
    assert flat.seconds("all-gather", MB, rows(mesh, "x")) == pytest.approx(15 * MB / (2 * 45e9))
    closed = Network(V5P, mesh, places)  # two rings
    assert closed.seconds("all-gather", MB, rows(mesh, "x")) == pytest.approx(15 * MB / (4 * 90e9))


def test_switches_and_hosts():
    inside = Network(H100, eqshard.MeshSpec(tp=8))
    assert inside.seconds("all-gather", MB, rows(inside.mesh, "tp")) == pytest.approx(7 * MB / 450e9)
    across = Network(H100, eqshard.MeshSpec(dp=4, tp=8))
    slow = across.seconds("all-reduce", 8 * MB, rows(across.mesh, "dp"))
    assert slow == pytest.approx(2 * 8 * MB * 3 / 4 / 50e9)
    both = (tuple(range(32)),)
    hierarchical = 2 * (800 * MB * 7 / 8 / 450e9 + 100 * MB * 3 / 4 / 50e9)
    assert across.seconds("all-reduce", 800 * MB, both) == pytest.approx(hierarchical)
    slices = Network(V5E, eqshard.MeshSpec(pod=2, x=4, dcn="pod"))
    assert slices.seconds("all-reduce", 8 * MB, rows(slices.mesh, "pod")) == pytest.approx(2 * 4 * MB / 6.25e9)


ASYNC = """HloModule m, is_scheduled=true, num_partitions=4

%fused (p0: f32[1024,1024]) -> f32[1024,1024] {
  %p0 = f32[1024,1024] parameter(0)
  ROOT %d = f32[1024,1024] dot(%p0, %p0), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %e (p: f32[1024,1024], q: f32[250000]) -> f32[1024,1024] {
  %p = f32[1024,1024] parameter(0)
  %q = f32[250000] parameter(1)
  %s = (f32[250000], f32[1000000]) all-gather-start(%q), replica_groups=[1,4]<=[4], dimensions={0}
  %f = f32[1024,1024] fusion(%p), kind=kOutput, calls=%fused, backend_config={"estimated_cycles":"CYCLES"}
  %g = f32[1000000] all-gather-done(%s)
  ROOT %h = f32[1024,1024] fusion(%p), kind=kOutput, calls=%fused, backend_config={"estimated_cycles":"1500"}
}
"""


@pytest.mark.parametrize("cycles, exposed", [(15_000, 3 * MB / 45e9 - 1e-5), (1_500_000, 0.0)])
def test_what_is_not_done_is_waited_for(cycles, exposed):
    module = read_module(ASYNC.replace("CYCLES", str(cycles)))
    ran, [c] = schedule(module, eqshard.MeshSpec(x=4), V5E, ())
    assert c.overlapped and c.bytes == 4 * MB and c.seconds == pytest.approx(3 * MB / 45e9)
    assert ran.exposed == pytest.approx(exposed) and c.exposed_seconds == pytest.approx(exposed)
    assert ran.products == pytest.approx((cycles + 1500) / 1.5e9)
    assert ran.seconds == pytest.approx(ran.products + exposed)
    assert [s.lane for s in ran.segments].count("network") == 1


def test_loops_are_as_long_as_all_their_trips():
    known = fsdp_scan(eqshard.MeshSpec(dp=2, tp=4), "float32")
    report = eqshard.compile_report(known.fn, *known.args, plans=known.plans, chip="v5e")
    [c] = report.collectives
    assert report.network_seconds == pytest.approx(6 * c.seconds)
    assert report.step_seconds == pytest.approx(report.compute_seconds + report.exposed_seconds)
    assert max(s.end for s in report.segments) <= report.step_seconds * 1.0001
    drawn = sum(s.end - s.begin for s in report.segments if s.lane == "network")
    assert drawn == pytest.approx(report.network_seconds)


@pytest.mark.parametrize(
    "line, flops",
    [
        ("dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}", 2 * 8 * 16 * 4),
        ("convolution(%a, %b), dim_labels=bf_io->bf", 2 * 8 * 16 * 4),
    ],
)
def test_flops_of_products(line, flops):
    text = (
        "HloModule m\n\nENTRY %e (a: f32[8,16], b: f32[16,4]) -> f32[8,4] {\n  %a = f32[8,16] parameter(0)\n"
        f"  %b = f32[16,4] parameter(1)\n  ROOT %c = f32[8,4] {line}\n}}\n"
    )
    module = read_module(text)
    work = work_of(module, module.main, module.main.root, V5E)
    assert work.flops == flops and work.bytes == 4 * (128 + 64 + 32)


def test_a_batched_matmul_that_a_tpu_writes_as_a_convolution():
    text = (
        "HloModule m\n\nENTRY %e (a: f32[4,8,16], b: f32[4,16,2]) -> f32[4,8,2] {\n  %a = f32[4,8,16] parameter(0)\n"
        "  %b = f32[4,16,2] parameter(1)\n  ROOT %c = f32[4,8,2] convolution(%a, %b), "
        "window={size=4 stride=3 lhs_dilate=4}, dim_labels=0bf_0io->0bf\n}\n"
    )
    module = read_module(text)
    assert work_of(module, module.main, module.main.root, V5E).flops == 2 * 4 * 8 * 16 * 2


def test_where_a_convolution_meets_its_input():
    """Counted without going through all pairs, which can be billions."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        size, out, taken, stride, spread, step = (int(n) for n in rng.integers(1, 9, 6))
        before = int(rng.integers(-4, 9))
        window = f"window={{size={size} stride={stride} pad={before}_0 lhs_dilate={spread} rhs_dilate={step}}}"
        places = [o * stride + w * step - before for o in range(out) for w in range(size)]
        met = sum(0 <= p <= (taken - 1) * spread and p % spread == 0 for p in places)
        assert _meets(window, 0, taken, out) == met, window
    assert _meets("window={size=1000000 pad=0_999999}", 0, 1000000, 1000000) == 500000500000
