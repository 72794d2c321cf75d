"""Reading what an Orbax checkpoint says of itself: `_METADATA`, `_sharding`, `array_metadatas`."""

import base64
import binascii
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec

from .._errors import FormatError
from .._spec import spec_from_list
from .._value import Reader, short
from ._encode import key_words
from ._files import check_links, is_file, parse_json, read_json
from ._stored import Contents, dict_path, StoredLeaf
from ._tensors import context, open_tensors, TensorSource


METADATA = "_METADATA"

_ARRAYS = ("jax.Array", "np.ndarray", "scalar")
_KEY_IMPL = "random_key_impl"


def orbax_contents(folder: pathlib.Path) -> Contents:
    """What the folder with `_METADATA` holds; opens every array, reads none."""
    names, ocdbt, driver = array_names(folder)
    check_links(folder, folder)
    if ocdbt and not is_file(folder / "manifest.ocdbt"):
        raise FormatError(f"{folder}: `manifest.ocdbt` is missing: not a complete checkpoint.")
    shared = context()
    sources = [(dict_path(keys), TensorSource(folder, name, ocdbt, driver, shared)) for keys, name in names]
    stores = open_tensors(sources)
    specs, impls = _saved_specs(folder), _key_impls(folder)
    leaves = []
    for (keys, name), (path, source), store in zip(names, sources, stores):
        shape, dtype, spec, impl = tuple(store.shape), store.dtype.name, specs.get(name), impls.get(name)
        if impl is not None:
            shape, dtype, spec = _of_keys(shape, impl, spec, f"{folder}: `{path}`")
        text = tuple(str(k) for k in keys)
        leaves.append(StoredLeaf(path, shape, dtype, spec, text, impl, store.dtype.name, source))
    return Contents(folder, "orbax", tuple(leaves))


def _of_keys(
    shape: tuple[int, ...], impl: str, spec: PartitionSpec | None, where: str
) -> tuple[tuple[int, ...], str, PartitionSpec | None]:
    """Keys are stored as their words, which are one dimension more."""
    dtype, words = key_words(impl, where)
    rank = len(shape) - len(words)
    if rank < 0 or shape[rank:] != words:
        raise FormatError(f"{where}: keys of {impl} are {words} words each, but the array is {shape}.")
    return shape[:rank], dtype, None if spec is None else PartitionSpec(*tuple(spec)[:rank])


def array_names(folder: pathlib.Path) -> tuple[list[tuple[tuple[str | int, ...], str]], bool, str]:
    """(keys, name in the store) of each array; whether it is a database; the driver."""
    read = Reader(read_json(folder / METADATA), "checkpoint", f"{folder / METADATA}")
    ocdbt = read.get("use_ocdbt", bool, is_file(folder / "manifest.ocdbt"))
    driver = "zarr3" if read.get("use_zarr3", bool, False) else "zarr"
    found: dict[str, tuple[str | int, ...]] = {}
    for text, data in read.get("tree_metadata", Mapping).items():
        entry = Reader(data, "checkpoint", f"{folder / METADATA}: {short(text)}")
        value = Reader(entry.get("value_metadata", Mapping), "checkpoint", entry.where)
        if value.get("value_type", str) not in _ARRAYS or value.get("skip_deserialize", bool, False):
            continue  # text, None, and empty containers
        keys = tuple(_key(k, entry.where) for k in entry.get("key_metadata", list))
        name = ".".join(map(str, keys))
        if name in found:
            raise FormatError(f"{entry.where}: two leaves are stored as {short(name)}; one has overwritten the other.")
        if not ocdbt:
            _check_name(name, entry.where)
        found[name] = keys
    return [(keys, name) for name, keys in found.items()], ocdbt, driver


def _key(data: Any, where: str) -> str | int:
    read = Reader(data, "checkpoint", where)
    key = read.get("key", (str, int))
    if read.get("key_type", int) == 1 and isinstance(key, str) and re.fullmatch(r"\d{1,9}", key):
        return int(key)  # of a list or tuple
    return str(key)


def _check_name(name: str, where: str) -> None:
    if not name or "/" in name or "\\" in name or "\0" in name or name in (".", "..") or len(name.encode()) > 255:
        raise FormatError(f"{where}: {short(name)} does not name a folder inside the checkpoint.")


def _saved_specs(folder: pathlib.Path) -> dict[str, PartitionSpec]:
    """The layouts that the arrays were saved from, by their name in the store."""
    file = folder / "_sharding"
    if not is_file(file):
        return {}
    specs = {}
    for coded, text in Reader(read_json(file), "checkpoint", str(file)).data.items():
        where = f"{file}: {short(coded)}"
        try:
            name = base64.b64decode(str(coded).encode(), validate=True).decode()
        except (binascii.Error, ValueError):
            raise FormatError(f"{where}: the name of an array must be base64.") from None
        if not isinstance(text, str):
            raise FormatError(f"{where}: expected a text, got {short(text)}.")
        read = Reader(parse_json(text, where), "checkpoint", where)
        if read.get("sharding_type", str) == "NamedSharding":
            specs[name] = spec_from_list(read.get("partition_spec", list), where)
    return specs


def _key_impls(folder: pathlib.Path) -> dict[str, str]:
    """Which arrays are PRNG keys, and how they are made, by their name in the store."""
    found = {}
    for file in sorted((folder / "array_metadatas").glob("process_*")):
        read = Reader(read_json(file), "checkpoint", str(file))
        for data in read.get("array_metadatas", list):
            entry = Reader(data, "checkpoint", str(file)).get("array_metadata", Mapping)
            row = Reader(entry, "checkpoint", str(file))
            more = row.get("ext_metadata", Mapping, None)
            if more and isinstance(more.get(_KEY_IMPL), str):
                found[row.get("param_name", str)] = more[_KEY_IMPL]
    return found
