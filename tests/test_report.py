import json
import re
import subprocess
import sys
import xml.etree.ElementTree

import equinox as eqx
import jax
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P

import eqshard
from eqshard._fold import fold


S = jax.ShapeDtypeStruct


class Layer(eqx.Module):
    attn: dict
    norm: S


class Model(eqx.Module):
    embed: S
    layers: list


def model(n=80):
    layers = [Layer({"wq": S((512, 512), "bfloat16"), "wo": S((512, 512), "bfloat16")}, S((512,), "float32"))] * n
    return Model(S((50257, 512), "bfloat16"), layers)


@pytest.fixture(scope="module")
def plan():
    whole = eqshard.replicated_plan(model(), eqshard.MeshSpec(data=2, fsdp=8, tp=4))
    split = whole.at("wq").set(P("fsdp", "tp"), use=P(None, "tp"), why="the rule 'wq'")
    return split.at("wo").set(P(("tp", "fsdp"))).at("embed").set(P("fsdp", "tp"), strict=False)


# ---- folding


@pytest.mark.parametrize(
    "paths, folded",
    [
        ([f".layers[{i}].w" for i in range(80)], [".layers[0..79].w"]),
        (["['a'][0]", "['a'][1]", "['a'][3]"], ["['a'][0..1,3]"]),
        ([f".b[{i}].l[{j}].w" for i in range(3) for j in range(2)], [".b[0..2].l[0..1].w"]),
        (["['layer_0']['w']", "['layer_1']['w']"], ["['layer_0..1']['w']"]),
        (["['0'].w", "['1'].w"], ["['0..1'].w"]),
        ([".w1", ".w2"], [".w1", ".w2"]),
        (["['a1']", "['a2']"], ["['a1']", "['a2']"]),
        ([".a", ".l[0]", ".b", ".l[1]"], [".a", ".l[0..1]", ".b"]),
        ([""], [""]),
    ],
)
def test_paths_fold(paths, folded):
    found = fold(paths, [0] * len(paths))
    assert [f.path for f in found] == folded
    assert sorted(i for f in found for i in f.members) == list(range(len(paths)))


def test_only_what_is_alike_folds():
    found = fold([".l[0]", ".l[1]", ".l[2]"], ["a", "b", "a"])
    assert [(f.path, f.members) for f in found] == [(".l[0,2]", [0, 2]), (".l[1]", [1])]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from("ab")), unique=True))
def test_folds_lose_nothing(places):
    paths = [f".x[{i}].{name}[{j}]" for i, j, name in places]
    unfolded = []
    for found in fold(paths, [0] * len(paths)):
        *_, first, name, second = re.fullmatch(r"(\.x\[(.*)\]\.(.)\[(.*)\])", found.path).groups()
        unfolded += [f".x[{i}].{name}[{j}]" for i in expand(first) for j in expand(second)]
    assert sorted(unfolded) == sorted(paths)


def expand(text):
    runs = [run.split("..") for run in text.split(",")]
    return [i for run in runs for i in range(int(run[0]), int(run[-1]) + 1)]


# ---- text


def test_text_of_a_plan(plan):
    text = eqshard.report(plan)
    assert "241 leaves, 67.7 M parameters" in text and "data 2 x fsdp 8 x tp 4 = 64 devices" in text
    assert re.search(r"\.layers\[0\.\.79\]\.attn\['wq'\] +bf16\[512,512\] +fsdp, tp +-, tp +1\.3 MB", text)
    assert re.search(r"\.layers\[0\.\.79\]\.norm +f32\[512\] +whole +163\.8 kB", text)
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("\n") < 20


def test_the_headline_is_the_analysis(plan):
    most = max(eqshard.analyze(plan).bytes_per_device)
    assert f"each device holds {most / 1e6:.1f} MB" in eqshard.report(plan)


def test_without_a_layout_in_use_there_is_no_such_column(m24):
    text = eqshard.report(eqshard.replicated_plan({"a": S((8,), "float32")}, m24))
    assert "in use" not in text and "['a']" in text


