"""PartitionAxis and logical names: every default, every mode, and where the seeds went wrong the right answer."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import eqshard
from eqshard import (
    BATCH,
    BIAS_HEAD_SEQ,
    BIAS_KV_SEQ,
    DP,
    EMBED,
    EMPTY,
    EP,
    EXPERT,
    EXPERT_GATE,
    FSDP,
    HEAD,
    HEAD_DIM,
    KV_HEAD,
    KV_HEAD_DIM,
    KV_LENGTH,
    LENGTH,
    LogicalAxes,
    MLP_INTERMEDIATE,
    Mode,
    PartitionAxis,
    QUERY_LENGTH,
    SP,
    TP,
    VOCAB,
)


DEFAULTS = {  # token: (train and prefill, decode and insert)
    BATCH: (("fsdp", "dp"), ("fsdp", "dp")),
    LENGTH: ("sp", "sp"),
    QUERY_LENGTH: ("sp", None),
    KV_LENGTH: ("sp", "sp"),
    EMBED: ("tp", "tp"),
    HEAD: ("tp", "tp"),
    KV_HEAD: ("tp", "tp"),
    MLP_INTERMEDIATE: ("tp", "tp"),
    VOCAB: ("tp", "tp"),
    EXPERT: ("ep", "ep"),
    EXPERT_GATE: (None, None),
    HEAD_DIM: (None, None),
    KV_HEAD_DIM: (None, None),
    BIAS_HEAD_SEQ: (None, None),
    BIAS_KV_SEQ: (None, None),
    EMPTY: (None, None),
    None: (None, None),
    DP: ("dp", "dp"),
    FSDP: ("fsdp", "fsdp"),
    TP: ("tp", "tp"),
    SP: ("sp", "sp"),
    EP: ("ep", "ep"),
}
DECODE = {
    BATCH: "decode_batch_axis",
    QUERY_LENGTH: "decode_query_sequence_axis",
    KV_LENGTH: "decode_key_sequence_axis",
    HEAD: "decode_head_axis",
    KV_HEAD: "decode_kv_head_axis",
    HEAD_DIM: "decode_attention_dim_axis",
    KV_HEAD_DIM: "decode_attention_kv_dim_axis",
}
FIELDS = {
    BATCH: "batch_axis",
    LENGTH: "sequence_axis",
    QUERY_LENGTH: "query_sequence_axis",
    KV_LENGTH: "key_sequence_axis",
    EMBED: "hidden_state_axis",
    HEAD: "head_axis",
    KV_HEAD: "kv_head_axis",
    MLP_INTERMEDIATE: "mlp_intermediate_axis",
    VOCAB: "vocab_axis",
    EXPERT: "expert_axis",
    EXPERT_GATE: "expert_gate_axis",
    HEAD_DIM: "attention_dim_axis",
    KV_HEAD_DIM: "attention_kv_dim_axis",
    BIAS_HEAD_SEQ: "bias_head_sequence_axis",
    BIAS_KV_SEQ: "bias_key_sequence_axis",
    DP: "data_parallel_axis",
    FSDP: "fully_sharded_data_parallel_axis",
    TP: "tensor_parallel_axis",
    SP: "sequence_parallel_axis",
    EP: "expert_parallel_axis",
}
MODES = [("train", 0), ("prefill", 0), ("decode", 1), ("insert", 1)]


@pytest.mark.parametrize("token", DEFAULTS, ids=str)
@pytest.mark.parametrize(("mode", "which"), MODES)
def test_defaults(token, mode, which):
    assert PartitionAxis().resolve_axis([token], mode) == [DEFAULTS[token][which]]


@pytest.mark.parametrize("token", FIELDS)
@pytest.mark.parametrize(("mode", "which"), MODES)
def test_each_token_reads_its_field(token, mode, which):
    field = DECODE.get(token, FIELDS[token]) if which else FIELDS[token]
    names = PartitionAxis(**{field: "mine"})
    assert names.resolve_axis([token], mode) == ["mine"]
    if which and token in DECODE:  # and the training field alone, told to be something else, does not matter
        assert PartitionAxis(**{field: "mine", FIELDS[token]: "other"}).resolve_axis([token], mode) == ["mine"]


def test_there_are_27_fields():
    assert len(set(FIELDS.values()) | set(DECODE.values())) == 27
    assert all(hasattr(PartitionAxis(), field) for field in (*FIELDS.values(), *DECODE.values()))


# Where the seeds went wrong


def test_batch_length_embed():
    assert PartitionAxis().resolve_spec([BATCH, LENGTH, EMBED], "train") == P(("fsdp", "dp"), "sp", "tp")


def test_a_decode_field_of_none_does_not_fall_back_to_training():
    spec = PartitionAxis().resolve_spec([BATCH, QUERY_LENGTH, HEAD, HEAD_DIM], "decode")
    assert tuple(spec) == (("fsdp", "dp"), None, "tp")


def test_two_names_for_one_mesh_axis_is_an_error_that_names_both():
    with pytest.raises(eqshard.DuplicateAxisError) as error:
        PartitionAxis().resolve_spec([HEAD, EMBED])
    assert "'head' (dim 0)" in str(error.value) and "'embed' (dim 1)" in str(error.value) and "'tp'" in str(error.value)
    with pytest.raises(eqshard.DuplicateAxisError):
        PartitionAxis().resolve_spec([(HEAD, EMBED)])


def test_nested_tuples_are_flattened():
    assert PartitionAxis().resolve_spec([(BATCH, SP)]) == P(("fsdp", "dp", "sp"))
    assert PartitionAxis().resolve_spec([[BATCH, [SP, (TP,)]]]) == P(("fsdp", "dp", "sp", "tp"))


def test_empty_names_vanish():
    assert PartitionAxis().resolve_spec([("_", SP)]) == P("sp")
    assert PartitionAxis().resolve_spec(["_", None, SP]) == P(None, None, "sp")
    assert PartitionAxis().resolve_spec([(None, "_")]) == P()


def test_a_parallelism_that_is_none():
    assert PartitionAxis(data_parallel_axis=None).resolve_spec([BATCH]) == P("fsdp")
    assert PartitionAxis(data_parallel_axis=None, fully_sharded_data_parallel_axis=None).resolve_spec([BATCH]) == P()


def test_two_parallelisms_on_one_mesh_axis():
    names = PartitionAxis(data_parallel_axis="data", fully_sharded_data_parallel_axis="data")
    assert names.resolve_spec([BATCH]) == P("data")


def test_derived_fields_follow():
    names = PartitionAxis().replace(tensor_parallel_axis="model")
    assert names.resolve_axis([HEAD], "train") == names.resolve_axis([HEAD], "decode") == ["model"]
    for token in (EMBED, KV_HEAD, MLP_INTERMEDIATE, VOCAB, TP):
        assert names.resolve_axis([token]) == ["model"]
    assert names == PartitionAxis(tensor_parallel_axis="model")
    told = PartitionAxis(head_axis="h").replace(tensor_parallel_axis="model")
    assert told.head_axis == told.kv_head_axis == told.decode_head_axis == "h" and told.vocab_axis == "model"
    chain = PartitionAxis().replace(sequence_parallel_axis="ring")
    assert chain.sequence_axis == chain.key_sequence_axis == chain.decode_key_sequence_axis == "ring"
    assert PartitionAxis().replace(batch_axis="b").decode_batch_axis == "b"


def test_unknown_token_lists_the_known_ones():
    with pytest.raises(eqshard.UnknownAxisError, match=r"'bath'.*batch, length.*register.*Did you mean 'batch'"):
        PartitionAxis().resolve_spec(["bath"])


def test_unknown_mode_lists_the_known_ones():
    with pytest.raises(eqshard.ShardingError, match=r"'training'.*'train', 'prefill', 'decode', 'insert'"):
        PartitionAxis().resolve_spec([BATCH], "training")


def test_register_returns_a_new_one():
    plain = PartitionAxis()
    names = plain.register("latent", ("head_axis", "sp"))
    assert plain.registered == {} and "latent" not in PartitionAxis().registered
    assert names.registered == {
        "latent": {"axis_rule": ("head_axis", "sp"), "generation_axis_rule": ("decode_head_axis", "sp")}
    }
    assert names.resolve_spec(["latent"]) == P(("tp", "sp"))
    assert names.unregister("latent") == plain and names.unregister("nope") == names
    with pytest.raises(eqshard.UnknownAxisError):
        plain.resolve_spec(["latent"])


def test_a_jitted_function_sees_the_new_rule():
    mesh, traces = eqshard.MeshSpec(tp=4, dp=2), []

    @eqx.filter_jit
    def f(x, names):
        traces.append(1)
        return eqshard.constrain_to(x, names.resolve_spec(["latent"]), mesh)

    x = jnp.ones(8)
    assert f(x, PartitionAxis().register("latent", "tp")).sharding.spec == P("tp")
    assert f(x, PartitionAxis().register("latent", "dp")).sharding.spec == P("dp")
    assert f(x, PartitionAxis().register("latent", ["dp"])).sharding.spec == P("dp") and len(traces) == 2


def test_register_allows_none():
    names = PartitionAxis().register("whole", None)
    assert names.resolve_spec(["whole", TP]) == P(None, "tp")
    assert PartitionAxis().register("cache", "tp", generation_axis_rule=None).resolve_axis(["cache"], "decode") == [
        None
    ]


def test_register_and_decode():
    names = PartitionAxis(decode_query_sequence_axis="ring").register("q", "query_sequence_axis")
    assert names.resolve_axis(["q"], "train") == ["sp"] and names.resolve_axis(["q"], "decode") == ["ring"]
    names = names.register("q", "tp", generation_axis_rule="sp", override=True)
    assert names.resolve_axis(["q"], "train") == ["tp"] and names.resolve_axis(["q"], "insert") == ["sp"]
    follows = PartitionAxis().register("h", "head_axis").replace(tensor_parallel_axis="model")
    assert follows.resolve_axis(["h"]) == ["model"]


def test_register_over_a_known_name_needs_override():
    for names, name in ((PartitionAxis(), BATCH), (PartitionAxis().register("a", "tp"), "a")):
        with pytest.raises(eqshard.ShardingError, match="override=True"):
            names.register(name, "dp")
    assert PartitionAxis().register(BATCH, "dp", override=True).resolve_spec([BATCH]) == P("dp")
    again = PartitionAxis().register(BATCH, "dp", override=True).unregister(BATCH)
    assert again.resolve_spec([BATCH]) == P(("fsdp", "dp"))


@pytest.mark.parametrize("name", ["", "_", "__"])
def test_names_that_are_none(name):
    with pytest.raises(eqshard.ShardingError, match="must be a name"):
        PartitionAxis().register(name, "tp")


def test_unregister_what_is_not_there():
    with pytest.raises(eqshard.UnknownAxisError, match=r"'b' was registered; there are: a"):
        PartitionAxis().register("a", "tp").unregister("b", missing_ok=False)


def test_as_a_jit_argument():
    names = PartitionAxis(tensor_parallel_axis="model")
    assert jax.tree.leaves(names) == []
    assert jax.jit(lambda names, x: x + len(names.head_axis))(names, jnp.ones(())) == 6
    assert {names: 1}[PartitionAxis(tensor_parallel_axis="model")] == 1


# Values


def test_one_way_to_write_each():
    assert PartitionAxis() == PartitionAxis(tensor_parallel_axis="tp") == PartitionAxis(tensor_parallel_axis=("tp",))
    assert PartitionAxis(expert_gate_axis="_") == PartitionAxis() and hash(PartitionAxis(expert_gate_axis="_"))
    assert PartitionAxis(head_axis="tp") != PartitionAxis()  # told, so it stays when tensor_parallel_axis changes
    assert repr(PartitionAxis(head_axis="h")) == "PartitionAxis(head_axis='h')"


def test_a_field_that_names_an_axis_twice():
    with pytest.raises(eqshard.DuplicateAxisError, match="`batch_axis`"):
        PartitionAxis(batch_axis=("dp", "dp"))


def test_replace_of_an_unknown_field():
    with pytest.raises(eqshard.ShardingError, match=r"'head_axes'.*Did you mean 'head_axis'"):
        PartitionAxis().replace(head_axes="tp")


# Modes


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("train", Mode.TRAIN),
        ("__train__", Mode.TRAIN),
        ("__prefill__", Mode.PREFILL),
        ("__autoregressive__", Mode.DECODE),
        ("__insert__", Mode.INSERT),
        (Mode.DECODE, Mode.DECODE),
    ],
)
def test_modes_of_the_seeds(text, mode):
    assert Mode.of(text) is mode and PartitionAxis().resolve_spec([BATCH], text) == P(("fsdp", "dp"))


def test_the_mode_by_a_dimension():
    names, axes = PartitionAxis(), [BATCH, QUERY_LENGTH, HEAD]
    assert names.resolve_spec(axes, mode=1, shape=(8, 512, 4)) == names.resolve_spec(axes, "train")
    assert names.resolve_spec(axes, mode=1, shape=(8, 1, 4)) == names.resolve_spec(axes, "decode")
    assert names.resolve_spec(axes, mode=-2, shape=(8, 1, 4)) == names.resolve_spec(axes, "decode")
    with pytest.raises(eqshard.ShardingError, match="pass `shape`"):
        names.resolve_spec(axes, mode=1)
    with pytest.raises(eqshard.ShardingError, match="no dimension"):
        names.resolve_spec(axes, mode=3, shape=(8, 1, 4))
    with pytest.raises(eqshard.ShardingError, match="True"):
        names.resolve_spec(axes, mode=True, shape=(8, 1, 4))


def test_more_names_than_dimensions():
    with pytest.raises(eqshard.RankError, match=r"2 logical axes.*1 dimensions"):
        PartitionAxis().resolve_spec([BATCH, EMBED], shape=(8,))


def test_axes_and_mode_together():
    names = PartitionAxis()
    cache = LogicalAxes((BATCH, QUERY_LENGTH, KV_HEAD), "__autoregressive__")
    assert names.resolve_spec(cache) == names.resolve_spec([BATCH, QUERY_LENGTH, KV_HEAD], "decode")
    assert names.resolve_spec(cache, "train") == names.resolve_spec([BATCH, QUERY_LENGTH, KV_HEAD], "train")
    by_shape = LogicalAxes([BATCH, QUERY_LENGTH], 1)
    assert names.resolve_spec(by_shape, shape=(8, 1)) == P(("fsdp", "dp"))
    assert cache == LogicalAxes([BATCH, (QUERY_LENGTH, "_"), KV_HEAD], "decode") and len({cache, by_shape}) == 2
    assert jax.tree.leaves(cache) == []
    for value in (cache, by_shape):
        again = LogicalAxes.from_json(value.to_json())
        assert again == value and hash(again) == hash(value)
    with pytest.raises(eqshard.ShardingError, match="mode"):
        LogicalAxes((BATCH,), "soon")


# JSON


@pytest.mark.parametrize(
    "names",
    [
        PartitionAxis(),
        PartitionAxis(tensor_parallel_axis="model", batch_axis=("a", "b"), sequence_axis=None),
        PartitionAxis(head_axis="h").register("latent", ("head_axis", ("sp", None))).register("none", None),
        PartitionAxis().register(BATCH, "dp", override=True, generation_axis_rule=("x", "y")),
    ],
    ids=str,
)
def test_json_round_trip(names):
    for again in (PartitionAxis.from_json(names.to_json()), PartitionAxis.from_dict(names.to_dict())):
        assert again == names and hash(again) == hash(names) and again.registered == names.registered
        assert again.replace(tensor_parallel_axis="m") == names.replace(tensor_parallel_axis="m")


def deep(depth):
    data = "x"
    for _ in range(depth):
        data = [data]
    return data


GOOD = PartitionAxis(head_axis="h").register("latent", "head_axis").to_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "version 99"),
        ({"format": "eqshard.mesh"}, "not an eqshard axes"),
        ({"fields": []}, "`fields` must be Mapping"),
        ({"fields": {"nope": "x"}}, "'nope'"),
        ({"fields": {"custom": "x"}}, "'custom'"),
        ({"fields": {"head_axis": 3}}, "'head_axis'.*3"),
        ({"fields": {"head_axis": True}}, "True"),
        ({"fields": {"head_axis": ""}}, "''"),
        ({"fields": {"head_axis": [["x"]]}}, "list of names"),
        ({"fields": {"head_axis": deep(400)}}, "list of names"),
        ({"fields": {"head_axis": deep(100_000)}}, "too large to print"),
        ({"fields": {"head_axis": ["x", "x"]}}, "twice"),
        ({"fields": {"head_axis": {}}}, "{}"),
        ({"custom": {}}, "`custom` must be list"),
        ({"custom": [["a"]]}, "custom"),
        ({"custom": [[1, "a", "b"]]}, "custom"),
        ({"custom": [["a", "x", 1.5]]}, "1.5"),
        ({"custom": [["a", "x", "x"], ["a", "y", "y"]]}, "twice"),
        ({"more": 1}, "'more'"),
    ],
)
def test_hostile_json(change, message):
    with pytest.raises(eqshard.FormatError, match=message):
        PartitionAxis.from_dict(GOOD | change)
    assert PartitionAxis.from_dict(GOOD).head_axis == "h"


@pytest.mark.parametrize("change", [{"axes": "x"}, {"axes": [1]}, {"mode": "soon"}, {"mode": True}, {"mode": None}])
def test_hostile_logical_axes(change):
    with pytest.raises(eqshard.FormatError):
        LogicalAxes.from_dict(LogicalAxes((BATCH,)).to_dict() | change)
