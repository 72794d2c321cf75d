"""ShardingPlan: a value that is looked up, changed, cut, joined, hashed and written."""

import copy
import pickle
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import eqshard
from eqshard import LeafPlan, MeshSpec, ShardingPlan


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


TREE = {"enc": {"w": struct(8, 16), "b": struct(16)}, "encoder": [struct(8), struct(8)], "name": "x", "none": None}
MESH = MeshSpec(dp=2, tp=4)


def plan():
    return eqshard.replicated_plan(TREE, MESH).at("['enc']['w']").set(P("dp", "tp"), why="by hand")


def test_rows():
    rows = list(plan())
    assert [r.path for r in rows] == ["['enc']['b']", "['enc']['w']", "['encoder'][0]", "['encoder'][1]"]
    row = plan()["['enc']['w']"]
    assert row.shape == (8, 16) and row.dtype == "float32" and row.spec == row.use == P("dp", "tp")
    assert row.memory_kind is None and row.why == "by hand" and row.given_up == ()
    assert row.nbytes == 8 * 16 * 4 and row.type == "float32[8,16]"
    assert len(plan()) == 4 and "['enc']['w']" in plan() and "nope" not in plan()
    assert repr(plan()) == "ShardingPlan(4 leaves on MeshSpec(dp=2, tp=4))"


@pytest.mark.parametrize(
    ("leaf", "dtype", "nbytes"),
    [
        (struct(3, dtype=jnp.bfloat16), "bfloat16", 6),
        (struct(3, dtype=jnp.float8_e4m3fn), "float8_e4m3fn", 3),
        (struct(3, dtype=jnp.int4), "int4", 3),
        (struct(dtype=bool), "bool", 1),
        (np.ones((0, 4), np.uint8), "uint8", 0),
        (np.ones(2, np.complex64), "complex64", 16),
        (jax.random.key(0), "key<fry>", 8),
        (jax.random.split(jax.random.key(0, impl="rbg"), 3), "key<rbg>", 48),
    ],
    ids=str,
)
def test_dtypes(leaf, dtype, nbytes):
    made = eqshard.replicated_plan(leaf, MESH)
    assert made[""].dtype == dtype and made[""].nbytes == nbytes
    assert ShardingPlan.from_json(made.to_json()) == made


def test_a_missing_path():
    with pytest.raises(
        eqshard.MismatchError, match=r"no leaf `\['enc'\]\['v'\]` in the plan; there are .*Did you mean"
    ):
        plan()["['enc']['v']"]


def test_a_tree_that_is_a_leaf():
    made = eqshard.replicated_plan(struct(8), MESH).at("").set(P("tp"))
    assert made[""].spec == P("tp") and made.specs(struct(8)) == P("tp") and made.specs() == {"": P("tp")}


# Value


def test_equality_is_of_the_layout_not_of_the_words():
    a, b = plan(), plan().at("w").set(P("dp", "tp"), why="other words")
    assert a == b and hash(a) == hash(b) and a["['enc']['w']"].why != b["['enc']['w']"].why
    assert a.fingerprint() == b.fingerprint()
    for other in (
        a.at("w").set(P("tp", "dp")),
        a.at("w").set(use=P()),
        a.at("w").set(memory_kind="pinned_host"),
        eqshard.replicated_plan(TREE, MeshSpec(dp=2, tp=2)).at("['enc']['w']").set(P("dp", "tp")),
        a.select("['enc']"),
    ):
        assert other != a and other.fingerprint() != a.fingerprint()
    backwards = ShardingPlan(MESH, list(a)[::-1])  # a leaf is known by its path, not by its place
    assert backwards == a and hash(backwards) == hash(a) and backwards.fingerprint() == a.fingerprint()
    assert backwards.leaves == a.leaves and not backwards.leaves != a.leaves
    assert a != "plan" and a != None  # noqa: E711


