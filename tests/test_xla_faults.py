"""Minimal reproductions of faults of XLA that eqshard works around, and the planned steps that must not have them.

A fault that is gone from the oldest supported jaxlib is a workaround that can go: its test then skips and says so.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from program_checks import check_equal

import eqshard


EAGER = eqshard.Chip("eager", flops=1e6, hbm_bytes=1e12, hbm_bandwidth=1e6, link_bandwidth=1e13)
MESHES = ({"data": 4, "tp": 2}, {"data": 2, "tp": 4}, {"a": 2, "b": 2, "c": 2}, {"data": 8})


def gone(workaround):
    pytest.skip(f"jaxlib {jax.lib.__version__} does not have this fault: {workaround} may go once this is the oldest.")


def test_xla_merges_slices_without_clamping():
    """Seen in jaxlib 0.10.2. Works around it: `clamped_starts`. No mesh and no sharding is needed."""
    x = jnp.arange(16.0)
    inner = lambda x, i: lax.dynamic_slice_in_dim(x, i, 4)
    outer = lambda x, i, j: lax.dynamic_slice_in_dim(inner(x, i), j, 2)
    got, want = jax.jit(outer)(x, 14, 0), inner(x, 14)[:2]
    if np.array_equal(got, want):
        gone("`clamped_starts`")
    np.testing.assert_array_equal(want, [12, 13])
    np.testing.assert_array_equal(got, [14, 15])


def test_xla_reads_a_skipped_row_from_another_shard():
    """Seen in jaxlib 0.10.2: the same fault, in what a scatter of one row is expanded to."""
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.arange(8.0)[:, None]

    def update(x, i):
        sharded = lax.with_sharding_constraint(x, NamedSharding(mesh, P("tp")))
        out = sharded.at[i].set(jnp.full((1,), -1.0))
        return lax.with_sharding_constraint(out, NamedSharding(mesh, P()))

    placed = jax.device_put(x, NamedSharding(mesh, P()))
    got = jax.jit(update)(placed, jnp.int32(0))
    want = x.at[0].set(-1.0)
    if np.array_equal(got, want):
        gone("replicated rows of scatters")
    assert np.flatnonzero(np.asarray(got) != np.asarray(want)).tolist() == [4]  # a row that nobody wrote to


def depthwise_gradient(x, kernel):
    conv = lambda k: lax.conv_general_dilated(
        x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=8
    )
    return jax.grad(lambda k: jnp.sum(conv(k) ** 2))(kernel)


def test_xla_sums_depthwise_gradients_over_replicas():
    """Seen in jaxlib 0.10.2 and 0.12.0.1: the gradient comes out as often as the batch is replicated."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = jax.random.normal(jax.random.key(0), (8, 8, 8, 8))
    kernel = jax.random.normal(jax.random.key(1), (3, 3, 1, 8))
    want = jax.jit(depthwise_gradient)(x, kernel)
    got = jax.jit(depthwise_gradient)(jax.device_put(x, NamedSharding(mesh, P("a"))), kernel)
    if np.allclose(got, want, rtol=1e-3):
        gone("the rule of grouped convolutions")
    np.testing.assert_allclose(got, 4 * want, rtol=1e-3)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_gradients_of_depthwise_convolutions(sizes, axis_type):
    x = jax.random.normal(jax.random.key(0), (8, 8, 8, 8))
    kernel = jax.random.normal(jax.random.key(1), (3, 3, 1, 8))
    mesh = eqshard.MeshSpec(sizes, axis_type=axis_type, chip=EAGER)
    for fixed in ({}, {"x": P(next(iter(sizes)))}):
        check_equal(depthwise_gradient, (x, kernel), mesh, fixed=fixed)


def row_updates(x, p):
    return lax.fori_loop(0, 2, lambda i, c: c.at[i % 8].set(jnp.tanh(c[(i + 1) % 8] @ p)), x)


def clamped_slice(x, p, i):
    return jax.value_and_grad(lambda p: jnp.sum(lax.dynamic_slice_in_dim(x @ p, i, 4) ** 2))(p)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_row_updates_in_a_loop(sizes, axis_type):
    x, p = (jax.random.normal(k, s) for k, s in zip(jax.random.split(jax.random.key(0)), ((8, 4), (4, 4))))
    check_equal(row_updates, (x, p), eqshard.MeshSpec(sizes, axis_type=axis_type, chip=EAGER))


@pytest.mark.parametrize("start", [14, 20, -3, 5])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_slices_that_start_out_of_bounds(sizes, start, axis_type):
    keys = jax.random.split(jax.random.key(0))
    x, p = jax.random.normal(keys[0], (16, 12)), jax.random.normal(keys[1], (12, 12)) / 4
    mesh = eqshard.MeshSpec(sizes, axis_type=axis_type, chip=EAGER)
    check_equal(clamped_slice, (x, p, jnp.int32(start)), mesh)


class Upsample(eqx.Module):
    norm: eqx.nn.LayerNorm
    up: eqx.nn.ConvTranspose2d

    def __call__(self, x):
        return self.up(jax.vmap(jax.vmap(self.norm))(x).transpose(2, 0, 1))


@pytest.mark.parametrize("options", [{"objective": "memory"}, {"max_bytes": 95_000}], ids=str)
def test_transposed_convolutions_compile_in_little_memory(options, axis_type):
    """The plan stores the kernel sharded along a spatial dimension; its gradient is not computed that way."""
    optim = optax.adam(1e-3)

    def step(model, state, x):
        grads = eqx.filter_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))(model)
        updates, state = optim.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state

    model = Upsample(eqx.nn.LayerNorm(32), eqx.nn.ConvTranspose2d(32, 1, 4, stride=4, key=jax.random.key(0)))
    state = optim.init(eqx.filter(model, eqx.is_array))
    x = jax.random.normal(jax.random.key(1), (16, 4, 4, 32))
    mesh = eqshard.MeshSpec({"data": 4, "fsdp": 2}, axis_type=axis_type)
    with jax.numpy_dtype_promotion("standard"):  # optax adds integers to floats
        check_equal(step, (model, state, x), mesh, **options)
