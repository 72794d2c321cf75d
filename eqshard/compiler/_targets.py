"""Where to compile for: the devices at hand, simulated ones, or TPUs that are not there."""

import importlib.util
import math
import re
from dataclasses import dataclass

from .._chip import CHIPS
from .._errors import ShardingError
from .._tree import did_you_mean


_TPUS = ("v4", "v5e", "v5p", "v6e")


class TargetError(ShardingError):
    """A target that cannot be compiled for, here or anywhere."""


@dataclass(frozen=True)
class Target:
    """A place to compile for, without devices.

    ```python
    from eqshard.compiler import as_target
    target = as_target("v5p:4x4x4")
    assert target.platform == "tpu" and target.size == 64
    ```
    """

    platform: str
    """`"cpu"` or `"tpu"`."""
    chip: str
    """A name in `eqshard.CHIPS`."""
    topology: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.topology)

    def __str__(self) -> str:
        return f"{self.chip}:{'x'.join(map(str, self.topology))}"


def as_target(text: "str | Target") -> Target:
    """Reads `"cpu:256"`, `"v5e:4x4"`, `"v5p:8x8x8"`.

    ```python
    from eqshard.compiler import as_target
    assert as_target("cpu:256").size == 256
    ```

    **Raises:**

    - `TargetError`: it is no such text.
    """
    if isinstance(text, Target):
        return text
    found = re.fullmatch(r"([a-z]\w*):(\d+(?:x\d+)*)", text)
    kinds = ("cpu", *_TPUS)
    if found is None or found.group(1) not in kinds:
        kind = text.partition(":")[0]
        extra = ""
        if kind in CHIPS and kind not in kinds:
            extra = f' For the times of a {kind}, compile for "cpu:8" with `chip="{kind}"`.'
        raise TargetError(
            f'no target {text!r}: write "cpu:256" for simulated devices, or a TPU with its topology, as in "v5e:4x4" '
            f'or "v5p:8x8x8" (known: {", ".join(_TPUS)}).' + extra + did_you_mean(kind, kinds)
        )
    kind, sizes = found.group(1), tuple(int(n) for n in found.group(2).split("x"))
    flat = 2 if kind in ("v5e", "v6e") else 3
    if 0 in sizes or (kind == "cpu" and len(sizes) != 1) or (kind != "cpu" and len(sizes) != flat):
        example = {"cpu": "cpu:8", "v5e": "v5e:4x4", "v6e": "v6e:4x4"}.get(kind, f"{kind}:4x4x4")
        raise TargetError(f'no target {text!r}: a {kind} target is written as in "{example}".')
    return Target("cpu" if kind == "cpu" else "tpu", kind, sizes)


def check_available(target: Target) -> None:
    """Raises if the compiler for `target` is not installed."""
    if target.platform == "tpu" and importlib.util.find_spec("libtpu") is None:
        raise TargetError(
            f'compiling for "{target}" needs the TPU compiler, which no TPU is needed for: '
            "`pip install eqshard[tpu]` (the package `libtpu`, 600 MB)."
        )
