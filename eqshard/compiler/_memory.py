"""Memory of one device, as the compiler says it, also when it refuses."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import jax.tree_util as jtu


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)i?B?"


@jtu.register_static
@dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    arguments: int = 0
    outputs: int = 0
    aliased: int = 0
    """Of the outputs, those that take the place of donated arguments."""
    temporary: int = 0
    code: int = 0
    peak: int = 0
    """Arguments, outputs that are not aliased, and temporaries."""
    host: int = 0
    """Of all kinds, in the host's memory."""
    limit: int = 0
    """What the chip has; what the compiler allows where it says so."""


def memory_from(stats: Mapping[str, int], limit: int) -> Memory:
    """The compiler's statistics."""
    arguments, outputs, aliased = (stats.get(f"{n}_size", 0) for n in ("argument", "output", "alias"))
    temporary = stats.get("temp_size", 0)
    host = sum(stats.get(f"host_{n}_size", 0) for n in ("argument", "output", "temp"))
    host -= stats.get("host_alias_size", 0)
    return Memory(
        arguments,
        outputs,
        aliased,
        temporary,
        stats.get("generated_code_size", 0),
        arguments + outputs - aliased + temporary,
        host,
        limit,
    )


def memory_from_refusal(words: str, arguments: int, limit: int) -> Memory:
    """The numbers in a compiler's refusal; `arguments` are those of the plan, in case it does not say."""
    allowed = _first(words, rf"of {_SIZE} hbm", rf"available HBM \({_SIZE}\)") or limit
    used = _first(
        words,
        rf"Used {_SIZE} of",
        rf"Total hbm usage >= {_SIZE}",
        rf"temporaries \({_SIZE}\)",
        rf"allocating {_SIZE}",
        rf"(?:allocate|requires?|needs?) {_SIZE}",
    )
    said = _first(words, rf"arguments\s+{_SIZE}") or arguments
    program = _first(words, rf"program\s+{_SIZE}")
    temporary = program or (used if "temporaries" in words else max(0, used - said))
    return Memory(arguments=said, temporary=temporary, peak=max(used, said + temporary), limit=allowed)


def _first(words: str, *patterns: str) -> int:
    for pattern in patterns:
        found = re.search(pattern, words, re.IGNORECASE)
        if found:
            return int(float(found.group(1).rstrip(".")) * _UNITS[found.group(2).upper()])
    return 0
