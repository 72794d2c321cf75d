"""`eqx.filter_jit` that keeps plans on arguments and results."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.tree_util as jtu
from jax.core import Tracer

from ._apply import apply
from ._errors import DonatedError, MismatchError
from ._narrow import narrow_leaves, tree_paths
from ._plan import match, named_shardings, ShardingPlan
from ._stray import check_devices, is_placed
from ._tree import is_array, path_name, some


Params = ParamSpec("Params")
Result = TypeVar("Result")
Plans = ShardingPlan | Sequence[ShardingPlan | None] | None
Donate = Literal["all", "all-except-first", "warn", "warn-except-first", "none"]


def filter_jit(
    fn: Callable[Params, Result],
    *,
    in_plans: Plans = None,
    out_plans: Plans = None,
    donate: Donate = "none",
    compiler_options: Mapping[str, Any] | None = None,
) -> "PlannedJit[Params, Result]":
    """`eqx.filter_jit` that keeps plans on arguments and results.

    Arguments are laid out by their plans before the call: those that lie right, as the results of the step before do,
    cost nothing. Results leave in the layout of theirs, so that they can be donated to the next step.

    ```python
    import equinox as eqx, eqshard, jax, jax.numpy as jnp
    model = eqx.nn.MLP(32, 32, 256, 2, key=jax.random.key(0))
    plan = eqshard.auto_plan(model, eqshard.MeshSpec(dp=2, tp=4), min_bytes=0)

    def decay(model, rate):
        return jax.tree.map(lambda x: x * rate if eqx.is_array(x) else x, model)

    step = eqshard.filter_jit(decay, in_plans=plan, out_plans=plan, donate="all")
    model = step(model, jnp.array(0.5))
    assert eqshard.plan_of(model) == plan
    ```

    As a decorator: `@functools.partial(eqshard.filter_jit, out_plans=plan)`.

    **Arguments:**

    - `fn`: any function that `eqx.filter_jit` takes: arrays are traced, everything else is static.
    - `in_plans`: a plan for each positional argument, or None to leave it alone; may be shorter than the arguments. A
        single plan is for the first one.
    - `out_plans`: a plan for each element of the tuple that `fn` returns, or None; a single plan is for all of it.
    - `donate`: as of `eqx.filter_jit`.
    - `compiler_options`: as of `jax.jit`.

    **Returns:**

    A function like `fn`; its `lower(*args)` gives the `jax.stages.Lowered`, to look at.

    **Raises:**

    When called:

    - `DonatedError`: an argument was donated to an earlier call; says which leaf.
    - `StrayError`: an argument lies on other devices than the plans' mesh; says which leaf.
    - `MismatchError`: an argument or result is not the one that was planned.
    """
    return PlannedJit(fn, in_plans, out_plans, donate, compiler_options)


class PlannedJit(Generic[Params, Result]):
    """What `filter_jit` returns. (A plain class: the methods of an `eqx.Module` take longer to call.)"""

    def __init__(
        self,
        fn: Callable[Params, Result],
        in_plans: Plans,
        out_plans: Plans,
        donate: Donate,
        compiler_options: Mapping[str, Any] | None,
    ):
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._signature = inspect.signature(fn)
        self._in_plans = (in_plans,) if isinstance(in_plans, ShardingPlan) else tuple(in_plans or ())
        self._out_plans = out_plans if out_plans is None or isinstance(out_plans, ShardingPlan) else tuple(out_plans)
        self._donate = donate
        self._options: dict[str, Any] = {} if compiler_options is None else {"compiler_options": dict(compiler_options)}
        self._jitted: Any = eqx.filter_jit(self._named(self._traced), donate=donate, **self._options)
        # The layouts of the last call's arguments: if they are the same now, there is nothing to place or to check.
        self._seen: list[Any] | None = None

    def __call__(self, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        given = self._bind(args, kwargs)
        flat = self._flat(*given)
        if _any_deleted(flat):
            self._raise_donated(*given)
        layouts = _layouts(flat)
        if layouts != self._seen:
            given = self._placed(*given)
            flat = self._flat(*given)
            self._seen = _layouts(flat)
        try:
            leaves, treedef = self._jitted(*flat)
        except ValueError:
            self._check_strays(*given)
            raise
        return jtu.tree_unflatten(treedef, leaves)

    def lower(self, *args: Params.args, **kwargs: Params.kwargs) -> jax.stages.Lowered:
        """The lowered function for these arguments, arrays or `jax.ShapeDtypeStruct`s, to look at."""
        first, rest, *structure = self._flat(*self._placed(*self._bind(args, kwargs)))
        (first, first_static), (rest, rest_static) = (eqx.partition(leaves, is_array) for leaves in (first, rest))

        def run(first: list[Any], rest: list[Any]) -> list[Any]:
            leaves, _ = self._traced(eqx.combine(first, first_static), eqx.combine(rest, rest_static), *structure)
            return eqx.filter(leaves, is_array)

        donated = {"none": ()}.get(self._donate, (1,) if self._donate.endswith("first") else (0, 1))
        return jax.jit(self._named(run), donate_argnums=donated, **self._options).lower(first, rest)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else eqx.Partial(self, instance)

    @property
    def _name(self) -> str:
        return getattr(self._fn, "__name__", type(self._fn).__name__)

    def _named(self, traced: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            return traced(*args)

        run.__name__ = run.__qualname__ = self._name  # as profiles and compiled programs show it
        return run

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if kwargs:  # an argument has its plan however it is passed
            bound = self._signature.bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        if len(args) < len(self._in_plans):
            raise MismatchError(
                f"`{self._name}` was called with {len(args)} arguments; `in_plans` has {len(self._in_plans)}."
            )
        return args, kwargs

    def _flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], list[Any], Any, Any]:
        first, first_def = jtu.tree_flatten(args[:1])
        rest, rest_def = jtu.tree_flatten((args[1:], kwargs, self._fn))
        first = narrow_leaves(first, lambda: self._paths(0, args[0]))
        rest = narrow_leaves(rest, lambda: self._rest_paths(args, kwargs))
        return first, rest, first_def, rest_def

    def _paths(self, i: int, arg: Any) -> list[str]:
        return [f"{self._argument(i)}: {path}" for path in tree_paths(arg)]

    def _rest_paths(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        others = [path for i, x in enumerate(args[1:], 1) for path in self._paths(i, x)]
        return [*others, *tree_paths(kwargs), *tree_paths(self._fn)]

    def _traced(self, first: list[Any], rest: list[Any], first_def: Any, rest_def: Any) -> tuple[list[Any], Any]:
        others, kwargs, fn = jtu.tree_unflatten(rest_def, rest)
        args = [*jtu.tree_unflatten(first_def, first), *others]
        for i, plan in enumerate(self._in_plans):
            args[i] = _apply(plan, args[i], self._argument(i))
        out = fn(*args, **kwargs)
        if isinstance(self._out_plans, tuple):
            parts, outer = jtu.tree_flatten(out, is_leaf=lambda x: x is not out)
            if len(parts) != len(self._out_plans) or not isinstance(out, (tuple, list)):
                raise MismatchError(
                    f"`{self._name}` returned {_described(out)}; `out_plans` is for a tuple of {len(self._out_plans)}."
                )
            out = jtu.tree_unflatten(
                outer, [_apply(p, x, f"result {i}") for i, (p, x) in enumerate(zip(self._out_plans, parts))]
            )
        else:
            out = _apply(self._out_plans, out, "the result")
        return jtu.tree_flatten(out)

    def _placed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._check_strays(args, kwargs)
        new = list(args)
        for i, plan in enumerate(self._in_plans):
            if plan is not None and not any(isinstance(x, Tracer) for x in jtu.tree_leaves(args[i])):
                new[i] = _apply(plan, args[i], self._argument(i), unless=_lies)
        return tuple(new), kwargs

    def _check_strays(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuses arguments that JAX could not run beside the plans, or each other; numpy and uncommitted ones can."""
        plans = [*self._in_plans, *(self._out_plans if isinstance(self._out_plans, tuple) else [self._out_plans])]
        named = [
            (path_name(path), x)
            for path, x in jtu.tree_flatten_with_path(({self._argument(i): x for i, x in enumerate(args)}, kwargs))[0]
        ]
        devices = next((frozenset(p.build().devices.flat) for p in plans if p is not None), None)
        whose = "the plans' mesh"
        if devices is None:
            placed = [(path, x) for path, x in named if is_placed(x)]
            if not placed:
                return
            devices, whose = frozenset(placed[0][1].sharding.device_set), f"{placed[0][0]}"
        check_devices(named, devices, whose)

    def _raise_donated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = jtu.tree_flatten_with_path(({self._argument(i): x for i, x in enumerate(args)}, kwargs))[0]
        gone = [path_name(path) for path, x in named if _is_concrete(type(x)) and x.is_deleted()]
        raise DonatedError(
            f"`{self._name}` was called with arrays that were donated to an earlier call: {some(gone, 5)}. To fix "
            'this, use the result of that call instead, or pass `donate="none"` to it.'
        )

    def _argument(self, i: int) -> str:
        names = list(self._signature.parameters)
        return f"argument {i}" + (f" `{names[i]}`" if i < len(names) else "")


