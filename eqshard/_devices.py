"""Devices: which ones, and in what order a mesh takes them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils

from ._errors import MeshError
from ._value import Reader, whole_number


Device = Any  # jax.Device, which is no type to type checkers


class Placement:
    """Which devices, in mesh order: equal by platform and ids, so that it survives JSON and another process.

    The devices themselves ride along where they are known; devices of a compile-only topology are not among
    `jax.devices()` and could not be looked up again.
    """

    def __init__(self, platform: str, ids: tuple[int, ...], devices: tuple[Device, ...] | None = None):
        self.platform: str = platform
        self.ids: tuple[int, ...] = ids
        self._devices = devices

    @classmethod
    def of(cls, devices: Sequence[Device]) -> "Placement":
        return cls(devices[0].platform, tuple(d.id for d in devices), tuple(devices))

    def devices(self) -> tuple[Device, ...]:
        if self._devices is not None:
            return self._devices
        try:
            found = {d.id: d for d in jax.devices(self.platform)}
        except RuntimeError as error:
            raise MeshError(f"this mesh lies on {self.platform!r} devices, which are not here: {error}") from None
        missing = [i for i in self.ids if i not in found]
        if missing:
            raise MeshError(
                f"this mesh lies on {self.platform!r} devices {list(self.ids)}; devices {missing} are not here. "
                "Use `.replace(devices=None)` on the mesh for whatever devices there are."
            )
        return tuple(found[i] for i in self.ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and (self.platform, self.ids) == (other.platform, other.ids)

    def __hash__(self) -> int:
        return hash((self.platform, self.ids))

    def __repr__(self) -> str:
        return f"{self.platform}:{list(self.ids)}"

    def __reduce__(self) -> Any:  # devices cannot be pickled; their ids can
        return Placement, (self.platform, self.ids)


def device_grid(axes: tuple[tuple[str, int], ...], dcn: tuple[str, ...], devices: list[Device]) -> np.ndarray:
    """The devices of a mesh in its shape, as near in the mesh as in the hardware; `dcn` axes cross the slow network."""
    slices = {getattr(d, "slice_index", None) for d in devices}
    by_process = len(slices) == 1
    granules = len({d.process_index for d in devices}) if by_process else len(slices)
    if dcn and granules > 1:
        across, left = _across(axes, dcn, granules)
        if left != 1:
            named = " x ".join(f"{n!r} {s}" for n, s in axes if n in dcn)
            raise MeshError(
                f"the `dcn` axes {named} cannot cross {granules} {'processes' if by_process else 'slices'} of "
                f"{len(devices) // granules} devices: their product must be a multiple of {granules}."
            )
        within = tuple(s // a for (_, s), a in zip(axes, across))
        return mesh_utils.create_hybrid_device_mesh(
            within, across, devices, process_is_granule=by_process, allow_split_physical_axes=True
        )
    return mesh_utils.create_device_mesh(tuple(s for _, s in axes), devices, allow_split_physical_axes=True)


def read_placement(data: Mapping[str, Any] | None) -> Placement | None:
    """The placement that `MeshSpec.to_dict` wrote."""
    if data is None:
        return None
    read = Reader(data, "mesh", "mesh devices")
    read.only("platform", "ids")
    ids = tuple(whole_number(i, "mesh devices") for i in read.get("ids", list))
    return Placement(read.get("platform", str), ids)


def _across(axes: tuple[tuple[str, int], ...], dcn: tuple[str, ...], granules: int) -> tuple[tuple[int, ...], int]:
    """How many granules each axis crosses, the first `dcn` axis as many as it can; and what is left over.

    A `dcn` axis may be longer than there are granules: then its major part crosses them, the rest lies inside.
    """
    across = []
    for name, size in axes:
        across.append(math.gcd(size, granules) if name in dcn else 1)
        granules //= across[-1]
    return tuple(across), granules
