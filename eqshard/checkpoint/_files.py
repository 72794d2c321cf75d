"""Files of a checkpoint that may be broken or hostile: what is read lies inside, is a file, and is not endless."""

import json
import operator
import os
import pathlib
import re
import stat
from typing import Any, SupportsIndex

import jax
import numpy as np

from .._errors import FormatError, ShardingError
from .._tree import size_text
from .._value import short


PathLike = str | os.PathLike[str]
Whole = SupportsIndex | np.ndarray | jax.Array
"""A whole number of any kind."""

MOST_JSON = 512 * 2**20
"""Bytes of the largest JSON file that is read: a plan of a million leaves takes half of it."""


def local_path(path: PathLike) -> pathlib.Path:
    """`path` as an absolute path of this machine's file system."""
    text = os.fspath(path)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        raise ShardingError(f"{text!r} is a URL: checkpoints are read and written through the file system; mount it.")
    if not text or "\0" in text:
        raise ShardingError(f"{text!r} is no path.")
    return pathlib.Path(os.path.abspath(text))


def step_number(step: Any) -> int:
    """`step` as an int; any kind of integer will do, and nothing else."""
    number = integer(step)
    if number is None or not 0 <= number < 10**18:
        raise ShardingError(f"`step={short(step)}` is not a step: it must be an integer from 0 to 10**18 - 1.")
    return number


def count_from_one(name: str, value: Any) -> int:
    """`value` as an int of at least 1."""
    number = integer(value)
    if number is None or number < 1:
        raise ShardingError(f"`{name}={short(value)}`: it must be an integer, and counts from 1.")
    return number


def integer(value: Any) -> int | None:
    """`value` as an int if it is an integer of any kind; else None. A bool is none."""
    if isinstance(value, bool) or getattr(value, "dtype", None) == np.dtype(bool):
        return None
    try:
        return operator.index(value)
    except TypeError:  # also of a value that is being traced
        return None


def inside(root: pathlib.Path, name: str, where: str) -> pathlib.Path:
    """The file that an index calls `name`, which must lie below `root`, links followed."""
    parts = name.split("/")
    if any(part in ("", ".", "..") or "\\" in part or "\0" in part for part in parts) or os.path.isabs(name):
        raise FormatError(f"{where}: {short(name)} does not name a file inside the checkpoint.")
    if any(len(os.fsencode(part)) > 255 for part in parts):
        raise FormatError(f"{where}: {short(name)} is too long for a file's name.")
    return _not_leaving(root, root.joinpath(*parts))


def _not_leaving(root: pathlib.Path, file: pathlib.Path) -> pathlib.Path:
    real, home = os.path.realpath(file), os.path.realpath(root)
    if real != home and not real.startswith(home.rstrip(os.sep) + os.sep):
        raise FormatError(f"{file}: a link that leads out of the checkpoint; it is not followed.")
    return file


def check_links(root: pathlib.Path, folder: pathlib.Path) -> None:
    """Refuses a folder in which a link leads out of `root`."""
    waiting = [folder]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_symlink():
                        _not_leaving(root, pathlib.Path(entry.path))
                    elif entry.is_dir(follow_symlinks=False):
                        waiting.append(pathlib.Path(entry.path))
        except OSError as error:
            raise FormatError(f"cannot read the checkpoint: {error}.") from error


def is_file(path: pathlib.Path) -> bool:
    """Whether `path` is a plain file; a link that leads nowhere, or in a circle, is none."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except PermissionError as error:
        raise denied(path, error) from error
    except (OSError, ValueError):
        return False


def folders(path: pathlib.Path) -> list[str]:
    """The names of the folders in `path`; none if it is no folder."""
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())
    except PermissionError as error:
        raise denied(path, error) from error
    except OSError:
        return []


def denied(path: pathlib.Path, error: OSError) -> ShardingError:
    """The error for a file that this user may not read."""
    return ShardingError(f"cannot read {path}: {error.strerror}. To fix this, give this user the right to read it.")


def read_json(path: pathlib.Path) -> Any:
    """The content of a JSON file."""
    try:
        if not is_file(path):
            raise FormatError(f"{path} is no file.")
        size = os.stat(path).st_size
        if size > MOST_JSON:
            raise FormatError(f"{path}: {size_text(size)} of JSON; at most {size_text(MOST_JSON)} are read.")
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error}.") from error


def parse_json(text: bytes | str, where: str) -> Any:
    """What a JSON text says."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: not a JSON text ({short(str(error))}).") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
