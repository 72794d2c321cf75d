"""The plan of a step: a plan for each argument, and the layouts of the values inside."""

import html
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import equinox as eqx
from jax.sharding import PartitionSpec

from .._errors import FormatError
from .._mesh import MeshSpec
from .._plan import ShardingPlan
from .._spec import spec_from_list, spec_to_list
from .._tree import size_text
from .._value import finite_number, header, Reader, Value, whole_number
from ._outline import Outline


Point = tuple[tuple[int, ...], str, int, PartitionSpec]
"""Where a layout is written: the equation's place, which side of it, which operand or result, and the layout."""


@dataclass(frozen=True)
class Cost:
    """A transfer that a planned step makes, by the planner's count."""

    what: str
    """The leaf that it moves, "update of" one, or the type of a value inside."""
    kind: str
    axes: tuple[str, ...]
    nbytes: float
    """Bytes in all along the axes, each time."""
    times: float
    seconds: float
    exposed_seconds: float
    """What is not hidden behind other work."""


@dataclass(frozen=True)
class Dim:
    """A dimension that products of a planned step cut."""

    what: str
    """Where it is found: in a leaf, or "inner"."""
    size: int
    axes: tuple[tuple[str, float], ...]
    """The mesh axes that cut it, each with the share of the step's arithmetic in which it does."""


@dataclass(frozen=True)
class Alternative:
    """A plan that was not taken."""

    name: str
    seconds: float | None
    """Of a step: predicted, or by the compiler if it was asked; None if it does not fit."""
    bytes_per_device: float | None
    """None where it is not known."""
    why: str
    """Why it lost."""


OLD = "made by an older eqshard, which did not record the program: `constrain` refuses it, so plan again"
SIDES = ("arg", "in", "again", "way", "out", "carry", "result")


