"""`demo`: a model trained over simulated devices, to see the whole of it in a minute."""

import argparse
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .._analyze import analyze
from .._batch import shard_batch
from .._fsdp import fsdp_plan
from .._init import init
from .._jit import filter_jit
from .._mesh import MeshSpec
from .._report import report
from .._tree import size_text
from ._output import put, simulate, width
from ._words import Commands, UsageError


_DEVICES, _WIDTH = 8, 256


def add_commands(commands: Commands) -> None:
    """Adds it."""
    parser = commands.add(
        "demo",
        "train a small model over 8 simulated devices",
        "",
        "  eqshard demo --steps 30 --html plan.html",
        _demo,
    )
    parser.add_argument("--steps", type=int, default=20, help="how many (default: %(default)s)")
    parser.add_argument("--html", metavar="FILE", help="also write the plan as a page")


def _demo(a: argparse.Namespace) -> int:
    if a.steps < 1:
        raise UsageError(f"--steps {a.steps}: at least 1.")
    simulate(_DEVICES)
    mesh = MeshSpec(data=2, fsdp=4)
    model, plan = init(_make, jax.random.key(0), mesh=mesh, planner=fsdp_plan)
    print(report(plan, width=width()), end="\n\n")
    if a.html is not None:
        put(report(plan, format="html"), a.html)
    train = filter_jit(_step, out_plans=(plan, None), donate="all-except-first")
    first = last = 0.0
    x = shard_batch(jax.random.normal(jax.random.key(1), (64, _WIDTH)), mesh, P(("data", "fsdp")))
    for i in range(a.steps):
        model, loss = train(model, x)
        first, last = (float(loss) if i == 0 else first), float(loss)
        if sys.stderr.isatty():
            sys.stderr.write(f"\rstep {i + 1} of {a.steps}, loss {last:.3f} ")
    if sys.stderr.isatty():
        sys.stderr.write("\r\033[K")
    held, whole = max(analyze(plan).bytes_per_device), sum(leaf.nbytes for leaf in plan)
    print(f"{a.steps} steps on {mesh.size()} devices: loss {first:.3f} -> {last:.3f}")
    print(f"each device held {size_text(held)} of the model's {size_text(whole)}")
    return 0


def _make(key: jax.Array) -> eqx.nn.MLP:
    return eqx.nn.MLP(_WIDTH, _WIDTH, 4 * _WIDTH, 2, key=key)


def _step(model: eqx.nn.MLP, x: jax.Array) -> tuple[eqx.nn.MLP, jax.Array]:
    loss, grads = eqx.filter_value_and_grad(lambda m: jnp.mean((jax.vmap(m)(x) - x) ** 2))(model)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -1e-3 * jnp.sign(g), grads)), loss
