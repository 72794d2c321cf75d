"""64-bit numpy input follows one rule at every entry."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P

import eqshard


MESH = eqshard.MeshSpec(data=8)


def _planned(x):
    return eqshard.replicated_plan({"a": x}, MESH).at("a").set(P("data"))


def _step(x):
    def step(tree):
        return tree["a"] + tree["a"]

    plan = eqshard.step_plan(step, {"a": x}, mesh=MESH)
    return jax.tree.map(lambda y: y - x.astype(y.dtype), eqshard.constrain(plan, step)({"a": x}))


def _restored(x, path):
    eqshard.checkpoint.save(path / "a", {"a": x})
    return eqshard.checkpoint.restore(path / "a", {"a": x}, _planned(x))["a"]


def _identity(tree):
    return tree["a"]


ENTRIES = {
    "apply": lambda x, _: eqshard.apply(_planned(x), {"a": x})["a"],
    "use": lambda x, _: eqshard.use(_planned(x), {"a": x})["a"],
    "replicate": lambda x, _: eqshard.replicate({"a": x}, MESH)["a"],
    "shard_batch": lambda x, _: eqshard.shard_batch({"a": x}, MESH, P("data"))["a"],
    "prefetch": lambda x, _: next(eqshard.prefetch([{"a": x}], _planned(x)))["a"],
    "parallel_map": lambda x, _: eqshard.parallel_map(_identity, {"a": x}, MESH, P("data")),
    "init": lambda x, _: eqshard.init(_identity, {"a": x}, mesh=MESH)[0],
    "batch_statistics": lambda x, _: eqshard.batch_statistics({"a": x}, _identity),
    "filter_jit": lambda x, _: eqshard.filter_jit(_identity)({"a": x}),
    "filter_jit_planned": lambda x, _: eqshard.filter_jit(_identity, in_plans=_planned(x))({"a": x}),
    "apply_shardings": lambda x, _: eqshard.checkpoint.apply_shardings({"a": x}, P("data"), MESH)["a"],
    "apply_shardings_plan": lambda x, _: eqshard.checkpoint.apply_shardings({"a": x}, _planned(x))["a"],
    "step_plan": lambda x, _: _step(x),
    "restore": _restored,
}
NARROW = {"float64": "float32", "int64": "int32", "uint64": "uint32", "complex128": "complex64"}


@pytest.mark.parametrize("wide", NARROW)
@pytest.mark.parametrize("entry", ENTRIES)
def test_what_fits_is_narrowed(entry, wide, tmp_path):
    x = (np.arange(8) + 0.1).astype(wide)
    out = ENTRIES[entry](x, tmp_path)
    assert out.dtype == NARROW[wide]
    np.testing.assert_allclose(np.asarray(out), x.astype(NARROW[wide]), rtol=1e-6)


@pytest.mark.parametrize(("wide", "value"), [("int64", 2**40), ("int64", -(2**31) - 1), ("uint64", 2**32)])
@pytest.mark.parametrize("entry", ENTRIES)
def test_an_integer_that_does_not_fit_is_an_error(entry, wide, value, tmp_path):
    with pytest.raises(eqshard.MismatchError, match=rf"\['a'\].* is {wide} and holds {value}"):
        ENTRIES[entry](np.array([1] * 7 + [value], wide), tmp_path)


@pytest.mark.parametrize("wide", NARROW)
@pytest.mark.parametrize("entry", ENTRIES)
def test_with_x64_nothing_is_narrowed(entry, wide, tmp_path):
    with jax.enable_x64(True):
        x = (np.arange(8) + (2.0**40 if wide != "float64" else 0.1)).astype(wide)
        out = ENTRIES[entry](x, tmp_path)
        assert out.dtype == wide
        assert np.array_equal(np.asarray(out), x)


@pytest.mark.parametrize("wide", NARROW)
@pytest.mark.parametrize("make", [np.ones, jax.ShapeDtypeStruct])
def test_plans_have_the_narrowed_dtype(make, wide):
    tree = {"a": make((64, 64), np.dtype(wide))}
    mesh = eqshard.MeshSpec(fsdp=8)
    plans = [
        eqshard.auto_plan(tree, mesh),
        eqshard.fsdp_plan(tree, mesh),
        eqshard.memory_plan(tree, mesh, 10**9),
        eqshard.rule_plan(tree, mesh, [("a", P("fsdp"))]),
        eqshard.replicated_plan(tree, mesh),
        eqshard.step_plan(_identity, tree, mesh=mesh).args[0],
    ]
    assert {leaf.dtype for plan in plans for leaf in plan} == {NARROW[wide]}
    for plan in plans:
        assert eqshard.apply(plan, tree)["a"].dtype == NARROW[wide]
        assert not [i for i in eqshard.validate(plan, tree) if i.severity == "error"]
    report = eqshard.compile_report(lambda t: t["a"] + t["a"], tree, plans=[plans[0]])
    assert report.memory.peak > 0


def test_validate_says_which_value_does_not_fit():
    tree = {"a": np.array([2**40])}
    (issue,) = eqshard.validate(eqshard.replicated_plan(tree, MESH), tree)
    assert issue.code == "narrowed" and str(2**40) in issue.message and "x64" in issue.remedy


def test_a_checkpoint_keeps_64_bits(tmp_path):
    x = np.array([2**40, -(2**50)])
    eqshard.checkpoint.save(tmp_path / "a", {"a": x})
    with jax.enable_x64(True):
        out = eqshard.checkpoint.restore(tmp_path / "a", {"a": x}, eqshard.replicated_plan({"a": x}, MESH))["a"]
        assert out.dtype == "int64" and out.tolist() == x.tolist()


def test_gather_leaves_numpy_arrays_alone():
    x = np.array([2**40])
    assert eqshard.gather({"a": x})["a"] is x


def test_floats_beyond_float32_become_infinite():
    assert eqshard.replicate(np.array([1e300, -1e300]), MESH).tolist() == [np.inf, -np.inf]


def test_the_plan_of_a_numpy_batch_fits_its_program_in_jit():
    def step(w, batch):
        return w * batch["x"].sum() + batch["n"].sum().astype("float32")

    w, batch = jnp.ones(8), {"x": np.ones((8, 2)), "n": np.arange(8)}
    plan = eqshard.step_plan(step, w, batch, mesh=MESH)
    assert jax.jit(eqshard.constrain(plan, step))(w, batch).tolist() == [44.0] * 8


limits = st.sampled_from([-(2**63), -(2**31), 0, 2**31, 2**32, 2**63 - 1])
near = st.builds(lambda limit, by: limit + by, limits, st.integers(-2, 2))


@settings(deadline=None)
@given(st.lists(near, min_size=1, max_size=4), st.sampled_from(["int64", "uint64"]))
def test_integers_survive_or_raise(values, wide):
    range_ = np.iinfo(wide)
    x = np.array([min(max(v, int(range_.min)), int(range_.max)) for v in values], wide)
    target = np.iinfo(NARROW[wide])
    fits = all(target.min <= int(v) <= target.max for v in x)
    try:
        out = eqshard.replicate(x, MESH)
    except eqshard.MismatchError:
        assert not fits
    else:
        assert fits and out.dtype == NARROW[wide] and out.tolist() == x.tolist()
