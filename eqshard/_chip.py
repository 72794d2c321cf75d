"""Chips: the few numbers that costs are made of."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import equinox as eqx

from ._errors import FormatError, MeshError
from ._tree import did_you_mean
from ._value import amount, Reader, short, Value, whole_number


_NUMBERS = ("flops", "hbm_bytes", "hbm_bandwidth", "link_bandwidth")
_MORE = ("link_latency", "host_bandwidth", "host_latency", "clock")


class Chip(Value):
    """One accelerator, as a cost model sees it.

    ```python
    import eqshard
    chip = eqshard.CHIPS["v5e"]
    seconds = 2 * 4096**3 / chip.flops
    assert chip.peak("int8") == 2 * chip.peak("bfloat16")
    ```
    """

    name: str = eqx.field(static=True)
    flops: float = eqx.field(static=True, converter=float)
    """Peak bfloat16 FLOP/s."""
    hbm_bytes: float = eqx.field(static=True, converter=float)
    hbm_bandwidth: float = eqx.field(static=True, converter=float)
    """Bytes a second."""
    link_bandwidth: float = eqx.field(static=True, converter=float)
    """Bytes a second of one link, one way; behind a switch, of all of a chip's links together."""
    link_latency: float = eqx.field(static=True, converter=float, default=1e-6)
    """Seconds of one hop."""
    host_bandwidth: float = eqx.field(static=True, converter=float, default=6.25e9)
    """Bytes a second of one chip over the network between hosts or slices, one way."""
    host_latency: float = eqx.field(static=True, converter=float, default=1e-5)
    clock: float = eqx.field(static=True, converter=float, default=0.0)
    """Cycles a second, as the chip's compiler counts them; 0 where it counts none."""
    switch: int = eqx.field(static=True, default=0)
    """How many chips one switch joins; 0 for a torus, where each chip is linked with its neighbours."""
    wrap: int = eqx.field(static=True, default=0)
    """A torus dimension closes to a ring if its size is a multiple of this; 0: never."""
    peaks: tuple[tuple[str, float], ...] = eqx.field(static=True, default=())
    """Peak operations a second of dtypes other than bfloat16."""

    def peak(self, dtype: str) -> float:
        """Peak operations a second in matrix products of `dtype`; bfloat16's where nothing else is known."""
        return dict(self.peaks).get(dtype, self.flops)

    def _key(self) -> Any:
        numbers = tuple(getattr(self, name) for name in (*_NUMBERS, *_MORE))
        return self.name, numbers, self.switch, self.wrap, self.peaks

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {"name": self.name} | {name: getattr(self, name) for name in _NUMBERS}
        data |= {name: getattr(self, name) for name in (*_MORE, "switch", "wrap")}
        return data | {"peaks": dict(self.peaks)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Chip":
        read = Reader(data, "chip")
        read.only("name", *_NUMBERS, *_MORE, "switch", "wrap", "peaks")
        numbers = [amount(read.get(n, (int, float)), f"chip {n}", positive=True) for n in _NUMBERS]
        known = {n: amount(read.get(n, (int, float)), f"chip {n}") for n in _MORE if n in data}
        switch, wrap = (whole_number(read.get(n, int, 0), f"chip {n}") for n in ("switch", "wrap"))
        peaks = read.get("peaks", Mapping, {})
        for dtype, peak in peaks.items():
            if not isinstance(dtype, str) or isinstance(peak, bool) or not isinstance(peak, (int, float)):
                raise FormatError(f"chip: `peaks` must be dtypes with numbers, got {short(dtype)}: {short(peak)}.")
        pairs = tuple((dtype, amount(peak, "chip peaks", positive=True)) for dtype, peak in peaks.items())
        return cls(read.get("name", str), *numbers, **known, switch=switch, wrap=wrap, peaks=pairs)


def _tpu(
    name: str,
    flops: float,
    hbm: float,
    bandwidth: float,
    link: float,
    host: float,
    clock: float,
    wrap: int,
    int8: int,
) -> Chip:
    peaks = (("int8", int8 * flops),)
    return Chip(name, flops, hbm, bandwidth, link, host_bandwidth=host, clock=clock, wrap=wrap, peaks=peaks)


def _gpu(
    name: str, flops: float, hbm: float, bandwidth: float, link: float, host: float, peaks: dict[str, float]
) -> Chip:
    # Latencies: the order of magnitude that NCCL's tuning tables assume for one step on NVLink and on the network.
    return Chip(
        name,
        flops,
        hbm,
        bandwidth,
        link,
        link_latency=2e-6,
        host_bandwidth=host,
        host_latency=1e-5,
        switch=8,
        peaks=tuple(peaks.items()),
    )


# TPUs. FLOP/s, HBM and its bandwidth: Google Cloud's TPU system architecture pages, "v4", "v5e", "v5p", "v6e". Link
# bandwidth, one way, of a link: the tables of "How to Scale Your Model" (chapter on TPUs), which also has 1 µs a hop
# and the network between hosts: 6.25e9 B/s a chip, 12.5e9 on v6e. Clock: the peak over the FLOPs of one cycle of the
# matrix units, 8 x 128², 4 x 128², 8 x 128² and 4 x 256² times two; cycles that the compiler estimates for a large
# matmul are 88 %, 90 % and 70 % of the peak at this clock on v5e, v5p and v6e. Wrap-around: a full axis of 16 on
# v5e and v6e, multiples of 4 on v4 and v5p.
_TPUS = (
    _tpu("v4", 275e12, 32e9, 1.2e12, 45e9, 6.25e9, clock=1.05e9, wrap=4, int8=1),
    _tpu("v5e", 197e12, 16e9, 0.82e12, 45e9, 6.25e9, clock=1.5e9, wrap=16, int8=2),
    _tpu("v5p", 459e12, 95e9, 2.8e12, 90e9, 6.25e9, clock=1.75e9, wrap=4, int8=2),
    _tpu("v6e", 918e12, 32e9, 1.6e12, 90e9, 12.5e9, clock=1.75e9, wrap=16, int8=2),
)
# GPUs, the SXM boards of eight. NVIDIA's data sheets: dense FLOP/s (half of those "with sparsity"), memory, NVLink
# one way (half of the total that the sheets print); between hosts one 200 Gb/s (A100) or 400 Gb/s port for each GPU.
_GPUS = (
    _gpu("a100", 312e12, 80e9, 2.039e12, 300e9, 25e9, {"float32": 19.5e12, "int8": 624e12}),
    _gpu("h100", 989e12, 80e9, 3.35e12, 450e9, 50e9, {"float32": 67e12, "int8": 1979e12, "float8": 1979e12}),
    _gpu("h200", 989e12, 141e9, 4.8e12, 450e9, 50e9, {"float32": 67e12, "int8": 1979e12, "float8": 1979e12}),
    _gpu("b200", 2250e12, 180e9, 8e12, 900e9, 50e9, {"float32": 75e12, "int8": 4500e12, "float8": 4500e12}),
)
# A server of no particular make, one socket a device: so that a program compiled for simulated devices has a cost.
_CPU = Chip("cpu", 2e12, 64e9, 0.1e12, 25e9, link_latency=1e-6, host_bandwidth=12.5e9, switch=2)

CHIPS: Mapping[str, Chip] = MappingProxyType({chip.name: chip for chip in (*_TPUS, *_GPUS, _CPU)})


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


def chip_of(device: Any) -> Chip | None:
    """The chip that a jax device is, by its kind; None if it is none of those we know."""
    kind = str(getattr(device, "device_kind", "")).lower()
    names = {"v5 lite": "v5e", "v5e": "v5e", "v5p": "v5p", "v5": "v5p", "v6": "v6e", "v4": "v4"}
    names |= {name: name for name in ("a100", "h100", "h200", "b200")}
    if getattr(device, "platform", "") == "cpu":
        return CHIPS["cpu"]
    return next((CHIPS[name] for part, name in names.items() if part in kind), None)
