"""Meshes as descriptions: names, sizes, axis types; devices only when asked to build."""

import math
from collections.abc import Iterable, Mapping, Sequence
from types import EllipsisType
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from ._chip import as_chip, Chip
from ._devices import Device, device_grid, Placement, read_placement
from ._errors import FormatError, MeshError, UnknownAxisError
from ._tree import did_you_mean, path_name, shown
from ._value import header, Reader, Value, whole_number


_MOST_AXES = 64  # dimensions of a numpy array
_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit, "manual": AxisType.Manual}


class MeshSpec(Value):
    """A device mesh as a value: axis names and sizes, without touching a device.

    ```python
    import eqshard
    mesh = eqshard.MeshSpec(data=2, fsdp=4)
    assert mesh.names == ("data", "fsdp") and mesh.size() == 8
    mesh.build()      # a jax.sharding.Mesh over this machine's devices
    mesh.abstract()   # a jax.sharding.AbstractMesh: no devices needed
    ```
    """

    axes: tuple[tuple[str, int], ...] = eqx.field(static=True)
    axis_types: tuple[str, ...] = eqx.field(static=True)
    dcn: tuple[str, ...] = eqx.field(static=True)
    chip: Chip | None = eqx.field(static=True)
    placement: Placement | None = eqx.field(static=True)

    def __init__(
        self,
        axes: Mapping[str, int] | Iterable[tuple[str, int]] | None = None,
        /,
        *,
        axis_type: str | Mapping[str, str] = "auto",
        dcn: str | Sequence[str] = (),
        chip: Chip | str | None = None,
        devices: Sequence[Device] | Placement | None = None,
        **sizes: int,
    ):
        """**Arguments:**

        - `axes`: axis names to sizes, major first; for names that are no Python identifiers.
        - `sizes`: the same as keywords. One size may be -1: whatever devices remain.
        - `axis_type`: `"auto"` (the compiler propagates) or `"explicit"` (layouts are part of types), for all axes or
            by name.
        - `dcn`: the axes that cross the slower network between hosts or slices.
        - `chip`: a name in `eqshard.CHIPS` or an `eqshard.Chip`, for costs.
        - `devices`: the very devices, in mesh order; by default whatever `build` finds.

        **Raises:**

        - `MeshError`: names or sizes that make no mesh.
        """
        pairs = [*(_pairs(axes) if axes is not None else ()), *sizes.items()]
        _check_axes(pairs)
        names = [name for name, _ in pairs]
        placement = devices if devices is None or isinstance(devices, Placement) else Placement.of(list(devices))
        self.axes = tuple((name, int(size)) for name, size in pairs)
        if placement is not None:
            self.axes = _filled(self.axes, len(placement.ids))
        self.axis_types = _axis_types(axis_type, names)
        slow = (dcn,) if isinstance(dcn, str) else tuple(dcn)
        for name in slow:
            self._known(name)
        self.dcn = tuple(n for n in names if n in slow)
        self.chip = as_chip(chip)
        self.placement = placement
        if placement is not None and len(placement.ids) != self.size():
            raise MeshError(
                f"`devices` has {len(placement.ids)} devices; a mesh of {' x '.join(map(str, self.sizes))} needs "
                f"{self.size()}."
            )

    def _key(self) -> Any:
        return self.axes, self.axis_types, self.dcn, self.chip, self.placement

    def __repr__(self) -> str:
        extra = ""
        if any(t != "auto" for t in self.axis_types):
            same = len(set(self.axis_types)) == 1
            extra += f", axis_type={self.axis_types[0] if same else dict(zip(self.names, self.axis_types))!r}"
        if self.dcn:
            extra += f", dcn={self.dcn!r}"
        if self.chip is not None:
            extra += f", chip={self.chip.name!r}"
        if self.placement is not None:
            extra += f", devices={self.placement}"
        return "MeshSpec(" + ", ".join(f"{n}={s}" for n, s in self.axes) + extra + ")"

    def _repr_html_(self) -> str:
        from ._report._notebook import mesh_html  # noqa: PLC0415  reports read this module: above, it would be a cycle

        return mesh_html(self)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    @property
    def shape(self) -> dict[str, int]:
        """Axis names to sizes, as on a jax Mesh."""
        return dict(self.axes)

    def has(self, *names: str) -> bool:
        """Whether the mesh has all of these axes."""
        return set(names) <= set(self.names)

    def size(self, names: str | Iterable[str] | None = None) -> int:
        """The number of devices along the named axes, or in the whole mesh.

        **Raises:**

        - `UnknownAxisError`: no such axis.
        - `MeshError`: the size of an axis is still open (-1).
        """
        wanted = self.names if names is None else (names,) if isinstance(names, str) else tuple(names)
        size = math.prod(self._known(name) for name in wanted)
        if size < 0:
            raise MeshError(f"{self} is open: say for how many devices, as `mesh.resolve(8)` or `mesh.resolve()`.")
        return size

    def _known(self, name: str) -> int:
        sizes = self.shape
        if name not in sizes:
            raise UnknownAxisError(
                f"no axis {name!r} in the mesh: its axes are {', '.join(map(repr, sizes))}." + did_you_mean(name, sizes)
            )
        return sizes[name]

    def resolve(self, n_devices: int | None = None) -> "MeshSpec":
        """This mesh with an axis of -1 filled in, for `n_devices` devices (default: all that JAX sees)."""
        if -1 not in self.sizes:
            return self
        return self.replace(axes=_filled(self.axes, jax.device_count() if n_devices is None else n_devices))

    def replace(
        self,
        *,
        axes: Mapping[str, int] | Iterable[tuple[str, int]] | None = None,
        axis_type: str | Mapping[str, str] | None = None,
        dcn: str | Sequence[str] | None = None,
        chip: Chip | str | EllipsisType | None = ...,
        devices: Sequence[Device] | Placement | EllipsisType | None = ...,
    ) -> "MeshSpec":
        """A new mesh with some arguments changed; `chip=None` and `devices=None` forget them."""
        new = self.axes if axes is None else _pairs(axes)
        kept = dict(zip(self.names, self.axis_types))
        return MeshSpec(
            new,
            axis_type={n: kept.get(n, "auto") for n, _ in new} if axis_type is None else axis_type,
            dcn=tuple(n for n in self.dcn if n in dict(new)) if dcn is None else dcn,
            chip=self.chip if isinstance(chip, EllipsisType) else chip,
            devices=self.placement if isinstance(devices, EllipsisType) else devices,
        )

    def abstract(self) -> AbstractMesh:
        """The `jax.sharding.AbstractMesh`: names, sizes and types, no devices."""
        self.size()  # an open axis has no abstract mesh
        return AbstractMesh(self.sizes, self.names, axis_types=self._jax_types())

    def build(self, devices: Sequence[Device] | None = None) -> Mesh:
        """The `jax.sharding.Mesh`.

        Neighbours in the mesh are neighbours in the hardware as far as its topology allows, and the `dcn` axes are
        the ones that cross hosts or slices. Of more devices than needed, the first ones are used.

        **Arguments:**

        - `devices`: where to build; default: the devices this mesh was read from or made with, else all that JAX has.

        **Raises:**

        - `MeshError`: there are too few devices.
        """
        if devices is None and self.placement is not None:
            grid = np.array(self.placement.devices(), dtype=object).reshape(self.sizes)
            return Mesh(grid, self.names, axis_types=self._jax_types())
        found = list(jax.devices() if devices is None else devices)
        spec = self.resolve(len(found))
        if len(found) < spec.size():
            raise MeshError(
                f"{spec} needs {spec.size()} devices; there are {len(found)} ({found[0].platform}). To simulate more "
                f'on a CPU, call `jax.config.update("jax_num_cpu_devices", {spec.size()})` before JAX is first used.'
            )
        grid = device_grid(spec.axes, spec.dcn, found[: spec.size()])
        return Mesh(grid, spec.names, axis_types=spec._jax_types())

    def _jax_types(self) -> tuple[AxisType, ...]:
        return tuple(_TYPES[t] for t in self.axis_types)

    @classmethod
    def of(cls, x: Any, /) -> "MeshSpec":
        """The mesh of a jax Mesh, AbstractMesh, NamedSharding, sharded array, tracer, plan, or tree of any of these.

        A MeshSpec is itself, with an axis of -1 filled in for the devices that JAX has. Of a Mesh whose devices are
        the ones that `build` would choose, in that order, only the description is kept.

        ```python
        import eqshard, jax
        mesh = jax.make_mesh((2, 4), ("data", "tp"))
        assert eqshard.MeshSpec.of(mesh).shape == {"data": 2, "tp": 4}
        ```

        **Raises:**

        - `MeshError`: there is none, or leaves of a tree lie on different ones.
        """
        found = _mesh_of(x)
        if found is not None:
            return found
        seen: dict[MeshSpec, str] = {}
        for path, leaf in jtu.tree_flatten_with_path(x, is_leaf=lambda node: isinstance(node, Value))[0]:
            spec = _mesh_of(leaf)
            if spec is not None:
                seen.setdefault(spec, path_name(path))
        if len(seen) > 1:
            (one, path), (two, other) = list(seen.items())[:2]
            raise MeshError(f"leaves lie on different meshes: {shown(path)} on {one}, {shown(other)} on {two}.")
        if not seen:
            raise MeshError(
                f"found no mesh in a {type(x).__name__}: no leaf has a NamedSharding. Pass a MeshSpec or a jax Mesh."
            )
        return next(iter(seen))

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = header("mesh") | {"axes": [list(pair) for pair in self.axes]}
        if any(t != "auto" for t in self.axis_types):
            data["axis_types"] = list(self.axis_types)
        if self.dcn:
            data["dcn"] = list(self.dcn)
        if self.chip is not None:
            data["chip"] = self.chip.to_dict()
        if self.placement is not None:
            data["devices"] = {"platform": self.placement.platform, "ids": list(self.placement.ids)}
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "MeshSpec":
        read = Reader(data, "mesh")
        read.header()
        read.only("format", "version", "axes", "axis_types", "dcn", "chip", "devices")
        axes = read.get("axes", list)
        if len(axes) > _MOST_AXES:
            raise FormatError(f"mesh: at most {_MOST_AXES} axes, got {len(axes)}.")
        for pair in axes:
            if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)):
                raise FormatError("mesh: `axes` must be a list of [name, size] pairs.")
            if pair[1] != -1:
                whole_number(pair[1], f"mesh axis {pair[0]!r}", least=1, most=2**31 - 1)
        whole_number(math.prod(abs(size) for _, size in axes), "mesh: number of devices", most=2**31 - 1)
        types = read.strings("axis_types", ()) or ("auto",) * len(axes)
        if len(types) != len(axes):
            raise FormatError(f"mesh: {len(types)} axis_types for {len(axes)} axes.")
        chip = read.get("chip", Mapping, None)
        try:
            return cls(
                [(name, size) for name, size in axes],
                axis_type={pair[0]: t for pair, t in zip(axes, types)},
                dcn=read.strings("dcn", ()),
                chip=None if chip is None else Chip.from_dict(chip),
                devices=read_placement(read.get("devices", Mapping, None)),
            )
        except (MeshError, UnknownAxisError) as error:
            raise FormatError(f"mesh: {error}") from None


