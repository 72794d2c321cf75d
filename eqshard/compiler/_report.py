"""What compiling says about a program: memory, collectives, time."""

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import equinox as eqx

from .._chip import Chip
from .._issue import Issue
from .._mesh import MeshSpec
from .._tree import size_text
from .._value import header, Reader, Value
from ._collectives import Collective
from ._compare import compare, Comparison
from ._memory import Memory
from ._schedule import Segment


_SECONDS = ("seconds", "product_seconds", "memory_seconds", "exposed_seconds", "network_seconds")


class CompileReport(Value):
    """What the compiler made of a program, for one device and one step.

    Times are estimates: on TPU from the compiler's own cycles, elsewhere from the chip's peaks; of collectives from
    bytes over links. They rank layouts; they do not replace a run.
    """

    target: str = eqx.field(static=True)
    mesh: MeshSpec = eqx.field(static=True)
    chip: Chip = eqx.field(static=True)
    memory: Memory = eqx.field(static=True)
    collectives: tuple[Collective, ...] = eqx.field(static=True, default=())
    segments: tuple[Segment, ...] = eqx.field(static=True, default=())
    """The timeline."""
    hints: tuple[Issue, ...] = eqx.field(static=True, default=())
    """What could be better, the dearest first."""
    seconds: float = eqx.field(static=True, default=0.0)
    product_seconds: float = eqx.field(static=True, default=0.0)
    """Matrix products."""
    memory_seconds: float = eqx.field(static=True, default=0.0)
    """Everything else that computes: bound by memory, as a rule."""
    exposed_seconds: float = eqx.field(static=True, default=0.0)
    """Communication during which nothing else runs."""
    network_seconds: float = eqx.field(static=True, default=0.0)
    """All communication."""
    model_flops: float = eqx.field(static=True, default=0.0)
    """Of the whole program on all devices, without what remat computes again."""
    refused: str = eqx.field(static=True, default="")
    """The compiler's words, if it refused the program for its memory."""
    unread: tuple[str, ...] = eqx.field(static=True, default=())
    """Lines of the compiled module that could not be read."""
    compile_seconds: float = eqx.field(static=True, default=0.0)
    hlo: str = eqx.field(static=True, default="", repr=False)
    """The compiled module as text; not part of equality or JSON."""

    @property
    def fits(self) -> bool:
        """Whether the program fits the memory of one chip."""
        return not self.refused and self.memory.peak <= self.memory.limit

    @property
    def bytes_per_device(self) -> int:
        """The peak."""
        return self.memory.peak

    @property
    def step_seconds(self) -> float:
        """The estimated time of one step; infinite if the compiler refused it."""
        return math.inf if self.refused else self.seconds

    @property
    def compute_seconds(self) -> float:
        return self.product_seconds + self.memory_seconds

    @property
    def hidden_seconds(self) -> float:
        """Communication that runs beside computation."""
        return max(0.0, self.network_seconds - self.exposed_seconds)

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends in a step."""
        return sum(c.total_bytes for c in self.collectives)

    @property
    def bound(self) -> str:
        """What takes the most time: `"compute"`, `"memory"` or `"network"`."""
        parts = {"compute": self.product_seconds, "memory": self.memory_seconds, "network": self.exposed_seconds}
        return max(parts, key=lambda name: parts[name])

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: the share of all chips' bfloat16 peak that the model's own FLOPs use."""
        if not self.seconds or self.refused:
            return 0.0
        return self.model_flops / (self.seconds * self.mesh.size() * self.chip.flops)

    def compare(self, other: "CompileReport") -> Comparison:
        """`other` against this one: seconds, bytes, and what each kind of collective sends.

        ```python
        import eqshard, jax
        from jax.sharding import PartitionSpec as P
        x = jax.ShapeDtypeStruct((64, 64), "float32")
        whole = eqshard.replicated_plan(x, eqshard.MeshSpec(dp=8))
        one, two = (eqshard.compile_report(lambda x: x * 2, x, plans=p) for p in (whole, whole.at("").set(P("dp"))))
        assert one.compare(two)["bytes_per_device"].ratio == 1 / 8
        ```
        """
        return compare(self, other)

    def counts(self) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
        """For each kind and axes: how many collectives run in a step, and how many bytes a device sends in them."""
        found: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}
        for c in self.collectives:
            trips, sent = found.get((c.kind, c.axes), (0, 0))
            found[c.kind, c.axes] = trips + c.trips, sent + c.total_bytes
        return found

    def _key(self) -> Any:
        skipped = ("hlo", "compile_seconds")
        return tuple(getattr(self, f.name) for f in fields(self) if f.name not in skipped)

    def __repr__(self) -> str:
        if self.refused:
            return f"CompileReport({self.target}: refused, {size_text(self.memory.peak)} a device)"
        return (
            f"CompileReport({self.target}: {self.seconds * 1e3:.3g} ms a step, bound by {self.bound}, "
            f"{size_text(self.memory.peak)} a device, {size_text(self.wire_bytes)} on the wire)"
        )

    def _repr_html_(self) -> str:
        from .._report._compile_notebook import compile_html  # noqa: PLC0415 (which reads this module)

        return compile_html(self)

    def to_dict(self) -> dict[str, Any]:
        return header("compile_report") | {
            "target": self.target,
            "mesh": self.mesh.to_dict(),
            "chip": self.chip.to_dict(),
            "memory": asdict(self.memory),
            "collectives": [asdict(c) | {"axes": list(c.axes)} for c in self.collectives],
            "segments": [asdict(s) for s in self.segments],
            "hints": [h.to_dict() for h in self.hints],
            **{name: getattr(self, name) for name in _SECONDS},
            "model_flops": self.model_flops,
            "refused": self.refused,
            "unread": list(self.unread),
            "compile_seconds": self.compile_seconds,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "CompileReport":
        read = Reader(data, "compile_report")
        read.header()
        known = [f.name for f in fields(cls) if f.name != "hlo"]
        read.only("format", "version", *known)
        numbers: Any = {n: float(read.get(n, (int, float))) for n in (*_SECONDS, "model_flops", "compile_seconds")}
        return cls(
            target=read.get("target", str),
            mesh=MeshSpec.from_dict(read.get("mesh", Mapping)),
            chip=Chip.from_dict(read.get("chip", Mapping)),
            memory=_row(Memory, read.get("memory", Mapping), "memory"),
            collectives=tuple(_row(Collective, c, f"collective {i}") for i, c in _each(read, "collectives")),
            segments=tuple(_row(Segment, s, f"segment {i}") for i, s in _each(read, "segments")),
            hints=tuple(Issue.from_dict(h) for _, h in _each(read, "hints")),
            refused=read.get("refused", str),
            unread=read.strings("unread"),
            **numbers,
        )


def _each(read: Reader, name: str) -> enumerate[Any]:
    return enumerate(read.get(name, list))


def _row(kind: Any, data: Any, where: str) -> Any:
    """A flat dataclass from a dictionary, field by field."""
    read = Reader(data, "compile_report", where)
    read.only(*(f.name for f in fields(kind)))
    values: dict[str, Any] = {}
    for f in fields(kind):
        if f.name == "axes":
            values["axes"] = read.strings("axes")
            continue
        value = read.get(f.name, (int, float) if f.type in (float, "float") else f.type)  # pyright: ignore
        values[f.name] = float(value) if f.type in (float, "float") else value
    return kind(**values)
