"""Which program this is: a hash of primitives, parameters, types and data flow.

Equations are read in the order in which they run, through `jit` calls as if these were not there. Values are numbered
by where they are made, so names of variables do not matter; nor do source lines, memory addresses or the process.
"""

import dataclasses
import enum
import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import Literal
from jax.sharding import NamedSharding, PartitionSpec

from .._put import is_key
from .._tree import type_text


LARGE_CONSTANT = 2**20
"""Bytes above which a constant counts by its type alone: weights that a function closes over change with every run,
and are not brought to the host to be compared."""
SHORT_ARRAY = 8
"""Elements up to which an array is written out."""
SKIPPED = frozenset("ctx_mesh context_mesh name_and_src_info debug_info source_info".split())
"""Parameters that say where an equation comes from, not what it does."""
CONSTRAINTS = frozenset(("sharding_constraint", "reshard"))
MEMORY = (None, "device", "unpinned_host")
"""Kinds of memory that arrays are in by default."""
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


class Line(NamedTuple):
    """An equation of a program that was read."""

    text: str
    """The primitive, its result types and its parameters, separated by ` | `."""
    operands: str
    """Which values it reads: `a0` is an argument, `3` the result of equation 3, others are constants."""
    eqn: Any
    depth: int
    """In how many bodies it is."""


class Identity(NamedTuple):
    """What a program is."""

    digest: str
    lines: list[Line]
    """All equations; those of a body come before the equation that has it, where it is met for the first time."""


def transparent(eqn: Any) -> bool:
    """Whether an equation is a `jit` call that asks for no layouts: the same program without it."""
    p = eqn.params
    if eqn.primitive.name not in ("jit", "pjit"):
        return False
    layouts = [x for key in ("in_layouts", "out_layouts") for x in p.get(key, ())]
    shardings = [x for key in ("in_shardings", "out_shardings") for x in p.get(key, ())]
    return all(x is None or type(x).__name__ == "UnspecifiedValue" for x in (*layouts, *shardings))


def identify(closed: Any, about: Sequence[str]) -> Identity:
    """Reads a closed jaxpr; `about` is hashed with it."""
    return _Canonical().program(closed, about)


def type_of(aval: Any) -> str:
    """Returns `float32[8,4]`, or `~float32[]` of a weak type."""
    if not hasattr(aval, "dtype") or type(aval).__name__ == "AbstractRef":
        return _ADDRESS.sub("", str(aval))
    return _type_text(tuple(aval.shape), aval.dtype, bool(getattr(aval, "weak_type", False)))


@functools.lru_cache(maxsize=4096)
def _type_text(shape: tuple[int, ...], dtype: Any, weak: bool) -> str:
    return "~" * weak + type_text(shape, str(dtype.name))


def plain_text(x: Any) -> str:
    """Returns a text of a value that is the same in every process: no addresses, functions by their names."""
    return _Canonical().param(x, _Body(0))


class _Body:
    """The equations of one jaxpr, `jit` calls inlined."""

    def __init__(self, depth: int):
        self.depth = depth
        self.lines: list[Line] = []
        """With those of bodies inside."""
        self.count = 0
        """Without them."""
        self.hash = hashlib.sha256()

    def add(self, text: str, operands: str, eqn: Any) -> list[str]:
        self.lines.append(Line(text, operands, eqn, self.depth))
        self.hash.update(f"{text}\n{operands}\n".encode())
        n, self.count = self.count, self.count + 1
        return [f"{n}"] if len(eqn.outvars) == 1 else [f"{n}.{k}" for k in range(len(eqn.outvars))]


