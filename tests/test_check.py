import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqshard


U = P.UNCONSTRAINED
S = jax.ShapeDtypeStruct


def plan_for(mesh, rows):
    """A plan of unchecked rows: {path: (shape, spec)} or {path: (shape, spec, fields)}."""
    made = []
    for path, (shape, spec, *more) in rows.items():
        fields = {"use": spec, "dtype": "float32"} | (more[0] if more else {})
        made.append(eqshard.LeafPlan(path, shape, spec=spec, **fields))
    return eqshard.ShardingPlan(mesh, made)


def codes(issues):
    return [(issue.severity, issue.code) for issue in issues]


def errors(issues):
    return [issue for issue in issues if issue.severity == "error"]


# ---- what is wrong with a row


@pytest.mark.parametrize(
    "shape, spec, found",
    [
        ((1023, 1024), P("dp", "tp"), ["indivisible"]),
        ((8, 12), P(("dp", "tp"), None), []),
        ((8, 12), P(None, ("dp", "tp")), ["indivisible"]),
        ((8, 8), P("zz"), ["unknown_axis"]),
        ((8, 8), P(("dp", "zz")), ["unknown_axis"]),
        ((8, 8), P("tp", "tp"), ["duplicate_axis"]),
        ((8, 8), P(("tp", "tp")), ["duplicate_axis"]),
        ((8,), P("dp", "tp"), ["over_rank"]),
        ((), P("dp"), ["over_rank"]),
        ((4,), P(None, None), []),
        ((0, 8), P("dp", "tp"), []),
    ],
)
def test_a_row_in_itself(m24, shape, spec, found):
    issues = eqshard.validate(plan_for(m24, {".w": (shape, spec)}), small_bytes=0)
    assert codes(issues) == [("error", code) for code in found]
    assert all(issue.path == ".w" and issue.remedy for issue in issues)


def test_small_and_whole_is_fine(m24):
    assert eqshard.validate(plan_for(m24, {".w": ((2, 2), P(None, None))})) == ()


def test_unconstrained_is_fine(m24):
    assert eqshard.validate(plan_for(m24, {".w": ((8, 8), P(U, "tp"))}), small_bytes=0) == ()


def test_the_message_has_the_arithmetic_and_the_ways_out(m24):
    (issue,) = eqshard.validate(plan_for(m24, {".w": ((1023, 1024), P("dp", None))}), large_bytes=2**30)
    assert "1023 % 2" in issue.message and "float32[1023,1024]" in issue.message
    assert "shard dim 1 instead" in issue.remedy and "pad dim 0 to 1024" in issue.remedy
    assert "`?`" not in str(issue) and ".w" in str(issue)


def test_a_typo_is_answered(m24):
    (issue,) = eqshard.validate(plan_for(m24, {".w": ((8, 8), P("ttp"))}))
    assert "Did you mean 'tp'" in issue.message and "'dp', 'tp'" in issue.remedy


def test_the_layout_in_use_is_checked_too(m24):
    plan = plan_for(m24, {".w": ((6, 8), P("dp"), {"use": P("tp")})})
    (issue,) = eqshard.validate(plan, small_bytes=0)
    assert issue.code == "indivisible" and issue.message.startswith("in use: ")


def test_bad_dtype_and_memory(m24):
    plan = plan_for(m24, {".w": ((8,), P(), {"dtype": "float33"})})
    assert codes(eqshard.validate(plan)) == [("error", "bad_dtype")]
    plan = plan_for(m24, {".w": ((8,), P(), {"memory_kind": "tape"})})
    assert codes(eqshard.validate(plan)) == [("error", "bad_memory_kind")]
    assert codes(eqshard.validate(plan, {"w": 1})) == [("error", "bad_memory_kind"), ("error", "missing_leaf")]


def test_reductions_are_for_values_inside_a_step(m24):
    plan = plan_for(m24, {".w": ((8,), P("dp", unreduced={"tp"}))})
    assert codes(eqshard.validate(plan, small_bytes=0)) == [("error", "bad_spec")]
    assert eqshard.analyze(plan).bytes_per_device == (16,) * 8


