"""From the layout at rest to the layout in use, with gradients that come back at rest."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.core import Tracer
from jax.typing import DTypeLike

from ._apply import _constrain as constrain_row, apply
from ._errors import ShardingError
from ._layer import used_row
from ._narrow import narrow
from ._plan import LeafPlan, match, ShardingPlan
from ._tree import dtype_name, Tree


def use(plan: ShardingPlan, tree: Tree, *, dtype: DTypeLike | None = None) -> Tree:
    """Brings `tree` from its layout at rest to its layout in use; its gradient comes back in the layout at rest.

    With `fsdp_plan` this is the gather of the weights, and its gradient may be a reduce-scatter. Call it where the
    weights are needed: for scanned layers inside the scan's body, on the layer's slice with `plan.layer()`, so that one
    layer is whole at a time; under `jax.checkpoint` the backward pass gathers again instead of keeping them.

    ```python
    import equinox as eqx, eqshard, jax, jax.numpy as jnp
    from jax.sharding import PartitionSpec as P
    model = eqx.nn.Linear(512, 512, key=jax.random.key(0))
    plan = eqshard.fsdp_plan(model, eqshard.MeshSpec(fsdp=8))

    @eqx.filter_jit
    @eqx.filter_grad
    def grads(model, x):
        model = eqshard.use(plan, model, dtype=jnp.bfloat16)
        return jnp.sum(jax.vmap(model)(x).astype(jnp.float32) ** 2)

    grad = grads(eqshard.apply(plan, model), jnp.ones((8, 512), jnp.bfloat16))
    assert grad.weight.dtype == jnp.float32 and grad.weight.sharding.spec == P("fsdp")
    ```

    **Arguments:**

    - `plan`: must match `tree`, leaf by leaf.
    - `dtype`: a floating-point dtype to compute in. Floating-point leaves are cast before they are gathered, so that
        the gather moves fewer bytes; the gradient is cast back to the leaf's dtype after it was summed over devices.

    **Returns:**

    A tree like `tree`. Leaves that have no gradient (integers, keys) are laid out only; leaves that are no arrays pass.

    **Raises:**

    - `MismatchError`: the tree is not the one that was planned.
    """
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ShardingError(f"`dtype` is what to compute in, a floating-point dtype; got {jnp.dtype(dtype).name}.")
    leaves, treedef = jtu.tree_flatten(tree)
    rows = [None if i is None else plan.leaves[i] for i in match(plan, leaves, treedef)]
    out = [x if row is None else _use_traced(plan, row, x, dtype) if isinstance(x, Tracer) else None
           for x, row in zip(leaves, rows)]  # fmt: skip
    still = {i: row for i, row in enumerate(rows) if row is not None and not isinstance(leaves[i], Tracer)}
    cast = {str(i): _cast(narrow(leaves[i], row.path), _compute_dtype(row, dtype)) for i, row in still.items()}
    wanted = [replace(used_row(row), path=f"['{i}']", dtype=dtype_name(cast[str(i)])) for i, row in still.items()]
    for i, x in apply(ShardingPlan(plan.mesh, wanted), cast).items():  # these have no gradient: one move for all
        out[int(i)] = x
    return jtu.tree_unflatten(treedef, out)


def sequenced(tree: Tree, after: Tree) -> tuple[Tree, Tree]:
    """The same values, of which the compiler can have none before it has all: so `tree` waits for `after`.

    For layers in a Python loop: without it the compiler is free to gather the weights of all layers at once, and on
    CPUs it does. (A scan has an order by itself.) Go on with both results.

    ```python
    import equinox as eqx, eqshard, jax, jax.numpy as jnp
    layers = [eqx.nn.Linear(512, 512, key=k) for k in jax.random.split(jax.random.key(0), 3)]
    plan = eqshard.fsdp_plan(layers, eqshard.MeshSpec(fsdp=8))

    @eqx.filter_jit
    def run(layers, x):
        for i, layer in enumerate(layers):
            layer, x = eqshard.sequenced(layer, x)
            x = jax.vmap(eqshard.use(plan.select(f"[{i}]"), layer))(x)
        return x

    y = run(eqshard.apply(plan, layers), jnp.ones((8, 512)))
    ```

    **Returns:**

    `tree` and `after`. Arrays that are not traced, and what is no array, are as they were.
    """
    leaves, treedef = jtu.tree_flatten((tree, after))
    traced = [i for i, x in enumerate(leaves) if isinstance(x, Tracer)]
    for i, x in zip(traced, jax.lax.optimization_barrier([leaves[i] for i in traced])):
        leaves[i] = x
    return jtu.tree_unflatten(treedef, leaves)


def _compute_dtype(row: LeafPlan, dtype: DTypeLike | None) -> str:
    floats = not row.dtype.startswith("key<") and jnp.issubdtype(row.dtype, jnp.floating)
    return row.dtype if dtype is None or not floats else jnp.dtype(dtype).name


def _cast(x: Any, dtype: str) -> Any:
    if dtype_name(x) == dtype:
        return x
    return x.update(dtype=jnp.dtype(dtype), weak_type=False) if isinstance(x, jax.ShapeDtypeStruct) else x.astype(dtype)


def _use_traced(plan: ShardingPlan, row: LeafPlan, x: Any, dtype: DTypeLike | None) -> Any:
    compute = _compute_dtype(row, dtype)
    here = replace(row, memory_kind=None if row.memory_kind is None else "device")
    low = replace(here, dtype=compute)
    wanted = used_row(low)

    def forward(x: Any) -> Any:
        if compute != row.dtype:
            x = _lay(_cast(_lay(x, here, plan), compute), low, plan)  # cast in pieces, then gather
        return _lay(x, wanted, plan)

    def backward(_: None, cotangent: Any) -> tuple[Any]:
        cotangent = _cast(_lay(cotangent, low, plan), row.dtype)
        return (_lay(cotangent, row, plan),)

    # At rest first: the slice of a scan, or a fresh value, may lie in whatever way the compiler likes.
    x = _lay(x, row, plan)
    if row.dtype.startswith("key<") or not jnp.issubdtype(row.dtype, jnp.inexact):
        return forward(x)
    laid = jax.custom_vjp(forward)
    laid.defvjp(lambda x: (forward(x), None), backward)
    return laid(x)


def _lay(x: Any, row: LeafPlan, plan: ShardingPlan) -> Any:
    """`apply` for one array: differentiated eagerly, custom gradients see values, not tracers."""
    if isinstance(x, Tracer):
        return constrain_row(x, row, plan)
    return apply(ShardingPlan(plan.mesh, (replace(row, path=""),)), x)
