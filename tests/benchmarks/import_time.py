"""`import eqshard` against `import equinox`, which it imports: seconds of CPU in fresh processes, in turns.

`python tests/benchmarks/import_time.py` fails if it takes more than 1.15 times as long.
"""

import resource
import subprocess
import sys
import tempfile

import jax
from _timing import ratio, table


LIMIT, ROUNDS = 1.15, 15


def seconds(module: str, compiled: str) -> float:
    """Seconds of CPU, which other work on the machine disturbs less than the clock on the wall."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-E", "-X", f"pycache_prefix={compiled}", "-c", f"import {module}"],
        check=True,
        cwd=tempfile.gettempdir(),
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    modules = ("equinox", "eqshard")
    with tempfile.TemporaryDirectory() as compiled:  # the same for both, whatever was compiled before
        taken = {module: [] for module in modules}
        for i in range(ROUNDS + 1):
            for module in modules:
                found = seconds(module, compiled)
                taken[module] += [found] if i else []
    found = ratio(taken, "eqshard", "equinox")
    jax.config.update("jax_platforms", "cpu")
    rows = [["import", *(min(taken[module]) for module in modules[::-1]), found]]
    table("Importing", ["", "eqshard, best s", "equinox, best s", "median ratio"], rows)
    if found > LIMIT:
        sys.exit(f"`import eqshard` takes {found:.2f} times as long as `import equinox`, not at most {LIMIT}")


if __name__ == "__main__":
    main()
