"""Helpers of the tests of programs."""

import equinox as eqx
import jax
import numpy as np

import eqshard


# Slow at arithmetic, quick at talking: everything is worth cutting.
EAGER = eqshard.Chip("eager", flops=1e7, hbm_bytes=1e12, hbm_bandwidth=1e7, link_bandwidth=1e13)


def shape(*dims, dtype="float32"):
    return jax.ShapeDtypeStruct(dims, dtype)


def mesh_of(axis_type, **sizes):
    return eqshard.MeshSpec(sizes, axis_type=axis_type, chip=EAGER)


def check_equal(fn, args, mesh, **options):
    """Plans, writes in, runs on 8 devices: the same values as without, in the planned layouts."""
    plan = eqshard.step_plan(fn, *args, mesh=mesh, **options)
    placed = [eqshard.apply(p, a) for p, a in zip(plan.args, args)]
    want = eqx.filter_jit(fn)(*args)
    got = eqx.filter_jit(eqshard.constrain(plan, fn))(*placed)
    assert jax.tree.structure(eqx.filter(want, eqx.is_array)) == jax.tree.structure(eqx.filter(got, eqx.is_array))
    for a, b in zip(jax.tree.leaves(eqx.filter(want, eqx.is_array)), jax.tree.leaves(eqx.filter(got, eqx.is_array))):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-4, atol=2e-5)
    return plan, got
