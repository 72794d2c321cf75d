"""MeshSpec: names, sizes, building, reading meshes off other things, JSON."""

import copy
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P

import eqshard
from eqshard import MeshSpec


TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def test_names_sizes_shape():
    mesh = MeshSpec(data=2, fsdp=4)
    assert mesh.names == ("data", "fsdp") and mesh.sizes == (2, 4) and mesh.shape == {"data": 2, "fsdp": 4}
    assert mesh.size() == 8 and mesh.size("fsdp") == 4 and mesh.size(("data", "fsdp")) == 8 and mesh.size(()) == 1
    assert mesh.has("data") and mesh.has("data", "fsdp") and mesh.has() and not mesh.has("data", "tp")
    assert (
        MeshSpec({"data": 2, "fsdp": 4})
        == mesh
        == MeshSpec([("data", 2), ("fsdp", 4)])
        == MeshSpec({"data": 2}, fsdp=4)
    )
    assert MeshSpec(fsdp=4, data=2) != mesh  # major first: the order says who lies where


def test_unknown_axis_in_size():
    with pytest.raises(eqshard.UnknownAxisError, match=r"'fdsp'.*'data', 'fsdp'.*Did you mean 'fsdp'"):
        MeshSpec(data=2, fsdp=4).size("fdsp")


def test_value_semantics():
    a, b = MeshSpec(x=2, y=4, chip="v5e", dcn="x"), MeshSpec({"x": 2, "y": 4}, dcn=["x"], chip=eqshard.CHIPS["v5e"])
    assert a == b and hash(a) == hash(b) and {a: 1}[b] == 1
    for other in (MeshSpec(x=2, y=4), a.replace(axis_type="explicit"), a.replace(chip="v4"), a.replace(dcn=())):
        assert other != a
    assert jax.tree.leaves(a) == [] and a != "mesh"
    assert pickle.loads(pickle.dumps(a)) == a and copy.deepcopy(a) == a
    with pytest.raises(AttributeError):
        a.dcn = ()


def test_repr_says_what_is_not_default():
    assert repr(MeshSpec(x=2)) == "MeshSpec(x=2)"
    text = repr(MeshSpec(x=2, y=4, axis_type="explicit", dcn="x", chip="v5e"))
    assert text == "MeshSpec(x=2, y=4, axis_type='explicit', dcn=('x',), chip='v5e')"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MeshSpec(), "at least one axis"),
        (lambda: MeshSpec(x=0), "'x' has size 0"),
        (lambda: MeshSpec(x=-2), "-2"),
        (lambda: MeshSpec({"x": True}), "True"),
        (lambda: MeshSpec({"": 2}), "must be a string"),
        (lambda: MeshSpec({"x": 2}, x=4), "'x' is given twice"),
        (lambda: MeshSpec(x=-1, y=-1), "only one axis"),
        (lambda: MeshSpec(x=2, dcn="y"), "'y'.*its axes are 'x'"),
        (lambda: MeshSpec(x=2, axis_type="automatic"), "'automatic'.*'auto', 'explicit'"),
        (lambda: MeshSpec(x=2, axis_type={"y": "auto"}), "'y'"),
        (lambda: MeshSpec(x=2, chip="v5x"), "'v5x'.*v5e.*Did you mean"),
        (lambda: MeshSpec(x=2, devices=jax.devices()[:3]), "3 devices.*needs 2"),
        (lambda: MeshSpec({f"a{i}": 1 for i in range(65)}), "at most 64"),
    ],
)
def test_refused(make, message):
    with pytest.raises(eqshard.ShardingError, match=message):
        make()


def test_build_and_abstract(axis_type):
    spec = MeshSpec(x=2, y=4, axis_type=axis_type)
    mesh = spec.build()
    assert isinstance(mesh, Mesh) and dict(mesh.shape) == spec.shape and mesh.axis_types == (TYPES[axis_type],) * 2
    assert spec.abstract() == AbstractMesh((2, 4), ("x", "y"), axis_types=(TYPES[axis_type],) * 2)
    assert mesh == jax.make_mesh((2, 4), ("x", "y"), axis_types=(TYPES[axis_type],) * 2)


