"""Arrays in zarr folders and OCDBT databases, through tensorstore: opened, checked, read in slices."""

import math
import pathlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._errors import FormatError
from .._tree import is_dtype_name, shown, size_text
from .._value import short
from ._library import library


# What tensorstore raises, by the status of its C++ code.
TENSORSTORE_ERRORS = (ValueError, IndexError, RuntimeError, NotImplementedError, OSError, TypeError, KeyError)

_LARGEST_CHUNK = 2**26  # elements; larger ones only if the array itself is as large
_LARGEST_RANK = 32


def context() -> Any:
    """What the arrays of one checkpoint share: the nodes of the database's tree are read once."""
    return library("tensorstore").Context(
        {"file_io_concurrency": {"limit": 128}, "cache_pool#ocdbt": {"total_bytes_limit": 100_000_000}}
    )


@dataclass(frozen=True)
class TensorSource:
    """Where the bytes of one array are: `name` in a database, or a folder."""

    folder: pathlib.Path
    name: str
    ocdbt: bool
    driver: str
    """`"zarr"` (version 2) or `"zarr3"`."""
    context: Any

    def spec(self) -> dict[str, Any]:
        if self.ocdbt:
            base = {"driver": "file", "path": f"{self.folder}/"}
            kvstore = {"driver": "ocdbt", "base": base, "path": f"{self.name}/", "cache_pool": "cache_pool#ocdbt"}
        else:
            kvstore = {"driver": "file", "path": f"{self.folder / self.name}/"}
        return {
            "driver": self.driver,
            "kvstore": kvstore,
            "recheck_cached_data": False,
            "recheck_cached_metadata": False,
            "fill_missing_data_reads": False,  # a chunk that is not there is an error, not zeros
        }


def open_tensors(sources: Iterable[tuple[str, TensorSource]]) -> list[Any]:
    """The opened arrays, in order; `sources` are named for errors. Reads their metadata only."""
    ts = library("tensorstore")
    opened, waiting = [], []
    for path, source in sources:
        try:
            waiting.append((path, ts.open(source.spec(), context=source.context, open=True, read=True)))
        except TENSORSTORE_ERRORS as error:
            raise _unreadable(path, error) from error
    for path, future in waiting:
        try:
            store = future.result()
        except TENSORSTORE_ERRORS as error:
            raise _unreadable(path, error) from error
        _check_sane(path, store)
        opened.append(store)
    return opened


def text_of(error: BaseException) -> str:
    """What an error says, without the places in tensorstore's own code."""
    return str(error).split(" [source locations=")[0][:500]


def _unreadable(path: str, error: BaseException) -> FormatError:
    text = text_of(error)
    if any(word in text for word in ("Digest mismatch", "CRC-32C")):
        text = f"its checksum does not fit: the data was changed after it was saved ({text})"
    return FormatError(f"cannot read {shown(path)} from the checkpoint: {text}")


def _check_sane(path: str, store: Any) -> None:
    """Refuses metadata that would make a read allocate what no array needs."""
    shape, dtype = tuple(store.shape), store.dtype.name
    if len(shape) > _LARGEST_RANK or any(store.domain.origin) or not all(0 <= n < 2**62 for n in shape):
        raise FormatError(f"{shown(path)}: {short(shape)} is no shape of an array.")
    if not is_dtype_name(dtype):
        raise FormatError(f"{shown(path)}: {short(dtype)} is no dtype of an array on a device.")
    layout = store.chunk_layout
    for chunk in (layout.read_chunk.shape, layout.write_chunk.shape):
        n = math.prod(chunk or ())
        if n > _LARGEST_CHUNK and n > 4 * max(1, math.prod(shape)):
            raise FormatError(
                f"{shown(path)}: chunks of {chunk} ({size_text(n * store.dtype.numpy_dtype.itemsize)}) in an array of "
                f"shape {shape}: damaged, or made to exhaust memory."
            )


def begin_read(path: str, store: Any, index: tuple[slice, ...]) -> Callable[[], np.ndarray]:
    """Starts to read a part of an array; the result waits for it.

    Into memory of numpy's, which goes back to the system when it is dropped: what tensorstore's own threads allocate
    stays with the process.
    """
    ts = library("tensorstore")
    piece = np.empty([s.stop - s.start for s in index], store.dtype.numpy_dtype)
    try:
        future = ts.array(piece).write(store[index][ts.d[:].translate_to[0]] if index else store)
    except TENSORSTORE_ERRORS as error:
        raise _unreadable(path, error) from error

    def result() -> np.ndarray:
        try:
            future.result()
        except TENSORSTORE_ERRORS as error:
            raise _unreadable(path, error) from error
        return piece

    return result


def read_chunk(store: Any) -> tuple[int, ...]:
    """The shape of the pieces that can be read alone."""
    return tuple(store.chunk_layout.read_chunk.shape or store.shape)
