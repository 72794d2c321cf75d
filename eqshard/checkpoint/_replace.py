"""Replacing one set of safetensors files by another: the index is what makes the change, at once."""

import json
import os
import pathlib
import re
import secrets
from collections.abc import Mapping, Sequence

import numpy as np

from .._errors import FormatError, ShardingError
from ._files import is_file, read_json
from ._library import has_library, library
from ._safetensors_contents import HF_INDEX, safetensors_contents


_SINGLE = "model.safetensors"
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?(\.v\d+)?\.safetensors")


def file_names(n: int) -> list[str]:
    """The names of the files of a save, as Hugging Face has them."""
    return [_SINGLE] if n == 1 else [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]


def failed(target: pathlib.Path, error: BaseException) -> ShardingError:
    """The error for files that cannot be written, with its cause."""
    problem = ShardingError(f"cannot save {target}: {error}. What was there before is as it was.")
    problem.__cause__ = error
    return problem


def write_beside(
    folder: pathlib.Path, arrays: dict[str, np.ndarray], metadata: Mapping[str, str] | None
) -> pathlib.Path:
    """Writes a file under a name that no reader looks for."""
    numpy, error = library("safetensors.numpy"), library("safetensors").SafetensorError
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f".{secrets.token_hex(6)}.safetensors.tmp"
    try:
        numpy.save_file(arrays, str(file), dict(metadata or {}))
    except (OSError, ValueError, error) as cause:
        file.unlink(missing_ok=True)
        raise OSError(str(cause)) from cause
    return file


def put_in_place(
    folder: pathlib.Path, files: Sequence[pathlib.Path], names: list[str], sizes: Sequence[Mapping[str, int]]
) -> list[str]:
    """Gives the files their names, and removes those of an older save; returns the names.

    At every moment a reader of the folder finds the old set or the new one. A file alone takes the place of another.
    Otherwise the index names the files of the old set until it names those of the new.

    **Arguments:**

    - `sizes`: the bytes of each tensor, by its name, for each of the files.
    """
    lock = _lock(folder)
    try:
        if len(files) == 1 and names[0] != _SINGLE:
            os.replace(files[0], folder / names[0])
            return names
        there = {file.name for file in folder.glob("*.safetensors") if _OURS.fullmatch(file.name)}
        if there and not is_file(folder / HF_INDEX):
            _write_index(folder, _tensors_of(folder))
        live = _indexed(folder) & there
        _remove(folder, there - live)
        if names == [_SINGLE] and live <= {_SINGLE}:
            _remove(folder, {HF_INDEX})
            os.replace(files[0], folder / _SINGLE)
            return names
        if live & {*names}:
            names = _free_names(live, names)
        for file, name in zip(files, names):
            os.replace(file, folder / name)
        _write_index(folder, dict(zip(names, sizes)))
        _remove(folder, live)
        if names == [_SINGLE]:
            _remove(folder, {HF_INDEX})
    finally:
        if lock is not None:
            os.close(lock)
    return names


def _free_names(there: set[str], names: list[str]) -> list[str]:
    number = 2
    while True:
        found = [f"{name.removesuffix('.safetensors')}.v{number}.safetensors" for name in names]
        if not there & {*found}:
            return found
        number += 1


def _remove(folder: pathlib.Path, names: set[str]) -> None:
    for name in sorted(names):
        (folder / name).unlink(missing_ok=True)


def _indexed(folder: pathlib.Path) -> set[str]:
    """The files that the index names; none if there is no index that can be read."""
    try:
        found = read_json(folder / HF_INDEX).get("weight_map", {}).values()
        return {name for name in found if isinstance(name, str)}
    except (FormatError, AttributeError):
        return set()


def _tensors_of(folder: pathlib.Path) -> dict[str, dict[str, int]]:
    """Which tensors each file of a folder without an index has; of files that cannot be read nothing is kept."""
    found: dict[str, dict[str, int]] = {}
    try:
        for leaf in safetensors_contents(folder).leaves:
            found.setdefault(leaf.source.file.name, {})[leaf.path] = leaf.nbytes
    except FormatError:
        return {}
    return found


def _write_index(folder: pathlib.Path, files: Mapping[str, Mapping[str, int]]) -> None:
    total = sum(size for tensors in files.values() for size in tensors.values())
    where = {tensor: name for name, tensors in files.items() for tensor in tensors}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2)
    beside = folder / f".{secrets.token_hex(6)}.json.tmp"
    try:
        beside.write_text(text)
        os.replace(beside, folder / HF_INDEX)
    finally:
        beside.unlink(missing_ok=True)


def _lock(folder: pathlib.Path) -> int | None:
    """Waits until no other writer changes what the folder holds. The lock ends when the file is closed."""
    if not has_library("fcntl"):
        return None
    fcntl = library("fcntl")
    opened = os.open(folder, os.O_RDONLY)
    fcntl.flock(opened, fcntl.LOCK_EX)
    return opened
