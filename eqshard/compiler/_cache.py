"""What a compiler said, kept in a folder by what it was asked."""

import gzip
import hashlib
import json
import os
import pathlib
import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import jax

from ._child import compile_elsewhere
from ._targets import Target
from ._worker import Answer


def compile_cached(
    jobs: Sequence[Any], target: Target, processes: int, folder: str | os.PathLike[str] | None
) -> list[Answer]:
    """`compile_elsewhere`, but what is in the folder is not asked again."""
    if folder is None:
        return compile_elsewhere(list(jobs), target, processes)
    where = pathlib.Path(folder)
    where.mkdir(parents=True, exist_ok=True)
    files = [where / f"{job_key(job, target)}.json.gz" for job in jobs]
    known = {file: _read(file) for file in files}
    asked = {file: job for file, job in zip(files, jobs) if known[file] is None}
    for file, answer in zip(asked, compile_elsewhere(list(asked.values()), target, processes) if asked else ()):
        known[file] = answer
        if not answer.failed:
            _write(file, answer)
    return [answer for answer in map(known.__getitem__, files) if answer is not None]


def job_key(job: Any, target: Target) -> str:
    """By the program, not by the lines of the files it came from."""
    module = re.sub(r"(?m)^#loc.*\n| loc\(.*\)", "", job.exported.mlir_module())
    asked = module, job.shardings, job.donated, job.options, str(target), jax.__version__
    return hashlib.sha256(repr(asked).encode()).hexdigest()[:32]


def _read(file: pathlib.Path) -> Answer | None:
    """What the file says; None if it is not there, or torn: then it is asked again."""
    try:
        data = json.loads(gzip.decompress(file.read_bytes()))
        return Answer(**data | {"coordinates": tuple(map(tuple, data["coordinates"]))})
    except (OSError, EOFError, ValueError, TypeError, KeyError, AttributeError, zlib.error):
        return None


def _write(file: pathlib.Path, answer: Answer) -> None:
    part = file.with_suffix(f".{os.getpid()}")
    part.write_bytes(gzip.compress(json.dumps(asdict(answer)).encode()))
    part.replace(file)
