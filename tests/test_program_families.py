"""Planned steps of every family of programs return what the plain steps return, with XLA's optimizations on."""

import itertools

import jax
import numpy as np
import pytest
from program_families import arguments, FAMILIES, MESHES, program

import eqshard


# Slow at arithmetic, quick at communication: everything is worth sharding.
EAGER = eqshard.Chip("eager", flops=1e6, hbm_bytes=1e12, hbm_bandwidth=1e6, link_bandwidth=1e13)
CASES = list(itertools.product(FAMILIES, range(len(MESHES)), ("auto", "explicit")))


def check(name, mesh, axis_type, bits, seed=0, **options):
    fn = program(name)
    with jax.enable_x64(bits == 64):
        args = arguments(seed, f"float{bits}")
        described = eqshard.MeshSpec(MESHES[mesh], axis_type=axis_type, chip=EAGER)
        plan = eqshard.step_plan(fn, *args, mesh=described, **options)
        placed = [eqshard.apply(p, a) for p, a in zip(plan.args, args)]
        want = jax.tree.leaves(jax.jit(fn)(*args))
        got = jax.tree.leaves(jax.jit(eqshard.constrain(plan, fn))(*placed))
        check_close(got, want, bits, f"{name} on {described}")
    return plan


def check_close(got, want, bits, what):
    tolerance = 1e-9 if bits == 64 else 2e-3
    for a, b in zip(got, want, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        scale = max(1.0, float(np.abs(b).max(initial=0)))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * scale, err_msg=what)


@pytest.mark.parametrize("number", range(len(FAMILIES)), ids=list(FAMILIES))
def test_every_family_keeps_its_values(number):
    """Each family on one mesh; those of even number on Auto axes, the others on Explicit ones."""
    name = list(FAMILIES)[number]
    check(name, number % len(MESHES), ("auto", "explicit")[number // len(MESHES) % 2], 64)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_on_every_mesh(name):
    for mesh, axis_type, bits in itertools.product(range(len(MESHES)), ("auto", "explicit"), (64, 32)):
        check(name, mesh, axis_type, bits, seed=mesh)
    check(name, 0, "auto", 64, objective="memory")