def test_bad_entries_without_type_checks():
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        plan = plan_for(eqshard.MeshSpec(dp=2), {".w": ((8,), P(("dp", None)))})
        assert codes(eqshard.validate(plan)) == [("error", "bad_spec")]
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def test_the_same_trouble_has_the_same_words(m24):
    plan = plan_for(m24, {f".layers[{i}].w": ((7, 8), P("dp")) for i in range(50)})
    issues = eqshard.validate(plan)
    assert len(issues) == 50 and len({(i.message, i.remedy) for i in issues}) == 1
    assert [i.path for i in issues] == [leaf.path for leaf in plan]


def test_errors_come_first(m24):
    rows = {".small": ((8,), P("dp")), ".bad": ((7,), P("dp")), ".also": ((8,), P("tp"))}
    assert [i.severity for i in eqshard.validate(plan_for(m24, rows))] == ["error", "info", "info"]


# ---- a plan and its tree


def test_missing_and_extra_leaves(m24):
    tree = {"a": np.ones(8, "float32"), "b": np.ones(8, "float32"), "name": "x", "none": None}
    plan = eqshard.replicated_plan(tree, m24)
    assert eqshard.validate(plan, tree) == ()
    found = eqshard.validate(plan, {"a": tree["a"], "c": tree["b"]})
    assert [(i.code, i.path) for i in found] == [("missing_leaf", "['b']"), ("extra_leaf", "['c']")]


def test_shape_and_dtype_mismatch(m24):
    plan = eqshard.replicated_plan({"a": S((8,), "float32")}, m24)
    assert codes(eqshard.validate(plan, {"a": S((9,), "float32")})) == [("error", "shape_mismatch")]
    assert codes(eqshard.validate(plan, {"a": S((8,), "int32")})) == [("error", "dtype_mismatch")]
    both = eqshard.validate(plan, {"a": S((9,), "int32")})
    assert codes(both) == [("error", "shape_mismatch"), ("error", "dtype_mismatch")]


def test_narrowed_and_deleted(m24):
    tree = {"a": np.full(8, 2**40)}
    assert codes(eqshard.validate(eqshard.replicated_plan(tree, m24), tree)) == [("error", "narrowed")]
    gone = jnp.ones(8)
    gone.delete()
    plan = eqshard.replicated_plan({"a": S((8,), "float32")}, m24)
    assert codes(eqshard.validate(plan, {"a": gone})) == [("error", "deleted")]


def test_devices_are_asked_for_only_where_arrays_wait():
    tree = {"a": S((64,), "float32")}
    plan = eqshard.replicated_plan(tree, eqshard.MeshSpec(x=64))
    assert eqshard.validate(plan) == () and eqshard.validate(plan, tree) == ()
    (issue,) = eqshard.validate(plan, {"a": jnp.ones(64)})
    assert issue.code == "no_devices" and "64 devices" in issue.message


def test_manual_axes_hold_no_arrays():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Manual,))
    plan = eqshard.replicated_plan({"a": jnp.ones(8)}, mesh)
    assert codes(eqshard.validate(plan, {"a": jnp.ones(8)})) == [("error", "manual_axis")]
    assert eqshard.validate(plan) == ()


def test_inside_shard_map_pieces_match(m24):
    tree = {"a": jnp.ones((8, 4))}
    plan = eqshard.replicated_plan(tree, m24).at("a").set(P("dp"))
    seen = []

    def body(a):
        seen.append(eqshard.validate(plan, {"a": a}, small_bytes=0))
        return a

    placed = eqshard.apply(plan, tree)["a"]
    jax.jit(jax.shard_map(body, mesh=m24.build(), in_specs=P("dp"), out_specs=P("dp")))(placed)
    assert seen == [()]


def test_under_jit(m24):
    plan = eqshard.replicated_plan({"a": S((8,), "float32")}, m24)
    seen = []

    @jax.jit
    def f(a):
        seen.extend([eqshard.validate(plan, {"a": a}), eqshard.validate(plan, {"a": a[:4]})])
        return a

    f(jnp.ones(8))
    assert [codes(found) for found in seen] == [[], [("error", "shape_mismatch")]]


# ---- strays


def test_strays_are_listed(m24):
    tree = {"a": jnp.ones(8), "b": jax.device_put(jnp.ones(8), jax.devices()[3]), "c": np.ones(8, "float32")}
    plan = eqshard.replicated_plan(tree, m24)
    (issue,) = eqshard.validate(plan, tree)
    assert (issue.severity, issue.code, issue.path) == ("warning", "stray_devices", "['b']")
    assert "1 of 8 devices" in issue.message
    assert eqshard.validate(plan, eqshard.apply(plan, tree)) == ()


