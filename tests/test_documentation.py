"""Every example in a docstring, a page or the README runs; every script in examples/ passes its own claim."""

import ast
import pathlib
import re
import subprocess
import sys
import textwrap

import jax
import pytest


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
