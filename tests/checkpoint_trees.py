"""Trees and layouts for the tests of checkpoints."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
from hypothesis import settings
from jax.sharding import PartitionSpec as P

import eqshard


MESHES = ({"x": 1}, {"x": 2}, {"x": 4}, {"x": 8}, {"x": 2, "y": 4}, {"x": 4, "y": 2}, {"x": 2, "y": 2, "z": 2})


def thorough():
    """Whether to run all of it: `pytest --hypothesis-profile=nightly`."""
    return settings().max_examples > 100


class Norm(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.linear = eqx.nn.Linear(8, 16, key=key)
        self.norm = eqx.nn.BatchNorm(16, axis_name="batch", mode="batch")


def training():
    model = eqx.nn.MLP(8, 16, 32, 2, key=jax.random.key(0))
    return {"model": model, "optimizer": optax.adamw(1e-3).init(eqx.filter(model, eqx.is_inexact_array))}


def stateful():
    return eqx.nn.make_with_state(Norm)(jax.random.key(1))


def dtypes():
    names = "bfloat16 float16 float8_e4m3fn float8_e5m2 float8_e4m3 int4 uint4 int8 uint32 bool complex64".split()
    bits = jax.random.bits(jax.random.key(2), (8, 4), "uint8")
    return {name: (bits > 100 if name == "bool" else (bits % 8).astype(name)) for name in names}


def scalars():
    keys = jax.random.split(jax.random.key(3), (8, 2))
    return [jnp.float32(1.5), keys, jax.random.key(4, impl="rbg"), jnp.zeros((0, 4)), (jnp.int32(-1), jnp.ones((1, 1)))]


def numpy_leaves():
    return {
        "a.b": np.arange(8.0, dtype="f4"),
        "a": {"b": np.arange(16, dtype="i4")},
        "c/d é": None,
        "it's": np.ones(3, "f4"),
    }


def weights():
    normal = jax.random.normal(jax.random.key(5), (16, 24, 8))
    return (normal, normal[0], [normal[1, 2:], "text", len], jnp.full((7, 5), jnp.nan))


TREES = {f.__name__: f for f in (training, stateful, dtypes, scalars, numpy_leaves, weights)}


def spread(tree, mesh):
    """A plan that uses every axis somewhere: each leaf's axes go to the first dims that they divide."""
    rows = []
    for i, leaf in enumerate(eqshard.replicated_plan(tree, mesh)):
        entries = [[] for _ in leaf.shape]
        left = list(leaf.shape)
        for axis, size in mesh.axes[:: 1 if i % 2 else -1]:
            dims = [d for d, n in enumerate(left) if n and n % size == 0][:: 1 if i % 3 else -1]
            if dims:
                entries[dims[0]].append(axis)
                left[dims[0]] //= size
        rows.append((leaf.path, P(*(tuple(e) or None for e in entries))))
    plan = eqshard.replicated_plan(tree, mesh)
    for path, spec in rows:
        plan = plan.at(path).set(spec)
    return plan


def shapes(tree):
    """The tree with shapes in the place of arrays, as `eqx.filter_eval_shape` gives it."""
    return jtu.tree_map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if eqshard.is_array(x) else x, tree)


def bits(x):
    """An array's bytes, so that NaNs are equal to themselves."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return (str(jax.random.key_impl(x)), x.shape, np.asarray(jax.random.key_data(x)).tobytes())
    return (x.dtype.name, x.shape, np.ascontiguousarray(np.asarray(x)).tobytes())


def assert_same(tree, restored, plan=None):
    """Bit for bit the same leaves, what is no array the very same, and laid out by `plan`."""
    one, two = jtu.tree_flatten(tree), jtu.tree_flatten(restored)
    assert one[1] == two[1]
    for x, y in zip(one[0], two[0]):
        if eqshard.is_array(x):
            assert isinstance(y, jax.Array) and bits(x) == bits(y)
        else:
            assert x is y
    if plan is not None:
        assert eqshard.plan_of(restored, plan.mesh).specs() == plan.specs()
        for leaf, want in plan.shardings().items():
            y = dict(eqshard._tree.array_leaves(restored))[leaf]
            assert y.sharding.is_equivalent_to(want, y.ndim)
