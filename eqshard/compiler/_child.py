"""Starting children that compile, and collecting their answers."""

import pathlib
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from ._targets import check_available, Target, TargetError
from ._worker import Answer, Job


def compile_elsewhere(jobs: Sequence[Job], target: Target, processes: int = 1) -> list[Answer]:
    """Compiles each job for `target`, in `processes` child processes that share the jobs.

    This process keeps its devices and its environment.

    **Raises:**

    - `TargetError`: the compiler is not installed, does not know the target, or died.
    """
    check_available(target)
    count = max(1, min(processes, len(jobs)))
    with tempfile.TemporaryDirectory(prefix="eqshard-") as root:
        folders = [pathlib.Path(root) / str(k) for k in range(count)]
        for k, folder in enumerate(folders):
            folder.mkdir()
            (folder / "target.pkl").write_bytes(pickle.dumps(target))
            for i in range(k, len(jobs), count):
                (folder / f"job{i:06d}.pkl").write_bytes(pickle.dumps(jobs[i]))
        children = [_start(folder) for folder in folders]
        try:
            for child, folder in zip(children, folders):
                if child.wait() != 0:
                    raise TargetError(_died(target, child.returncode, (folder / "stderr").read_text(errors="replace")))
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
                    child.wait()
        return [pickle.loads((folders[i % count] / f"job{i:06d}.answer").read_bytes()) for i in range(len(jobs))]


def _start(folder: pathlib.Path) -> "subprocess.Popen[bytes]":
    # The child must import what this process imports, from where this process found it.
    code = f"import sys; sys.path[:] = {sys.path!r}\nfrom eqshard.compiler._worker import main; main({str(folder)!r})"
    with (folder / "stderr").open("wb") as stderr:
        return subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr
        )


def _died(target: Target, status: int, stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if line.strip()]
    words = next((line for line in reversed(lines) if "Error" in line or "error" in line), lines[-1] if lines else "")
    return f'the compiler process for "{target}" ended with status {status}: {words[:1000]}'
