"""The forms in which training steps return their results, each as a step and a way to read it."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax


WIDTH, ROWS = 256, 64
OPTIM = optax.adam(1e-2)


class Module(eqx.Module):
    loss: Any
    state: Any
    model: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Data:
    state: Any
    loss: Any
    model: Any


class Named(NamedTuple):
    loss: Any
    model: Any
    state: Any


class Normed(eqx.Module):
    """A model with `eqx.nn.State`."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, key):
        self.first = eqx.nn.Linear(WIDTH, 2 * WIDTH, key=key)
        self.norm = eqx.nn.BatchNorm(2 * WIDTH, "batch", mode="batch")
        self.last = eqx.nn.Linear(2 * WIDTH, WIDTH, key=key)

    def __call__(self, x, state):
        x, state = self.norm(self.first(x), state)
        return self.last(jax.nn.relu(x)), state


class Form(NamedTuple):
    """A form of results."""

    wrap: Callable[[Any, Any, Any], Any]
    """The result of a step from its model, state and loss."""
    read: Callable[[Any], tuple[Any, Any]]
    """Model and state of a result."""
    with_state: bool = False
    """Whether the step's state has an `eqx.nn.State` beside the optimizer's."""


FORMS: dict[str, Form] = {
    "model, state, loss": Form(lambda m, s, loss: (m, s, loss), lambda r: (r[0], r[1])),
    "state, model, loss": Form(lambda m, s, loss: (s, m, loss), lambda r: (r[1], r[0])),
    "loss, model, state": Form(lambda m, s, loss: (loss, m, s), lambda r: (r[1], r[2])),
    "loss, (model, state)": Form(lambda m, s, loss: (loss, (m, s)), lambda r: r[1]),
    "(state, [model]), loss": Form(lambda m, s, loss: ((s, [m]), loss), lambda r: (r[0][1][0], r[0][0])),
    "dict": Form(lambda m, s, loss: {"loss": loss, "model": m, "optimizer": s}, lambda r: (r["model"], r["optimizer"])),
    "nested dict": Form(
        lambda m, s, loss: {"aux": {"loss": loss}, "new": {"b": m, "a": s}}, lambda r: (r["new"]["b"], r["new"]["a"])
    ),
    "dataclass": Form(lambda m, s, loss: Data(s, loss, m), lambda r: (r.model, r.state)),
    "module": Form(lambda m, s, loss: Module(loss, s, m), lambda r: (r.model, r.state)),
    "namedtuple": Form(lambda m, s, loss: Named(loss, m, s), lambda r: (r.model, r.state)),
    "model, state, loss with State": Form(lambda m, s, loss: (m, s, loss), lambda r: (r[0], r[1]), True),
    "loss, (state, model) with State": Form(lambda m, s, loss: (loss, (s, m)), lambda r: (r[1][1], r[1][0]), True),
}


def make_step(form: Form) -> Callable[[Any, Any, Any], Any]:
    """A training step that returns its results in a form."""

    def step(model, state, x):
        def loss_fn(model, state):
            if not form.with_state:
                return jnp.mean((jax.vmap(model)(x) - x) ** 2), None
            y, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
            return jnp.mean((y - x) ** 2), state

        moments, norms = state if form.with_state else (state, None)
        (loss, norms), grads = eqx.filter_value_and_grad(loss_fn, has_aux=True)(model, norms)
        with jax.numpy_dtype_promotion("standard"):
            updates, moments = OPTIM.update(grads, moments)
        model = eqx.apply_updates(model, updates)
        return form.wrap(model, (moments, norms) if form.with_state else moments, loss)

    return step


def make_args(form: Form) -> tuple[Any, Any, Any]:
    """Model, state and batch of the step of a form."""
    key = jax.random.key(0)
    x = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
    if form.with_state:
        model, norms = eqx.nn.make_with_state(Normed)(key)
        return model, (OPTIM.init(eqx.filter(model, eqx.is_inexact_array)), norms), x
    model = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, key=key)
    return model, OPTIM.init(eqx.filter(model, eqx.is_inexact_array)), x
