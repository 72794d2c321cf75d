"""What planned steps cost, by the planner and by the compiler, and what it decides."""

import jax
import jax.numpy as jnp
import pytest
import zoo
from jax.sharding import PartitionSpec as P
from program_checks import EAGER, shape

import eqshard
from eqshard.program import _study, _tune
from eqshard.program._build import build
from eqshard.program._cost import Machine
from eqshard.program._fold import fold_alike
from eqshard.program._links import piecewise_seconds
from eqshard.program._price import busy_seconds, moved
from eqshard.program._problem import problem
from eqshard.program._study import arriving, study
from eqshard.program._trace import trace


def test_data_parallel_where_it_is_best():
    def step(w, x):
        return jnp.mean((x @ w) ** 2)

    mesh = eqshard.MeshSpec(data=8, chip="v5e")
    plan = eqshard.step_plan(jax.grad(step), shape(64, 64), shape(2**16, 64), mesh=mesh)
    assert plan.args[1][""].spec == P("data") and plan.args[0][""].spec == P()


def test_repeated_layers_are_solved_once():
    def step(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return x

    sizes = []
    for n in (16, 32):
        traced = trace(step, ([shape(64, 64)] * n, shape(128, 64)))
        graph, ins, _ = build(traced, {})
        p = problem(graph, Machine.of(eqshard.MeshSpec(data=2, tp=4, chip="v5e")), ins, {})
        sizes.append(len(fold_alike(graph, p.layouts, {}).ops))
    assert sizes[1] == sizes[0] <= 10


@pytest.mark.parametrize("fixed", [{}, {1: P(("a", "b"))}, {1: P("a")}], ids=["free", "alike", "told apart"])
def test_of_plans_with_equal_axes_exchanged_one_is_looked_at(monkeypatch, fixed):
    def step(w, v, x):
        return jax.grad(lambda w, v: jnp.mean((jnp.tanh(x @ w) @ v) ** 2), argnums=(0, 1))(w, v)

    args = shape(512, 2048), shape(2048, 512), shape(1024, 512)
    begun = study(trace(step, args), eqshard.MeshSpec(a=2, b=2, c=2, chip=EAGER), {}, None, 30.0)
    one = begun.choose(fixed)
    monkeypatch.setattr(_study, "without_mirrors", lambda p, fold, given: p)
    every = begun.choose(fixed)
    assert one.choice.seconds == pytest.approx(every.choice.seconds, rel=1e-2)
    ways = [sum(map(len, chosen.p.ways)) for chosen in (one, every)]
    assert ways[0] < ways[1]


def test_what_a_loop_goes_through_is_read_and_written():
    """A cache that a step of decoding goes through, layer by layer, and stacks again."""

    def step(cache, x):
        def layer(x, keys):
            return x + keys.sum(axis=0), keys.at[0].set(x)

        return jax.lax.scan(layer, x, cache)

    args = shape(16, 4096, 4096), shape(4096)
    one, eight = (eqshard.step_plan(step, *args, mesh=eqshard.MeshSpec(a=n, chip="v5e")) for n in (1, 8))
    gone_through = 2 * 2 * 16 * 4096 * 4096 * 4 / 0.82e12
    assert one.compute_seconds >= gone_through
    assert eight.args[0][""].spec == P(None, None, "a") and eight.seconds < one.seconds / 4


def test_a_constraint_of_the_program_is_paid_for():
    mesh = eqshard.MeshSpec(a=4, b=2, chip="v5e")

    def step(spec):
        def run(weight, x):
            x = eqshard.constrain_to(x * 2.0, P("a", "b"), mesh)
            return weight * eqshard.constrain_to(x, spec, mesh).sum(axis=0)

        return run

    args = shape(), shape(4096, 4096)
    same, moved = (eqshard.step_plan(step(spec), *args, mesh=mesh) for spec in (P("a", "b"), P(None, "b")))
    gathered = 3 * 4096 * 4096 * 4 / 8 / 45e9
    assert moved.seconds - same.seconds == pytest.approx(gathered, rel=0.1)
    assert same.args[1][""].spec == P("a", "b")


@pytest.mark.parametrize("name", ["mlp", pytest.param("moe", marks=pytest.mark.slow)])
def test_what_was_solved_costs_what_it_was_solved_for(name):
    case = zoo.case(name, "tiny")
    mesh = eqshard.MeshSpec(data=4, tp=2, chip=EAGER)
    begun = study(trace(case.step, case.args), mesh, {}, None, 30.0)
    chosen = begun.choose({})
    waits = sum(m.exposed for m in moved(chosen.p, chosen.choice))
    assert busy_seconds(chosen.p, chosen.own, chosen.choice) + waits == pytest.approx(chosen.choice.seconds, rel=1e-6)


def test_explain_says_what_is_cut_what_it_costs_and_what_was_not_taken():
    case = zoo.case("mlp", "tiny")
    plan = eqshard.step_plan(case.step, *case.args, mesh=eqshard.MeshSpec(data=4, tp=2, chip="v5e"), compare=True)
    text = eqshard.explain(plan)
    for words in ("a step on", "at rest", "not taken", "whole weights, batch over all"):
        assert words in text
    assert max(len(line) for line in text.splitlines()) < 160
    assert all(other.seconds >= plan.seconds * (1 - 1e-9) for other in plan.alternatives if other.seconds is not None)
    assert eqshard.StepPlan.from_json(plan.to_json()).explain() == text
    with pytest.raises(eqshard.ShardingError, match="a plan for each argument"):
        eqshard.explain(plan, ".layers")


def test_the_compiler_decides_among_candidates(tmp_path):
    case = zoo.case("mlp", "tiny")
    mesh = eqshard.MeshSpec(data=4, tp=2)
    said = []
    tune = lambda: eqshard.step_plan(
        case.step, *case.args, mesh=mesh, tune=3, target="cpu:8", cache=tmp_path, progress=said.append
    )
    plan = tune()
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    assert 1 <= len(kept) <= 3
    assert "by the compiler" in plan.notes[-1]
    assert len(plan.alternatives) == len(kept) - 1
    assert any("compiling candidate 1 of at most 3: planned" in line for line in said)
    assert tune() == plan
    assert {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == kept  # nothing was compiled again
    next(iter(kept)).write_bytes(b"torn")
    assert tune() == plan


def test_best_mesh_is_the_quickest_that_fits():
    shapes = shape(4096, 4096, dtype="bfloat16"), shape(8192, 4096, dtype="bfloat16")
    found = eqshard.best_mesh(lambda w, x: jnp.tanh(x @ w), *shapes, devices=12, chip="v5e")
    assert [c.mesh.sizes for c in found.candidates if len(c.mesh.sizes) == 1] == [(12,)]
    assert {c.mesh.sizes for c in found.candidates} == {(12,), (6, 2), (4, 3)}
    seconds = [c.plan.seconds for c in found.candidates if c.plan is not None]
    assert seconds == sorted(seconds)
    assert found.plan.mesh == found.mesh
    assert found.to_dict()["candidates"][0]["fits"]
    assert "does not fit" not in str(found)
    with pytest.raises(eqshard.BudgetError, match="on none of 3 meshes of 12 devices"):
        eqshard.best_mesh(lambda w, x: x @ w, *shapes, devices=12, chip="v5e", max_bytes=10)


def test_an_alternative_that_does_not_fit_is_written_too():
    step = lambda w, x: (w - x.T @ (x @ w), x @ w)
    tight = eqshard.MeshSpec(x=8, chip=eqshard.Chip("small", 1e14, 2**26, 1e12, 1e11))
    plan = eqshard.step_plan(step, shape(4096, 4096), shape(512, 4096), mesh=tight, compare=True)
    unfit = [other for other in plan.alternatives if other.seconds is None]
    assert unfit and all(other.why == "does not fit" for other in unfit) and "inf" not in plan.explain()
    assert eqshard.StepPlan.from_json(plan.to_json()) == plan


def test_tuning_keeps_to_the_memory_by_the_compilers_count(tmp_path):
    """What the compiler takes more than was predicted is planned for; what nothing fits is said."""
    step = lambda w, x: (w - x.T @ jnp.tanh(x @ w), jnp.sum(jnp.sort(jnp.sin(x @ w), axis=1)))
    args, mesh = (shape(512, 512), shape(4096, 512)), eqshard.MeshSpec(a=8)
    tune = lambda **options: eqshard.step_plan(
        step, *args, mesh=mesh, tune=2, target="cpu:8", cache=tmp_path, **options
    )
    free = tune()
    report = eqshard.compile_report(
        eqshard.constrain(free, step),
        *args,
        plans=free.args,
        target="cpu:8",
        donate=(0,),
        compiler_options=dict(free.options),
    )
    tight = tune(max_bytes=report.bytes_per_device)
    assert "by the compiler" in tight.notes[-1]
    with pytest.raises(eqshard.BudgetError, match="fits"):
        tune(max_bytes=report.bytes_per_device / 20)


def test_what_comes_from_the_host():
    """A batch does, and so lies in pieces; what is updated does not, nor a model that is only read."""
    w, x, batch = shape(1024, 1024), shape(4096, 1024), {"x": shape(4096, 1024)}
    train = lambda w, batch: w - batch["x"].T @ (batch["x"] @ w)
    serve = lambda w, cache, batch: (cache + batch["x"] @ w, 1.0)
    adapt = lambda part, base, batch: part - batch["x"].T @ (batch["x"] @ (base.sum(0) + part))
    for fn, args in ((train, (w, batch)), (serve, (w, x, batch)), (adapt, (w, shape(16, 1024, 1024), batch))):
        traced = trace(fn, args)
        assert {traced.ins[i].path for i in arriving(traced)} == {"['x']"}


def test_a_sum_is_scattered_along_one_dimension():
    """XLA does not scatter it along two: it would make the whole sum and cut that."""
    step = lambda w, x: w - x.T @ jnp.tanh(x @ w)
    plan = eqshard.step_plan(step, shape(4096, 4096), shape(65536, 4096), mesh=eqshard.MeshSpec(a=4, b=4, chip="v5e"))
    assert plan.args[0][""].spec in (P(("a", "b")), P(None, ("a", "b")))


def test_a_sum_is_scattered_along_the_large_operand():
    """As for a head of many words: piece by piece, what has not the dimension of the pieces is read for each."""
    step = lambda w, x, y: w - x.T @ y
    for m, n in ((768, 50304), (50304, 768)):
        args = shape(m, n), shape(131072, m), shape(131072, n)
        plan = eqshard.step_plan(step, *args, mesh=eqshard.MeshSpec(a=16, chip="v5e"))
        assert plan.args[0][""].spec == (P("a") if m > n else P(None, "a"))


def test_a_convolution_is_not_summed_in_thin_pieces():
    """Thirty-two channels take a TPU as long as 128."""

    def step(w, x):
        conv = lambda w: jax.lax.conv(x, w, (1, 1), "SAME")
        return w - jax.grad(lambda w: jnp.sum(conv(w) ** 2))(w)

    args = shape(512, 512, 3, 3), shape(256, 512, 56, 56)
    planned = lambda chip: eqshard.step_plan(step, *args, mesh=eqshard.MeshSpec(a=16, chip=chip)).args[0][""].spec
    assert planned("v5e") == P() and planned("h100") != P()


def test_tuning_says_what_the_compiler_said_where_nothing_smaller_can_be_planned(monkeypatch):
    step, args = lambda w, x: w - x.T @ (x @ w), (shape(512, 512), shape(512, 512))

    class Huge(eqshard.CompileReport):
        fits, step_seconds, bytes_per_device = True, 1.0, 50e6

    monkeypatch.setattr(_tune, "compile_reports", lambda programs, **_: [object.__new__(Huge)])
    with pytest.raises(eqshard.BudgetError, match=r"none fits by the compiler.*does not fit: 0.05 GB"):
        eqshard.step_plan(step, *args, mesh=eqshard.MeshSpec(a=8), max_bytes=5e6, tune=1, target="cpu:8")


def test_where_nothing_fits_by_the_planner_the_compiler_is_asked_about_what_takes_least(monkeypatch):
    step, args = lambda w, x: w - x.T @ (x @ w), (shape(512, 512), shape(512, 512))
    mesh, said = eqshard.MeshSpec(a=8), []

    class Small(eqshard.CompileReport):
        fits, step_seconds, bytes_per_device = True, 1.0, 1e5

    monkeypatch.setattr(_tune, "compile_reports", lambda programs, **_: [object.__new__(Small)])
    plan = lambda most, **tuned: eqshard.step_plan(step, *args, mesh=mesh, max_bytes=most, **tuned)
    with pytest.raises(eqshard.BudgetError, match="by the planner's count"):
        plan(2e5)
    found = plan(2e5, tune=2, target="cpu:8", progress=said.append)
    assert "the plan that takes least was the best of 1 by the compiler" in found.notes[-1]
    assert sum("compiling" in line for line in said) == 1
    with pytest.raises(eqshard.BudgetError, match=r"the plan that takes least: does not fit: 0\.0001 GB"):
        plan(5e4, tune=2, target="cpu:8")


def test_what_is_cut_along_two_dimensions_is_gathered_in_tiles():
    machine = Machine.of(eqshard.MeshSpec(a=4, b=4, chip="v5e"))
    (tiles,) = machine.moves(1e9, (0, 1), (-1, -1))
    (rows,) = machine.moves(1e9, (0, 0), (-1, -1))
    assert (tiles[0], rows[0]) == ("gather of tiles", "all-gather") and tiles[1] == rows[1] == (0, 1)
    assert tiles[3] > 1.5 * rows[3]
    early = ("all-gather",)
    assert machine.exposed(tiles, early) == tiles[3] and machine.exposed(rows, early) < 0.3 * rows[3]
    elsewhere = Machine.of(eqshard.MeshSpec(a=4, b=4, chip="h100"))
    assert [t[0] for t in elsewhere.moves(1e9, (0, 1), (-1, -1))] == ["all-gather"] * 2


def test_a_program_is_priced_as_it_stands_if_that_is_asked_for():
    mesh = eqshard.MeshSpec(a=8, chip="v5e")
    seconds = lambda step, args, **how: study(trace(step, args), mesh, {}, None, 30.0, **how).choose({}).choice.seconds

    def rows(table, index):  # which `constrain` writes by one index each
        look = lambda t: jnp.sum(jax.vmap(lambda i: t[i])(index) ** 2)
        return table - jax.grad(look)(table)

    args = shape(4096, 64), jax.ShapeDtypeStruct((8192,), "int32")
    assert seconds(rows, args, as_written=True) > seconds(rows, args) + 1024 * 4e-6

    def constrained(weight, x):  # a gradient that is wanted in pieces is made in pieces, and each reads all of x again
        gradient = jax.grad(lambda w: jnp.sum(x @ w))(weight)
        return weight - eqshard.constrain_to(gradient, P(None, "a"), mesh)

    args = shape(64, 1024), shape(2**23, 64)
    assert seconds(constrained, args, as_written=True) > seconds(constrained, args)


@pytest.mark.parametrize("width, whole", [(128, True), (2048, False)])
def test_a_sum_of_rows_in_pieces_narrower_than_a_tile_is_made_whole(width, whole):
    def step(table, index):
        return jax.grad(lambda t: jnp.sum(t[index] ** 2))(table)

    mesh = eqshard.MeshSpec(a=16, chip="v5e")
    graph, _, _ = build(trace(step, (shape(4096, width), jax.ShapeDtypeStruct((2**16,), "int32"))), {}, (16,))
    (op,) = (op for op in graph.ops if op.kind == "scatter")
    ((v, letters),) = op.outs
    more = piecewise_seconds(op, v, letters, (-1,), (True,), (1,), graph, Machine.of(mesh))
    dearer = Machine.of(mesh).settle(graph.values[v].nbytes, (-1,), (True,), (-1,))
    less = Machine.of(mesh).settle(graph.values[v].nbytes, (-1,), (True,), (1,), graph.values[v].hides)
    assert more == pytest.approx(dearer - less if whole else 0.0, rel=0.02)


@pytest.mark.parametrize("chip, kind", [("v5p", "all-reduce"), (EAGER, "all-gather")])
def test_along_three_axes_a_tpu_gathers_by_sums(chip, kind):
    machine = Machine.of(eqshard.MeshSpec(a=4, b=4, c=4, chip=chip))
    assert [t[0] for t in machine.moves(1e9, (0, 0, 0), (-1, -1, -1))] == [kind]
    assert [t[0] for t in machine.moves(1e9, (0, 0, -1), (-1, -1, -1))] == ["all-gather"]
    scattered = "reduce-scatter" if kind == "all-gather" else "all-reduce"
    assert [t[0] for t in machine.sums(1e9, (-1, -1, -1), (True, True, True), (0, 0, 0))] == [scattered]
