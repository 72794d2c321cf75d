"""Chips: the few numbers that costs are made of."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import equinox as eqx

from ._errors import MeshError
from ._tree import did_you_mean
from ._value import positive_number, Reader, Value


class Chip(Value):
    """One accelerator, as a cost model sees it.

    ```python
    import eqshard
    chip = eqshard.CHIPS["v5e"]
    seconds = 2 * 4096**3 / chip.flops
    ```
    """

    name: str = eqx.field(static=True)
    flops: float = eqx.field(static=True, converter=float)
    """Peak bfloat16 FLOP/s."""
    hbm_bytes: float = eqx.field(static=True, converter=float)
    hbm_bandwidth: float = eqx.field(static=True, converter=float)
    """Bytes a second."""
    link_bandwidth: float = eqx.field(static=True, converter=float)
    """Bytes a second of one link, one way."""

    def _key(self) -> Any:
        return self.name, self.flops, self.hbm_bytes, self.hbm_bandwidth, self.link_bandwidth

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "flops": self.flops,
            "hbm_bytes": self.hbm_bytes,
            "hbm_bandwidth": self.hbm_bandwidth,
            "link_bandwidth": self.link_bandwidth,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Chip":
        read = Reader(data, "chip")
        numbers = ("flops", "hbm_bytes", "hbm_bandwidth", "link_bandwidth")
        read.only("name", *numbers)
        return cls(read.get("name", str), *(positive_number(read.get(n, (int, float)), f"chip {n}") for n in numbers))


# Published peaks of one chip: bf16 FLOP/s, HBM bytes, HBM B/s, B/s of one link one way.
CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        chip.name: chip
        for chip in (
            Chip("v4", 275e12, 32e9, 1.2e12, 45e9),
            Chip("v5e", 197e12, 16e9, 0.82e12, 45e9),
            Chip("v5p", 459e12, 95e9, 2.8e12, 90e9),
            Chip("v6e", 918e12, 32e9, 1.6e12, 90e9),
        )
    }
)


def as_chip(chip: "Chip | str | None") -> Chip | None:
    """A chip by its name."""
    if not isinstance(chip, str):
        return chip
    if chip not in CHIPS:
        raise MeshError(
            f"unknown `chip` {chip!r}: known are {', '.join(CHIPS)}; or pass an `eqshard.Chip` with your own numbers."
            + did_you_mean(chip, CHIPS)
        )
    return CHIPS[chip]
