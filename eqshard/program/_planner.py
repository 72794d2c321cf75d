"""`step_plan`: trace, read, price, solve, and say what came out."""

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from .._axes import PartitionAxis
from .._errors import ShardingError
from .._mesh import MeshLike, MeshSpec
from .._plan import ShardingPlan
from .._tree import size_text
from ..compiler import Target
from ._candidates import compared
from ._fixed import Fixed, fixed_specs
from ._ops import OpRules
from ._step import StepPlan
from ._study import study
from ._trace import trace
from ._tune import Tuning
from ._write import written


T = TypeVar("T")


def step_plan(
    fn: Callable[..., Any],
    *args: Any,
    mesh: MeshLike,
    max_bytes: int | float | None = None,
    fixed: Mapping[str, Fixed] | Sequence[ShardingPlan | None] | None = None,
    names: PartitionAxis | None = None,
    rules: OpRules | None = None,
    objective: str = "time",
    compare: bool = False,
    tune: int = 0,
    target: str | Target | None = None,
    cache: str | os.PathLike[str] | None = None,
    time_limit: int | float = 30.0,
    progress: Callable[[str], None] | None = None,
) -> StepPlan:
    """Plans a step from its own program: the layouts of its arguments and of the values inside that make it fastest.

    The step is traced, not run, and nothing is allocated. Values that lie together are found in its jaxpr; each matrix
    product, convolution, gather and the like is priced for every way to cut it, with what it takes to bring its
    operands there; and an integer program picks the cheapest that fits the memory.

    ```python
    import equinox as eqx, eqshard, jax, optax
    optim = optax.adamw(1e-3)

    def step(model, state, x):
        grads = eqx.filter_grad(lambda m: (jax.vmap(m)(x) ** 2).mean())(model)
        updates, state = optim.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state

    model = eqx.filter_eval_shape(eqx.nn.MLP, 256, 256, 1024, 2, key=jax.random.key(0))
    state = eqx.filter_eval_shape(lambda m: optim.init(eqx.filter(m, eqx.is_array)), model)
    x = jax.ShapeDtypeStruct((512, 256), "float32")
    plan = eqshard.step_plan(step, model, state, x, mesh=eqshard.MeshSpec(data=4, tp=2))
    model_plan, state_plan, batch_plan = plan.args
    ```

    **Arguments:**

    - `args`: arrays or shapes; leaves that are no arrays are part of the program.
    - `mesh`: its `chip`, where known, gives the costs and the memory; else those of a TPU v5e.
    - `max_bytes`: what a step may take on each device; by default the memory of `mesh.chip`, if it has one.
    - `fixed`: layouts that are given: the name of an argument, or a regular expression on the paths of leaves, to a
        PartitionSpec (which is cut to the rank of each leaf), to logical names such as `("batch", "length")`, or, for
        an argument, to a plan of some of its leaves. Or a plan, or None, for each argument.
    - `names`: what logical names in `fixed` mean; by default those of `PartitionAxis()`.
    - `rules`: for operations that eqshard does not know, such as Pallas and other opaque calls, by the name of their
        primitive: which dimensions may be cut together, as `"b q d, b k d -> b q d"` (`-`: must be whole), or a
        function of the equation that gives that, or None. Without a rule they are taken whole, and named in `notes`.
    - `objective`: `"time"`, or `"memory"` for the plan that takes the fewest bytes on a device.
    - `compare`: also plan under other beliefs, and as people write it by hand; `plan.explain()` then says what these
        would have cost, and why they lost.
    - `tune`: compile that many candidates for the target and let the compiler decide: the plans of `compare`, and on
        TPUs each with other compiler options.
    - `target`: where to compile for, as of `compile_report`; default: the devices at hand.
    - `cache`: a folder for what the compiler said.
    - `time_limit`: seconds that the solver may take; then the best so far is taken, and its gap said.
    - `progress`: is called with a line of text as the search goes on, as `print` may be.

    **Returns:**

    A `StepPlan`: `plan.args` to lay the arguments out, `constrain(plan, fn)` to write the rest into the program.

    **Raises:**

    - `BudgetError`: nothing fits `max_bytes`.
    """
    described = MeshSpec.of(mesh)
    described.size()
    if objective not in ("time", "memory"):
        raise ShardingError(f'`objective` is "time" or "memory", not {objective!r}.')
    say = progress or (lambda text: None)
    traced = uncollected(lambda: trace(fn, args))
    limit = described.chip.hbm_bytes if max_bytes is None and described.chip is not None else max_bytes
    room = None if limit is None else float(limit)
    begun = uncollected(lambda: study(traced, described, rules or {}, room, float(time_limit), objective))
    say(f"traced: {len(begun.graph.values)} values, {len(begun.graph.ops)} operations between them")
    said = fixed_specs(fn, traced, fixed or {}, described, names or PartitionAxis())
    if tune > 0:
        return Tuning(fn, args, tune, target, cache, say).best(begun, said)
    if compare:
        plan, others = compared(begun, said)
        return replace(plan, alternatives=others)
    plan = uncollected(lambda: written(begun, begun.choose(said)))
    say(f"planned: {1e3 * plan.seconds:.3g} ms, {size_text(plan.bytes_per_device)} a device")
    return plan


def uncollected(make: Callable[[], T]) -> T:
    """Makes something while Python does not look for garbage: among the many objects of a large program that takes a
    third of the time, and finds none."""
    if not gc.isenabled():
        return make()
    gc.disable()
    try:
        return make()
    finally:
        gc.enable()
