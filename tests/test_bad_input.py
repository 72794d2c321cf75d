"""Bad documents and bad input get an error of eqshard's own, and allocate little."""

import copy
import json
import math
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import eqshard
from eqshard.cli import main


def step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)


SHAPES = jax.ShapeDtypeStruct((16, 16), "float32"), jax.ShapeDtypeStruct((32, 16), "float32")
STEP_PLAN = eqshard.step_plan(step, *SHAPES, mesh=eqshard.MeshSpec(data=4, tp=2), compare=True)
DOCUMENTS = {
    "step": (eqshard.StepPlan, STEP_PLAN.to_dict()),
    "plan": (eqshard.ShardingPlan, STEP_PLAN.args[0].to_dict()),
    "mesh": (eqshard.MeshSpec, eqshard.MeshSpec(data=4, tp=2, chip="v5e").to_dict()),
    "axes": (eqshard.PartitionAxis, eqshard.PartitionAxis().to_dict()),
}


@pytest.mark.parametrize("number", [10**400, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["seconds", "bytes_per_device", "compute_seconds"])
def test_numbers_of_a_step_plan_are_finite(field, number):
    document = STEP_PLAN.to_dict() | {field: number}
    with pytest.raises(eqshard.FormatError, match=f"{field}: expected a finite number"):
        eqshard.StepPlan.from_dict(document)


def test_a_mesh_of_very_many_devices_is_not_reported_on():
    plan = eqshard.auto_plan({"w": jax.ShapeDtypeStruct((2**31, 4), "float32")}, eqshard.MeshSpec(x=2**31 - 1))
    read = eqshard.ShardingPlan.from_json(plan.to_json())
    for look in (eqshard.analyze, eqshard.report, lambda p: eqshard.diff(p, p.at("w").set(P(None, None)))):
        with pytest.raises(eqshard.MeshError, match=r"2147483647 devices; .* at most 1048576"):
            look(read)


def test_a_mesh_of_very_many_devices_on_the_command_line(tmp_path, capsys):
    (tmp_path / "model.py").write_text("import jax\n\ndef make():\n    return {'w': jax.numpy.ones((8, 8))}\n")
    assert main(["plan", f"{tmp_path / 'model.py'}:make", "--mesh", "x=99999999999"]) == 1
    assert "99999999999 devices" in capsys.readouterr().err.replace("\n", " ")


def test_converting_a_plan_whose_spec_is_too_long():
    document = eqshard.auto_plan({"w": jax.ShapeDtypeStruct((8,), "float32")}, eqshard.MeshSpec(a=2)).to_dict()
    text = json.dumps(document).replace('"shape": [8]', '"shape": []')
    text = json.dumps(_with_spec(json.loads(text), ["a", None, "a"]))
    try:
        plan = eqshard.ShardingPlan.from_json(text)
    except eqshard.ShardingError:
        return
    with pytest.raises(eqshard.ShardingError):
        eqshard.convert_plan(plan, eqshard.MeshSpec(a=4))


def _with_spec(document, spec):
    for leaf in document["leaves"]:
        leaf["spec"] = spec
    return document


def test_what_the_users_file_prints_is_not_part_of_the_json(tmp_path, capsys):
    (tmp_path / "train.py").write_text(
        "import jax\nprint('loading')\n\ndef step():\n    print('making')\n"
        "    def train(w):\n        print('tracing')\n        return w * 2\n"
        "    return train, (jax.numpy.ones((8, 8)),)\n"
    )
    assert main(["verify", f"{tmp_path / 'train.py'}:step", "--mesh", "a=8", "--json", "-"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["format"]
    assert all(word in said.err for word in ("loading", "making", "tracing"))


def test_constrain_leaks_no_tracer():
    args = tuple(jnp.ones(s.shape) for s in SHAPES)
    plan = eqshard.step_plan(step, *args, mesh=eqshard.MeshSpec(data=4, tp=2))
    with jax.checking_leaks():
        jax.jit(eqshard.constrain(plan, step)).lower(*args)


ODD = [None, True, -1, 0, 2**63, 10**400, 1.5, math.nan, math.inf, "", "x", "data", [], {}, [[]], ["a", "a"], {"a": 1}]


def mutated(rng, document):
    """A document with one to three values replaced, removed, or put in twice."""
    document = copy.deepcopy(document)
    for _ in range(rng.integers(1, 4)):
        node = document
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = keys[rng.integers(len(keys))]
            inner = node[key]
            if isinstance(inner, (dict, list)) and inner and rng.random() < 0.8:
                node = inner
                continue
            kind = rng.integers(4)
            if kind == 0:
                del node[key]
            elif kind == 1 and isinstance(node, list):
                node.append(copy.deepcopy(inner))
            elif kind == 2 and isinstance(node, dict):
                node[str(key) + "x"] = inner
            else:
                node[key] = copy.deepcopy(ODD[rng.integers(len(ODD))])
            break
    return document


def check_mutations(count, name):
    kind, document = DOCUMENTS[name]
    rng = np.random.default_rng(0)
    read = 0
    tracemalloc.start()
    for _ in range(count):
        try:
            made = kind.from_dict(mutated(rng, document))
            assert kind.from_json(made.to_json()) == made
            repr(made)
            if name == "plan":
                eqshard.validate(made)
                eqshard.analyze(made)
                eqshard.convert_plan(made, eqshard.MeshSpec(data=2, tp=4))
            read += 1
        except eqshard.ShardingError:
            continue
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100e6
    return read


@pytest.mark.parametrize("count", [150, pytest.param(5000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_mutated_documents(name, count):
    assert check_mutations(count, name) < count
