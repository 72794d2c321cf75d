"""Every example in a docstring, a page or the README runs; every script in examples/ passes its own claim."""

import ast
import inspect
import json
import pathlib
import re
import subprocess
import sys
import textwrap

import jax
import pytest

import eqshard


ROOT = pathlib.Path(__file__).parent.parent
FENCE = re.compile(r"^( *)```python\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def blocks(text):
    return [textwrap.dedent(code) for _, code in FENCE.findall(text)]


def docstring_blocks():
    for file in sorted((ROOT / "eqshard").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                for i, code in enumerate(blocks(ast.get_docstring(node) or "")):
                    name = getattr(node, "name", "module")
                    yield pytest.param(code, id=f"{file.relative_to(ROOT)}:{name}:{i}")


def page_blocks():
    for file in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if code := "\n".join(blocks(file.read_text())):  # a page reads from top to bottom
            yield pytest.param(code, id=str(file.relative_to(ROOT)))


@pytest.fixture
def as_a_reader():
    """JAX as it comes: examples may mix dtypes as optax does."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.usefixtures("as_a_reader")
@pytest.mark.parametrize("code", list(docstring_blocks()))
def test_docstring(code):
    exec(compile(code, "<docstring>", "exec"), {"__name__": "docstring"})


@pytest.mark.usefixtures("as_a_reader")
@pytest.mark.parametrize("code", list(page_blocks()))
def test_page(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "<page>", "exec"), {"__name__": "page"})


@pytest.mark.parametrize("script", [pytest.param(p, id=p.name) for p in sorted((ROOT / "examples").glob("*.py"))])
def test_example(script):
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert len(script.read_text().splitlines()) <= 80


def notebook_cells():
    cells = json.loads((ROOT / "examples" / "tour.ipynb").read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.usefixtures("as_a_reader")
def test_notebook():
    """Every cell runs; what ends a cell shows itself."""
    names, shown = {"__name__": "notebook"}, []
    for cell in notebook_cells():
        body = ast.parse(cell).body
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        lines = [line for line in map(ast.unparse, body) if "jax.config.update" not in line]  # JAX runs already
        exec("\n".join(lines), names)
        if last is not None:
            value = eval(ast.unparse(last), names)
            shown += [type(value).__name__] if hasattr(value, "_repr_html_") and value._repr_html_() else []
    assert shown == ["MeshSpec", "PartitionAxis", "ShardingPlan", "Analysis"]


def public_names(module):
    return [name for name in dir(module) if not name.startswith("_")]


def test_every_public_name_is_in_the_reference():
    pages = "\n".join(file.read_text() for file in (ROOT / "docs" / "api").glob("*.md"))
    described = set(re.findall(r"^::: eqshard\.([\w.]+)$|^\| `eqshard\.(\w+)` \|", pages, re.MULTILINE))
    described = {name or other for name, other in described}
    names = {name for name in public_names(eqshard) if not inspect.ismodule(getattr(eqshard, name))}
    for module in (eqshard.checkpoint, eqshard.compiler, eqshard.program):
        here = module.__name__.removeprefix("eqshard.")
        names |= {f"{here}.{name}" for name in public_names(module) if not hasattr(eqshard, name)}
    assert names - described == set()
    assert described - names <= {f"checkpoint.{name}" for name in public_names(eqshard.checkpoint)}


def test_names_in_tables_are_there():
    """Names in code that look like ours, in the tables that say what to write."""
    pages = [ROOT / "docs" / "which.md", *(ROOT / "docs" / "from").glob("*.md")]
    for page in pages:
        for row in re.findall(r"^\|(.*)\|$", page.read_text(), re.MULTILINE):
            ours = row.split("|")[-1]
            for text in re.findall(r"`([^`]+)`", ours):
                called = re.match(r"(?:eqshard\.)?((?:checkpoint\.)?[A-Za-z]\w*)(?:\(|$)", text)
                if called is None or called[1] in WORDS or text.endswith("="):
                    continue
                found = eqshard
                for part in called[1].split("."):
                    assert hasattr(found, part), f"{page.name}: {text}"
                    found = getattr(found, part)


# What stands in those tables and is no name of eqshard's own: methods, arguments, steps of a path.
WORDS = "x replace resolve_axis resolve_spec register update shard_map".split()


def test_version_and_changes_agree():
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## (\S+)", changes, re.MULTILINE)[1] == eqshard.__version__


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    pages = {str(file.relative_to(ROOT / "docs")) for file in (ROOT / "docs").rglob("*.md")}
    assert set(re.findall(r": (\S+\.md)$", nav, re.MULTILINE)) == pages
