"""Plans from patterns: the first match decides, typos raise, and every complaint names the rule and the leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import PartitionSpec as P

import eqshard
from eqshard import (
    DuplicateAxisError,
    FormatError,
    IndivisibleError,
    MismatchError,
    RankError,
    ShardingError,
    UnknownAxisError,
)


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


TREE = {"attn": {"q": f32(64, 64), "o": f32(64, 64)}, "mlp": [f32(64, 256), f32(256, 64)], "scale": f32(64)}


def test_match_partition_rules(m24):
    """First match wins, in order; specs are canonical; the reason is the rule."""
    rules = [(r"\['o'\]", P("tp", None)), ("attn", P(None, "tp")), ("mlp", P(("dp", "tp"))), (".*", P())]
    plan = eqshard.rule_plan(TREE, m24, rules)
    assert plan.specs() == {
        "['attn']['o']": P("tp"),
        "['attn']['q']": P(None, "tp"),
        "['mlp'][0]": P(("dp", "tp")),
        "['mlp'][1]": P(("dp", "tp")),
        "['scale']": P(),
    }
    assert plan["['attn']['q']"].why == "rule 1 (`attn`)"


def test_every_form_of_leaf_and_mesh(m24):
    seen = []
    for mesh in (m24, m24.build(), m24.abstract()):
        for x in (f32(8, 8), np.zeros((8, 8), np.float32), jnp.zeros((8, 8))):
            seen.append(eqshard.rule_plan([x], mesh, [(".", P("tp"))])["[0]"].spec)
        jax.jit(lambda x, m=mesh: seen.append(eqshard.rule_plan([x], m, [(".", P("tp"))])["[0]"].spec))(x)
    assert seen == [P("tp")] * 12


def test_a_dictionary_of_rules(m24):
    assert eqshard.rule_plan(TREE, m24, {"scale": None, ".": P("dp")})["['scale']"].spec == P()


def test_functions_as_rules(m24):
    def matrices(path, leaf):
        return P("dp", "tp") if len(leaf.shape) == 2 and "mlp" in path else None

    plan = eqshard.rule_plan(TREE, m24, [matrices], default=P())
    assert plan["['mlp'][0]"].spec == P("dp", "tp") and plan["['attn']['q']"].spec == P()
    assert plan["['mlp'][0]"].why == "rule 0 (matrices)" and plan["['attn']['q']"].why == "default"


def test_a_leaf_without_a_rule(m24):
    with pytest.raises(MismatchError, match=r"(?s)2 of 5 leaves: `\['attn'\]\['o'\]` float32\[64,64\].*default"):
        eqshard.rule_plan(TREE, m24, [("mlp", P()), ("scale", P())])
    assert eqshard.rule_plan(TREE, m24, [("mlp", P("dp"))], default=P())["['scale']"].spec == P()
    by_rank = lambda path, leaf: P(*[None] * (len(leaf.shape) - 1), "dp")
    assert eqshard.rule_plan(TREE, m24, [("mlp", P("dp"))], default=by_rank)["['attn']['q']"].spec == P(None, "dp")


def test_a_rule_without_a_leaf(m24):
    rules = [("attn", P("tp")), ("atn", P("tp")), (r"\['q'\]", P()), (".", P())]
    with pytest.raises(MismatchError, match=r"(?s)rule 1 \(`atn`\) matches no leaf, rule 2 .* comes after rules"):
        eqshard.rule_plan(TREE, m24, rules)
    assert eqshard.rule_plan(TREE, m24, rules, unused="ignore")["['scale']"].spec == P()
    with pytest.raises(ShardingError, match="'error' or 'ignore'"):
        eqshard.rule_plan(TREE, m24, rules, unused="no")


@pytest.mark.parametrize(
    "spec, error, says",
    [
        (P("tq"), UnknownAxisError, "the mesh has 'dp', 'tp'"),
        (P("tp", "tp"), DuplicateAxisError, "twice"),
        (P(("tp", "dp"), "dp"), DuplicateAxisError, "twice"),
        (P(None, None, "tp"), RankError, "3 entries for 2 dimensions"),
        (P("dp", ("tp", "dp")), DuplicateAxisError, "twice"),
    ],
)
def test_typos_name_the_rule_and_the_leaf(m24, spec, error, says):
    for strict in (True, False):
        with pytest.raises(error, match=rf"(?s)rule 1 \(`w`\): .*`\['w'\]`.*{says}"):
            eqshard.rule_plan({"w": f32(64, 64), "v": f32(8)}, m24, [("v", P()), ("w", spec)], strict=strict)


def test_a_typo_is_an_error_for_small_leaves_and_scalars_too(m24):
    for leaf in (f32(4), f32()):
        with pytest.raises(UnknownAxisError, match="rule 0"):
            eqshard.rule_plan([leaf], m24, [(".", P("tq"))], min_bytes=1000)


def test_what_does_not_divide(m24):
    with pytest.raises(IndivisibleError, match=r"(?s)rule 0 \(`w`\).*6 % 4"):
        eqshard.rule_plan({"w": f32(6, 8)}, m24, [("w", P("tp"))])
    plan = eqshard.rule_plan({"w": f32(6, 8)}, m24, [("w", P(("dp", "tp")))], strict=False)
    assert plan["['w']"].spec == P("dp")
    assert [(g.dim, g.size, g.axes) for g in plan["['w']"].given_up] == [(0, 6, ("tp",))]


def test_small_leaves_stay_whole(m24):
    plan = eqshard.rule_plan(TREE, m24, [(".", P("dp"))], min_bytes=1000)
    assert plan["['scale']"].spec == P() and plan["['scale']"].why == "small: 256 B < 1.0 kB; rule 0 (`.`) said P('dp')"
    assert plan["['attn']['q']"].spec == P("dp")
    assert eqshard.rule_plan(TREE, m24, [(".", P("dp"))])["['scale']"].spec == P("dp")


def test_scalars_need_no_rule_and_follow_none(m24):
    plan = eqshard.rule_plan({"n": f32(), "w": f32(8)}, m24, [("w", P("dp"))])
    assert plan["['n']"].spec == P() and plan["['n']"].why == "a scalar"
    assert eqshard.rule_plan({"n": f32()}, m24, [("n", P("dp"))])["['n']"].spec == P()


def test_unconstrained_stays(m24):
    assert eqshard.rule_plan([f32(8, 8)], m24, [("", P(P.UNCONSTRAINED, "tp"))])["[0]"].spec == P(P.UNCONSTRAINED, "tp")


@pytest.mark.parametrize(
    "rules, says",
    [
        ("w->tp", "parse_rules"),
        (["ab"], "rule 0 must be a pair"),
        ([("w",)], "rule 0 must be a pair"),
        ([(P("tp"), "w")], "rule 0 must be a pair"),
        ([("(w", P())], "no regular expression"),
        ([("w", "tp")], "expected a PartitionSpec"),
        ([("w", ("tp",))], "expected a PartitionSpec"),
        ([lambda path, leaf: "tp"], "expected a PartitionSpec"),
    ],
)
def test_what_is_no_rule(m24, rules, says):
    with pytest.raises(ShardingError, match=says):
        eqshard.rule_plan({"w": f32(8, 8)}, m24, rules)


# --- rules as text ---


def test_create_pattern_based_partition_spec(m24):
    rules = eqshard.parse_rules("attention|mlp->data,hidden->model")
    assert rules == [("attention|mlp", P("data")), ("hidden", P("model"))]
    plan = eqshard.rule_plan(TREE, m24, eqshard.parse_rules("attn->tp, mlp->None.dp+tp"), default=P())
    assert plan["['mlp'][0]"].spec == P(None, ("dp", "tp"))


@pytest.mark.parametrize(
    "text, rules",
    [
        ("(a|b)w->tp", [("(a|b)w", P("tp"))]),
        ("w->None.tp", [("w", P(None, "tp"))]),
        ("w->_.tp", [("w", P(None, "tp"))]),
        ("w->().tp", [("w", P(None, "tp"))]),
        ("w->(fsdp,dp).tp", [("w", P(("fsdp", "dp"), "tp"))]),
        ("w->(fsdp,)", [("w", P("fsdp"))]),
        ("w->fsdp+dp", [("w", P(("fsdp", "dp")))]),
        ("w->", [("w", P())]),
        ("", []),
        (" a -> x . y ,\n b->z,\n", [("a", P("x", "y")), ("b", P("z"))]),
        (r"layers\[0\]\.w{1,2}->tp", [(r"layers\[0\]\.w{1,2}", P("tp"))]),
        ("[(,]a->tp,b->dp", [("[(,]a", P("tp")), ("b", P("dp"))]),
        (r"[]\],]a->tp,b->dp", [(r"[]\],]a", P("tp")), ("b", P("dp"))]),
        (r"[^],]a->tp,b->dp", [(r"[^],]a", P("tp")), ("b", P("dp"))]),
        (r"a\(->tp,b->dp", [(r"a\(", P("tp")), ("b", P("dp"))]),
        ("a->b->tp", [("a->b", P("tp"))]),
        ("w->data-1", [("w", P("data-1"))]),
    ],
)
def test_texts(text, rules):
    assert eqshard.parse_rules(text) == rules


@pytest.mark.parametrize(
    "text, says",
    [
        ("w", "expected `pattern->spec`"),
        ("->tp", "expected `pattern->spec`"),
        ("(w->tp", "no regular expression"),
        ("(w->tp,b->dp", "no regular expression"),
        ("w->tp.", "empty dimension"),
        ("w->.tp", "empty dimension"),
        ("w->tp+", "is no axis name"),
        ("w->(None,tp)", "`None` in the spec"),
        ("w->t p", "is no axis name"),
        ("w->(tp", "is no axis name"),
        ("[w->tp", "no regular expression"),
    ],
)
def test_texts_that_are_no_rules(text, says):
    with pytest.raises(FormatError, match=says):
        eqshard.parse_rules(text)


# --- laws ---


@given(
    st.lists(st.lists(st.sampled_from([1, 2, 3, 4, 8, 12]), max_size=3).map(tuple), min_size=1, max_size=5),
    st.lists(st.sampled_from(["dp", "tp", ("dp", "tp"), None]), max_size=2),
)
def test_plans_that_are_made_are_valid(shapes, entries):
    tree, mesh = [f32(*s) for s in shapes], eqshard.MeshSpec(dp=2, tp=4)
    try:
        plan = eqshard.rule_plan(tree, mesh, [("", P(*entries))], strict=False)
    except (RankError, DuplicateAxisError):
        return
    assert not [i for i in eqshard.validate(plan, tree) if i.severity == "error"]
    for leaf in plan:  # nothing is lost without a record
        asked = eqshard.shard_factor(P(*entries), mesh) if leaf.shape else 1
        lost = mesh.size([a for g in leaf.given_up for a in g.axes])
        assert eqshard.shard_factor(leaf.spec, mesh) * lost == asked
