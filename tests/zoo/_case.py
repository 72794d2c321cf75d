"""A case: one model as a step, its arguments as shapes, and what its dimensions are called."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
from jax import Array

import eqshard


Dims = tuple[str | None, ...]
"""The names of an array's dimensions, None for one that no layout splits."""


class Hooks(NamedTuple):
    """Where a hand-written layout reaches into a step; the plain step has these, which do nothing."""

    pin: Callable[[Array, str], Array] = lambda x, name: x
    """Of an activation and its name."""
    use: Callable[[Any, str], Any] = lambda tree, at: tree
    """Of weights about to be used, and their path in the model; of one layer of a stack, the path of the stack."""


@dataclass(frozen=True)
class Model:
    """What one file of the zoo says about its model."""

    sizes: Mapping[str, Any]
    """Configurations: "tiny" runs on eight simulated devices, "bench" is for the compiler."""
    init: Callable[[Any, Array], Any]
    """Of a configuration and a key."""
    batch: Callable[[Any, Array], Any]
    """Of a configuration and a key: what a step reads."""
    weights: Mapping[str, Dims]
    """A regular expression on the paths of weights, and the names of their dims; one of a stack has "layers" before."""
    values: Mapping[str, Dims]
    """What is pinned, by name; and what a step reads, by its path."""
    loss: Callable[[Any, Any, Any, Hooks], Array] | None = None
    """Of the model in the dtype of computation, the batch, the configuration and the hooks; None: it is not trained."""


@dataclass(frozen=True)
class Case:
    """A step with its arguments.

    **Attributes:**

    - `args`: shapes; nothing is allocated.
    - `make`: of a key: the same as arrays.
    - `build`: of `Hooks`: the step with them in it.
    - `kinds`: for each argument what it is: "weights", "state" (of the optimizer) or "values".
    - `donate`: the numbers of the arguments that a step consumes.
    """

    name: str
    size: str
    config: Any
    model: Model
    args: tuple[Any, ...]
    make: Callable[[Array], tuple[Any, ...]]
    build: Callable[[Hooks], Callable[..., Any]]
    kinds: tuple[str, ...] = ("weights", "state", "values")
    donate: tuple[int, ...] = (0, 1)

    @property
    def step(self) -> Callable[..., Any]:
        """The step as a user writes it, without a layout."""
        return self.build(Hooks())

    def layouts(self, mesh: eqshard.MeshLike) -> dict[str, Any]:
        """The layouts by hand, and those from weights alone, by name: each a `Layout`."""
        from ._layouts import hand_written  # these are about cases
        from ._weights import from_weights

        described = eqshard.MeshSpec.of(mesh)
        return hand_written(self, described) | from_weights(self, described)

    @property
    def parameters(self) -> int:
        """How many numbers the model has."""
        return sum(x.size for x in jtu.tree_leaves(eqx.filter(self.args[0], _is_shape)))


def training_case(name: str, size: str, model: Model) -> Case:
    """The case of one step of training with AdamW."""
    config, loss = model.sizes[size], model.loss
    assert loss is not None
    optim = optax.adamw(3e-4, b2=0.95, weight_decay=0.1)

    def make(key: Array) -> tuple[Any, ...]:
        key, other = jax.random.split(key)
        made = model.init(config, key)
        return made, optim.init(eqx.filter(made, eqx.is_inexact_array)), model.batch(config, other)

    def build(hooks: Hooks) -> Callable[..., Any]:
        def loss_of(made: Any, batch: Any) -> Array:
            return loss(cast(made, config.compute), batch, config, hooks)

        def step(made: Any, state: Any, batch: Any) -> tuple[Any, Any, Array]:
            loss, grads = eqx.filter_value_and_grad(loss_of)(made, batch)
            with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
                updates, state = optim.update(grads, state, eqx.filter(made, eqx.is_inexact_array))
            return eqx.apply_updates(made, updates), state, loss

        return step

    return Case(name, size, config, model, shapes(make), make, build)


def shapes(make: Callable[[Array], tuple[Any, ...]]) -> tuple[Any, ...]:
    """What `make` gives, as shapes."""
    return eqx.filter_eval_shape(make, jax.random.key(0))


def cast(tree: Any, dtype: str) -> Any:
    """The floating-point arrays of `tree` in another dtype."""
    return jtu.tree_map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, tree)


def dims_of(path: str, rank: int, rules: Mapping[str, Dims]) -> Dims:
    """The names of the dims of the leaf at `path`; one that no rule knows has none."""
    for pattern, dims in rules.items():
        if re.search(pattern, path):
            assert rank - len(dims) in (0, 1), f"{path} has rank {rank}, {pattern} says {dims}"
            return ("layers",) * (rank - len(dims)) + dims
    return (None,) * rank


def _is_shape(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def tokens(key: Array, shape: tuple[int, ...], most: int) -> Array:
    """Random integers below `most`."""
    return jax.random.randint(key, shape, 0, most, jnp.int32)