def test_long_paths_lose_their_middle(m24):
    tree = {"a" * 60: {"b" * 60: S((8, 8), "float32")}}
    text = eqshard.report(eqshard.replicated_plan(tree, m24))
    assert max(map(len, text.splitlines())) <= 80 and "…" in text and "b']" in text


def test_many_rows_are_cut_to_the_largest(m24):
    tree = {f"x{'y' * i}": S((i + 1,), "float32") for i in range(100)}
    text = eqshard.report(eqshard.replicated_plan(tree, m24), rows=10, width=300)
    assert "90 smaller rows" in text and "[100]" in text and "[5]" not in text


def test_issues_are_in_the_text(plan):
    rows = [*plan, eqshard.LeafPlan(".bad", (7,), "float32", P("tp"), P("tp"))]
    text = eqshard.report(eqshard.ShardingPlan(plan.mesh, rows))
    assert "error indivisible .bad" in text and "7 % 4" in text


def test_the_same_issue_is_told_once(m24):
    rows = [eqshard.LeafPlan(f".l[{i}].w", (7,), "float32", P("tp"), P("tp")) for i in range(9)]
    text = eqshard.report(eqshard.validate(eqshard.ShardingPlan(m24, rows)))
    assert text.count("indivisible") == 1 and ".l[0..8].w (9 leaves)" in text
    assert eqshard.report(()) == "no issues"


def test_text_of_an_analysis(plan):
    text = eqshard.report(eqshard.analyze(plan))
    assert re.search(r"fsdp +8 +160", text) and "largest leaves" in text and ".embed" in text


def test_text_of_a_diff(plan):
    text = eqshard.report(eqshard.diff(plan, eqshard.replicated_plan(model(), plan.mesh)))
    assert re.search(r"\.layers\[0\.\.79\]\.attn\['wq'\] +fsdp, tp +whole +all-gather", text)
    assert "161 leaves move" in text


def test_a_tree_is_checked_and_counted(m24):
    w = np.ones((8, 8), "float32")
    tree = [w, w]
    plan = eqshard.replicated_plan(tree, m24)
    assert "256 B on" in eqshard.report(plan, tree) and "512 B on" in eqshard.report(plan)
    assert "missing_leaf" in eqshard.report(plan, [w])


def test_an_empty_plan_and_a_single_array(m24):
    assert "0 leaves" in eqshard.report(eqshard.replicated_plan({}, m24))
    assert "(the array)" in eqshard.report(eqshard.replicated_plan(S((8,), "float32"), m24))


def test_formats_are_checked(plan):
    with pytest.raises(eqshard.ShardingError, match="pdf"):
        eqshard.report(plan, format="pdf")
    with pytest.raises(eqshard.ShardingError, match="for plans"):
        eqshard.report(eqshard.analyze(plan), format="rich")


# ---- rich


def test_rich_table(plan):
    from rich.console import Console

    console = Console(width=120, record=True, file=open("/dev/null", "w"))
    with console.file:
        console.print(eqshard.report(plan, format="rich"))
    text = console.export_text()
    assert ".layers[0..79].attn['wq']" in text and "P('fsdp', 'tp')" in text and "P(None, 'tp')" in text