MeshLike = MeshSpec | Mesh | AbstractMesh


def _pairs(axes: Mapping[str, int] | Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    pairs: Any = axes.items() if isinstance(axes, Mapping) else axes
    return tuple(pairs)


def _check_axes(pairs: list[tuple[str, int]]) -> None:
    if not pairs:
        raise MeshError("a mesh needs at least one axis, as in `MeshSpec(data=8)`.")
    if len(pairs) > _MOST_AXES:
        raise MeshError(f"a mesh has at most {_MOST_AXES} axes, got {len(pairs)}.")
    names = [name for name, _ in pairs]
    for name, size in pairs:
        if not isinstance(name, str) or not name:
            raise MeshError(f"an axis name must be a string, got {name!r}.")
        whole = isinstance(size, (int, np.integer)) and not isinstance(size, bool)
        if not whole or (size < 1 and size != -1):
            raise MeshError(f"axis {name!r} has size {size!r}: sizes are positive, or -1 for whatever devices remain.")
        if names.count(name) > 1:
            raise MeshError(f"axis {name!r} is given twice.")
    if sum(size == -1 for _, size in pairs) > 1:
        raise MeshError("only one axis may have size -1.")


def _filled(axes: tuple[tuple[str, int], ...], n: int) -> tuple[tuple[str, int], ...]:
    """`axes` over `n` devices, with the size of -1 filled in."""
    open_axis = next((name for name, size in axes if size == -1), None)
    if open_axis is None:
        return axes
    fixed = math.prod(size for _, size in axes if size != -1)
    if n % fixed or n < fixed:
        raise MeshError(
            f"axis {open_axis!r} of size -1 cannot be filled in: the other axes take {fixed} devices, and {n} is no "
            f"multiple of {fixed}."
        )
    return tuple((name, n // fixed if size == -1 else size) for name, size in axes)


def _axis_types(axis_type: str | Mapping[str, str], names: list[str]) -> tuple[str, ...]:
    by_name = dict.fromkeys(names, axis_type) if isinstance(axis_type, str) else dict(axis_type)
    for name, kind in by_name.items():
        if name not in names:
            raise UnknownAxisError(f"`axis_type` names {name!r}; the axes are {', '.join(names)}.")
        if kind not in _TYPES:
            raise MeshError(f"`axis_type` {kind!r} is none of {', '.join(map(repr, _TYPES))}.")
    return tuple(str(by_name.get(name, "auto")) for name in names)


def _mesh_of(x: Any) -> MeshSpec | None:
    if isinstance(x, MeshSpec):
        return x.resolve()
    if isinstance(x, (Mesh, AbstractMesh)):
        return _described(x) if x.axis_names else None
    if isinstance(x, NamedSharding):
        return _mesh_of(x.mesh)
    if isinstance(x, Tracer):
        return _mesh_of(jax.typeof(x).sharding.mesh)
    if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
        return _mesh_of(x.sharding)
    if isinstance(getattr(x, "mesh", None), MeshSpec):  # a plan
        return x.mesh
    return None


def _described(mesh: Mesh | AbstractMesh) -> MeshSpec:
    names = {kind: name for name, kind in _TYPES.items()}
    spec = MeshSpec(
        [(str(n), int(s)) for n, s in mesh.shape.items()],
        axis_type={str(n): names[t] for n, t in zip(mesh.axis_names, mesh.axis_types)},
    )
    if isinstance(mesh, AbstractMesh):
        return spec
    devices = list(mesh.devices.flat)
    return spec if _chosen(spec, devices) else spec.replace(devices=devices)


def _chosen(spec: MeshSpec, devices: list[Device]) -> bool:
    """Whether `spec.build()` would take these very devices in this order."""
    here = jax.devices()[: len(devices)]
    return set(here) == set(devices) and list(device_grid(spec.axes, spec.dcn, here).flat) == devices