class StepPlan(Value):
    """The layouts of a whole step: of its arguments, and of the values inside it.

    ```python
    import eqshard, jax

    def step(w, x):
        return x @ w

    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((512, 512), (1024, 512))]
    plan = eqshard.step_plan(step, *shapes, mesh=eqshard.MeshSpec(data=8))
    weights, batch = plan.args
    print(plan)
    ```
    """

    mesh: MeshSpec = eqx.field(static=True)
    args: tuple[ShardingPlan, ...] = eqx.field(static=True)
    """A plan for each argument, at rest and in use."""
    inner: tuple[Point, ...] = eqx.field(static=True)
    """The layouts that `constrain` writes into the program."""
    program: str = eqx.field(static=True)
    """A hash of the program that this is a plan of: primitives, parameters, types and data flow. The same in every
    process, with and without `jit` around the step."""
    seconds: float = eqx.field(static=True, default=0.0)
    """The predicted time of a step."""
    compute_seconds: float = eqx.field(static=True, default=0.0)
    """The part of it that is not communication."""
    bytes_per_device: float = eqx.field(static=True, default=0.0)
    """The predicted bytes on each device: arguments and what is alive at the worst moment."""
    notes: tuple[str, ...] = eqx.field(static=True, default=())
    """What the planner wants a person to know."""
    options: tuple[tuple[str, str], ...] = eqx.field(static=True, default=())
    """Compiler options that go with the layouts."""
    costs: tuple[Cost, ...] = eqx.field(static=True, default=())
    """The dearest transfers."""
    dims: tuple[Dim, ...] = eqx.field(static=True, default=())
    """The dimensions that products cut."""
    alternatives: tuple[Alternative, ...] = eqx.field(static=True, default=())
    """What else was looked at, and what it would have cost."""
    outline: Outline | None = eqx.field(static=True, default=None)
    """The program in short, to say how another one differs; None in plans of older versions."""
    versions: tuple[tuple[str, str], ...] = eqx.field(static=True, default=())
    """The versions of eqshard and jax that made the plan."""

    def _key(self) -> Any:
        return self.mesh, self.args, self.inner, self.program, self.options

    def __iter__(self) -> Iterator[ShardingPlan]:
        return iter(self.args)

    def __repr__(self) -> str:
        return (
            f"StepPlan({len(self.args)} arguments, {len(self.inner)} inner layouts on {self.mesh}: "
            f"{1e3 * self.seconds:.3g} ms, {size_text(self.bytes_per_device)} a device)"
        )

    @property
    def communication_seconds(self) -> float:
        """The predicted time of communication, none of it hidden."""
        return self.seconds - self.compute_seconds

    def explain(self) -> str:
        """Why the step is laid out as it is: what is cut, what that costs, and what was not taken."""
        from ._explain import explain_step  # noqa: PLC0415 (which reads this module)

        return explain_step(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.explain())}</pre>"

    def to_dict(self) -> dict[str, Any]:
        return header("step") | {
            "args": [plan.to_dict() for plan in self.args],
            "inner": [[list(path), side, slot, spec_to_list(spec)] for path, side, slot, spec in self.inner],
            "program": self.program,
            "mesh": self.mesh.to_dict(),
            "seconds": self.seconds,
            "compute_seconds": self.compute_seconds,
            "bytes_per_device": self.bytes_per_device,
            "notes": list(self.notes),
            "options": [list(pair) for pair in self.options],
            "costs": [asdict(cost) for cost in self.costs],
            "dims": [asdict(dim) for dim in self.dims],
            "alternatives": [asdict(other) for other in self.alternatives],
            "outline": None if self.outline is None else self.outline.to_dict(),
            "versions": [list(pair) for pair in self.versions],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "StepPlan":
        read = Reader(data, "step")
        read.header()
        numbers = ("seconds", "compute_seconds", "bytes_per_device")
        extras = ("costs", "dims", "alternatives", "outline", "versions")
        read.only("format", "version", "args", "inner", "program", "mesh", "notes", "options", *numbers, *extras)
        inner = []
        for entry in read.get("inner", list):
            if not (isinstance(entry, list) and len(entry) == 4 and isinstance(entry[0], list) and entry[1] in SIDES):
                raise FormatError("step: `inner` holds [place, side, slot, spec] lists.")
            place = tuple(whole_number(n, "step: place") for n in entry[0])
            inner.append((place, entry[1], whole_number(entry[2], "step: slot"), spec_from_list(entry[3], "step")))
        outline = read.get("outline", (Mapping, type(None)), None)
        notes = read.strings("notes", ())
        notes += (OLD,) if outline is None and OLD not in notes else ()
        return cls(
            mesh=MeshSpec.from_dict(read.get("mesh", Mapping)),
            args=tuple(ShardingPlan.from_dict(_mapping(plan, "args")) for plan in read.get("args", list)),
            inner=tuple(inner),
            program=read.get("program", str),
            notes=notes,
            options=_pairs(read, "options"),
            outline=None if outline is None else Outline.from_dict(outline),
            versions=_pairs(read, "versions"),
            costs=tuple(_cost(entry) for entry in read.get("costs", list, [])),
            dims=tuple(_dim(entry) for entry in read.get("dims", list, [])),
            alternatives=tuple(_alternative(entry) for entry in read.get("alternatives", list, [])),
            **{n: finite_number(read.get(n, (int, float)), f"step: {n}") for n in numbers},
        )


def _mapping(entry: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(entry, Mapping):
        raise FormatError(f"step: `{what}` holds objects.")
    return entry


def _reader(entry: Any, what: str) -> Reader:
    return Reader(_mapping(entry, what), f"step: {what}")


def _pairs(read: Reader, name: str) -> tuple[tuple[str, str], ...]:
    found = []
    for pair in read.get(name, list, []):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(x, str) for x in pair)):
            raise FormatError(f"step: `{name}` holds [name, value] pairs of strings.")
        found.append((pair[0], pair[1]))
    return tuple(found)


def _cost(entry: Any) -> Cost:
    read = _reader(entry, "costs")
    names = ("nbytes", "times", "seconds", "exposed_seconds")
    numbers = {n: finite_number(read.get(n, (int, float)), f"step: costs: {n}") for n in names}
    return Cost(read.get("what", str), read.get("kind", str), read.strings("axes", ()), **numbers)


def _dim(entry: Any) -> Dim:
    read = _reader(entry, "dims")
    axes = []
    for pair in read.get("axes", (list, tuple)):
        if not (isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[0], str)):
            raise FormatError("step: `axes` of a dimension holds [axis, share] pairs.")
        axes.append((pair[0], finite_number(pair[1], "step: share")))
    return Dim(read.get("what", str), whole_number(read.get("size", int), "step: size"), tuple(axes))


def _alternative(entry: Any) -> Alternative:
    read = _reader(entry, "alternatives")
    seconds, nbytes = (read.get(n, (int, float, type(None))) for n in ("seconds", "bytes_per_device"))
    optional = lambda x: None if x is None else finite_number(x, "step: alternatives")
    return Alternative(read.get("name", str), optional(seconds), optional(nbytes), read.get("why", str))
