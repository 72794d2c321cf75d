"""Starts real processes that form one JAX runtime over loopback, runs a function in each, and brings back the results.

```python
def body(tree):                      # at the top level of a module; runs in every process
    return jax.process_index()

assert run_processes(body, 2, devices_each=4, args=(tree,)) == [0, 1]
```
"""

import dataclasses
import inspect
import os
import pathlib
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any


HERE = pathlib.Path(__file__).parent
GRACE = 5.0  # seconds that the others get to end by themselves once a process has failed


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one process ended. `value` is what the function returned; `returncode` is None if it had to be killed."""

    index: int
    returncode: int | None
    value: Any
    output: str
    seconds: float
    ended: float
    """By the clock, as `time.time()`."""

    def __str__(self) -> str:
        end = "still ran, and was killed" if self.returncode is None else f"exit code {self.returncode}"
        return f"--- process {self.index}: {end} after {self.seconds:.1f} s\n{self.output[-6000:].rstrip()}"


class ProcessesFailed(AssertionError):
    """At least one process failed or had to be killed; the message has the output of every one."""


def run_processes(
    fn: Callable[..., Any],
    n: int,
    devices_each: int = 4,
    *,
    args: tuple[Any, ...] = (),
    timeout: float = 120,
    heartbeat: int = 100,
    checked: bool = True,
) -> list[Any]:
    """Runs `fn(*args)` in each of `n` processes of `devices_each` CPU devices; returns what each returned, in order.

    `fn` stands at the top level of a module; `args` and results are pickled. With `n=1` there is no distributed
    runtime. `checked`: whether types are checked, warnings are errors and promotion is strict, as in the tests.
    Raises `ProcessesFailed` with everybody's output as soon as one fails, and at the time limit.
    """
    outcomes = run_outcomes(
        fn, n, devices_each, args=args, timeout=timeout, heartbeat=heartbeat, together=True, checked=checked
    )
    if any(o.returncode != 0 for o in outcomes):
        raise ProcessesFailed(f"{n} processes of `{fn.__name__}`:\n" + "\n".join(map(str, outcomes)))
    return [o.value for o in outcomes]


def run_outcomes(
    fn: Callable[..., Any],
    n: int,
    devices_each: int = 4,
    *,
    args: tuple[Any, ...] = (),
    timeout: float = 120,
    heartbeat: int = 100,
    together: bool = False,
    checked: bool = True,
) -> list[Outcome]:
    """As `run_processes`, but failures are data. `together`: the failure of one soon ends all."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as held:
        # The bound socket keeps others from being given this port; gRPC may share it, as it asks to reuse ports.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        where = pathlib.Path(folder)
        source = inspect.getsourcefile(inspect.unwrap(fn))
        job = (source, fn.__qualname__, args, n, devices_each, held.getsockname()[1], heartbeat, checked)
        (where / "job").write_bytes(pickle.dumps(job))
        started = time.monotonic()
        running = [_start(where, i) for i in range(n)]
        begun = time.time()
        ends = _wait(running, started, timeout, together)
        return [_outcome(where, i, *end, begun) for i, end in enumerate(ends)]


def _start(where: pathlib.Path, i: int) -> subprocess.Popen:
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}", "PYTHONUNBUFFERED": "1"}
    with open(where / f"output{i}", "wb") as output:
        command = [sys.executable, str(HERE / "process_main.py"), str(where), str(i)]
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True)


def _wait(
    running: list[subprocess.Popen], started: float, timeout: float, together: bool
) -> list[tuple[int | None, float]]:
    """The exit code of each, None if it had to be killed, and after how many seconds it ended."""
    ends: dict[int, tuple[int | None, float]] = {}
    limit = started + timeout
    try:
        while len(ends) < len(running) and time.monotonic() < limit:
            for i, p in enumerate(running):
                if i not in ends and p.poll() is not None:
                    ends[i] = p.returncode, time.monotonic() - started
                    if together and p.returncode != 0:
                        limit = min(limit, time.monotonic() + GRACE)
            time.sleep(0.02)
    finally:
        for i, p in enumerate(running):
            if i not in ends:
                os.killpg(p.pid, signal.SIGKILL)
                p.wait()
                ends[i] = None, time.monotonic() - started
    return [ends[i] for i in range(len(running))]


def _outcome(where: pathlib.Path, i: int, code: int | None, seconds: float, begun: float) -> Outcome:
    result = where / f"result{i}"
    value = pickle.loads(result.read_bytes()) if result.exists() else None
    return Outcome(i, code, value, (where / f"output{i}").read_text(errors="replace"), seconds, begun + seconds)
