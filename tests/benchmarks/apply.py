"""`apply` against what it stands for: one `jax.device_put`, and constraints written by hand.

    python tests/benchmarks/apply.py

Claims, asserted: over a tree of 2,000 leaves `apply(plan, tree)` takes at most 1.1 times as long as
`jax.device_put(leaves, shardings)` with shardings made beforehand; and a jitted step with `apply` lowers to the very
text of the step with the constraints written out.
"""

from functools import partial

import jax


jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from _timing import in_turns, ratio, table  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import eqshard  # noqa: E402


LEAVES = 2_000
LIMIT = 1.1
MESH = eqshard.MeshSpec(dp=2, tp=4)


def make_tree():
    """Layers of weights, biases and scales, as numpy."""
    rng = np.random.default_rng(0)
    shapes = {"w": (64, 64), "v": (64, 32), "b": (64,), "s": ()}
    return [{k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()} for _ in range(LEAVES // 4)]


def make_plan(tree):
    plan = eqshard.replicated_plan(tree, MESH)
    return plan.at(r"'w'").set(P("dp", "tp")).at(r"'v'").set(P("tp")).at(r"'b'").set(P("tp"))


def eager():
    tree = make_tree()
    plan = make_plan(tree)
    shardings = jax.tree.leaves(plan.shardings(tree))
    starts = {
        "numpy -> sharded": tree,
        "one device -> sharded": jax.device_put(tree, jax.devices()[0]),
        "already placed": eqshard.apply(plan, tree),
    }
    rows = []
    for name, start in starts.items():
        leaves = jax.tree.leaves(start)
        assert len(leaves) == LEAVES
        seconds = in_turns(
            {
                "apply": lambda start=start: eqshard.apply(plan, start),
                "device_put": lambda leaves=leaves: jax.device_put(leaves, shardings),
            }
        )
        best = {k: min(v) * 1e3 for k, v in seconds.items()}
        rows.append([name, best["apply"], best["device_put"], ratio(seconds, "apply", "device_put")])
    table(f"Placing {LEAVES} leaves", ["from", "apply, best ms", "device_put, best ms", "median ratio"], rows)
    for name, _, _, found in rows:
        assert found <= LIMIT, f"{name}: {found:.2f} times the time of device_put"


def lowered():
    """The text of a step with `apply`, and with constraints by hand, on Auto and on Explicit axes."""
    params = {"w1": np.ones((64, 256), np.float32), "w2": np.ones((256, 64), np.float32)}
    for axis_type in ("auto", "explicit"):
        mesh = MESH.replace(axis_type=axis_type)
        whole = eqshard.replicated_plan(params, mesh)
        plan = whole.at("w1").set(P("dp", "tp")).at("w2").set(P("tp", "dp"))
        by_hand = jax.lax.with_sharding_constraint if axis_type == "auto" else jax.sharding.reshard
        placed, x = eqshard.apply(plan, params), eqshard.replicate(jnp.ones((8, 64)), mesh)
        ours = step_text(placed, x, partial(eqshard.apply, whole), partial(eqshard.apply, plan))
        theirs = step_text(placed, x, *(partial(constrained, by_hand, p.shardings(params)) for p in (whole, plan)))
        assert ours == theirs, f"{axis_type}: the programs differ"
        assert ours.count("sharding_constraint") >= 4  # two to gather, two to scatter
        print(f"{axis_type}: the step with apply lowers to the same {len(ours.splitlines())} lines as by hand")


def constrained(by_hand, shardings, tree):
    return jax.tree.map(by_hand, tree, shardings)


def step_text(params, x, gather, scatter):
    """A step that gathers its parameters and scatters them again, lowered."""

    def step(params, x):
        params = gather(params)
        grads = jax.grad(lambda p: jnp.mean((jnp.tanh(x @ p["w1"]) @ p["w2"]) ** 2))(params)
        return scatter(jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))

    return jax.jit(step).lower(params, x).as_text()


if __name__ == "__main__":
    eager()
    lowered()
