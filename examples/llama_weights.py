"""Weights of a Llama-style model, as Hugging Face names them, read in slices onto 8 devices by a map of names."""

import pathlib
import re
import tempfile

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import eqshard
from eqshard.checkpoint import load_safetensors, plan_from_index, save_safetensors


jax.config.update("jax_num_cpu_devices", 8)
WIDTH, HIDDEN, VOCAB, LAYERS = 64, 128, 256, 3


def linear(into, out, key):
    return eqx.nn.Linear(into, out, use_bias=False, dtype=jnp.bfloat16, key=key)


class Layer(eqx.Module):
    q: eqx.nn.Linear
    k: eqx.nn.Linear
    v: eqx.nn.Linear
    o: eqx.nn.Linear
    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norm1: eqx.nn.RMSNorm
    norm2: eqx.nn.RMSNorm

    def __init__(self, key):
        shapes = [(WIDTH, WIDTH)] * 4 + [(WIDTH, HIDDEN)] * 2 + [(HIDDEN, WIDTH)]
        made = [linear(*shape, k) for shape, k in zip(shapes, jax.random.split(key, 7))]
        self.q, self.k, self.v, self.o, self.gate, self.up, self.down = made
        self.norm1, self.norm2 = (eqx.nn.RMSNorm(WIDTH, use_bias=False, dtype=jnp.bfloat16) for _ in range(2))


class Llama(eqx.Module):
    embed: eqx.nn.Embedding
    layers: list[Layer]
    norm: eqx.nn.RMSNorm

    def __init__(self, key):
        keys = jax.random.split(key, LAYERS + 1)
        self.embed = eqx.nn.Embedding(VOCAB, WIDTH, dtype=jnp.bfloat16, key=keys[0])
        self.layers = [Layer(k) for k in keys[1:]]
        self.norm = eqx.nn.RMSNorm(WIDTH, use_bias=False, dtype=jnp.bfloat16)


PARTS = {part: f"self_attn.{part}_proj" for part in "qkvo"} | {
    part: f"mlp.{part}_proj" for part in ("gate", "up", "down")
}
PARTS |= {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}


def llama_name(path):
    """`.layers[0].q.weight` is `model.layers.0.self_attn.q_proj.weight`."""
    if found := re.fullmatch(r"\.layers\[(\d+)\]\.(\w+)\.weight", path):
        return f"model.layers.{found[1]}.{PARTS[found[2]]}.weight"
    return {".embed.weight": "model.embed_tokens.weight", ".norm.weight": "model.norm.weight"}[path]


model = Llama(jax.random.key(0))
shapes = eqx.filter_eval_shape(Llama, jax.random.key(0))
plan = eqshard.replicated_plan(shapes, eqshard.MeshSpec(tp=8)).at(r"\.(q|k|v|gate|up|embed)\.").set(P("tp"))
plan = plan.at(r"\.(o|down)\.").set(P(None, "tp"))
with tempfile.TemporaryDirectory() as folder:
    files = save_safetensors(folder, model, rename=llama_name, max_bytes=100_000)
    assert len(files) > 1 and (pathlib.Path(folder) / "model.safetensors.index.json").exists()
    assert "model.layers.2.mlp.down_proj.weight" in plan_from_index(folder, plan.mesh)
    loaded = load_safetensors(folder, shapes, plan, rename=llama_name)
assert loaded.layers[1].o.weight.addressable_shards[0].data.shape == (WIDTH, WIDTH // 8)
assert eqx.tree_equal(eqshard.gather(loaded), eqshard.gather(model))
print(f"{len(plan)} tensors of {len(files)} files, each device its slices")
