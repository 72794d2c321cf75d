"""Gathers and scatters of planned steps: by rows, and in pieces."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from program_checks import check_equal, shape

import eqshard


def test_windows_of_a_scatter_are_shared_out():
    """On a TPU each window that is a part of the table takes its time, so that they come from pieces of the batch."""

    def grad(table, at):
        look = lambda t, i: jax.lax.dynamic_slice(t, (i, 0), (2, 512))
        return table - jax.grad(lambda t: jnp.sum(jnp.tanh(jax.vmap(look, (None, 0))(t, at))))(table)

    args = shape(1024, 512), jax.ShapeDtypeStruct((65536,), "int32")
    tpu = eqshard.step_plan(grad, *args, mesh=eqshard.MeshSpec(x=8, chip="v5e"))
    assert tpu.args[1][""].spec == P("x")
    assert tpu.seconds > 65536 / 8 * 4e-6
    gpu = eqshard.step_plan(grad, *args, mesh=eqshard.MeshSpec(x=8, chip="h100"))
    assert gpu.seconds < 1e-3


@pytest.mark.parametrize("batched", [False, True])
def test_the_rows_of_a_scatter_are_added_where_they_are(batched, axis_type):
    """The gradient of a table: each device adds up its part of the batch, then the sums are shared out."""

    def grad(table, tokens):
        look = (lambda t, i: jax.vmap(lambda t, i: t[i])(t, i)) if batched else (lambda t, i: t[i])
        return table - 0.1 * jax.grad(lambda t: jnp.sum(jnp.sin(look(t, tokens)) ** 2))(table)

    lead = (4,) if batched else ()
    table = jax.random.normal(jax.random.key(0), (*lead, 64, 128))
    tokens = jax.random.randint(jax.random.key(1), (*lead, 65536), 0, 80)  # some beyond the end
    mesh = eqshard.MeshSpec({"data": 4, "tp": 2}, axis_type=axis_type, chip="v5e")
    plan, _ = check_equal(grad, (table, tokens), mesh)
    assert any(spec != P() for _, side, slot, spec in plan.inner if side == "way" and slot == 2)
    if not batched:
        text = str(
            jax.make_jaxpr(eqshard.constrain(plan, grad))(
                *(eqshard.apply(p, a) for p, a in zip(plan.args, (table, tokens)))
            )
        )
        assert "psum" in text or "reduce_scatter" in text


@pytest.mark.parametrize("edit", [{2: P("data")}, {1: P("data")}, {0: P("data")}, {0: P(None, "tp")}])
def test_an_edited_scatter_changes_no_value(edit):
    """Layouts of a table, an index and updates that do not belong together."""
    table = jax.random.normal(jax.random.key(0), (64, 16))
    tokens = jax.random.randint(jax.random.key(1), (256, 1), 0, 64)
    add = lambda table, tokens: table + table.at[tokens[:, 0]].add(jnp.sin(table[tokens[:, 0]]))
    plan = eqshard.step_plan(add, table, tokens, mesh=eqshard.MeshSpec(data=4, tp=2))
    where = {path for path, side, slot, _ in plan.inner if side == "way" and slot == 2}
    (path,) = where
    edited = {(path, "way", slot): edit.get(slot, P()) for slot in range(3)}
    inner = [entry for entry in plan.inner if entry[:3] not in edited] + [(*k, spec) for k, spec in edited.items()]
    edited_plan = dataclasses.replace(plan, inner=tuple(inner))
    found = jax.jit(eqshard.constrain(edited_plan, add))(table, tokens)
    np.testing.assert_allclose(found, add(table, tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["clip", "promise_in_bounds", "fill"])
@pytest.mark.parametrize("size", [1, 2, 16])
def test_windows_that_are_rows(mode, size):
    """What `jax.vmap` makes of an index or a slice, as of `eqx.nn.Embedding`: by rows, bit for bit."""
    table = jax.random.normal(jax.random.key(0), (16, 8))
    at = jax.random.randint(jax.random.key(1), (32, 2), 0 if mode == "promise_in_bounds" else -3, 18 - size)
    at = at.at[:, 1].set(0) if mode == "promise_in_bounds" else at
    at = jnp.minimum(at, 16 - size) if mode == "promise_in_bounds" else at
    numbers = jax.lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0, 1))

    def both(table, at):
        look = lambda t: jax.lax.gather(t, at, numbers, (size, 8), mode=mode)
        return look(table), jax.grad(lambda t: jnp.sum(look(t) ** 3))(table)

    plan = eqshard.step_plan(both, table, at, mesh=eqshard.MeshSpec(x=1))
    for got, want in zip(jax.jit(eqshard.constrain(plan, both))(table, at), jax.jit(both)(table, at)):
        np.testing.assert_array_equal(got, want)
    check_equal(both, (table, at), eqshard.MeshSpec(x=4))


def test_an_embedding_by_rows():
    """One kernel on a TPU, and no loop: no window of one row is left in the program."""
    embed = eqx.nn.Embedding(64, 16, key=jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (8, 12), 0, 64)
    grad = eqx.filter_grad(lambda e, x: jnp.sum(jnp.sin(jax.vmap(jax.vmap(e))(x))))
    plan = eqshard.step_plan(grad, embed, tokens, mesh=eqshard.MeshSpec(x=1, chip="v5e"))
    text = str(eqx.filter_make_jaxpr(eqshard.constrain(plan, grad))(embed, tokens)[0])
    assert "inserted_window_dims=(0,)" in text and "collapsed_slice_dims=(0,)" in text
    assert "inserted_window_dims=()" not in text and plan.seconds < 1e-4
