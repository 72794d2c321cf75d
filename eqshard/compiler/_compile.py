"""compile_report: what a plan costs, on devices that need not be there."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._chip import as_chip, Chip, chip_of, CHIPS
from .._mesh import MeshSpec
from .._spec import shard_factor
from .._tree import dtype_name, itemsize
from ._cache import compile_cached
from ._flops import count_flops, Flops
from ._hints import find_hints, refusal_hint
from ._hlo import read_module
from ._memory import memory_from, memory_from_refusal
from ._program import Flat, flatten, lower_for, Program
from ._report import CompileReport
from ._schedule import schedule
from ._targets import as_target, Target, TargetError
from ._worker import Answer, compile_lowered


def compile_report(
    fn: Callable[..., Any],
    *args: Any,
    plans: Any = None,
    target: str | Target | None = None,
    donate: str | Sequence[int] = "none",
    chip: Chip | str | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> CompileReport:
    """Compiles `fn` for a target and says what XLA made of it: collectives, memory, estimated time.

    Nothing runs and no array is allocated. For another target than the devices at hand the function is traced here,
    so closures and lambdas are fine, and compiled in a child process: this process keeps its devices and environment.

    ```python
    import eqshard, jax, jax.numpy as jnp
    from jax.sharding import PartitionSpec as P
    mesh = eqshard.MeshSpec(dp=2, tp=4)
    w = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
    x = jax.ShapeDtypeStruct((64, 512), jnp.float32)
    plans = (
        eqshard.replicated_plan(w, mesh).at("").set(P("tp")),
        eqshard.replicated_plan(x, mesh).at("").set(P("dp", "tp")),
    )
    report = eqshard.compile_report(lambda w, x: x @ w, w, x, plans=plans)
    print(report)
    assert {c.axes for c in report.collectives} == {("tp",)}
    ```

    **Arguments:**

    - `args`: trees of arrays or `jax.ShapeDtypeStruct`s; leaves that are no arrays are part of the program.
    - `plans`: a `ShardingPlan` for each argument, None to leave it as it lies; or a `StepPlan`.
    - `target`: None for the devices at hand; `"cpu:256"` for simulated ones; `"v5e:4x4"`, `"v5p:8x8x8"`, … for TPUs
        that are not there (with the extra `tpu`).
    - `donate`: `"none"`, `"all"`, or the numbers of the arguments that the outputs may overwrite.
    - `chip`: whose times and memory to estimate with; default: the mesh's, else the target's.
    - `compiler_options`: passed to XLA, such as `{"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}`.

    **Returns:**

    A `CompileReport`, also where the program does not fit: then `fits` is False.

    **Raises:**

    - `TargetError`: no such target, its compiler is not installed, or it fails.
    - `ShardingError`: a plan does not match its argument or its mesh.
    """
    program = Program(fn, args, plans, donate, compiler_options)
    return compile_reports([program], target=target, chip=chip)[0]


def compile_reports(
    programs: Sequence[Program],
    *,
    target: str | Target | None = None,
    chip: Chip | str | None = None,
    processes: int = 1,
    cache: str | os.PathLike[str] | None = None,
) -> list[CompileReport]:
    """`compile_report` for several programs, in one child process or several.

    ```python
    import eqshard, jax
    from eqshard.compiler import compile_reports, Program
    x = jax.ShapeDtypeStruct((8, 8), "float32")
    reports = compile_reports([Program(lambda x: x @ x, (x,))], chip="h100")
    assert reports[0].chip.name == "h100"
    ```

    **Arguments:**

    - `processes`: how many children share the programs, if the target is not at hand.
    - `cache`: a folder for what the compiler of such a target said, so that it is not asked twice.
    """
    if target is None:
        return [_compile_here(flatten(program, None), as_chip(chip)) for program in programs]
    where = as_target(target)
    flats = [flatten(program, where) for program in programs]
    lowered = [lower_for(flat, where) for flat in flats]
    answers = compile_cached([job for job, _ in lowered], where, processes, cache)
    return [
        report_on(flat, answer, flops, as_chip(chip) or flat.mesh.chip or CHIPS[where.chip], str(where))
        for flat, answer, (_, flops) in zip(flats, answers, lowered)
    ]


def _compile_here(flat: Flat, chip: Chip | None) -> CompileReport:
    mesh = flat.mesh.build()
    traced = flat.jitted().trace(*flat.structs(mesh))
    places = tuple(tuple(getattr(d, "coords", None) or (d.id,)) for d in mesh.devices.flat)
    answer = compile_lowered(traced.lower(), dict(flat.options), places)
    first = mesh.devices.flat[0]
    known = chip or flat.mesh.chip or chip_of(first) or CHIPS["cpu"]
    return report_on(flat, answer, count_flops(traced.jaxpr), known, f"{first.platform}:{flat.mesh.size()}, at hand")


def report_on(flat: Flat, answer: Answer, flops: Flops, chip: Chip, target: str) -> CompileReport:
    """Reads a compiler's answer."""
    if answer.failed:
        raise TargetError(f'the compiler for "{target}" failed: {answer.failed[:2000]}')
    common: dict[str, Any] = {"target": target, "mesh": flat.mesh, "chip": chip, "model_flops": flops.model}
    if answer.refused:
        given = _argument_bytes(flat)
        memory = memory_from_refusal(answer.refused, given, int(chip.hbm_bytes))
        hints = (refusal_hint(memory),)
        return CompileReport(
            **common, memory=memory, refused=answer.refused, hints=hints, compile_seconds=answer.seconds
        )
    module = read_module(answer.text)
    ran, found = schedule(module, flat.mesh, chip, answer.coordinates, flat.names)
    compiled_for_tpu = target.partition(":")[0] == chip.name and chip.clock > 0
    memory = memory_from(answer.memory, int(chip.hbm_bytes))
    if compiled_for_tpu:  # it compiled, so it fits: the compiler knows what the chip really has
        memory = memory_from(answer.memory, max(memory.peak, memory.limit))
    return CompileReport(
        **common,
        memory=memory,
        collectives=found,
        segments=tuple(ran.segments),
        hints=find_hints(module, flat, found, flops, chip),
        seconds=ran.seconds,
        product_seconds=ran.products,
        memory_seconds=ran.memory,
        exposed_seconds=ran.exposed,
        network_seconds=math.fsum(c.total_seconds for c in found),
        unread=module.unread,
        compile_seconds=answer.seconds,
        hlo=answer.text,
    )


def _argument_bytes(flat: Flat) -> int:
    total = 0
    for leaf, layout in zip(flat.leaves, flat.layouts):
        whole = math.prod(leaf.shape) * itemsize(dtype_name(leaf))
        total += whole // (shard_factor(layout[0], MeshSpec.of(flat.mesh)) if layout else 1)
    return total
