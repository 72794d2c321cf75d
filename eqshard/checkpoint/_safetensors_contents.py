"""Reading what safetensors files hold: one file, or a folder with an index as Hugging Face writes it."""

import os
import pathlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes  # noqa: F401  gives numpy its small floats
import numpy as np

from .._errors import FormatError
from .._tree import shown
from .._value import Reader, short, whole_number
from ._files import inside, is_file, MOST_JSON, parse_json, read_json
from ._library import library
from ._stored import Contents, StoredLeaf


HF_INDEX = "model.safetensors.index.json"

DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}


@dataclass(frozen=True)
class FileSource:
    """Where the bytes of one array are: from `start` on in a file."""

    file: pathlib.Path
    start: int
    shape: tuple[int, ...]
    dtype: str

    def view(self, path: str) -> np.ndarray:
        """The array as a view of the file: only what is taken of it is read."""
        try:
            if 0 in self.shape:
                return np.zeros(self.shape, self.dtype)
            return np.memmap(self.file, np.dtype(self.dtype), "r", offset=self.start, shape=self.shape)
        except (OSError, ValueError) as error:
            raise FormatError(f"cannot read {shown(path)} from {self.file}: {error}.") from None


def is_safetensors(path: pathlib.Path) -> bool:
    """Whether `path` is a safetensors file, or a folder that has some."""
    if path.name.endswith((".safetensors", ".safetensors.index.json")):
        return is_file(path)
    return bool(path.is_dir() and (is_file(path / HF_INDEX) or any(path.glob("*.safetensors"))))


def safetensors_contents(path: pathlib.Path, files: Iterable[pathlib.Path] | None = None) -> Contents:
    """What a file, a folder or an index holds; `files` names the very files instead."""
    named = None
    if files is None:
        named, files = _files(path)
    leaves: dict[str, StoredLeaf] = {}
    for file in files:
        for leaf in _file_leaves(file):
            if leaf.path in leaves:
                raise FormatError(f"{file}: {shown(leaf.path)} is in another file too.")
            leaves[leaf.path] = leaf
    if named is not None:
        wrong = [n for n, file in named.items() if n not in leaves or leaves[n].source.file != file]
        if wrong:
            raise FormatError(f"{path}: the index says that {named[wrong[0]]} has {short(wrong[0])}; it has not.")
    return Contents(path, "safetensors", tuple(leaves.values()))


def _files(path: pathlib.Path) -> tuple[dict[str, pathlib.Path] | None, list[pathlib.Path]]:
    """What the index says where there is one, and the files to read."""
    index = path if path.name.endswith(".index.json") else path / HF_INDEX
    if path.name.endswith(".safetensors") and is_file(path):
        return None, [path]
    if not is_file(index):
        return None, sorted(path.glob("*.safetensors"))
    folder = index.parent
    read = Reader(read_json(index), "checkpoint", str(index))
    named = {}
    for name, file in read.get("weight_map", Mapping).items():
        if not isinstance(file, str) or "/" in file or not file.endswith(".safetensors"):
            raise FormatError(f"{index}: {short(name)} is in {short(file)}, which is no safetensors file beside it.")
        # Files of a Hugging Face cache are links out of the folder, which is the user's own; only names are checked.
        named[str(name)] = folder / file if os.path.islink(folder / file) else inside(folder, file, str(index))
    return named, sorted(set(named.values()))


def _file_leaves(file: pathlib.Path) -> list[StoredLeaf]:
    start, header = _header(file)
    leaves = []
    for name, data in header.items():
        if name == "__metadata__":
            continue
        row = Reader(data, "checkpoint", f"{file}: {short(name)}")
        code = row.get("dtype", str)
        if code not in DTYPES:
            raise FormatError(f"{row.where}: dtype {short(code)} is not known; known are {', '.join(DTYPES)}.")
        shape = tuple(whole_number(n, f"{row.where}: shape") for n in row.get("shape", list))
        begin, end = (whole_number(n, f"{row.where}: data_offsets") for n in row.get("data_offsets", list))
        dtype = DTYPES[code]
        source = FileSource(file, start + begin, shape, dtype)
        leaf = StoredLeaf(name, shape, dtype, None, tuple(name.split(".")), None, dtype, source)
        if leaf.nbytes != end - begin:
            raise FormatError(f"{row.where}: {leaf.type} takes {leaf.nbytes} bytes; the file has {end - begin}.")
        leaves.append(leaf)
    return leaves


def _header(file: pathlib.Path) -> tuple[int, Mapping[str, Any]]:
    """Where the data starts, and the header, which safetensors itself has checked: offsets, overlaps, length."""
    if not is_file(file):
        raise FormatError(f"{file} is no file.")
    safetensors = library("safetensors")
    try:
        with safetensors.safe_open(str(file), framework="np"):
            pass
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > min(MOST_JSON, os.stat(file).st_size):
                raise FormatError(f"{file}: a header of {length} bytes.")
            text = opened.read(length)
    except (safetensors.SafetensorError, OSError) as error:
        raise FormatError(f"cannot read {file}: {short(str(error))}.") from None
    return 8 + length, Reader(parse_json(text, str(file)), "checkpoint", str(file)).data