def test_specs_are_canonical_whoever_makes_the_row():
    spelled = [LeafPlan("", (8, 8), "float32", s, s) for s in (P("dp"), P("dp", None), P(("dp",), None))]
    plans = [ShardingPlan(MESH, [row]) for row in spelled]
    assert len(set(plans)) == 1 and all(tuple(p[""].spec) == tuple(p[""].use) == ("dp",) for p in plans)
    one = ShardingPlan(MeshSpec(dp=2, one=1), [LeafPlan("", (8, 8), "float32", P("one", "dp"), P("one"))])
    assert tuple(one[""].spec) == (None, "dp") and one[""].use == P()


def test_immutable_and_without_leaves():
    made = plan()
    assert jax.tree.leaves(made) == [] and jax.tree.leaves(made["['enc']['w']"]) == []
    with pytest.raises(AttributeError):
        made.mesh = MESH
    with pytest.raises(AttributeError):
        made["['enc']['w']"].spec = P()


def test_copies():
    made = plan()
    hash(made)
    for again in (pickle.loads(pickle.dumps(made)), copy.copy(made), copy.deepcopy(made)):
        assert again == made and hash(again) == hash(made) and again["['enc']['w']"] == made["['enc']['w']"]
    assert jax.tree.map(lambda x: x, made) == made


def test_a_leaf_twice():
    row = plan()["['enc']['w']"]
    with pytest.raises(eqshard.ShardingError, match=r"`\['enc'\]\['w'\]` is there twice"):
        ShardingPlan(MESH, [row, row])


