"""Reading eformer's `tensorstore_index.json`. The `*_structure.json` beside it holds pickles, and is never opened."""

import pathlib
import re
from typing import Any

from .._errors import FormatError, MismatchError
from .._tree import did_you_mean, is_dtype_name
from .._value import Reader, short, whole_number
from ._files import check_links, inside, is_file, read_json
from ._stored import Contents, dict_path, StoredLeaf
from ._tensors import context, TensorSource


INDEX = "tensorstore_index.json"


def eformer_contents(folder: pathlib.Path, prefix: str | None) -> Contents:
    """What the index lists below `prefix`; opens no array."""
    file = folder / INDEX
    read = Reader(read_json(file), "checkpoint", str(file))
    if read.get("format", str) != "tensorstore":
        raise FormatError(f"{file}: `format` is {short(read.data['format'])}, not 'tensorstore'.")
    version = read.get("version", str, "1.0")
    if not re.fullmatch(r"[0-2](\.\d{1,9}){1,3}", version):
        raise FormatError(f"{file}: version {short(version)} is not known; 0.x, 1.x and 2.x are.")
    rows, prefix = _rows(read, prefix, str(file))
    check_links(folder, folder)
    shared = context()
    leaves = []
    for number, data in enumerate(rows):
        row = Reader(data, "checkpoint", f"{file}: array {number}")
        name = row.get("path", str)
        inside(folder, name, row.where)
        keys = tuple(name.split("/"))
        keys = keys[1:] if prefix is not None and keys[0] == prefix and len(keys) > 1 else keys
        shape = tuple(whole_number(n, f"{row.where}: shape", most=2**62) for n in row.get("shape", list))
        dtype = row.get("dtype", str)
        if not is_dtype_name(dtype):
            raise FormatError(f"{row.where}: {short(dtype)} is no dtype of an array.")
        driver = "zarr3" if is_file(folder / name / "zarr.json") else "zarr"
        source = TensorSource(folder, name, False, driver, shared)
        leaves.append(StoredLeaf(dict_path(keys), shape, dtype, None, keys, None, dtype, source))
    _check_once(leaves, str(file))
    return Contents(folder, "eformer", tuple(leaves))


def _rows(read: Reader, prefix: str | None, where: str) -> tuple[list[Any], str | None]:
    prefixes = Reader(read.get("prefixes", dict, {}), "checkpoint", f"{where}: prefixes")
    known = [str(name) for name in prefixes.data]
    if prefix is not None and prefix not in known:
        listed = ", ".join(map(repr, known)) or "none"
        raise MismatchError(f"{where}: no prefix {prefix!r}; there are: {listed}." + did_you_mean(prefix, known))
    if prefix is None and "arrays" in read.data:
        return read.get("arrays", list), None
    if prefix is None and len(known) != 1:
        listed = ", ".join(map(repr, known)) or "none"
        raise MismatchError(f"{where}: pass `prefix`, which says what to read; there are: {listed}.")
    prefix = known[0] if prefix is None else prefix
    return prefixes.get(prefix, list), prefix


def _check_once(leaves: list[StoredLeaf], where: str) -> None:
    seen: set[str] = set()
    for leaf in leaves:
        if leaf.path in seen:
            raise FormatError(f"{where}: `{leaf.path}` is listed twice.")
        seen.add(leaf.path)
