"""In which order planned specs name the axes that cut one dimension."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P
from program_checks import EAGER, mesh_of, shape

import eqshard
from eqshard._spec import entry_axes


def train(w, x):
    return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)


ORDERS = [P(("a", "b")), P(("b", "a")), P(None, ("b", "a")), P("b", "a")]


@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
@pytest.mark.parametrize("spec", ORDERS, ids=str)
def test_what_is_fixed_keeps_its_order(spec, axis_type):
    """Also as a result, which takes the argument's place."""
    mesh = mesh_of(axis_type, a=4, b=2)
    args = jax.random.normal(jax.random.key(0), (16, 16)), jax.random.normal(jax.random.key(1), (32, 16))
    plan = eqshard.step_plan(train, *args, mesh=mesh, fixed={"w": spec})
    assert plan.args[0][""].spec == spec
    placed = [eqshard.apply(p, x) for p, x in zip(plan.args, args)]
    made = jax.jit(eqshard.constrain(plan, train))(*placed)
    assert made.sharding.is_equivalent_to(placed[0].sharding, 2)
    np.testing.assert_allclose(made, train(*args), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fixed", [P(("a", "b")), P(("c", "b"))], ids=str)
def test_what_is_used_in_pieces_is_stored_in_pieces_of_these(fixed):
    """What one axis cuts in use is stored along that axis first, so that what is gathered lies side by side."""

    def step(ws, batch):
        loss = lambda ws: jnp.mean((jax.nn.relu(batch @ ws[0]) @ ws[1]) ** 2)
        return [w - g for w, g in zip(ws, jax.grad(loss)(ws))]

    mesh = eqshard.MeshSpec(a=4, b=4, c=4, chip="v5p")
    args = [shape(4096, 4096)] * 2, shape(2048, 4096)
    plan = eqshard.step_plan(step, *args, mesh=mesh, fixed={"batch": fixed}, max_bytes=60e6)
    both = [(entry_axes(a), entry_axes(b)) for leaf in plan.args[0].leaves for a, b in zip(leaf.spec, leaf.use)]
    assert any(len(stored) > len(used) > 0 or stored == entry_axes(fixed[0]) for stored, used in both)
    assert all(stored[: len(used)] == used for stored, used in both if set(used) <= set(stored))


@given(st.permutations(["a", "b", "c"]), st.integers(1, 3))
@settings(deadline=None, max_examples=20)
def test_a_constraint_of_the_program_says_the_order_too(axes, n):
    """What is made for a constraint lies as it says: nothing is moved for the order alone."""
    mesh = eqshard.MeshSpec(a=2, b=2, c=2, chip=EAGER)
    said = P(tuple(axes[:n]))

    def step(x, w):
        return jnp.tanh(eqshard.constrain_to(x @ w, said, mesh)) @ w

    plan = eqshard.step_plan(step, shape(64, 16), shape(16, 16), mesh=mesh)
    cuts = [entry_axes(spec[0]) for _, _, _, spec in plan.inner if len(spec)]
    assert all(cut == tuple(axes[:n]) for cut in cuts if set(cut) == set(axes[:n]))


PLAN = """
import jax, jax.numpy as jnp, eqshard
s = lambda *d: jax.ShapeDtypeStruct(d, "float32")
def loss(ws, x):
    for a, b in ws:
        x = x + jnp.tanh(x @ a) @ b
    return jnp.mean(x**2)
step = lambda ws, x: jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws, x))
ws = [(s(512, 2048), s(2048, 512)) for _ in range(4)]
mesh = eqshard.MeshSpec(a=4, b=4, chip="v5e")
print(eqshard.step_plan(step, ws, s(256, 512), mesh=mesh).inner)
"""


def test_processes_find_the_same_plan():
    """Each process of a run plans for itself: of equally good plans they must take the same."""

    def run(seed):
        env = os.environ | {"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
        return subprocess.run([sys.executable, "-c", PLAN], capture_output=True, text=True, check=True, env=env).stdout

    first, *rest = map(run, "012")
    assert len(first) > 100 and all(other == first for other in rest)