def test_the_fingerprint_is_the_same_in_every_process():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import eqshard\n"
        "print(eqshard.ShardingPlan.from_json(sys.stdin.read()).fingerprint())"
    )
    root = str(pathlib_of(eqshard).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", code, root], input=plan().to_json(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == plan().fingerprint()
    assert plan().fingerprint() == "1fdd42e206393f2547c07344e5393f1f65669c6ca84bab3008ab1d8a1ae7ee69"


def pathlib_of(module):
    import pathlib

    return pathlib.Path(module.__file__)


# at


def test_at_a_path_a_subtree_or_a_pattern():
    assert specs_set(plan().at("['encoder'][1]")) == ["['encoder'][1]"]
    assert specs_set(plan().at("['encoder']")) == ["['encoder'][0]", "['encoder'][1]"]
    assert specs_set(plan().at(r"\['enc.*\d\]")) == ["['encoder'][0]", "['encoder'][1]"]
    assert specs_set(plan().at("enc")) == [row.path for row in plan()]
    assert specs_set(plan().at("b|w")) == ["['enc']['b']", "['enc']['w']"]


def specs_set(at):
    return [row.path for row in at.set(P("dp"), why="!") if row.why == "!"]


def test_at_a_misspelt_path_is_not_a_pattern():
    # As a regular expression, ['v'] would find every path that has a quote in it.
    for typo in ("['v']", "['enc']['v']", "[0]", "['encoder'][2]", '["enc"]'):
        with pytest.raises(eqshard.MismatchError, match="no leaf"):
            plan().at(typo)
    with pytest.raises(eqshard.MismatchError, match="no leaf"):
        plan().at("decoder")
    with pytest.raises(eqshard.ShardingError, match="neither a path nor a regular expression"):
        plan().at("(")


def test_set_checks():
    with pytest.raises(eqshard.IndivisibleError, match=r"\['enc'\]\['w'\]"):
        eqshard.replicated_plan({"enc": {"w": struct(7)}}, MESH).at("w").set(P("dp"))
    with pytest.raises(eqshard.UnknownAxisError):
        plan().at("w").set(P("fsdp"))
    with pytest.raises(eqshard.UnknownAxisError):
        plan().at("w").set(use=P("fsdp"))
    with pytest.raises(eqshard.RankError):
        plan().at("b").set(P(None, "dp"))


def test_set_not_strictly_records_what_was_given_up():
    made = eqshard.replicated_plan(struct(6, 7), MESH).at("").set(P(("dp", "tp"), "tp"[:0] or None), strict=False)
    assert made[""].spec == P("dp") and made[""].given_up == (eqshard.GivenUp(0, 6, ("tp",)),)
    again = ShardingPlan.from_json(made.to_json())
    assert again[""].given_up == made[""].given_up
    used = eqshard.replicated_plan(struct(6, 7), MESH).at("").set(P("dp"), use=P(None, "tp"), strict=False)
    assert used[""].use == P() and [g.dim for g in used[""].given_up] == [1]


def test_set_use_and_memory_kind_apart():
    made = plan().at("w").set(use=P("dp")).at("w").set(memory_kind="pinned_host")
    row = made["['enc']['w']"]
    assert (row.spec, row.use, row.memory_kind) == (P("dp", "tp"), P("dp"), "pinned_host")
    row = made.at("w").set(P("tp"))["['enc']['w']"]
    assert (row.spec, row.use, row.memory_kind) == (P("tp"), P("tp"), "pinned_host")
    assert made.at("w").set(memory_kind=None)["['enc']['w']"].memory_kind is None


# select, merge


def test_select():
    part = plan().select("['enc']")
    assert part.specs() == {"['b']": P(), "['w']": P("dp", "tp")}  # and not `encoder`
    assert part.specs(TREE["enc"]) == {"b": P(), "w": P("dp", "tp")}
    assert plan().select("") == plan() and plan().select("['enc']['w']").specs() == {"": P("dp", "tp")}
    assert plan().select("['enc']").select("['w']") == plan().select("['enc']['w']")
    with pytest.raises(eqshard.MismatchError, match=r"no leaf at or below `\['en'\]`"):
        plan().select("['en']")
    model = eqx.nn.MLP(4, 4, 4, 1, key=jax.random.key(0))
    made = eqshard.replicated_plan(model, MESH)
    assert made.select(".layers[1]") == eqshard.replicated_plan(model.layers[1], MESH)
    with pytest.raises(eqshard.MismatchError):
        made.select(".lay")


def test_merge():
    a, b = plan().select("['enc']"), plan().select("['encoder']")
    joined = a.merge(b)
    assert [r.path for r in joined] == ["['b']", "['w']", "[0]", "[1]"]
    whole = a.merge(b, at="['more']")
    assert whole.select("['more']") == b
    changed = a.at("w").set(P("tp"))
    assert a.merge(changed) == changed and changed.merge(a) == a and a.merge(a) == a
    assert a.merge(ShardingPlan(MESH, [])) == a and ShardingPlan(MESH, []).merge(a) == a
    with pytest.raises(eqshard.MeshError, match=r"different meshes: MeshSpec\(dp=2, tp=4\) and MeshSpec\(dp=8\)"):
        a.merge(eqshard.replicated_plan(TREE, MeshSpec(dp=8)))


# Trees


def test_specs_and_shardings_as_trees():
    specs = plan().specs(TREE)
    assert specs == {
        "enc": {"w": P("dp", "tp"), "b": P()},
        "encoder": [P(), P()],
        "name": None,
        "none": None,
    }
    shardings = plan().shardings(TREE)
    assert shardings["enc"]["w"] == NamedSharding(MESH.build(), P("dp", "tp")) and shardings["name"] is None
    assert plan().shardings()["['enc']['w']"] == shardings["enc"]["w"]
    arrays = {"enc": {"w": jnp.ones((8, 16)), "b": jnp.ones(16)}, "encoder": [jnp.ones(8)] * 2}
    jitted = jax.jit(lambda t: t, out_shardings={k: shardings[k] for k in arrays})
    assert jitted(arrays)["enc"]["w"].sharding.spec == P("dp", "tp")
    with pytest.raises(eqshard.MismatchError):
        plan().specs(TREE["enc"])


def test_the_plan_of_nothing():
    empty = eqshard.replicated_plan({"a": "text", "b": None}, MESH)
    assert (
        len(empty) == 0
        and empty.specs() == {}
        and eqshard.apply(empty, {"a": "text", "b": None}) == {"a": "text", "b": None}
    )
    assert ShardingPlan.from_json(empty.to_json()) == empty


# JSON


GOOD = plan().at("w").set(use=P(), memory_kind="pinned_host").to_dict()


def test_json_holds_all_of_it():
    made = ShardingPlan.from_dict(GOOD)
    assert made.to_dict() == GOOD and [r.why for r in made] == ["replicated", "set by hand", "replicated", "replicated"]
    placed = eqshard.apply(made, jax.tree.map(lambda s: jnp.ones(s.shape) if eqshard.is_array(s) else s, TREE))
    assert placed["enc"]["w"].sharding.memory_kind == "pinned_host"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": 3}, "`path` must be str"),
        ({"path": "['enc']['b']"}, "twice"),
        ({"shape": 8}, "`shape` must be list"),
        ({"shape": [8, -1]}, "-1"),
        ({"shape": [8, True]}, "True"),
        ({"shape": [8, 16.0]}, r"16\.0"),
        ({"shape": [8, float("nan")]}, "nan"),
        ({"shape": [10**30, 1]}, "whole number"),
        ({"shape": [2**62, 2**62]}, "number of elements"),
        ({"shape": [1] * 1000}, "1000 dimensions"),
        ({"dtype": "float33"}, "unknown dtype 'float33'"),
        ({"dtype": "O"}, "unknown dtype"),
        ({"dtype": "f4"}, "unknown dtype"),
        ({"dtype": "float"}, "unknown dtype"),
        ({"dtype": "i4,i4"}, "unknown dtype"),
        ({"dtype": "(2,)float32"}, "unknown dtype"),
        ({"dtype": "datetime64[s]"}, "unknown dtype"),
        ({"dtype": "key<"}, "unknown dtype"),
        ({"dtype": 4}, "`dtype` must be str"),
        ({"spec": "dp"}, "`spec` must be list"),
        ({"spec": [1]}, "no entry of a spec"),
        ({"use": [[["dp"]]]}, "no entry of a spec"),
        ({"memory_kind": 1}, "`memory_kind` must be str"),
        ({"why": []}, "`why` must be str"),
        ({"given_up": [{"dim": 0}]}, "`size` is missing"),
        ({"given_up": [{"dim": 0, "size": 1, "axes": "dp"}]}, "`axes`"),
        ({"given_up": [3]}, "expected an object"),
        ({"extra": 1}, "unknown field 'extra'"),
    ],
)
def test_hostile_rows(change, message):
    leaves = [GOOD["leaves"][0], GOOD["leaves"][1] | change, *GOOD["leaves"][2:]]
    with pytest.raises(eqshard.FormatError, match=message):
        ShardingPlan.from_dict(GOOD | {"leaves": leaves})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2"),
        ({"format": "eqshard.axes"}, "not an eqshard plan"),
        ({"mesh": None}, "`mesh` must be Mapping"),
        ({"mesh": {}}, "not an eqshard mesh"),
        ({"leaves": {}}, "`leaves` must be list"),
        ({"leaves": [None]}, "plan leaf 0: expected an object"),
        ({"extra": 1}, "'extra'"),
    ],
)
def test_hostile_plans(change, message):
    with pytest.raises(eqshard.FormatError, match=message):
        ShardingPlan.from_dict(GOOD | change)


def test_rows_that_do_not_fit_can_be_read_but_not_used():
    row = GOOD["leaves"][1] | {"spec": ["typo", None]}
    made = ShardingPlan.from_dict(GOOD | {"leaves": [row]})
    with pytest.raises(eqshard.UnknownAxisError, match="'typo'"):
        made.shardings()
    memory = ShardingPlan.from_dict(GOOD | {"leaves": [GOOD["leaves"][1] | {"memory_kind": "moon"}]})
    with pytest.raises(eqshard.ShardingError, match="'moon'"):
        memory.shardings()


def test_a_large_plan_is_quick_to_make_and_hash():
    rows = [LeafPlan(f"[{i}]", (8, 8), "float32", P("dp"), P("dp")) for i in range(20_000)]
    made = ShardingPlan(MESH, rows)
    again = ShardingPlan(MESH, [LeafPlan(f"[{i}]", (8, 8), "float32", P("dp"), P("dp")) for i in range(20_000)])
    assert made == again and {made: 1}[again] == 1
