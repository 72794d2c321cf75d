"""What is released agrees with itself: sessions, entry point, extras, the table of benchmarks."""

import importlib
import pathlib
import re
import tomllib

from benchmarks._collect import page, ratios


ROOT = pathlib.Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_ci_runs_sessions_that_there_are():
    there = set(re.findall(r"^@nox\.session.*?\ndef (\w+)", (ROOT / "noxfile.py").read_text(), re.MULTILINE))
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    asked = re.findall(r"\{session: (\w+)", workflow)
    assert {"lint", "types", "tests", "tests_oldest", "tests_newest", "docs", "build"} == set(asked) <= there
    for line in re.findall(r"nox -s ([a-z_ ]+)$", workflow, re.MULTILINE):
        assert set(line.split()) <= there


def test_readme_runs_sessions_that_there_are():
    there = (ROOT / "noxfile.py").read_text()
    for session in re.findall(r"nox -s (\w+)", (ROOT / "README.md").read_text()):
        assert f"def {session}(" in there


def test_the_command_is_there():
    module, _, name = PROJECT["project"]["scripts"]["eqshard"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_extras_are_those_that_errors_speak_of():
    said = set()
    for file in (ROOT / "eqshard").rglob("*.py"):
        said |= set(re.findall(r"eqshard\[(\w+)\]", file.read_text()))
    assert said == set(PROJECT["project"]["optional-dependencies"])


def test_ratios_are_found_in_what_benchmarks_print():
    output = """
Planning (2 cores)

| shapes | leaves | auto_plan, µs | eformer, µs | time / eformer's |
| ------ | ------ | ------------- | ----------- | ---------------- |
| mixed  | 100    | 12.1          | 24.2        | 0.5              |

    step: 0.990   (69.810 ms with plans, 70.498 ms without)
 100 leaves: auto_plan 1.5 ms  validate 6.2 (4.13x)  analyze, tree 2.3 (1.52x)
a batch of many leaves                 120 us        100 us   1.20x
HTML page of 10000 different leaves: 1.53 MB in 1.43 s
"""
    assert ratios(output) == [
        ("mixed 100", "0.5"),
        ("step", "0.990"),
        ("100 leaves: validate", "4.13"),
        ("100 leaves: analyze, tree", "1.52"),
        ("a batch of many leaves 120 us 100 us", "1.20"),
    ]
    text = page({"plan": (output, 0, 1.0), "slow": ("x: 2.50", 1, 1.0)})
    assert "| plan | mixed 100 | 0.5 | yes |" in text and "| slow | x | 2.50 | **no** |" in text
