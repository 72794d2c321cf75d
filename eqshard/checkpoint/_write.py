"""Writing arrays as Orbax lays them out: zarr 3 in an OCDBT database, with a CRC-32C of every chunk.

Orbax's own savers are not used. They signal each other through values that all saves of a process share, wait for
signals of a save that has failed, and do not let the codecs of a chunk be chosen.
"""

import base64
import json
import pathlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from .._spec import spec_to_list
from ._chunks import chunk_shape
from ._library import library


Index = tuple[slice, ...]

_BATCH = 2**30  # bytes that are written in one transaction, which holds them in memory
_CHILD = "ocdbt.process_"
_CONFIG = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000, "manifest_kind": "single"}


@dataclass(frozen=True)
class HostArray:
    """What this process writes of an array, in memory of the host."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    pieces: tuple[tuple[Index, np.ndarray], ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for _, piece in self.pieces)


def to_host(arrays: Mapping[str, Any], *, copy: bool) -> list[HostArray]:
    """Copies to the host what this process writes of `arrays`; `copy` says whether numpy arrays are copied too."""
    chosen: dict[str, list[tuple[Index, Any]]] = {}
    for number, (name, x) in enumerate(arrays.items()):
        chosen[name] = _own_shards(x, number)
        for _, data in chosen[name]:
            if isinstance(data, jax.Array):
                data.copy_to_host_async()
    found = []
    for name, x in arrays.items():
        pieces = tuple((i, _on_host(data, copy)) for i, data in chosen[name])
        found.append(HostArray(name, tuple(x.shape), x.dtype.name, chunk_shape(x), pieces))
    return found


def _on_host(data: Any, copy: bool) -> np.ndarray:
    return np.asarray(data) if isinstance(data, jax.Array) or not copy else np.array(data)


def _own_shards(x: Any, number: int) -> list[tuple[Index, Any]]:
    """The shards that this process writes: of those that several processes hold, each process writes its share."""
    if not isinstance(x, jax.Array):
        return [((), x)] if jax.process_index() == 0 else []
    if x.is_fully_addressable and x.is_fully_replicated:
        return [((), x.addressable_data(0))]
    local = {_key(shard.index): shard for shard in x.addressable_shards}
    if jax.process_count() == 1:
        return [(shard.index, shard.data) for shard in local.values()]
    holders: dict[Any, set[int]] = {}
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        holders.setdefault(_key(index), set()).add(device.process_index)
    own = []
    for place, (key, processes) in enumerate(holders.items()):
        if sorted(processes)[(number + place) % len(processes)] == jax.process_index():
            own.append((local[key].index, local[key].data))
    return own


def _key(index: Index) -> Any:
    return tuple((s.start, s.stop) for s in index)


def database(folder: pathlib.Path, *, writes: bool = True) -> dict[str, Any]:
    """The specification of the key-value store in `folder`."""
    files = {"driver": "file", "path": f"{folder}/"}
    # Nobody else writes to it: no locks, and no look at what is there.
    base = files | {"file_io_locking": {"mode": "non_atomic"}}
    spec = {"driver": "ocdbt", "base": base, "manifest": files, "cache_pool": "cache_pool#ocdbt"}
    return spec | {"config": _CONFIG, "assume_config": True, "target_data_file_size": 2**31} if writes else spec


def write_arrays(folder: pathlib.Path, arrays: list[HostArray], context: Any) -> None:
    """Writes this process's pieces: into the database in `folder`, or beside it where several processes write."""
    ts = library("tensorstore")
    if jax.process_count() > 1:
        folder = folder / f"{_CHILD}{jax.process_index()}"
    store = database(folder)
    for batch in _batches([x for x in arrays if x.pieces]):
        transaction = ts.Transaction(atomic=True)
        try:
            _write_batch(ts, store, batch, context, transaction)
        except BaseException:
            transaction.abort()
            raise
        transaction.commit_async().result()


def _write_batch(ts: Any, store: dict[str, Any], batch: list[HostArray], context: Any, transaction: Any) -> None:
    opened = [ts.open(_array_spec(x, store), create=True, context=context, transaction=transaction) for x in batch]
    writes = []
    for x, future in zip(batch, opened):
        target = future.result()
        for index, piece in x.pieces:
            part = target[index] if index else target
            writes.append(part.write(piece, can_reference_source_data_indefinitely=True))
    for write in writes:
        write.result()


def _batches(arrays: list[HostArray]) -> Iterator[list[HostArray]]:
    batch: list[HostArray] = []
    size = 0
    for x in arrays:
        if batch and size + x.nbytes > _BATCH:
            yield batch
            batch, size = [], 0
        batch.append(x)
        size += x.nbytes
    if batch:
        yield batch


def _array_spec(x: HostArray, store: dict[str, Any]) -> dict[str, Any]:
    order = {"name": "bytes", "configuration": {"endian": "little"}}
    codecs = [order, {"name": "zstd", "configuration": {"level": 1}}, {"name": "crc32c"}]
    return {
        "driver": "zarr3",
        "kvstore": store | {"path": f"{x.name}/"},
        "dtype": x.dtype,
        "metadata": {
            "shape": x.shape,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": x.chunk}},
            "codecs": codecs,
        },
        "store_data_equal_to_fill_value": True,  # a chunk that is not there is an error on the way back
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
    }


def merge(folder: pathlib.Path, context: Any) -> None:
    """Makes one database of those that the processes have written; it refers to their files."""
    ts = library("tensorstore")
    children = sorted(folder.glob(f"{_CHILD}*"))
    if not children:
        return
    opened = [ts.KvStore.open(database(child, writes=False), context=context).result() for child in children]
    parent = ts.KvStore.open(database(folder), context=context).result()
    transaction = ts.Transaction(atomic=True)
    copies = [child.experimental_copy_range_to(parent.with_transaction(transaction)) for child in opened]
    for copy in copies:
        copy.result()
    transaction.commit_async().result()


def write_metadata(folder: pathlib.Path, shardings: Mapping[str, Sharding | None]) -> None:
    """Writes what Orbax wants to know of the arrays: their names, and the shardings of those that were on devices."""
    tree = {
        repr((name,)): {
            "key_metadata": [{"key": name, "key_type": 2}],
            "value_metadata": {
                "value_type": "np.ndarray" if sharding is None else "jax.Array",
                "skip_deserialize": False,
            },
        }
        for name, sharding in shardings.items()
    }
    found = {
        "tree_metadata": tree,
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    (folder / "_METADATA").write_text(json.dumps(found))
    texts = {sharding: _sharding_text(sharding) for sharding in {*shardings.values()}}
    layouts = {base64.b64encode(n.encode()).decode(): texts[s] for n, s in shardings.items() if texts[s] is not None}
    (folder / "_sharding").write_text(json.dumps(layouts))


def _sharding_text(sharding: Any) -> str | None:
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, jax.sharding.Mesh):
        mesh = sharding.mesh
        ids = np.vectorize(lambda d: {"id": d.id}, otypes=[object])(mesh.devices).tolist()
        data = {
            "sharding_type": "NamedSharding",
            "shape": list(mesh.devices.shape),
            "axis_names": list(mesh.axis_names),
            "axis_types": [f"AxisType.{t.name}" for t in mesh.axis_types],
            "partition_spec": spec_to_list(sharding.spec),
            "device_mesh": {"mesh": ids},
        }
        return json.dumps(data)
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        (device,) = sharding.device_set
        return json.dumps({"sharding_type": "SingleDeviceSharding", "device_str": str(device)})
    return None