def test_build_takes_the_first_devices_or_those_given():
    assert list(MeshSpec(x=3).build().devices.flat) == jax.devices()[:3]
    assert list(MeshSpec(x=2).build(jax.devices()[5:]).devices.flat) == jax.devices()[5:7]
    assert list(MeshSpec(x=2, devices=jax.devices()[6:]).build().devices.flat) == jax.devices()[6:]


def test_too_few_devices():
    with pytest.raises(eqshard.MeshError) as error:
        MeshSpec(data=4, tp=4).build()
    text = str(error.value)
    assert "needs 16 devices" in text and "there are 8 (cpu)" in text and '"jax_num_cpu_devices", 16' in text


def test_open_axis():
    mesh = MeshSpec({"data": 2, "fsdp": -1}, chip="v5e", axis_type="explicit")
    assert mesh.resolve(16).shape == {"data": 2, "fsdp": 8} and mesh.resolve().shape == {"data": 2, "fsdp": 4}
    assert mesh.resolve(16).chip == mesh.chip and mesh.resolve(16).axis_types == ("explicit",) * 2
    assert dict(mesh.build().shape) == {"data": 2, "fsdp": 4}
    assert dict(mesh.build(jax.devices()[:4]).shape) == {"data": 2, "fsdp": 2}
    assert MeshSpec(x=-1, devices=jax.devices()[:3]).shape == {"x": 3}
    assert MeshSpec.of(mesh).shape == {"data": 2, "fsdp": 4}
    assert MeshSpec.from_json(mesh.to_json()) == mesh
    with pytest.raises(eqshard.MeshError, match="open"):
        mesh.size()
    with pytest.raises(eqshard.MeshError, match="open"):
        mesh.abstract()
    with pytest.raises(eqshard.MeshError, match=r"'y'.*take 3 devices.*8 is no multiple of 3"):
        MeshSpec(x=3, y=-1).build()
    with pytest.raises(eqshard.MeshError, match="0 is no multiple of 3"):
        MeshSpec(x=3, y=-1).resolve(0)


def test_an_open_mesh_in_every_function_that_takes_one():
    mesh = MeshSpec(x=-1)
    assert eqshard.shard_shape((16,), P("x"), mesh) == (2,)
    assert eqshard.fit_spec(P("x"), (12,), mesh).spec == P()  # 12 % 8, not 12 % -1
    plan = eqshard.replicated_plan(jnp.ones(16), mesh).at("").set(P("x"))
    assert plan.mesh == MeshSpec(x=8) and eqshard.apply(plan, jnp.ones(16)).sharding.shard_shape((16,)) == (2,)


def test_replace():
    mesh = MeshSpec(x=2, y=4, dcn="x", chip="v5e", axis_type={"y": "explicit"}, devices=jax.devices())
    assert mesh.replace() == mesh
    assert mesh.replace(chip=None, devices=None) == MeshSpec(x=2, y=4, dcn="x", axis_type={"y": "explicit"})
    new = mesh.replace(axes={"y": 2, "z": 1}, devices=None)
    assert new.shape == {"y": 2, "z": 1} and new.axis_types == ("explicit", "auto") and new.dcn == ()


def test_the_slow_network_needs_as_many_groups():
    mesh = MeshSpec(data=2, tp=4, dcn="data")
    assert dict(mesh.build().shape) == {"data": 2, "tp": 4}  # one process, no slices: nothing to cross

    class Fake:
        platform, device_kind = "cpu", "fake"

        def __init__(self, i):
            self.id, self.process_index = i, i // 2

    devices = [Fake(i) for i in (7, 0, 6, 1, 5, 2, 4, 3)]
    grid = eqshard._devices.device_grid((("data", 4), ("tp", 2)), ("data",), devices)
    assert [{d.process_index for d in row} for row in grid] == [{0}, {1}, {2}, {3}]
    with pytest.raises(eqshard.MeshError, match=r"'data' 2.*4 processes of 2 devices"):
        mesh.build(devices)


