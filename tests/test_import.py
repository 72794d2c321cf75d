"""`import eqshard`: quick, without the extras, and whole all the same."""

import ast
import pathlib
import subprocess
import sys

import pytest

import eqshard


EXTRAS = ("orbax", "tensorstore", "safetensors", "rich", "tqdm", "libtpu", "optax", "scipy.optimize")
SOURCE = pathlib.Path(eqshard.__file__)


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_no_extra_is_imported():
    code = f"import sys, eqshard; print(*[m for m in {EXTRAS} if m in sys.modules and m not in before])"
    assert python("import sys, equinox; before = set(sys.modules); " + code).split() == []


def test_parts_are_imported_when_asked_for():
    """Also the report, whose function is called as the thing is: a picture of a mesh must not hide it."""
    code = """
import sys, eqshard
parts = ["eqshard.checkpoint", "eqshard.compiler", "eqshard.program", "eqshard._report"]
assert not [part for part in parts if part in sys.modules]
mesh = eqshard.MeshSpec(data=2)
mesh._repr_html_()
assert callable(eqshard.report) and "eqshard._report" in sys.modules
assert eqshard.checkpoint.save and eqshard.StepPlan and not [part for part in parts if part not in sys.modules]
"""
    python(code)


def test_what_comes_later_is_what_type_checkers_see():
    """The names are written twice: for a type checker as imports, and in the table that finds them."""
    (block,) = [
        node
        for node in ast.parse(SOURCE.read_text()).body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    ]
    seen = {(node.module or alias.name, alias.name) for node in block.body for alias in node.names}
    table = {(module, name) for module, names in eqshard._LATER.items() for name in names.split()}
    modules = {module for module in eqshard._LATER if not module.startswith("_")}
    assert seen == table | {(module, module) for module in modules}
    assert {name for _, name in seen} <= set(dir(eqshard))
    for _, name in seen:
        assert getattr(eqshard, name) is not None


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="module 'eqshard' has no attribute 'auto_plann'"):
        eqshard.auto_plann
