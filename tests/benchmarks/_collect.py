"""Runs benchmarks one after the other, and writes one Markdown table: machine, versions, ratios.

`python tests/benchmarks/_collect.py --to benchmarks.md import_time apply`; without names, all that do not take hours.
Exit code 1 if one of them is over its limit; the table is written all the same.
"""

import argparse
import importlib.metadata
import os
import pathlib
import platform
import re
import subprocess
import sys
import time


HERE = pathlib.Path(__file__).parent
HOURS = ("layouts", "zoo")
FAILED = "-- failed --"  # what comes after it is no result
PACKAGES = "eqshard jax jaxlib equinox numpy optax orbax-checkpoint eformer datarax haliax flax scalax".split()
RATIO = re.compile(r"(?P<text>.*[^\d.])(?<![\d.])(?P<ratio>\d+(?:\.\d+)?)x\b")  # the last of a line
AFTER_COLON = re.compile(r"\s*(?P<text>[^:|]+):\s+(?P<ratio>\d+\.\d+)(?=\s*$|\s+\()")
IN_BRACKETS = re.compile(r"([a-z_][\w, ]*?) [\d.]+ \((\d+\.\d+)x\)")  # several on a line: name seconds (ratio)


def ratios(output: str) -> list[tuple[str, str]]:
    """What is compared, and the ratio, of each row of a table and each line that has one."""
    found, column = [], None
    for line in output.partition(f"\n{FAILED}\n")[0].splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.lstrip().startswith("|"):
            if column is None:
                column = next((i for i, title in enumerate(cells) if "ratio" in title or " / " in title), None)
            elif column < len(cells) and re.fullmatch(r"\d+(\.\d+)?(e[+-]?\d+)?", cells[column]):
                found.append((" ".join(cells[: 2 if column > 3 else 1]), cells[column]))
            continue
        column = None
        many = IN_BRACKETS.findall(line)
        if many:
            what = line.partition(":")[0].strip()
            found += [(f"{what}: {name.split('  ')[-1].strip()}", ratio) for name, ratio in many]
            continue
        hit = RATIO.match(line) or AFTER_COLON.match(line)
        if hit is not None:
            found.append((" ".join(hit["text"].split()).rstrip(" :("), hit["ratio"]))
    return found


def run(name: str) -> tuple[str, int, float]:
    """The output of a benchmark, its exit code, and how long it took."""
    start = time.perf_counter()
    print(f"{name} …", file=sys.stderr)
    done = subprocess.run([sys.executable, HERE / f"{name}.py"], capture_output=True, text=True)
    said = done.stdout + ("" if done.returncode == 0 else f"\n{FAILED}\n{done.stderr[-2000:]}")
    return said, done.returncode, time.perf_counter() - start


def versions() -> str:
    """The packages that are installed, peers among them."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} not installed")
    return ", ".join(found)


def page(results: dict[str, tuple[str, int, float]]) -> str:
    """One table of all ratios, with the whole output of each benchmark below it."""
    lines = [
        "# Benchmarks",
        "",
        f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}, Python {platform.python_version()}",
        "",
        versions(),
        "",
        "| benchmark | compared | ratio | all of the benchmark within limits |",
        "|---|---|---|---|",
    ]
    for name, (output, code, _) in results.items():
        held = "yes" if code == 0 else "**no**"
        rows = ratios(output) or [("(no ratio)", "")]
        lines += [f"| {name} | {text.replace('|', '/')} | {ratio} | {held} |" for text, ratio in rows]
    for name, (output, code, seconds) in results.items():
        lines += ["", f"## {name}", "", f"exit code {code}, {seconds:.0f} s", "", "```text", output.strip(), "```"]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--to", type=pathlib.Path, default=pathlib.Path("benchmarks.md"))
    a = parser.parse_args()
    every = sorted(path.stem for path in HERE.glob("[a-z]*.py") if path.stem not in HOURS)
    results = {name: run(name) for name in a.names or every}
    a.to.write_text(page(results))
    print(page(results).split("\n## ")[0])
    return int(any(code for _, code, _ in results.values()))


if __name__ == "__main__":
    sys.exit(main())