def test_without_rich_text_still_works():
    code = """
import sys
sys.modules["rich"] = None
import eqshard, jax
plan = eqshard.replicated_plan(jax.ShapeDtypeStruct((8,), "float32"), eqshard.MeshSpec(x=8))
print(eqshard.report(plan))
try:
    eqshard.report(plan, format="rich")
except eqshard.ShardingError as error:
    assert "pip install eqshard[rich]" in str(error)
else:
    raise AssertionError
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "f32[8]" in done.stdout, done.stderr


# ---- the page


def page_data(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL).group(1))


def test_page_needs_nothing_else(plan):
    page = eqshard.report(plan, format="html")
    urls = set(re.findall(r"https?://[^\"'` )]+", page))
    assert urls <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<link|<img|@import|@font-face|url\(|\bfetch\(|XMLHttpRequest|<script src", page)
    assert "prefers-color-scheme: dark" in page and page.startswith("<!doctype html>")


def test_page_holds_the_plan(plan):
    data = page_data(eqshard.report(plan, format="html"))
    names = {"".join(data["tokens"][t] for t in row[2:]): row for row in data["rows"]}
    assert list(names) == [".embed", *(f".layers[0..79]{k}" for k in (".attn['wo']", ".attn['wq']", ".norm"))]
    kind, times = names[".layers[0..79].attn['wq']"][:2]
    type_, shape, item, at_rest, in_use, spec, use, memory, why, given_up = data["kinds"][kind]
    assert (times, type_, shape, item) == (80, "bf16[512,512]", [512, 512], 2)
    assert (at_rest, in_use, spec, use) == ([[1], [2]], [[], [2]], "P('fsdp', 'tp')", "P(None, 'tp')")
    assert (memory, why, given_up) == (0, "the rule 'wq'", [])
    assert "+" in data["kinds"][names[".embed"][0]][9][0]
    assert data["totals"]["most"] == max(eqshard.analyze(plan).bytes_per_device)
    assert data["mesh"] == [["data", 2], ["fsdp", 8], ["tp", 4]]


def test_page_links_issues_to_leaves(m24):
    rows = [eqshard.LeafPlan(f".l[{i}].w", (7,), "float32", P("tp"), P("tp")) for i in range(9)]
    data = page_data(eqshard.report(eqshard.ShardingPlan(m24, rows), format="html"))
    ((severity, code, path, times, _, _, row),) = data["issues"]
    assert (severity, code, path, times, row) == ("error", "indivisible", ".l[0..8].w", 9, 0)


def test_page_cannot_be_broken_out_of(m24):
    evil = "</script><script>alert(1)</script>"
    plan = eqshard.replicated_plan({evil: S((8,), "float32")}, m24)
    page = eqshard.report(plan, format="html")
    assert evil not in page and page.count("<script") == 2
    assert page_data(page)["tokens"] == [f"['{evil}']"]
    assert "<script" not in plan._repr_html_() and "<script" not in eqshard.visualize_leaf(
        plan, f"['{evil}']", format="svg"
    )


def test_page_of_many_different_leaves():
    tree = {f"block{'abcdefghij'[i % 10]}": {} for i in range(10)}
    for i in range(2_000):
        tree[f"block{'abcdefghij'[i % 10]}"][f"w{chr(97 + i // 1000)}x{i}y"] = S((i % 97 + 1, i + 1), "float32")
    page = eqshard.report(eqshard.replicated_plan(tree, eqshard.MeshSpec(x=8)), format="html")
    assert len(page_data(page)["rows"]) == 2_000
    assert len(page) < 30_000 + 2_000 * 150


def test_page_folds_many_layers():
    tree = [{"w": S((64, 64), "float32"), "b": S((64,), "float32")} for _ in range(2_000)]
    page = eqshard.report(eqshard.replicated_plan(tree, eqshard.MeshSpec(x=8)), format="html")
    assert [row[1] for row in page_data(page)["rows"]] == [2_000, 2_000] and len(page) < 40_000


def test_pages_of_other_things(plan):
    page = eqshard.report(eqshard.analyze(plan), format="html")
    assert "largest leaves" in page and page.startswith("<!doctype html>")


# ---- a leaf


def test_visualized_slices_are_those_of_jax(m222):
    shape, spec = (4, 6, 8), P("fsdp", None, ("tp", "dp"))
    plan = eqshard.replicated_plan(S(shape, "float32"), m222).at("").set(spec)
    text = eqshard.visualize_leaf(plan, "")
    index = NamedSharding(m222.build(), spec).devices_indices_map(shape)
    table = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if "|" in line]
    heads = re.findall(r"\d+:\d+", next(line for line in text.splitlines() if line.startswith("  ")))
    for number, device in enumerate(m222.build().devices.flat):
        first, _, last = ("{}:{}".format(*s.indices(n)[:2]) for s, n in zip(index[device], shape))
        (row,) = [cells for cells in table if cells[0] == first]
        assert row[1 + heads.index(last)] == str(number)


@pytest.mark.parametrize(
    "shape, spec",
    [
        ((), P()),
        ((8,), P()),
        ((8,), P("fsdp")),
        ((8, 8), P(None, "tp")),
        ((8, 8, 8), P("data", "fsdp", "tp")),
        ((8, 2, 8, 8), P("fsdp", "data", None, "tp")),
        ((64, 64), P(("fsdp", "tp"), "data")),
        ((0, 8), P("fsdp")),
        ((10,), P("fsdp")),
    ],
)
def test_any_rank_can_be_drawn(shape, spec):
    row = eqshard.LeafPlan(".w", shape, "float32", spec, spec)
    plan = eqshard.ShardingPlan(eqshard.MeshSpec(data=2, fsdp=8, tp=4), (row,))
    text = eqshard.visualize_leaf(plan, ".w")
    assert max(map(len, text.splitlines())) <= 90 and "f32[" in text
    svg = xml.etree.ElementTree.fromstring(eqshard.visualize_leaf(plan, ".w", format="svg"))
    cells = svg.findall("{http://www.w3.org/2000/svg}rect")
    entries = [(entry,) if isinstance(entry, str) else entry for entry in spec if entry]
    cuts = [plan.mesh.size(entry) for entry in entries]
    panels = int(np.prod(cuts[2:]))
    assert len(cells) == int(np.prod([min(cut, 16) for cut in cuts[:2]])) * min(panels, 16)


def test_visualize_in_use_and_errors(plan):
    path = ".layers[0].attn['wq']"
    assert "32 pieces" in eqshard.visualize_leaf(plan, path)
    assert "4 pieces" in eqshard.visualize_leaf(plan, path, in_use=True)
    with pytest.raises(eqshard.MismatchError):
        eqshard.visualize_leaf(plan, ".nope")
    with pytest.raises(eqshard.ShardingError, match="png"):
        eqshard.visualize_leaf(plan, path, format="png")


# ---- explain


def test_explain(plan):
    text = eqshard.explain(plan, ".layers[3].attn['wq']")
    assert "`.layers[3].attn['wq']` bfloat16[512,512], 524.3 kB" in text
    assert "at rest  P('fsdp', 'tp'): 32 pieces of [64,128], 16.4 kB a device, 2 copies of each" in text
    assert "in use   P(None, 'tp'): 4 pieces of [512,128], 131.1 kB a device, 16 copies of each" in text
    assert "why      the rule 'wq'" in text


def test_explain_tells_what_was_given_up_and_its_cost(plan):
    text = eqshard.explain(plan, "embed")
    held = 50257 * 512 * 2 / 4
    assert f"gave up  dim 0 (50257) does not divide over fsdp: +{held * 7 / 8 / 1e6:.1f} MB a device" in text


def test_explain_folds_and_finds(plan):
    text = eqshard.explain(plan)
    assert text.count("at rest") == 4 and "(80 leaves)" in text
    assert eqshard.explain(plan, "wo|norm").count("at rest") == 2
    with pytest.raises(eqshard.MismatchError):
        eqshard.explain(plan, "nope")
    with pytest.raises(eqshard.ShardingError, match="regular expression"):
        eqshard.explain(plan, "(")


# ---- notebooks


def test_notebooks(plan):
    for value, words in [
        (plan, [".layers[0..79].norm", "fsdp, tp", "163.8 kB"]),
        (plan.mesh, ["data 2 x fsdp 8 x tp 4", ">63<", "data 1"]),
        (eqshard.analyze(plan), ["mesh axis", "fsdp"]),
        (eqshard.PartitionAxis().register("latent", "tp"), ["query_length", "fsdp × dp", "latent"]),
    ]:
        markup = value._repr_html_()
        xml.etree.ElementTree.fromstring(markup)  # well formed
        assert all(word in markup for word in words), markup
        assert "<script" not in markup


def test_a_large_mesh_and_uneven_devices_in_notebooks():
    assert "4096 devices" in eqshard.MeshSpec(x=64, y=64)._repr_html_()
    assert ">7<" in eqshard.MeshSpec(x=8)._repr_html_()
    row = eqshard.LeafPlan(".w", (10,), "float32", P("x"), P("x"))
    markup = eqshard.analyze(eqshard.ShardingPlan(eqshard.MeshSpec(x=4), (row,)))._repr_html_()
    assert "12 B" in markup and "4 B" in markup