class _Canonical:
    def __init__(self):
        self.texts: dict[int, str] = {}
        """Of equations, by object: those of a function that is called again are the same objects."""
        self.digests: dict[int, str] = {}
        """Of jaxprs, by object."""
        self.met: set[str] = set()
        """Digests of the bodies whose lines are kept."""

    def program(self, closed: Any, about: Sequence[str]) -> Identity:
        body = _Body(0)
        digest = self.read(closed.jaxpr, closed.consts, body, about)
        return Identity(digest, body.lines)

    def read(self, jaxpr: Any, consts: Sequence[Any], body: _Body, about: Sequence[str] = ()) -> str:
        """Reads a jaxpr into `body` and returns its digest."""
        types = [type_of(v.aval) for v in jaxpr.invars]
        body.hash.update("\n".join([*about, *types, ""]).encode())
        results = self.walk(jaxpr, consts, [f"a{i}" for i in range(len(types))], body)
        body.hash.update("\n".join(results).encode())
        return body.hash.hexdigest()

    def walk(self, jaxpr: Any, consts: Sequence[Any], ins: Sequence[str], body: _Body) -> list[str]:
        env = dict(zip(jaxpr.invars, ins))
        env.update((v, _array_text(x, v.aval)) for v, x in zip(jaxpr.constvars, consts))
        read = lambda v: _array_text(v.val, v.aval) if isinstance(v, Literal) else env[v]
        for eqn in jaxpr.eqns:
            refs = [read(v) for v in eqn.invars]
            if transparent(eqn):
                inner = eqn.params["jaxpr"]
                outs = self.walk(inner.jaxpr, inner.consts, refs, body)
            else:
                outs = body.add(self.text(eqn, body), " ".join(refs), eqn)
            env.update(zip(eqn.outvars, outs))
        return [read(v) for v in jaxpr.outvars]

    def text(self, eqn: Any, body: _Body) -> str:
        known = self.texts.get(id(eqn))
        if known is None:
            name = eqn.primitive.name
            parts = [name, "-> " + ", ".join([type_of(v.aval) for v in eqn.outvars])]
            for key, value in sorted(eqn.params.items()):
                if key in SKIPPED or (key == "name" and name in ("jit", "pjit")):
                    continue
                if key.endswith("sharding") and name not in CONSTRAINTS and _unsharded(value):
                    value = None  # so says an ambient mesh of Explicit axes
                parts.append(f"{key}={self.param(value, body)}")
            parts += [f"effects={sorted({type(e).__name__ for e in eqn.effects})}"] if eqn.effects else []
            known = self.texts[id(eqn)] = " | ".join(parts)
        return known

    def body(self, inner: Any, outer: _Body) -> str:
        known = self.digests.get(id(inner))
        if known is None:
            body = _Body(outer.depth + 1)
            jaxpr, consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
            known = self.digests[id(inner)] = self.read(jaxpr, consts, body)[:16]
            if known not in self.met:
                self.met.add(known)
                outer.lines += body.lines
        return known

    def param(self, x: Any, body: _Body) -> str:
        if x is None or (isinstance(x, (bool, int, float, complex, str, bytes)) and not isinstance(x, enum.Enum)):
            return repr(x)
        if hasattr(x, "eqns") or (hasattr(x, "jaxpr") and hasattr(x, "consts")):
            return f"<{self.body(x, body)}>"
        if isinstance(x, (tuple, list, set, frozenset, Mapping)):
            return self.collection(x, body)
        if (known := _leaf_text(x)) is not None:
            return known
        if isinstance(x, functools.partial):
            return f"partial{self.param((x.func, x.args, x.keywords), body)}"
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            fields = {f.name: getattr(x, f.name, None) for f in dataclasses.fields(x) if f.name not in SKIPPED}
            return type(x).__name__ + self.param(fields, body)
        if callable(x):  # rules of custom gradients too: where they are applied, their equations are in the program
            return str(getattr(x, "__qualname__", type(x).__qualname__))
        return f"{type(x).__name__} {_ADDRESS.sub('', repr(x))}"

    def collection(self, x: Any, body: _Body) -> str:
        if isinstance(x, PartitionSpec):
            return str(x)
        if isinstance(x, Mapping):
            texts = [f"{key}: {self.param(value, body)}" for key, value in x.items()]
            return "{" + ", ".join(sorted(texts)) + "}"
        if hasattr(x, "_fields"):
            return type(x).__name__ + self.collection(x._asdict(), body)
        texts = [self.param(y, body) for y in x]
        return "(" + ", ".join(sorted(texts) if isinstance(x, (set, frozenset)) else texts) + ")"


def _leaf_text(x: Any) -> str | None:
    """The text of a parameter that is one thing to JAX or numpy."""
    if isinstance(x, enum.Enum):
        return x.name
    if isinstance(x, np.dtype):
        return x.name
    if isinstance(x, (np.ndarray, np.generic, jax.Array)):
        return _array_text(x, x)
    if isinstance(x, NamedSharding):
        kind = "" if x.memory_kind in MEMORY else f" in {x.memory_kind}"
        return f"{x.spec} on {dict(x.mesh.shape)}{kind}"
    if isinstance(x, PartitionSpec):
        return str(x)
    if hasattr(x, "axis_names") and hasattr(x, "axis_types"):
        return f"mesh {dict(x.shape)} {[str(t) for t in x.axis_types or ()]}"
    return type_of(x) if hasattr(x, "shape") and hasattr(x, "dtype") else None


def _unsharded(x: Any) -> bool:
    return isinstance(x, NamedSharding) and x.memory_kind in MEMORY and all(entry is None for entry in x.spec)


def _array_text(x: Any, aval: Any) -> str:
    """A constant: short ones are written out, larger ones have a digest, the largest only their type."""
    kind = type_of(aval)
    if isinstance(x, Tracer):
        return f"<traced>:{kind}"
    here = not isinstance(x, jax.Array) or x.is_fully_addressable
    if not here or getattr(x, "nbytes", 0) > LARGE_CONSTANT:
        return f"<large>:{kind}"
    if is_key(x):
        with jax.ensure_compile_time_eval():
            x = jax.random.key_data(x)
    data = np.asarray(x)
    if data.ndim == 0:
        return f"{data.item()!r}:{kind}"
    if data.size <= SHORT_ARRAY and data.dtype.kind in "biufc":
        return f"{data.tolist()!r}:{kind}"
    return f"<{hashlib.sha256(np.ascontiguousarray(data).tobytes()).hexdigest()[:16]}>:{kind}"
