"""Families of small programs, one for each kind of operation, to compare planned steps with plain ones."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def _images(x):
    return x.reshape(8, 8, 8, 4)


def _one(dtype):
    return jnp.ones((), dtype)


def _conv(x, w, groups=1, stride=1, padding="SAME", transposed=False, dilation=1):
    """NHWC by HWIO; the kernel is cut out of `w`."""
    features = 4
    kernel = w.reshape(-1)[: 3 * 3 * (4 // groups) * features].reshape(3, 3, 4 // groups, features)
    numbers = ("NHWC", "HWIO", "NHWC")
    if transposed:
        return lax.conv_transpose(_images(x), kernel, (stride, stride), padding, dimension_numbers=numbers)
    return lax.conv_general_dilated(
        _images(x), kernel, (stride, stride), padding, rhs_dilation=(dilation, dilation), dimension_numbers=numbers,
        feature_group_count=groups,
    )  # fmt: skip


def _patch_upsample(x, w):
    """A layer norm before a transposed convolution without overlap, as heads of vision models have."""
    images = _images(x)
    centred = images - jnp.mean(images, axis=-1, keepdims=True)
    kernel = w.reshape(-1)[: 4 * 4 * 4].reshape(4, 4, 4, 1)
    return lax.conv_transpose(centred, kernel, (4, 4), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _attention(x, w):
    q, k, v = (a.reshape(64, 4, 4) for a in (x[:, :16], x[:, 16:] @ w[:16, :16], x[:, :16] * 2))
    scores = jnp.einsum("qhd,khd->hqk", q, k) / 4
    causal = jnp.tril(jnp.ones((64, 64), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1)
    return jnp.einsum("hqk,khd->qhd", weights, v)


def _row_updates(x, w):
    step = lambda i, c: c.at[i % 64].set(jnp.tanh(c[(i + 1) % 64] @ w))
    return lax.fori_loop(0, 3, step, x)


def _index(x, count, high):
    """Some indices, which depend on values."""
    return (jnp.argsort(x[:count, 0]) * 7) % high


def _recurrent(x, w):
    cell = lambda h, row: (jnp.tanh(h @ w / 8 + row), h)
    return lax.scan(cell, jnp.zeros((32,), x.dtype), x)


def _stacked_layers(x, w):
    layers = jnp.stack([w, w.T, w * 2, w + 1])
    block = jax.checkpoint(lambda h, w: jnp.tanh(h @ w / 8))
    return lax.scan(lambda h, w: (block(h, w), None), x, layers)[0]


def _while(x, w):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1] @ w / 8)), (0, x))[1]


@jax.custom_vjp
def _straight_through(x):
    return jnp.round(x)


_straight_through.defvjp(lambda x: (jnp.round(x), x), lambda x, g: (g * jnp.cos(x),))


@jax.custom_jvp
def _softsign(x):
    return x / (1 + jnp.abs(x))


_softsign.defjvps(lambda t, out, x: t * (1 - jnp.abs(out)) ** 2)


def _mixture(x, w):
    """Top-1 routing by sorting, as in mixtures of experts."""
    gates = jax.nn.softmax(x @ w[:, :4], axis=-1)
    expert = jnp.argmax(gates, axis=-1)
    order = jnp.argsort(expert)
    experts = jnp.stack([w, w.T, w * 2, w - 1])
    outs = jnp.einsum("td,edf->etf", x[order], experts)
    picked = jnp.take_along_axis(outs, expert[order][None, :, None], axis=0)[0]
    return jnp.zeros_like(x).at[order].set(picked) * jnp.max(gates, axis=-1, keepdims=True)


def _linear_recurrence(x, w):
    gate = jax.nn.sigmoid(x @ w / 8)
    combine = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])
    return lax.associative_scan(combine, (gate, x), axis=0)[1]


def _spd(x):
    m = x.reshape(8, 4, 64)
    return m @ m.transpose(0, 2, 1) + 8 * jnp.eye(4, dtype=x.dtype)[None]


def _scatter(kind):
    def family(x, w):
        rows = _index(x, 16, 70)  # some beyond the end
        return getattr(x.at[rows], kind)((x[:16] @ w) / 8 + 1.5, mode="drop")

    return family


def _dynamic_slice(x, w, start=61):
    return lax.dynamic_slice_in_dim(x @ w, jnp.int32(start) + jnp.argmax(x[0]).astype(jnp.int32), 8)


def _dynamic_update(x, w):
    at = jnp.int32(60) + jnp.argmax(x[0]).astype(jnp.int32)
    return lax.dynamic_update_slice_in_dim(x, jnp.sin(x[:8] @ w), at, 0)


def _pool(kind, init):
    return lambda x, w: lax.reduce_window(
        _images(x @ w), np.array(init, x.dtype), kind, (1, 2, 2, 1), (1, 2, 2, 1), "SAME"
    )


def _overlapping_pool(x, w):
    return lax.reduce_window(_images(x @ w), np.array(0, x.dtype), lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")


def _dropout(x, w):
    keep = jax.random.bernoulli(jax.random.key(3), 0.7, x.shape)
    return jnp.where(keep, x @ w, 0)


def _raw_random(x, w):
    keys = jax.random.split(jax.random.PRNGKey(1), 4)
    return jax.vmap(lambda k, a: a * jax.random.normal(k, (16, 32), x.dtype))(keys, (x @ w).reshape(4, 16, 32))


def _layer_norm(x, w):
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * lax.rsqrt(jnp.var(x, axis=-1, keepdims=True) + np.array(1e-5, x.dtype)) @ w


def _batch_norm(x, w):
    y = x @ w
    return (y - jnp.mean(y, axis=0, keepdims=True)) / jnp.sqrt(jnp.var(y, axis=0, keepdims=True) + 1)


def _cross_entropy(x, w):
    labels = _index(x, 64, 32)
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ w, axis=-1), labels[:, None], axis=1)


def _group_norm(x, w):
    y = (x @ w).reshape(4, 16, 4, 8)
    centred = y - jnp.mean(y, axis=(1, 3), keepdims=True)
    return centred / jnp.sqrt(jnp.mean(centred**2, axis=(1, 3), keepdims=True) + 1)


FAMILIES = {
    "matmul": lambda x, w: jnp.tanh(x @ w) @ w.T,
    "mlp": lambda x, w: jax.nn.gelu(x @ w) @ w,
    "einsum": lambda x, w: jnp.einsum("abd,df,acf->abc", x.reshape(4, 16, 32), w, x.reshape(4, 16, 32)) / 32,
    "batched_matmul": lambda x, w: jnp.matmul(x.reshape(4, 16, 32), jnp.stack([w, w.T, w * 2, w + 1])),
    "outer": lambda x, w: x[:, :, None] * w[0][None, None, :],
    "attention": _attention,
    "conv": lambda x, w: _conv(x, w),
    "strided_conv": lambda x, w: _conv(x, w, stride=2),
    "dilated_conv": lambda x, w: _conv(x, w, dilation=2),
    "depthwise_conv": lambda x, w: _conv(x, w, groups=4),
    "grouped_conv": lambda x, w: _conv(x, w, groups=2),
    "transposed_conv": lambda x, w: _conv(x, w, stride=2, transposed=True),
    "patch_upsample": _patch_upsample,
    "conv_1d": lambda x, w: lax.conv_general_dilated(
        x.reshape(4, 16, 32), w[:, :24].reshape(3, 32, 8), (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
    ),
    "layer_norm": _layer_norm,
    "batch_norm": _batch_norm,
    "group_norm": _group_norm,
    "softmax": lambda x, w: jax.nn.softmax(x @ w, axis=0) + jax.nn.log_softmax(x, axis=1),
    "logsumexp": lambda x, w: jax.nn.logsumexp(x @ w, axis=-1),
    "cross_entropy": _cross_entropy,
    "scan": _recurrent,
    "scan_layers_remat": _stacked_layers,
    "while": _while,
    "fori_row_updates": _row_updates,
    "cond": lambda x, w: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x - x[::-1]),
    "switch": lambda x, w: lax.switch(jnp.argmax(x[0]) % 3, [lambda: x @ w, lambda: x * 2, lambda: jnp.cumsum(x, 0)]),
    "gather_rows": lambda x, w: (x @ w)[_index(x, 16, 64)],
    "gather_columns": lambda x, w: (x @ w)[:, _index(x, 16, 32)],
    "gather_points": lambda x, w: (x @ w)[_index(x, 16, 64), _index(x, 16, 32)],
    "take_along_axis": lambda x, w: jnp.take_along_axis(x @ w, jnp.argsort(x, axis=0), axis=0),
    "embedding": lambda x, w: jnp.take(w, _index(x, 64, 40), axis=0, mode="clip") * x,
    "gather_fill": lambda x, w: jnp.take(x @ w, _index(x, 16, 70), axis=0, mode="fill", fill_value=0),
    "scatter_set": _scatter("set"),
    "scatter_add": _scatter("add"),
    "scatter_mul": _scatter("multiply"),
    "scatter_min": _scatter("min"),
    "scatter_max": _scatter("max"),
    "scatter_columns": lambda x, w: x.at[:, _index(x, 8, 32)].add((x @ w)[:, :8]),
    "scatter_row": lambda x, w: x.at[jnp.argmax(x[0])].set((x @ w)[0]),
    "dynamic_slice_clamped": _dynamic_slice,
    "dynamic_slice_inside": lambda x, w: _dynamic_slice(x, w, 3),
    "dynamic_slice_both": lambda x, w: lax.dynamic_slice(x @ w, (jnp.int32(62), jnp.int32(30)), (8, 8)),
    "dynamic_update_clamped": _dynamic_update,
    "slice_strided": lambda x, w: (x @ w)[1:57:3, ::2],
    "sort": lambda x, w: jnp.sort(x @ w, axis=0),
    "sort_pairs": lambda x, w: lax.sort((x @ w, x), dimension=1, num_keys=1)[1],
    "top_k": lambda x, w: lax.top_k(x @ w, 5)[0],
    "argmax": lambda x, w: (x @ w) * jax.nn.one_hot(jnp.argmax(x, axis=1), 32, dtype=x.dtype),
    "cumsum": lambda x, w: jnp.cumsum(x @ w, axis=0) / 64,
    "cumprod": lambda x, w: jnp.cumprod(jnp.tanh(x @ w) + 1, axis=1),
    "cummax": lambda x, w: lax.cummax(x @ w, axis=0),
    "cumlogsumexp": lambda x, w: lax.cumlogsumexp(x @ w, axis=1),
    "fft": lambda x, w: jnp.abs(jnp.fft.fft(x @ w, axis=1)) ** 2,
    "rfft2": lambda x, w: jnp.real(jnp.fft.irfft2(jnp.fft.rfft2(_images(x @ w), axes=(1, 2)) * 2, axes=(1, 2))),
    "cholesky": lambda x, w: jnp.linalg.cholesky(_spd(x @ w)),
    "triangular_solve": lambda x, w: lax.linalg.triangular_solve(
        jnp.linalg.cholesky(_spd(x)), (x @ w).reshape(8, 4, 64), left_side=True, lower=True
    ),
    "qr": lambda x, w: jnp.abs(jnp.linalg.qr((x @ w).reshape(8, 16, 16)[:, :, :4])[1]),
    "solve": lambda x, w: jnp.linalg.solve(_spd(x), (x @ w).reshape(8, 4, 64)),
    "eigh": lambda x, w: jnp.linalg.eigh(_spd(x))[0] + jnp.sum(w),
    "dropout": _dropout,
    "random_normal": _raw_random,
    "custom_vjp": lambda x, w: _straight_through(x @ w) * x,
    "custom_jvp": lambda x, w: _softsign(x @ w),
    "remat": lambda x, w: jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x @ w) @ w))(x, w),
    "vmap": lambda x, w: jax.vmap(lambda row, col: jnp.dot(row, w @ col) * row)(x, x[::-1]),
    "vmapped_slices": lambda x, w: jax.vmap(lambda row, i: lax.dynamic_slice(row, (i,), (4,)))(
        x @ w, jnp.arange(64, dtype=jnp.int32)
    ),
    "associative_scan": _linear_recurrence,
    "max_pool": _pool(lax.max, -np.inf),
    "mean_pool": _pool(lax.add, 0),
    "overlapping_pool": _overlapping_pool,
    "resize": lambda x, w: jax.image.resize(_images(x @ w), (8, 16, 16, 4), "bilinear"),
    "resize_nearest": lambda x, w: jax.image.resize(_images(x @ w), (8, 4, 4, 4), "nearest"),
    "pad": lambda x, w: jnp.pad(x @ w, ((1, 3), (2, 0))),
    "pad_reflect": lambda x, w: jnp.pad(x @ w, ((2, 2), (3, 3)), mode="reflect"),
    "pad_interior": lambda x, w: lax.pad(x @ w, np.array(0, x.dtype), ((0, 0, 1), (-1, 2, 0))),
    "concatenate": lambda x, w: jnp.concatenate([x @ w, x, x[:5]]),
    "roll": lambda x, w: jnp.roll(x @ w, 5, axis=0) + jnp.roll(x, -3, axis=1),
    "flip": lambda x, w: (x @ w)[::-1, ::-1] * x,
    "split": lambda x, w: jnp.stack(jnp.split(x @ w, 4, axis=1)),
    "reshape": lambda x, w: ((x @ w).reshape(4, 16, 4, 8).transpose(2, 0, 3, 1).reshape(32, 64) @ x).reshape(8, 128),
    "reshape_uneven": lambda x, w: (x[:60] @ w).reshape(12, 5, 32).transpose(1, 0, 2).reshape(30, 64),
    "tile": lambda x, w: jnp.tile(x @ w, (2, 3)),
    "repeat": lambda x, w: jnp.repeat(x @ w, 3, axis=0),
    "diagonal": lambda x, w: jnp.diagonal(w @ w)[None] * x,
    "triangle": lambda x, w: jnp.tril(w @ w) * jnp.sum(x),
    "mixture": _mixture,
    "segment_sum": lambda x, w: jax.ops.segment_sum(x @ w, _index(x, 64, 10), num_segments=10),
    "searchsorted": lambda x, w: (x @ w) * jnp.searchsorted(jnp.sort(w[0]), x).astype(x.dtype),
    "where_mask": lambda x, w: jnp.where(x > 0, x @ w, jnp.mean(x, axis=0, keepdims=True)),
    "variance": lambda x, w: jnp.std(x @ w, axis=1) + jnp.prod(x[:, :3], axis=1),
    "linear_layers": lambda x, w: jax.vmap(eqx.tree_at(lambda m: m.weight, _LINEAR, w))(x),
}
_LINEAR = eqx.nn.Linear(32, 32, use_bias=False, key=jax.random.key(0))
FORWARD_ONLY = {"while", "scatter_min", "scatter_max", "scatter_mul", "searchsorted"}
MESHES = ({"data": 4, "tp": 2}, {"data": 8}, {"a": 2, "b": 2, "c": 2}, {"data": 2, "tp": 4})


def program(name):
    """Returns the step of a family: its result, the gradients, and both arguments after a step of descent."""
    family = FAMILIES[name]

    def forward(x, w):
        return family(x, w)

    def step(x, w):
        def loss(x, w):
            out = family(x, w)
            return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(out)), out

        (value, out), (gx, gw) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, w)
        return x - 0.1 * gx, w - 0.1 * gw, value, out

    return forward if name in FORWARD_ONLY else step


def arguments(seed, dtype):
    """Two arguments that every family takes: 64 rows, and a square."""
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((64, 32), (32, 32)))