def test_a_tree_on_half_the_devices_is_stray():
    half = eqshard.MeshSpec(x=4, devices=jax.devices()[:4])
    other = eqshard.MeshSpec(x=4, devices=jax.devices()[4:])
    tree = {"a": jnp.ones(8)}
    placed = eqshard.apply(eqshard.replicated_plan(tree, half), tree)
    issues = eqshard.validate(eqshard.replicated_plan(tree, other), placed)
    assert codes(issues) == [("warning", "stray_devices")]


# ---- advice


def test_small_leaf_sharded(m24):
    plan = plan_for(m24, {".w": ((2, 4), P("dp", "tp")), ".v": ((256, 256), P("dp", "tp"))})
    (issue,) = eqshard.validate(plan)
    assert (issue.severity, issue.code, issue.path) == ("info", "small_sharded", ".w")
    assert eqshard.validate(plan, small_bytes=32) == ()


def test_large_leaf_replicated():
    mesh = eqshard.MeshSpec(fsdp=8, tp=2)
    rows = {f".layers[{i}]": ((4096, 4096), P("fsdp", "tp")) for i in range(16)} | {".embed": ((4096, 4096), P())}
    (issue,) = eqshard.validate(plan_for(mesh, rows))
    assert (issue.severity, issue.code, issue.path) == ("warning", "large_replicated", ".embed")
    assert "50%" in issue.message and "Split dim 0 over 'fsdp' (8): saves 58.7 MB a device" in issue.remedy
    assert eqshard.validate(plan_for(mesh, rows), large_bytes=2**27) == ()


def test_large_leaf_that_is_a_small_part_is_no_matter():
    rows = {f".layers[{i}]": ((4096, 4096), P("x")) for i in range(100)} | {".embed": ((4096, 4096), P())}
    assert eqshard.validate(plan_for(eqshard.MeshSpec(x=8), rows)) == ()


def test_many_large_leaves_replicated_are_one_issue():
    rows = {f".layers[{i}].w": ((1024, 1024), P()) for i in range(40)} | {".embed": ((4096, 1024), P("x"))}
    (issue,) = eqshard.validate(plan_for(eqshard.MeshSpec(x=8), rows))
    assert issue.code == "large_replicated" and "39 leaves like it" in issue.message


@pytest.mark.parametrize("shape, dtype", [((4099, 4099), "float32"), ((2**20,), "key<fry>")])
def test_what_cannot_be_split_is_not_blamed(shape, dtype):
    rows = {".a": (shape, P(), {"dtype": dtype}), ".b": ((8, 8), P("x"))}
    assert eqshard.validate(plan_for(eqshard.MeshSpec(x=8), rows), small_bytes=0) == ()


def test_data_parallel_is_on_purpose():
    rows = {f".layers[{i}]": ((4096, 4096), P()) for i in range(4)}
    assert codes(eqshard.validate(plan_for(eqshard.MeshSpec(data=8), rows))) == [("info", "unused_axis")]


def test_axis_never_used():
    rows = {".w": ((4096, 4096), P("tp"))}
    (issue,) = eqshard.validate(plan_for(eqshard.MeshSpec(data=2, tp=4), rows))
    assert (issue.severity, issue.code) == ("info", "unused_axis") and "'data'" in issue.message
    assert eqshard.validate(plan_for(eqshard.MeshSpec(data=1, tp=4), rows)) == ()
    used = {".w": ((4096, 4096), P("tp"), {"use": P("data")})}
    assert eqshard.validate(plan_for(eqshard.MeshSpec(data=2, tp=4), used)) == ()


def test_more_than_the_chip_has():
    mesh = eqshard.MeshSpec(x=2, chip="v5e")
    rows = {".w": ((16, 2**30), P("x"))}
    (issue,) = eqshard.validate(plan_for(mesh, rows))
    assert (issue.severity, issue.code) == ("warning", "over_memory") and "34.4 GB" in issue.message
    on_host = {".w": ((16, 2**30), P("x"), {"memory_kind": "pinned_host"})}
    assert eqshard.validate(plan_for(mesh, on_host)) == ()


