"""The optimizers that the tests of state plans go through, each with its own shape of state."""

import jax
import optax
import optax.contrib


def kind_of(path, x):
    return "matrix" if len(x.shape) >= 2 else "vector"


def by_kind(params):
    """Labels for `multi_transform`, as a function of the parameters."""
    return jax.tree_util.tree_map_with_path(kind_of, params)


def multi(labels):
    return optax.multi_transform({"matrix": optax.adamw(1e-3), "vector": optax.sgd(1e-2, momentum=0.9)}, labels)


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-3),
    "adamw_bf16_momentum": lambda: optax.adamw(1e-3, mu_dtype="bfloat16"),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=8),
    "lion": lambda: optax.lion(1e-3),
    "sgd_momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "multi_transform": lambda: multi(by_kind),
    "multi_steps": lambda: optax.MultiSteps(optax.adamw(1e-3), every_k_schedule=2).gradient_transformation(),
    "chain": lambda: optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.add_decayed_weights(1e-2),
        optax.scale_by_adam(),
        optax.scale_by_schedule(optax.cosine_decay_schedule(1e-3, 100)),
    ),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-3),
    "muon": lambda: optax.contrib.muon(1e-3),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
}
