"""What notebooks show: every noun as HTML that is well formed, escaped, and says what it is."""

import html.parser

import jax
import pytest
from jax.sharding import PartitionSpec as P

import eqshard
from eqshard._report._compile_notebook import compile_html


VOID = {"br", "img", "hr", "meta", "link"}


class Checker(html.parser.HTMLParser):
    """Fails on a tag that is not closed, and on a script."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attrs):
        assert tag != "script"
        self.open += [] if tag in VOID else [tag]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def words(text):
    checker = Checker()
    checker.feed(text)
    assert not checker.open
    return " ".join(checker.text)


MESH = eqshard.MeshSpec(data=4, tp=2)
NASTY = "<script>alert(1)</script>"


def shapes():
    return jax.ShapeDtypeStruct((512, 512), "float32"), jax.ShapeDtypeStruct((1024, 512), "float32")


def step(w, x):
    return (x @ w).sum()


def test_a_mesh_shows_its_devices():
    said = words(MESH._repr_html_())
    assert "data 4 x tp 2 = 8 devices" in said and all(str(i) in said for i in range(8))


def test_names_show_training_and_decoding():
    said = words(eqshard.PartitionAxis()._repr_html_())
    assert "query_length" in said and "fsdp × dp" in said


@pytest.mark.parametrize("show", [lambda plan: plan, eqshard.analyze])
def test_a_plan_and_its_analysis(show):
    plan = eqshard.replicated_plan({NASTY: shapes()[0]}, MESH).at("").set(P("tp"))
    text = show(plan)._repr_html_()
    assert "1 leaf" in words(text)


def test_a_compile_report():
    w, x = shapes()
    plans = [
        eqshard.replicated_plan(tree, MESH).at("").set(spec) for tree, spec in ((w, P("tp")), (x, P("data", "tp")))
    ]
    report = eqshard.compile_report(step, w, x, plans=tuple(plans), chip="v5e")
    said = words(compile_html(report))
    assert "times of a v5e" in said and "all-reduce" in said and "tp" in said


def test_a_step_plan():
    plan = eqshard.step_plan(step, *shapes(), mesh=MESH)
    assert "a step" in words(plan._repr_html_())
