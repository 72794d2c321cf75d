"""The child process: compiles programs for devices that the parent does not have."""

import os
import pathlib
import pickle
import re
import time
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.experimental import topologies
from jax.export import Exported
from jax.sharding import NamedSharding, PartitionSpec

from .._mesh import MeshSpec
from .._tree import struct_of
from ._targets import Target


@dataclass(frozen=True)
class Job:
    """One program to compile: flat arguments, its module lowered by the parent."""

    exported: Exported
    mesh: MeshSpec
    shardings: tuple[tuple[Any, str | None] | None, ...]
    """The spec and memory kind of each argument; None where the compiler may choose."""
    donated: tuple[int, ...]
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Answer:
    """What the compiler made of one program."""

    text: str = ""
    memory: dict[str, int] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)
    coordinates: tuple[tuple[int, ...], ...] = ()
    """Where each device of the mesh is in the hardware, in mesh order."""
    seconds: float = 0.0
    refused: str = ""
    """The compiler's words, if the program does not fit the memory."""
    failed: str = ""
    """Its words, if it failed for any other reason."""


def main(folder: str) -> None:
    """Reads `target.pkl` and the jobs in `folder`, and writes an answer beside each as it is ready."""
    here = pathlib.Path(folder)
    target = pickle.loads((here / "target.pkl").read_bytes())
    devices = _devices(target)
    for path in sorted(here.glob("job*.pkl")):
        dump = path.with_suffix(".dump") if target.platform == "tpu" else None
        answer = _compile(pickle.loads(path.read_bytes()), devices, dump)
        made = path.with_suffix(".part")
        made.write_bytes(pickle.dumps(answer))
        made.rename(path.with_suffix(".answer"))


def _devices(target: Target) -> list[Any]:
    """Sets this process up for the target; its environment is its own, and nothing has been asked of JAX yet."""
    jax.config.update("jax_platforms", "cpu")
    if target.platform == "cpu":
        flags = os.environ.get("XLA_FLAGS", "")  # a simulated device count in it would be in the way of ours
        os.environ["XLA_FLAGS"] = re.sub(r"--xla_force_host_platform_device_count=\S+", "", flags)
        jax.config.update("jax_num_cpu_devices", target.size)
        return list(jax.devices())
    os.environ.update(
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_ACCELERATOR_TYPE=f"{target.chip}-{target.size}",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        TPU_STDERR_LOG_LEVEL="3",
        TPU_MIN_LOG_LEVEL="3",
    )
    # The two cores of a v4 chip are one device in "megacore" mode, which later chips have by default.
    mode = {"chip_config_name": "megacore"} if target.chip == "v4" else {}
    return list(topologies.get_topology_desc(platform="tpu", topology_name=str(target), **mode).devices)


def _compile(job: Job, devices: list[Any], dump: pathlib.Path | None) -> Answer:
    mesh = job.mesh.build(devices)
    structs = []
    # One layout says for which devices to compile; without any, arguments are whole on all of them.
    nothing = NamedSharding(mesh, PartitionSpec()) if not any(job.shardings) else None
    for aval, layout in zip(job.exported.in_avals, job.shardings):
        sharding = nothing if layout is None else NamedSharding(mesh, layout[0], memory_kind=layout[1])
        structs.append(struct_of(aval, sharding))
    lowered = jax.jit(job.exported.call, donate_argnums=job.donated, keep_unused=True).lower(*structs)
    places = tuple(tuple(getattr(d, "coords", None) or (d.id,)) for d in mesh.devices.flat)
    return compile_lowered(lowered, dict(job.options), places, dump)


def compile_lowered(
    lowered: Any, options: dict[str, Any], places: tuple[tuple[int, ...], ...], dump: pathlib.Path | None = None
) -> Answer:
    """Compiles, and says what came of it; out of memory is an answer too.

    `dump` is where the compiler may write its text itself: a TPU's compiler may know instructions that this jaxlib does
    not, and then the module cannot be read back from it.
    """
    start = time.perf_counter()
    if dump is not None:
        options = {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True} | options
    try:
        compiled = lowered.compile(compiler_options=options or None)
    except jax.errors.JaxRuntimeError as error:
        words = str(error)
        took = time.perf_counter() - start
        if "RESOURCE_EXHAUSTED" in words:
            return Answer(coordinates=places, seconds=took, refused=words)
        return Answer(coordinates=places, seconds=took, failed=words)
    took = time.perf_counter() - start
    return Answer(_text(compiled, dump), memory_of(compiled), cost_of(compiled), places, took)


def _text(compiled: Any, dump: pathlib.Path | None) -> str:
    try:
        return compiled.as_text() or ""
    except jax.errors.JaxRuntimeError:
        if dump is None:
            raise
        for stage in ("after_codegen", "after_optimizations"):
            found = sorted(dump.rglob(f"*.{stage}.txt"), key=lambda path: path.stat().st_size)
            if found:
                return found[-1].read_text()
        raise


def memory_of(compiled: Any) -> dict[str, int]:
    """The compiler's memory statistics of one device, as plain numbers."""
    stats = compiled.memory_analysis()
    if stats is None:
        return {}
    names = [n for n in dir(stats) if n.endswith("_in_bytes")]
    return {n.removesuffix("_in_bytes"): int(getattr(stats, n)) for n in names}


def cost_of(compiled: Any) -> dict[str, float]:
    """The compiler's own counts, of which loops are counted once."""
    cost = compiled.cost_analysis() or {}
    return {k: float(v) for k, v in cost.items() if k in ("flops", "bytes accessed", "transcendentals")}
