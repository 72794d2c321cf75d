"""Eight layouts of one training step, by the compiler: estimated time, bytes on the wire, memory.

A Llama-style decoder of 1.1 billion parameters, 16 scanned layers with remat, batch 64 x 1024, AdamW, on v5e:4x4. No
TPU is needed, only the extra `tpu`; each layout takes a minute or two.

    python tests/benchmarks/layouts.py [target] [number of the layout ...]
"""

import functools
import sys

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import eqshard
from eqshard.compiler import as_target, compile_reports, Program


LAYERS, WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD, VOCAB = 16, 2048, 8192, 32, 8, 64, 32000
BATCH, LENGTH = 64, 1024
OPTIMIZER = optax.adamw(3e-4)
S = jax.ShapeDtypeStruct


def shapes():
    def stack(*shape):
        return S((LAYERS, *shape), jnp.bfloat16)

    layers = {
        "q": stack(WIDTH, HEADS * HEAD),
        "k": stack(WIDTH, KV_HEADS * HEAD),
        "v": stack(WIDTH, KV_HEADS * HEAD),
        "o": stack(HEADS * HEAD, WIDTH),
        "gate": stack(WIDTH, HIDDEN),
        "up": stack(WIDTH, HIDDEN),
        "down": stack(HIDDEN, WIDTH),
        "norm1": stack(WIDTH),
        "norm2": stack(WIDTH),
    }
    ends = {"embed": S((VOCAB, WIDTH), jnp.bfloat16), "head": S((WIDTH, VOCAB), jnp.bfloat16)}
    return ends | {"layers": layers, "norm": S((WIDTH,), jnp.bfloat16)}


def rms(x, scale):
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-5)
    return y.astype(x.dtype) * scale


def attention(q, k, v):
    b, t = q.shape[:2]
    q = q.reshape(b, t, KV_HEADS, HEADS // KV_HEADS, HEAD)
    k, v = (x.reshape(b, t, KV_HEADS, HEAD) for x in (k, v))
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k).astype(jnp.float32) * HEAD**-0.5
    scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(b, t, HEADS * HEAD)


def layer(w, x, pin):
    y = rms(x, w["norm1"])
    x = pin(x + attention(y @ w["q"], y @ w["k"], y @ w["v"]) @ w["o"])
    y = rms(x, w["norm2"])
    return pin(x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"])


def loss(params, tokens, pin, use):
    x = pin(use["embed"](params["embed"])[tokens])

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def body(x, w):
        return layer(use["layers"](w), x, pin), None

    x, _ = jax.lax.scan(body, x, params["layers"])
    logits = rms(x, params["norm"]) @ use["head"](params["head"])
    logits = logits[:, :-1].astype(jnp.float32)
    picked = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def program(mesh, rules, batch, *, pinned=False, whole="no"):
    """The step with its plans; no rules: `fsdp_plan`. `whole`: if and how weights are gathered in the scan body."""
    params = shapes()
    plan = eqshard.rule_plan(params, mesh, rules, default=P()) if rules else eqshard.fsdp_plan(params, mesh)
    state = jax.eval_shape(OPTIMIZER.init, params)
    state_plan = eqshard.plan_like(plan, state)
    tokens = S((BATCH, LENGTH), jnp.int32)
    tokens_plan = eqshard.replicated_plan(tokens, mesh).at("").set(P(batch))

    def pin(x):
        return eqshard.constrain_to(x, P(batch), mesh) if pinned else x

    parts = {
        "embed": plan.select("['embed']"),
        "head": plan.select("['head']"),
        "layers": plan.select("['layers']").layer(),
    }
    use = dict.fromkeys(parts, lambda x: x)
    if whole == "constrained":
        use = {
            n: lambda x, p=p: jax.tree.map(lambda a: eqshard.constrain_to(a, P(), mesh), x) for n, p in parts.items()
        }
    elif whole == "used":
        use = {n: functools.partial(eqshard.use, p) for n, p in parts.items()}

    def step(params, state, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens, pin, use)
        updates, state = OPTIMIZER.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return eqshard.apply(plan, params), eqshard.apply(state_plan, state), value

    return Program(step, (params, state, tokens), (plan, state_plan, tokens_plan), donate=(0, 1))


def layouts(target):
    n = target.size
    one, two, fsdp = eqshard.MeshSpec(data=n), eqshard.MeshSpec(data=n // 4, tp=4), eqshard.MeshSpec(fsdp=n)
    whole = [(".*", P())]
    tp = [
        ("'embed'", P(None, "tp")),
        ("'head'", P(None, "tp")),
        ("norm", P()),
        (r"'(q|k|v|gate|up)'", P(None, None, "tp")),
        (r"'(o|down)'", P(None, "tp")),
    ]
    both = [
        ("'embed'", P("data", "tp")),
        ("'head'", P("data", "tp")),
        ("norm", P()),
        (r"'(q|k|v|gate|up)'", P(None, "data", "tp")),
        (r"'(o|down)'", P(None, "tp", "data")),
    ]
    return {
        "replicated weights, batch over all": program(one, whole, "data"),
        "FSDP, weights only": program(fsdp, [], "fsdp"),
        "FSDP, activations pinned": program(fsdp, [], "fsdp", pinned=True),
        "FSDP, weights whole in the scan body": program(fsdp, [], "fsdp", pinned=True, whole="constrained"),
        "FSDP, `use` in the scan body": program(fsdp, [], "fsdp", pinned=True, whole="used"),
        "Megatron TP 4 x DP": program(two, tp, "data", pinned=True),
        "Megatron TP 4 x FSDP, weights only": program(two, both, "data"),
        "Megatron TP 4 x FSDP, activations pinned": program(two, both, "data", pinned=True),
    }


def main(target="v5e:4x4", *numbers):
    rows = list(layouts(as_target(target)).items())
    columns = "layout", "est. step", "compute", "exposed", "wire, MB a chip", "bytes per chip", "MFU", "compile"
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for i in [int(n) for n in numbers] or range(len(rows)):
        name, program = rows[i]
        r = compile_reports([program], target=target)[0]
        times = [f"{s * 1e3:.0f} ms" for s in (r.step_seconds, r.compute_seconds, r.exposed_seconds)]
        sizes = f"{r.wire_bytes / 1e6:,.0f}", f"{r.bytes_per_device / 1e9:.2f} GB"
        cells = name, *times, *sizes, f"{r.mfu:.0%}", f"{r.compile_seconds:.0f} s"
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(*sys.argv[1:])
