"""Reading a plan against making it, on 100 to 100,000 leaves; and the HTML page of 10,000 leaves that do not fold.

`python tests/benchmarks/read_plan.py` prints one line a size and fails if `validate` or `analyze` takes 3 times as long
as `auto_plan` on 100,000 leaves, each with the tree and on a plan that was never read before.
"""

import gc
import statistics
import time

import jax

import eqshard


S = jax.ShapeDtypeStruct
MESH = eqshard.MeshSpec(data=2, fsdp=8, tp=4)
SIZES = (100, 1_000, 10_000, 100_000)
TIMES = 3
LIMIT = 3.0


def layers(n: int) -> list[dict[str, S]]:
    """About 50 kinds of leaves, as in a large model."""
    widths = [128 * (1 + i % 25) for i in range(n // 2)]
    return [{"w": S((512, width), "bfloat16"), "b": S((width,), "float32")} for width in widths]


def seconds(fn, prepare):
    """The median of a few runs, each on arguments that were made afresh."""
    taken = []
    for _ in range(TIMES):
        args = prepare()
        gc.collect()
        start = time.perf_counter()
        fn(*args)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def compare(n: int) -> dict[str, float]:
    tree = layers(n)
    made = seconds(lambda: eqshard.auto_plan(tree, MESH), lambda: ())
    fresh = lambda: (eqshard.auto_plan(tree, MESH),)
    read = {
        "validate": lambda plan: eqshard.validate(plan),
        "validate, tree": lambda plan: eqshard.validate(plan, tree),
        "analyze": lambda plan: eqshard.analyze(plan),
        "analyze, tree": lambda plan: eqshard.analyze(plan, tree),
        "report": lambda plan: eqshard.report(plan),
    }
    taken = {name: seconds(fn, fresh) for name, fn in read.items()}
    others = "  ".join(f"{name} {1e3 * t:.1f} ({t / made:.2f}x)" for name, t in taken.items())
    print(f"{n:>7} leaves: auto_plan {1e3 * made:.1f} ms  {others}")
    return {name: t / made for name, t in taken.items()}


def page(n: int = 10_000) -> None:
    tree = {f"block{i // 100}": {} for i in range(0, n, 100)}
    for i in range(n):
        tree[f"block{i // 100}"][f"weight{i}x"] = S((64, i + 1), "float32")
    plan = eqshard.auto_plan(tree, MESH)
    start = time.perf_counter()
    text = eqshard.report(plan, format="html")
    print(f"HTML page of {n} different leaves: {len(text) / 1e6:.2f} MB in {time.perf_counter() - start:.2f} s")


def main() -> None:
    ratios = [compare(n) for n in SIZES][-1]
    page()
    for name, ratio in ratios.items():
        if name != "report":
            assert ratio < LIMIT, f"{name} takes {ratio:.2f} times as long as auto_plan, not under {LIMIT}"


if __name__ == "__main__":
    main()