def _any_deleted(flat: tuple[list[Any], list[Any], Any, Any]) -> bool:
    return any(x.is_deleted() for leaves in flat[:2] for x in leaves if _is_concrete(type(x)))


@functools.cache
def _is_concrete(kind: type) -> bool:
    """Returns whether arrays of a type have buffers; asked of the type, since `isinstance` is slow for each leaf."""
    return issubclass(kind, jax.Array) and not issubclass(kind, Tracer)


def _layouts(flat: tuple[list[Any], list[Any], Any, Any]) -> list[Any]:
    return [getattr(x, "sharding", None) for leaves in flat[:2] for x in leaves]  # numpy and tracers have none


def _apply(plan: ShardingPlan | None, tree: Any, what: str, unless: Callable[..., bool] = lambda *_: False) -> Any:
    try:
        return tree if plan is None or unless(plan, tree) else apply(plan, tree)
    except MismatchError as error:
        raise MismatchError(f"{what}: {error}") from None


def _lies(plan: ShardingPlan, tree: Any) -> bool:
    """Whether every leaf lies as planned, however the layout is spelt: on Explicit axes results spell it in full."""
    leaves, treedef = jtu.tree_flatten(tree)
    targets = named_shardings(plan, plan.build())
    return all(
        i is None or (is_placed(x) and x.sharding.is_equivalent_to(targets[i], x.ndim))
        for x, i in zip(leaves, match(plan, leaves, treedef))
    )


def _described(out: Any) -> str:
    return f"a {type(out).__name__}" + (f" of {len(out)}" if isinstance(out, (tuple, list)) else "")
