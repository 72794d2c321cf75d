"""What the nouns share: reading files that may be broken, hostile, or mutated at random."""

import json

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import PartitionSpec as P

import eqshard
from eqshard import Chip, LogicalAxes, MeshSpec, PartitionAxis, ShardingPlan
from eqshard._value import digest, short, whole_number


def full_plan():
    tree = {
        "w": jax.ShapeDtypeStruct((8, 12), jnp.bfloat16),
        "k": jax.random.split(jax.random.key(0), 8),
        "b": np.ones(6, np.float32),
    }
    mesh = MeshSpec(x=2, y=4, axis_type={"y": "explicit"}, dcn="x", chip="v5e", devices=jax.devices())
    plan = eqshard.replicated_plan(tree, mesh).at("w").set(P("x", P.UNCONSTRAINED), use=P(None, ("y", "x")[:1]))
    return plan.at("b").set(P(("x", "y")), strict=False).at("k").set(P("y"), memory_kind="pinned_host")


VALUES = [
    full_plan(),
    full_plan().mesh,
    PartitionAxis(head_axis=("a", "b"), sequence_axis=None).register("latent", ("head_axis", "sp")),
    LogicalAxes(("batch", ("head", "embed"), None), "decode"),
    eqshard.CHIPS["v5e"],
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_round_trip(value):
    for text in (value.to_json(), value.to_json(indent=2)):
        again = type(value).from_json(text)
        assert again == value and hash(again) == hash(value) and again.to_dict() == value.to_dict()
    assert json.loads(value.to_json()) == json.loads(json.dumps(value.to_dict()))


@pytest.mark.parametrize("cls", [ShardingPlan, MeshSpec, PartitionAxis, LogicalAxes, Chip])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "3",
        "[]",
        '"eqshard.plan"',
        "NaN",
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"version": ' + "9" * 5000 + "}",
        '{"version": 1e999}',
        '{"format": Infinity}',
        '{"format": "eqshard.plan", "format": "eqshard.mesh"}',
        "\x00",
        '"\\ud800"',
        '{"\\ud800": 1}',
    ],
    ids=lambda t: t[:20],
)
def test_texts_that_are_no_value(cls, text):
    with pytest.raises(eqshard.FormatError) as error:
        cls.from_json(text)
    assert len(str(error.value)) < 500


def test_the_error_says_where():
    data = full_plan().to_dict()
    data["leaves"][1]["shape"] = [8, "x"]
    with pytest.raises(eqshard.FormatError, match=r"plan leaf 1: shape.*'x'"):
        ShardingPlan.from_dict(data)


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 0, 1, 2**31, 2**63, 2**64, 10**40, -(10**40)]),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(
        ["x", "y", "auto", "float32", "O", "i4,i4", "V9999999999", "(3,)f4", "key<", "datetime64[s]", "a5"]
    ),
    st.lists(st.one_of(st.none(), st.integers(), st.text(max_size=2), st.lists(st.text(max_size=2))), max_size=3),
    st.dictionaries(st.text(max_size=3), st.one_of(st.none(), st.integers(), st.booleans()), max_size=2),
)


def places(data, at=()):
    """Every path into nested dicts and lists."""
    yield at
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from places(value, (*at, key))


@st.composite
def mutated(draw, value):
    data = json.loads(value.to_json())
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.sampled_from(sorted(places(data), key=repr)))
        if not at:
            return draw(JUNK)
        inner = data
        for key in at[:-1]:
            inner = inner[key]
        action = draw(st.sampled_from(["replace", "replace", "delete", "twice", "add"]))
        if action == "replace":
            inner[at[-1]] = draw(JUNK)
        elif action == "delete":
            del inner[at[-1]]
        elif action == "twice" and isinstance(inner, list):
            inner.append(inner[at[-1]])
        elif isinstance(inner, dict):
            inner[draw(st.text(max_size=5))] = draw(JUNK)
    return data


def use(value):
    """What a program does first with a value that it read."""
    assert type(value).from_dict(value.to_dict()) == value and repr(value)
    hash(value)
    if isinstance(value, ShardingPlan):
        value.fingerprint()
        for leaf in value:
            assert leaf.nbytes >= 0 and leaf.type
        value.shardings()
    if isinstance(value, MeshSpec):
        value.build()
    if isinstance(value, PartitionAxis):
        value.resolve_spec(["head"])


@pytest.mark.parametrize("entry", ["", [""], ["x", ""]])
def test_an_axis_has_a_name(entry):
    data = eqshard.replicated_plan(jax.ShapeDtypeStruct((8, 12), "float32"), eqshard.MeshSpec(x=2)).to_dict()
    data["leaves"][0]["spec"] = [entry]
    with pytest.raises(eqshard.FormatError, match="no entry of a spec"):
        ShardingPlan.from_dict(data)


@settings(max_examples=100)
@given(st.data())
@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_mutated_json_gives_only_sharding_errors(value, data):
    mutant = data.draw(mutated(value))
    try:
        if isinstance(mutant, dict):
            use(type(value).from_dict(mutant))
    except eqshard.ShardingError:
        pass
    try:
        use(type(value).from_json(json.dumps(mutant)))
    except eqshard.ShardingError:
        pass


@settings(max_examples=100)
@given(st.data())
def test_mutated_text_gives_only_sharding_errors(data):
    value = data.draw(st.sampled_from(VALUES))
    text = value.to_json()
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 10)))
    try:
        use(type(value).from_json(text[:start] + data.draw(st.text(max_size=5)) + text[stop:]))
    except eqshard.ShardingError:
        pass


def test_whole_number():
    assert whole_number(3, "here") == 3
    for bad in (True, -1, 2**63, 1.0, "1", None, float("nan")):
        with pytest.raises(eqshard.FormatError, match="here"):
            whole_number(bad, "here")


def test_short():
    assert short("a") == "'a'" and len(short("a" * 1000)) == 60
    assert "too large" in short(10**5000)


def test_digest_is_the_same_everywhere():
    assert digest({"b": [1, None], "a": "é"}) == "9b10bedce64e86a275540261fbe95bc6c195bfb10d5def7a5fc12eefcc7d0a87"


def test_every_error_is_a_sharding_error_and_a_value_error():
    errors = [e for e in vars(eqshard).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert len(errors) >= 8 and all(issubclass(e, eqshard.ShardingError) and issubclass(e, ValueError) for e in errors)
