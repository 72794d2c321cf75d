"""The command line: each command with something good and with things that are wrong, at 80 columns."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqshard
from eqshard import _verify
from eqshard.cli import main


MODEL = """
import equinox as eqx
import jax
import jax.numpy as jnp

SHAPES = {"w": jax.ShapeDtypeStruct((2048, 512), "float32")}
NOTHING = {"name": "nothing"}


def make(key):
    return eqx.nn.MLP(256, 256, 1024, 1, key=key)


def huge():
    return {"layers": [jnp.zeros((53248, 16384), "bfloat16") for _ in range(232)]}


def needs(width, depth):
    return eqx.nn.MLP(width, width, width, depth, key=jax.random.key(0))


def broken():
    return jnp.ones((2, 3)) @ jnp.ones((2, 3))


def train(w, x):
    return ((x @ w) ** 2).sum()


def step():
    return train, (jnp.ones((256, 256)), jnp.ones((64, 256)))


def leaking():
    w = jnp.ones((256, 256))
    return lambda x: x @ w, (jnp.ones((64, 256)),)


def planned():
    import eqshard

    w, x = jnp.ones((256, 256)), jnp.ones((64, 256))
    return train, (w, x), tuple(eqshard.auto_plan(arg, eqshard.MeshSpec(data=8)) for arg in (w, x))
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a command in a folder that has the model in it: `run("plan ...")` gives (exit code, stdout, stderr)."""
    (tmp_path / "my_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(text, *more):
        code = main([*text.split(), *more])
        out, err = capsys.readouterr()
        if "--json -" not in text:
            assert all(len(line) <= 80 or " " not in line.strip() for line in (out + err).splitlines()), out + err
        assert "Traceback" not in err
        return code, out, err

    return call


@pytest.fixture
def plans(run):
    """Two plans of the same model, as files."""
    assert run("plan my_model.py:make --mesh fsdp=4,tp=2 --json a.json")[0] == 0
    assert run("plan my_model.py:make --mesh fsdp=4,tp=2 --how replicated --json b.json")[0] == 0
    return run


def bad(run, command, code, *words):
    found, _, err = run(*command) if isinstance(command, tuple) else run(command)
    assert found == code, err
    said = " ".join(err.split())  # wrapped at 80 columns
    for word in words:
        assert word in said, err


def test_help_names_every_command_and_has_an_example_for_each(run):
    code, out, _ = run("--help")
    assert code == 0
    for command in ("plan", "explain", "check", "diff", "convert", "inspect", "compile", "verify", "best-mesh", "demo"):
        assert f"\n    {command}" in out
        code, text, _ = run(f"{command} --help")
        assert code == 0 and f"example:\n  eqshard {command}" in text


def test_without_a_command(run):
    code, out, _ = run("")
    assert code == 2 and "commands:" in out
    bad(run, "plann x", 2, "invalid choice: 'plann'")
    bad(run, "plan my_model.py:make --mesh a=2 --verbose", 2, "unrecognized arguments: --verbose")
    bad(run, "plan", 2, "the following arguments are required: MODEL")


def test_plan(run, tmp_path):
    code, out, err = run("plan my_model.py:make --mesh fsdp=4,tp=2 --html out.html --json plan.json")
    assert code == 0 and ".layers[0].weight" in out and "fsdp 4 x tp 2 = 8 devices" in out
    assert err == "wrote plan.json\nwrote out.html\n"
    plan = eqshard.ShardingPlan.from_json((tmp_path / "plan.json").read_text())
    model = jax.eval_shape(lambda: jnp.zeros((1024, 256)))
    assert plan[".layers[0].weight"].spec == eqshard.auto_spec(model, plan.mesh)
    assert (tmp_path / "out.html").read_text().startswith("<!doctype html>")


def test_plan_as_json_alone(run):
    code, out, _ = run("plan my_model.py:SHAPES --mesh x=8 --json -")
    assert code == 0 and eqshard.ShardingPlan.from_json(out)["['w']"].spec == jax.P("x")


def test_plan_of_what_no_machine_could_hold(run):
    code, out, _ = run("plan my_model.py:huge --mesh data=4,fsdp=16,tp=8 --memory 16GB --chip v5e")
    assert code == 0 and "404.8 GB" in out and "202.4 B parameters" in out


def test_plan_by_other_ways(run, tmp_path):
    (tmp_path / "rules.toml").write_text("[rules]\nweight = ['tp', ['fsdp']]\nbias = ['_']\n")
    code, out, _ = run("plan my_model.py:make --mesh fsdp=4,tp=2 --rules rules.toml")
    assert code == 0 and "tp, fsdp" in out
    assert run("plan my_model.py:make --mesh fsdp=4,tp=2 --rules", "weight->tp.fsdp, bias->")[1] == out
    code, out, _ = run("plan my_model.py:make --mesh fsdp=4,tp=2 --how fsdp")
    assert code == 0 and "in use" in out
    code, out, _ = run("plan my_model.py:make --mesh fsdp=4,tp=2 --how tp --dcn fsdp")
    assert code == 0 and "-, tp" in out


def test_plan_of_what_is_not_there(run):
    mesh = "--mesh fsdp=4"
    bad(run, f"plan nowhere.py:make {mesh}", 2, "no file nowhere.py.")
    bad(run, f"plan my_model.py:mak {mesh}", 2, "no 'mak' in my_model.py.", "Did you mean 'make'?")
    bad(run, f"plan my_model.py {mesh}", 2, "as my_model.py:make")
    bad(run, f"plan no_such_module:make {mesh}", 2, "no module 'no_such_module'")
    bad(run, f"plan my_model.py:needs {mesh}", 2, "it asks for width, depth", "def make(): return needs(...)")
    bad(run, f"plan my_model.py:NOTHING {mesh}", 2, "gives a dict without an array")


def test_plan_of_a_model_that_raises(run, tmp_path):
    bad(run, "plan my_model.py:broken --mesh fsdp=4", 1, "my_model.py, line 23, in broken: TypeError: dot_general")
    (tmp_path / "typo.py").write_text("x = 1\ndef make(:\n")
    bad(run, "plan typo.py:make --mesh fsdp=4", 1, "typo.py, line 2: SyntaxError")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)\n")
    bad(run, "plan leaves.py:make --mesh fsdp=4", 1, "leaves.py, line 1", "SystemExit: 3")
    with pytest.raises(eqshard.ShardingError, match="dot_general"):
        main(["plan", "my_model.py:broken", "--mesh", "fsdp=4", "--debug"])


def test_plan_on_a_wrong_mesh_or_budget(run):
    bad(run, "plan my_model.py:make", 2, "say which mesh, as --mesh fsdp=4,tp=2")
    bad(run, "plan my_model.py:make --mesh fsdp", 2, "cannot read 'fsdp'", "fsdp=4,tp=2")
    bad(run, "plan my_model.py:make --mesh fsdp=4,fsdp=2", 2, "axis 'fsdp' is given twice")
    bad(run, "plan my_model.py:make --mesh fsdp=4 --memory much", 2, "cannot read 'much' as bytes", "16GB")
    bad(run, "plan my_model.py:make --mesh fsdp=4 --memory 1kB", 1, "the least is")
    bad(run, "plan my_model.py:make --mesh fsdp=4 --chip v9", 2, "no chip 'v9'", "v5e")
    bad(run, "plan my_model.py:make --mesh fsdp=4 --dcn tp", 1, "no axis 'tp' in the mesh")
    bad(run, "plan my_model.py:make --mesh fsdp=4 --memory 1GB --how fsdp", 2, "--memory and --how")
    bad(run, "plan my_model.py:make --mesh fsdp=4 --json no/such/folder.json", 2, "cannot write no/such/folder.json")


@pytest.mark.parametrize(
    "text, word",
    [
        ("[rules]\nweight = 'tp'\n", "expected a list with an entry for each dimension"),
        ("[rule]\nweight = ['tp']\n", "unknown field 'rule'"),
        ("default = []\n", "no table [rules]"),
        ("[rules\n", "not a TOML file"),
        ("strict = 1\n[rules]\nweight = ['tp']\n", "`strict` is true or false"),
        ("[rules]\nweight = ['tpp']\nbias = []\n", "Did you mean 'tp'?"),
        ("[rules]\nweight = ['tp']\n", "no rule"),
    ],
)
def test_plan_by_wrong_rules(run, tmp_path, text, word):
    (tmp_path / "rules.toml").write_text(text)
    bad(run, "plan my_model.py:make --mesh fsdp=4,tp=2 --rules rules.toml", 1, word)
    bad(run, "plan my_model.py:make --mesh fsdp=4,tp=2 --rules nowhere.toml", 2, "no file nowhere.toml")


def test_explain(plans):
    code, out, _ = plans("explain a.json --leaf layers.0..weight")
    assert code == 0 and "largest dims over fsdp, tp" in out and "bias" not in out
    assert plans("explain my_model.py:make --mesh fsdp=4,tp=2")[1] == plans("explain a.json")[1]
    bad(plans, "explain a.json --leaf decoder", 1, "decoder")
    bad(plans, "explain a.jsn.json", 2, "no file a.jsn.json.", "Did you mean 'a.json'?")
    bad(plans, "explain a.json --mesh fsdp=8", 2, "a.json is a plan already")
    bad(plans, "explain my_model.py:make", 2, "say which mesh")


def test_check(plans, tmp_path):
    code, out, _ = plans("check my_model.py:make --plan a.json")
    assert (code, out) == (0, "no issues\n")
    data = json.loads(plans("check my_model.py:make --plan a.json --json -")[1])
    assert data == {"ok": True, "issues": []}
    code, out, _ = plans("check b.json")
    assert code == 0 and "info unused_axis" in out and "2 infos" in out
    plans("plan my_model.py:huge --mesh fsdp=4 --how replicated --chip v5e --json c.json")
    assert plans("check c.json")[0] == 0
    code, out, _ = plans("check c.json --strict")
    assert code == 1 and "warning over_memory" in out


def test_check_of_what_is_wrong(plans, tmp_path):
    code, out, _ = plans("check my_model.py:SHAPES --plan a.json")
    assert code == 1 and "error missing_leaf" in out and "error extra_leaf" in out and "5 errors" in out
    text = (tmp_path / "a.json").read_text()
    (tmp_path / "typo.json").write_text(text.replace('"fsdp",\n    "tp"', '"fsdp",\n    "tpp"'))
    code, out, _ = plans("check typo.json")
    assert code == 1 and "unknown_axis" in out
    (tmp_path / "cut.json").write_text(text[:100])
    bad(plans, "check cut.json", 1, "not a JSON text")
    (tmp_path / "other.json").write_text("{}")
    bad(plans, "check other.json", 1, "not an eqshard plan")
    (tmp_path / "noise.json").write_bytes(b"\xff\xfe\x00")
    bad(plans, "check noise.json", 2, "noise.json is no text")
    bad(plans, "check my_model.py:make --plan nowhere.json", 2, "no file nowhere.json")


def test_diff(plans, tmp_path):
    code, out, _ = plans("diff a.json b.json")
    assert code == 0 and "2 leaves move" in out and "all-gather" in out
    assert len(json.loads(plans("diff a.json b.json --json -")[1])["moves"]) == 2
    assert plans("diff a.json b.json --exit-code")[0] == 1
    assert plans("diff a.json a.json --exit-code")[0] == 0
    bad(plans, "diff a.json", 2, "the following arguments are required: B.json")
    bad(plans, "diff a.json nowhere.json", 2, "no file nowhere.json")
    (tmp_path / "step.json").write_text('{"format": "eqshard.step", "version": 1}')
    bad(plans, "diff a.json step.json", 1, "`format` is 'eqshard.step'")


def test_convert(plans, tmp_path):
    code, out, _ = plans("convert a.json --mesh fsdp=8,model=4 --rename tp=model --json c.json --html c.html")
    assert code == 0 and "fsdp, model" in out
    assert eqshard.ShardingPlan.from_json((tmp_path / "c.json").read_text()).mesh.shape == {"fsdp": 8, "model": 4}
    code, out, _ = plans("convert a.json --mesh fsdp=3,tp=2")
    assert code == 0 and "given up:\n  .layers[0].weight: dim 0 (1024) does not divide over fsdp" in out
    bad(plans, "convert a.json", 2, "the following arguments are required: --mesh")
    bad(plans, "convert a.json --mesh fsdp=8 --rename tp", 2, "cannot read 'tp'", "tp=model")
    bad(plans, "convert a.json --mesh fsdp=8 --rename tp=modl", 1, "`rename` maps 'tp' to 'modl'")
    bad(plans, "convert a.json --mesh fsdp=8 --strategy other", 2, "invalid choice: 'other'")


def test_inspect(run, tmp_path):
    tree = {"layers": [{"w": jnp.ones((64, 8))} for _ in range(3)], "step": np.zeros((), "int32")}
    plan = eqshard.auto_plan(tree, eqshard.MeshSpec(fsdp=8), min_bytes=0)
    for step in (1, 2):
        eqshard.checkpoint.save(tmp_path / "run", eqshard.apply(plan, tree), step=step)
    code, out, _ = run("inspect run")
    assert code == 0 and "written by eqshard\nsteps: 1, 2\n4 arrays" in out and "saved from fsdp 8 devices" in out
    assert "['layers'][0..2]['w']  float32[64,8]  fsdp" in out
    data = json.loads(run("inspect run --step 1 --prefix layers --json -")[1])
    assert data["steps"] == [1, 2] and len(data["leaves"]) == 3 and data["leaves"][0]["spec"] == "P('fsdp')"


def test_inspect_of_what_is_no_checkpoint(run, tmp_path):
    bad(run, "inspect nowhere", 1, "no checkpoint at", "there is no such file or folder")
    bad(run, "inspect .", 1, "is no checkpoint: it has none of")
    (tmp_path / "m.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00not json at all!")
    bad(run, "inspect m.safetensors", 1, "m.safetensors")
    eqshard.checkpoint.save(tmp_path / "run", jnp.ones(8), step=3)
    bad(run, "inspect run --step 4", 1, "no complete checkpoint of step 4", "there are: 3")


def test_compile(run, tmp_path):
    code, out, err = run("compile my_model.py:step --target cpu:8 --mesh data=4,tp=2 --html r.html --json r.json")
    assert code == 0 and "cpu:8, data 4 x tp 2 = 8 devices" in out and "compiling for cpu:8" in err
    report = eqshard.CompileReport.from_json((tmp_path / "r.json").read_text())
    assert report.mesh.shape == {"data": 4, "tp": 2} and (tmp_path / "r.html").stat().st_size > 1000


def test_compile_with_plans_of_ones_own(run):
    code, out, _ = run("compile my_model.py:planned --target cpu:8 --donate 0 --json -")
    assert code == 0 and "planning" not in out
    own = json.loads(out)["memory"]["arguments"]
    whole = json.loads(run("compile my_model.py:planned --target cpu:8 --how replicated --json -")[1])
    assert own * 8 == whole["memory"]["arguments"]


def test_compile_of_what_is_wrong(run):
    bad(run, "compile my_model.py:step --target v9:4x4", 1, "no target 'v9:4x4'", "v5e")
    bad(run, "compile my_model.py:step --target cpu:8 --mesh data=4", 2, "--mesh has 4 devices, --target cpu:8 has 8")
    bad(run, "compile my_model.py:make --target cpu:8", 2, "expected (function, arguments)", "return train_step")
    bad(run, "compile my_model.py:leaking --target cpu:8", 2, "is not among its arguments")
    bad(run, "compile my_model.py:step --target cpu:8 --memory 1kB", 1, "1.0 kB")
    bad(run, "compile my_model.py:step --target cpu:8 --donate first", 2, "cannot read 'first'")


def test_best_mesh(run):
    code, out, err = run("best-mesh my_model.py:step --devices 8")
    assert code == 0 and "data 4 x tp 2" in out and "data 8" in out and "a device" in err
    best = out.splitlines()[2].split()[:2]
    data = json.loads(run("best-mesh my_model.py:step --devices 8 --json -")[1])
    assert data["candidates"][0]["mesh"]["axes"][0] == [best[0], int(best[1])]
    eqshard.StepPlan.from_dict(data["plan"])


def test_best_mesh_of_what_is_wrong(run):
    bad(run, "best-mesh my_model.py:step", 2, "the following arguments are required: --devices")
    bad(run, "best-mesh my_model.py:step --devices 1", 2, "--devices 1: there is nothing to arrange")
    bad(run, "best-mesh my_model.py:step --devices 8 --axes data,data", 2, "write different names, as data,tp")
    bad(run, "best-mesh my_model.py:step --devices 8 --chip v9", 2, "no chip 'v9'")
    bad(run, "best-mesh my_model.py:step --devices 8 --memory 1kB", 1, "on none of")
    bad(run, "best-mesh my_model.py:make --devices 8", 2, "expected (function, arguments)")


def test_demo(run, tmp_path):
    code, out, _ = run("demo --steps 12 --html plan.html")
    assert code == 0 and "12 steps on 8 devices: loss " in out and (tmp_path / "plan.html").exists()
    first, last = out.partition("loss ")[2].split("\n")[0].split(" -> ")
    assert float(last) < 0.8 * float(first)
    bad(run, "demo --steps 0", 2, "--steps 0: at least 1")
    bad(run, "demo --steps many", 2, "invalid int value: 'many'")
    bad(run, "demo --steps 1 --html no/such/folder.html", 2, "cannot write no/such/folder.html")


def test_as_a_process(run, tmp_path):
    """Its own process: on one CPU device, a pipe for a terminal, and a model that must not be made."""
    command = [sys.executable, "-m", "eqshard", "plan", "my_model.py:huge", "--mesh", "fsdp=64", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(eqshard.ShardingPlan.from_json(done.stdout)) == 232
    done = subprocess.run([*command[:3], "check", "nowhere.json"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr == "eqshard check: no file nowhere.json.\n" and not done.stdout


def test_verify(run, tmp_path):
    code, out, _ = run("verify my_model.py:step --mesh data=4,tp=2 --json found.json")
    assert code == 0 and out.startswith("ok: 1 leaf") and "float32[]" in out
    assert eqshard.Verification.from_json((tmp_path / "found.json").read_text()).ok
    code, out, _ = run("verify my_model.py:planned --json -")
    assert code == 0 and json.loads(out)["ok"] is True
    assert run("verify my_model.py:step --mesh data=8 --how auto --runs 2 --seed 1")[0] == 0
    bad(run, "verify my_model.py:step", 2, "say which mesh")
    bad(run, "verify my_model.py:step --mesh data=8 --runs 1", 1, "`runs` must be at least 2, got 1")


def test_verify_finds_a_fault(run, monkeypatch):
    monkeypatch.setattr(_verify, "constrain", lambda plan, fn: lambda *args: fn(*args) * 1.01)
    code, out, _ = run("verify my_model.py:step --mesh data=4,tp=2")
    assert code == 1 and out.startswith("FAULT: 1 of 1 leaf") and "fault in the tree itself" in out
