"""Whole training and serving steps, planned: the same results as on one device, Auto and Explicit."""

import equinox as eqx
import jax
import numpy as np
import pytest
import zoo
from program_checks import EAGER

import eqshard


EVERY_DAY = ("mlp",)


@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
@pytest.mark.parametrize(
    "name", [name if name in EVERY_DAY else pytest.param(name, marks=pytest.mark.slow) for name in zoo.NAMES]
)
def test_a_planned_step_is_the_step(name, axis_type):
    case = zoo.case(name)
    mesh = eqshard.MeshSpec({"data": 4, "tp": 2}, axis_type=axis_type, chip=EAGER)
    args = eqx.filter_jit(case.make)(jax.random.key(0))
    plan = eqshard.step_plan(case.step, *args, mesh=mesh)
    assert any(leaf.spec != jax.P() for leaf in plan.args[0])
    step = eqx.filter_jit(eqshard.constrain(plan, case.step))
    placed = tuple(eqshard.apply(p, a) for p, a in zip(plan.args, args))
    plain = eqx.filter_jit(case.step)
    for _ in range(2):
        want, got = plain(*args), step(*placed)
        for a, b in zip(_arrays(want), _arrays(got), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=5e-3, atol=5e-4)
        for i in case.donate:  # what a step returns first takes the place of what it consumed, in the same layout
            at = case.donate.index(i)
            assert eqshard.specs_of(got[at]) == eqshard.specs_of(placed[i])
            args, placed = _with(args, i, want[at]), _with(placed, i, got[at])


def _arrays(tree):
    return [jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
            for x in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]  # fmt: skip


def _with(args, i, value):
    return tuple(value if j == i else x for j, x in enumerate(args))