def test_one_device_has_no_advice():
    assert eqshard.validate(plan_for(eqshard.MeshSpec(x=1), {".w": ((4096, 4096), P())})) == ()


# ---- laws

DIMS = st.sampled_from([0, 1, 2, 3, 4, 6, 8, 16])
ENTRIES = st.sampled_from([None, None, "dp", "tp", ("dp", "tp"), ("tp", "dp"), U, "zz"])
KINDS = st.sampled_from([None, None, None, "device", "pinned_host", "tape"])
DTYPES = st.sampled_from(["float32", "bfloat16", "int8", "bool"])


@st.composite
def rows(draw):
    spec = P(*draw(st.lists(ENTRIES, max_size=3)))
    use = draw(st.sampled_from([spec, P(*draw(st.lists(ENTRIES, max_size=3)))]))
    shape = tuple(draw(st.lists(DIMS, max_size=3)))
    return shape, spec, {"use": use, "dtype": draw(DTYPES), "memory_kind": draw(KINDS)}


def works(fn):
    try:
        fn()
        return True
    except ValueError:  # ours, and what JAX has to say
        return False


@given(st.lists(rows(), min_size=1, max_size=3), st.sampled_from(["same", "missing", "extra", "reshaped", "recast"]))
def test_no_errors_means_that_apply_works(m24, found, change):
    plan = plan_for(m24, {f"['{'abc'[i]}']": row for i, row in enumerate(found)})
    tree = {"abc"[i]: np.zeros(shape, more["dtype"]) for i, (shape, _, more) in enumerate(found)}
    if change == "missing":
        del tree["a"]
    elif change == "extra":
        tree["d"] = np.zeros(3, "float32")
    elif change == "reshaped":
        tree["a"] = np.zeros((*tree["a"].shape, 2), tree["a"].dtype)
    elif change == "recast":
        tree["a"] = tree["a"].astype("float16")
    in_use = plan_for(
        m24, {f"['{'abc'[i]}']": (s, m["use"], m | {"use": m["use"]}) for i, (s, _, m) in enumerate(found)}
    )
    both = works(lambda: eqshard.apply(plan, tree)) and works(lambda: eqshard.apply(in_use, tree))
    assert both == (errors(eqshard.validate(plan, tree)) == [])


@given(st.lists(rows(), max_size=4))
def test_what_is_said_is_a_value(m24, found):
    plan = plan_for(m24, {f".x[{i}]": row for i, row in enumerate(found)})
    issues = eqshard.validate(plan, small_bytes=10**6, large_bytes=0)
    for issue in issues:
        assert eqshard.Issue.from_json(issue.to_json()) == issue
        assert hash(eqshard.Issue.from_json(issue.to_json())) == hash(issue)
        assert jax.tree.leaves(issue) == []


@pytest.mark.parametrize(
    "data", [{"severity": "fatal"}, {"path": 3}, {"extra": 1}, {"format": "eqshard.plan"}, {"version": 2}]
)
def test_issues_refuse_bad_json(data):
    good = eqshard.Issue("error", "x", ".a", "m", "r").to_dict()
    with pytest.raises(eqshard.FormatError):
        eqshard.Issue.from_dict(good | data)


def test_every_maker_passes(m222):
    model = eqx.filter_eval_shape(eqx.nn.MLP, 64, 48, 96, 3, key=jax.random.key(0))
    plans = [
        eqshard.replicated_plan(model, m222),
        eqshard.auto_plan(model, m222, min_bytes=0),
        eqshard.fsdp_plan(model, m222, min_bytes=0),
        eqshard.memory_plan(model, m222, 40_000),
        eqshard.rule_plan(model, m222, [("weight", P("tp", "fsdp")), ("bias", P("tp"))]),
    ]
    for plan in plans:
        assert errors(eqshard.validate(plan, model)) == []
        assert eqshard.validate(plan) == eqshard.validate(plan, model)


def test_placed_as_planned_is_fine(m24):
    tree = {"w": np.ones((64, 128), "float32"), "b": np.ones(128, "float32")}
    plan = eqshard.auto_plan(tree, m24, min_bytes=0)
    placed = eqshard.apply(plan, tree)
    assert isinstance(placed["w"].sharding, NamedSharding)
    assert eqshard.validate(plan, placed, small_bytes=0) == ()