# Reading


def test_of_meshes_and_shardings(axis_type):
    spec = MeshSpec(x=2, y=4, axis_type=axis_type)
    mesh = spec.build()
    sharding = NamedSharding(mesh, P("x"))
    x = jax.device_put(jnp.ones(8), sharding)
    plan = eqshard.replicated_plan(x, spec)
    struct = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    for thing in (spec, mesh, spec.abstract(), sharding, x, struct, plan):
        assert MeshSpec.of(thing) == spec
        assert MeshSpec.of({"a": [thing, None], "b": 3, "c": np.ones(3), "d": jnp.ones(3)}) == spec
    model = eqx.tree_at(lambda m: m.weight, eqx.nn.Linear(2, 4, key=jax.random.key(0)), jnp.ones((4, 2)))
    assert MeshSpec.of(eqshard.replicate(model, spec)) == spec


def test_of_a_tracer():
    seen = []

    @jax.jit
    def f(x):
        seen.append(MeshSpec.of(x))
        return x

    spec = MeshSpec(x=8, axis_type="explicit")
    f(eqshard.replicate(jnp.ones(8), spec))
    assert seen == [spec]


def test_of_inside_shard_map():
    spec = MeshSpec(x=2, y=4)

    def f(x):
        assert MeshSpec.of(x).axis_types == ("manual", "auto")
        assert MeshSpec.of(x).shape == spec.shape
        return x

    mapped = jax.shard_map(f, mesh=spec.build(), in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    jax.jit(mapped)(eqshard.constrain_to(jnp.ones(8), P("x"), spec))


def test_of_a_mesh_in_another_order_keeps_the_devices():
    devices = np.array(jax.devices())[::-1].reshape(2, 4)
    mesh = Mesh(devices, ("x", "y"))
    spec = MeshSpec.of(mesh)
    assert spec != MeshSpec(x=2, y=4) and spec.build() == mesh
    assert MeshSpec.from_json(spec.to_json()) == spec and MeshSpec.from_json(spec.to_json()).build() == mesh
    assert "cpu:[7, 6, 5, 4, 3, 2, 1, 0]" in repr(spec)
    assert pickle.loads(pickle.dumps(spec)) == spec
    some = Mesh(np.array(jax.devices()[2:4]), ("x",))
    assert MeshSpec.of(some).build() == some


def test_of_nothing():
    for thing in (jnp.ones(3), {"a": np.ones(3)}, [], None, 3, "x"):
        with pytest.raises(eqshard.MeshError, match="found no mesh"):
            MeshSpec.of(thing)


def test_of_two_meshes_names_both():
    tree = {k: eqshard.replicate(jnp.ones(8), MeshSpec({k: 8})) for k in "ab"}
    with pytest.raises(eqshard.MeshError) as error:
        MeshSpec.of(tree)
    assert "`['a']` on MeshSpec(a=8" in str(error.value) and "`['b']` on MeshSpec(b=8" in str(error.value)


def test_devices_that_are_not_here():
    spec = MeshSpec.from_dict(MeshSpec(x=2).to_dict() | {"devices": {"platform": "cpu", "ids": [3, 99]}})
    with pytest.raises(eqshard.MeshError, match=r"devices \[99\] are not here.*replace\(devices=None\)"):
        spec.build()
    assert spec.replace(devices=None).build()
    spec = MeshSpec.from_dict(MeshSpec(x=1).to_dict() | {"devices": {"platform": "abacus", "ids": [0]}})
    with pytest.raises(eqshard.MeshError, match="'abacus' devices, which are not here"):
        spec.build()


# Chips


def test_chips():
    assert set(eqshard.CHIPS) >= {"v4", "v5e", "v5p", "v6e"}
    own = eqshard.Chip("mine", 1e12, 8e9, 1e11, 1e10)
    mesh = MeshSpec(x=2, chip=own)
    assert mesh.chip == own and hash(mesh.chip) == hash(own) and MeshSpec.from_json(mesh.to_json()).chip == own
    assert eqshard.Chip.from_json(own.to_json()) == own
    assert eqshard.Chip("ints", 1, 2, 3, 4).flops == 1.0


# JSON


@pytest.mark.parametrize(
    "mesh",
    [
        MeshSpec(x=2),
        MeshSpec({"a b": 1, "é": -1}),
        MeshSpec(x=2, y=4, axis_type="explicit", dcn=("y", "x"), chip="v6e"),
        MeshSpec(x=2, y=4, axis_type={"y": "explicit"}),
    ],
    ids=str,
)
def test_json_round_trip(mesh):
    for again in (MeshSpec.from_json(mesh.to_json()), MeshSpec.from_dict(mesh.to_dict())):
        assert again == mesh and hash(again) == hash(mesh) and repr(again) == repr(mesh)


GOOD = MeshSpec(x=2, y=4, axis_type="explicit", dcn="x", chip="v5e", devices=jax.devices()).to_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2.*reads version 1"),
        ({"version": True}, "version True"),
        ({"version": "1"}, "version '1'"),
        ({"version": 1.0}, r"version 1\.0"),
        ({"version": None}, "version None"),
        ({"format": "eqshard.plan"}, "not an eqshard mesh"),
        ({"format": ["eqshard.mesh"]}, "not an eqshard mesh"),
        ({"surprise": 1}, "unknown field 'surprise'"),
        ({"axes": {"x": 2}}, "`axes` must be list"),
        ({"axes": [], "axis_types": [], "dcn": []}, "at least one axis"),
        ({"axes": [["x"]]}, "pairs"),
        ({"axes": [["x", 2, 3]]}, "pairs"),
        ({"axes": [[1, 2]]}, "pairs"),
        ({"axes": [["x", True], ["y", 4]]}, "True"),
        ({"axes": [["x", 2.0], ["y", 4]]}, r"2\.0"),
        ({"axes": [["x", 0], ["y", 4]]}, "from 1"),
        ({"axes": [["x", 10**30], ["y", 4]]}, "1000000"),
        ({"axes": [["x", 2**31 - 1], ["y", 2**31 - 1]]}, "number of devices"),
        ({"axes": [["x", 2], ["x", 4]]}, "twice"),
        ({"axes": [["x", "2"], ["y", 4]]}, "'2'"),
        ({"axes": [["x", None], ["y", 4]]}, "None"),
        ({"axes": [[f"a{i}", 1] for i in range(100_000)]}, "at most 64"),
        ({"axis_types": ["auto"]}, "1 axis_types for 2 axes"),
        ({"axis_types": ["auto", "autom"]}, "autom"),
        ({"axis_types": [1, 2]}, "list of strings"),
        ({"dcn": ["z"]}, "'z'"),
        ({"dcn": "x"}, "`dcn` must be list"),
        ({"chip": "v5e"}, "`chip` must be Mapping"),
        ({"chip": {"name": "a"}}, "`flops` is missing"),
        ({"chip": eqshard.CHIPS["v5e"].to_dict() | {"flops": float("nan")}}, "positive"),
        ({"chip": eqshard.CHIPS["v5e"].to_dict() | {"flops": 10**400}}, "positive"),
        ({"chip": eqshard.CHIPS["v5e"].to_dict() | {"flops": -1.0}}, "positive"),
        ({"chip": eqshard.CHIPS["v5e"].to_dict() | {"flops": True}}, "True"),
        ({"devices": {"platform": "cpu", "ids": [0]}}, "1 devices"),
        ({"devices": {"platform": 1, "ids": [0] * 8}}, "`platform` must be str"),
        ({"devices": {"platform": "cpu", "ids": [-1] * 8}}, "-1"),
        ({"devices": [0]}, "`devices` must be Mapping"),
    ],
)
def test_hostile_json(change, message):
    with pytest.raises(eqshard.FormatError, match=message):
        MeshSpec.from_dict(GOOD | change)
    assert MeshSpec.from_dict(GOOD).names == ("x", "y")
