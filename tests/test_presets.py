"""Tensor parallel rules for Equinox models, and what the compiler makes of them."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import eqshard
from eqshard import MeshSpec


COLUMN, ROW, WHOLE = P("tp"), P(None, "tp"), P()


def shape_of(make, *args, **kwargs):
    return eqx.filter_eval_shape(make, *args, **kwargs, key=jax.random.key(0))


def planned(model, mesh=None):
    mesh = MeshSpec(tp=8) if mesh is None else mesh
    plan = eqshard.rule_plan(model, mesh, eqshard.tp_rules(model))
    assert not [i for i in eqshard.validate(plan, model) if i.severity == "error"]
    return plan.specs()


def test_mlp():
    assert planned(shape_of(eqx.nn.MLP, 64, 64, 256, 1)) == {
        ".layers[0].weight": COLUMN,
        ".layers[0].bias": COLUMN,
        ".layers[1].weight": ROW,
        ".layers[1].bias": WHOLE,
    }


def test_mlp_with_a_layer_left_over():
    specs = planned(shape_of(eqx.nn.MLP, 64, 64, 64, 2))
    assert [specs[f".layers[{i}].weight"] for i in range(3)] == [COLUMN, ROW, WHOLE]


def test_mlp_to_a_scalar():
    specs = planned(shape_of(eqx.nn.MLP, 64, "scalar", 64, 1))
    assert specs[".layers[1].weight"] == ROW


def test_multihead_attention():
    model = shape_of(eqx.nn.MultiheadAttention, 8, 64, use_query_bias=True, use_output_bias=True)
    assert planned(model) == {
        ".query_proj.weight": COLUMN,
        ".query_proj.bias": COLUMN,
        ".key_proj.weight": COLUMN,
        ".value_proj.weight": COLUMN,
        ".output_proj.weight": ROW,
        ".output_proj.bias": WHOLE,
    }


class Attention(eqx.Module):
    q: eqx.nn.Linear
    k: eqx.nn.Linear
    v: eqx.nn.Linear
    o: eqx.nn.Linear

    def __init__(self, d, *, key):
        self.q, self.k, self.v, self.o = (eqx.nn.Linear(d, d, use_bias=False, key=key) for _ in range(4))


class GatedMLP(eqx.Module):
    gate_proj: eqx.nn.Linear
    up_proj: eqx.nn.Linear
    down_proj: eqx.nn.Linear

    def __init__(self, d, *, key):
        self.gate_proj, self.up_proj = (eqx.nn.Linear(d, 4 * d, key=key) for _ in range(2))
        self.down_proj = eqx.nn.Linear(4 * d, d, key=key)


class Block(eqx.Module):
    norm: eqx.nn.RMSNorm
    attention: Attention
    mlp: GatedMLP

    def __init__(self, d, *, key):
        self.norm = eqx.nn.RMSNorm(d)
        self.attention, self.mlp = Attention(d, key=key), GatedMLP(d, key=key)


class Transformer(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: list
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, d, depth, *, key):
        self.embed = eqx.nn.Embedding(512, d, key=key)
        self.blocks = [Block(d, key=key) for _ in range(depth)]
        self.norm = eqx.nn.LayerNorm(d)
        self.head = eqx.nn.Linear(d, 512, key=key)


BLOCK = {
    ".norm.weight": WHOLE,
    ".norm.bias": WHOLE,
    ".attention.q.weight": COLUMN,
    ".attention.k.weight": COLUMN,
    ".attention.v.weight": COLUMN,
    ".attention.o.weight": ROW,
    ".mlp.gate_proj.weight": COLUMN,
    ".mlp.gate_proj.bias": COLUMN,
    ".mlp.up_proj.weight": COLUMN,
    ".mlp.up_proj.bias": COLUMN,
    ".mlp.down_proj.weight": ROW,
    ".mlp.down_proj.bias": WHOLE,
}


def test_a_transformer_block_of_ones_own():
    assert planned(shape_of(Block, 64)) == BLOCK


def test_a_transformer_with_few_rules_for_many_layers():
    model = shape_of(Transformer, 64, 12)
    specs = planned(model)
    for i in range(12):
        assert {path: specs[f".blocks[{i}]{path}"] for path in BLOCK} == BLOCK
    assert specs[".embed.weight"] == COLUMN and specs[".head.weight"] == COLUMN and specs[".head.bias"] == COLUMN
    assert specs[".norm.weight"] == WHOLE
    rules = eqshard.tp_rules(model)
    assert len(rules) == 13 and rules[-1] == (".*", P())
    assert (r"^\.blocks\[\d+\]\.attention\.q\.weight$", P("tp")) in rules


def test_layers_that_differ_by_their_number_keep_it():
    model = [shape_of(eqx.nn.MLP, 64, 64, 64, 1) for _ in range(3)]
    rules = dict(eqshard.tp_rules(model))
    assert rules[r"^\[\d+\]\.layers\[0\]\.weight$"] == COLUMN and rules[r"^\[\d+\]\.layers\[1\]\.weight$"] == ROW


def test_stacked_layers():
    make = eqx.filter_vmap(lambda key: Block(64, key=key))
    stacked = eqx.filter_eval_shape(make, jax.random.split(jax.random.key(0), 4))
    assert planned(stacked) == {path: P(None, *spec) if spec != P() else spec for path, spec in BLOCK.items()}


@pytest.mark.parametrize(
    "names, rows",
    [
        (["q_proj", "k_proj", "v_proj", "o_proj"], ["o_proj"]),
        (["q_proj", "k_proj", "v_proj", "out_proj"], ["out_proj"]),
        (["qkv", "proj"], ["proj"]),
        (["c_attn", "c_proj"], ["c_proj"]),
        (["wq", "wk", "wv", "wo"], ["wo"]),
        (["w1", "w2", "w3"], ["w2"]),
        (["fc1", "fc2"], ["fc2"]),
        (["to_q", "to_k", "to_v", "to_out"], ["to_out"]),
        (["fc_in", "fc_out"], ["fc_out"]),
        (["gate", "up", "down"], ["down"]),
        (["linear1", "linear2"], ["linear2"]),
        (["a", "b"], ["b"]),  # no name tells, but the second takes what the first gives
    ],
)
def test_names(names, rows):
    """As fields of a dictionary; the sizes are such that the names must decide."""
    layers = {name: shape_of(eqx.nn.Linear, 64, 64, use_bias=False) for name in names}
    specs = planned(layers)
    assert [name for name in names if specs[f"['{name}'].weight"] == ROW] == rows
    assert all(specs[f"['{name}'].weight"] == COLUMN for name in names if name not in rows)


def test_parallel_heads_are_no_pair():
    heads = {"mean": shape_of(eqx.nn.Linear, 64, 32), "scale": shape_of(eqx.nn.Linear, 64, 32)}
    assert set(planned(heads).values()) == {WHOLE}


def test_sequential():
    model = eqx.nn.Sequential(
        [
            shape_of(eqx.nn.Linear, 64, 128),
            eqx.nn.Lambda(jax.nn.relu),
            shape_of(eqx.nn.Linear, 128, 64),
            eqx.nn.LayerNorm(64),
        ]
    )
    specs = planned(model)
    assert specs[".layers[0].weight"] == COLUMN and specs[".layers[2].weight"] == ROW


def test_convolutions():
    model = {
        "a": shape_of(eqx.nn.Conv2d, 16, 32, 3),
        "b": shape_of(eqx.nn.ConvTranspose2d, 32, 16, 3),
        "norm": eqx.nn.GroupNorm(4, 16),
    }
    assert planned(model) == {
        "['a'].weight": COLUMN,
        "['a'].bias": COLUMN,
        "['b'].weight": COLUMN,
        "['b'].bias": COLUMN,
        "['norm'].weight": WHOLE,
        "['norm'].bias": WHOLE,
    }


def test_a_convolutional_net_computes_the_same():
    keys = jax.random.split(jax.random.key(0), 3)
    model = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(3, 8, 3, key=keys[0]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Conv2d(8, 16, 3, key=keys[1]),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(16 * 4 * 4, 8, key=keys[2]),
        ]
    )
    x = jax.random.normal(jax.random.key(1), (3, 8, 8))
    plan = eqshard.rule_plan(model, MeshSpec(tp=8), eqshard.tp_rules(model))
    y = eqx.filter_jit(lambda m, x: m(x))(eqshard.apply(plan, model), x)
    assert jnp.allclose(y, model(x), atol=1e-5)


def test_a_lone_linear():
    assert planned(shape_of(eqx.nn.Linear, 64, 1024))[".weight"] == COLUMN
    assert planned(shape_of(eqx.nn.Linear, 64, 64))[".weight"] == WHOLE


def test_another_axis_and_what_does_not_divide(m24):
    model = shape_of(eqx.nn.MLP, 6, 6, 6, 1)
    rules = eqshard.tp_rules(model, axis="dp")
    assert rules[0][1] == P("dp")
    plan = eqshard.rule_plan(model, m24, eqshard.tp_rules(model), strict=False)
    assert {leaf.spec for leaf in plan} == {P()} and plan[".layers[0].weight"].given_up


def test_rules_of_ones_own_come_first(m24):
    model = shape_of(Transformer, 64, 2)
    rules = [("embed", P(None, "tp")), *eqshard.tp_rules(model)]
    plan = eqshard.rule_plan(model, m24, rules, unused="ignore")
    assert plan[".embed.weight"].spec == P(None, "tp") and plan[".head.weight"].spec == P("tp")


def test_a_model_without_layers(m24):
    assert eqshard.tp_rules(jnp.ones(3)) == [(".*", P())]
    assert eqshard.tp_rules({}) == []
    assert len(eqshard.rule_plan(jnp.ones(3), m24, eqshard.tp_rules(jnp.ones(3)))) == 1


def test_the_compiled_pair_has_one_all_reduce():
    """Forward, the two layers of an MLP need exactly one all-reduce, and nothing else moves."""
    mesh = MeshSpec(tp=8)
    model = eqx.nn.MLP(64, 64, 256, 1, key=jax.random.key(0))
    plan = eqshard.rule_plan(model, mesh, eqshard.tp_rules(model))
    placed = eqshard.apply(plan, model)
    x = eqshard.replicate(jax.random.normal(jax.random.key(1), (32, 64)), mesh)
    run = eqx.filter_jit(lambda m, x: eqshard.constrain_to(jax.vmap(m)(x), P(), mesh))
    text = run.lower(placed, x).compile().compiled.as_text()
    moves = re.findall(r"= \S+ (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", text)
    assert moves == ["all-reduce"]
    assert jnp.allclose(run(placed, x), jax.vmap(model)(x), atol=1e-5)
