"""Runs a planned step beside the plain one, and tells rounding from a fault."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ._apply import apply
from ._errors import MismatchError, ShardingError
from ._gather import gather
from ._leaf_check import compare, Verification
from ._plan import ShardingPlan
from ._rounding_noise import noisy_step
from .program import constrain, StepPlan


RUNS = 8


def verify(
    plan: StepPlan | ShardingPlan | Sequence[ShardingPlan | None],
    fn: Callable[..., Any],
    *args: Any,
    runs: int = RUNS,
    seed: int = 0,
) -> Verification:
    """Runs a step as planned and as it is, and compares the results leaf by leaf.

    To be called once before a long run, on simulated devices or at a reduced size. A plan changes the order of sums, so
    results differ in their last bits, and a step may make much of that: Adam turns the rounding of a gradient near zero
    into a whole step. So the plain step also runs with the last bits of its arguments, and of its sums, matmuls and
    other inexact operations, changed at random. How far that moves each element is its noise, and a difference far
    above it is a fault. The arguments are neither donated nor changed.

    ```python
    import equinox as eqx, eqshard, jax, jax.numpy as jnp

    def step(model, x):
        return eqx.filter_value_and_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))(model)

    model, x = eqx.nn.MLP(16, 16, 64, 2, key=jax.random.key(0)), jnp.ones((32, 16))
    plan = eqshard.step_plan(step, model, x, mesh=eqshard.MeshSpec(data=4, tp=2))
    found = eqshard.verify(plan, step, model, x)
    print(found)
    assert found.ok
    ```

    **Arguments:**

    - `plan`: of `fn`: what `step_plan` returns; or a plan, or None, for each argument, as `in_plans` of `filter_jit`.
    - `fn`: the plain step, not jitted by a plan.
    - `args`: its arguments. In place of a `jax.ShapeDtypeStruct`, values are drawn: small positive floats, zeros for
        integers and booleans.
    - `runs`: how often the plain step runs to measure the noise: the first half with single last bits changed, the
        others with up to 16 units in the last place of float32, 2 of bfloat16.
    - `seed`: of the noise and of the values that are drawn.

    **Returns:**

    A `Verification`: for each leaf of the result the largest absolute and relative difference, the noise, and a
    verdict; `.ok` if none is at fault.

    **Raises:**

    - `MismatchError`: the plan is of another program, or of other arguments.
    - `ShardingError`: `runs` is less than 2, or a part of an argument or result is in another process.
    """
    if runs < 2:
        raise ShardingError(f"`runs` must be at least 2, got {runs}.")
    args = tuple(jtu.tree_map(lambda x: _plain(x, seed), args))
    planned = gather(_planned(plan, fn, args))
    plain = gather(eqx.filter_jit(fn)(*args))
    noisy = noisy_step(fn, args)
    first = np.random.default_rng(seed).integers(2**31)
    results = (gather(noisy(int(first) + i, i >= runs // 2)) for i in range(runs))
    return Verification(compare(planned, plain, results), runs)


def _planned(plan: Any, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What the planned step returns."""
    options: dict[str, Any] = {}
    if isinstance(plan, StepPlan):
        plans: tuple[Any, ...] = plan.args
        fn = constrain(plan, fn)
        if plan.options and jax.default_backend() == "tpu":
            options = {"compiler_options": dict(plan.options)}
    else:
        plans = (plan,) if isinstance(plan, ShardingPlan) else tuple(plan)
    if len(plans) > len(args) or (isinstance(plan, StepPlan) and len(plans) < len(args)):
        raise MismatchError(f"the plan has {len(plans)} arguments, but {len(args)} were given.")
    placed = [arg if p is None else apply(p, arg) for p, arg in zip(plans, args)]
    return eqx.filter_jit(fn, **options)(*placed, *args[len(placed) :])


def _plain(x: Any, seed: int) -> Any:
    """An argument on one device: what is sharded is gathered, what is only a shape is drawn."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return _drawn(x, seed)
    if isinstance(x, jax.Array) and len(x.sharding.device_set) > 1:
        return jnp.asarray(gather(x))
    return x


def _drawn(x: jax.ShapeDtypeStruct, seed: int) -> jax.Array:
    key = jax.random.key(seed)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(seed, impl=str(jax.random.key_impl(x))), x.shape)  # pyright: ignore[reportArgumentType]
    if jnp.issubdtype(x.dtype, jnp.inexact):  # positive, as second moments must be
        return (0.02 * jnp.abs(jax.random.normal(key, x.shape))).astype(x.dtype)
    return jnp.zeros(x.shape, x.dtype)
