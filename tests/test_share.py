"""Parts of datasets: every element exactly once."""

from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import PartitionSpec as P

import eqshard
from eqshard import MeshSpec, process_slice
from eqshard._share import mesh_share


class Dataset:
    """As little as a dataset must have."""

    def __init__(self, n):
        self.n, self.asked = n, []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if not 0 <= i < self.n:
            raise IndexError(i)
        self.asked.append(i)
        return i


KINDS = {
    "range": lambda n: n,
    "list": lambda n: list(range(n)),
    "tuple": lambda n: tuple(range(n)),
    "numpy": lambda n: np.arange(n),
    "jax": lambda n: jnp.arange(n),
    "dataset": Dataset,
}


@given(
    n=st.integers(0, 23),
    count=st.integers(1, 6),
    remainder=st.sampled_from(["keep", "drop", "pad"]),
    order=st.sampled_from(["block", "stride"]),
    kind=st.sampled_from(sorted(KINDS)),
)
def test_every_element_once(n, count, remainder, order, kind):
    parts = [process_slice(KINDS[kind](n), share=(i, count), remainder=remainder, order=order) for i in range(count)]
    sizes = [len(part) for part in parts]
    found = Counter(int(x) for part in parts for x in part)
    if remainder == "keep":
        assert found == Counter(range(n)) and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    elif remainder == "drop":
        assert found == Counter(range(n - n % count)) and set(sizes) == {n // count}
    else:
        padded = list(range(n)) + [i % n for i in range(-n % count)] if n else []
        assert found == Counter(padded) and set(sizes) == {-(-n // count)}
    if order == "block" and remainder != "pad":
        assert [int(x) for part in parts for x in part] == list(range(sum(sizes)))


def test_the_same_type_comes_back():
    assert process_slice([1, 2], share=(0, 2)) == [1] and process_slice((1, 2), share=(1, 2)) == (2,)
    assert process_slice("abcd", share=(1, 2)) == "cd" and process_slice(b"abcd", share=(0, 2)) == b"ab"
    strings = process_slice(np.array(["a", "b"]), share=(1, 2))
    assert strings.tolist() == ["b"]
    x = np.arange(8)
    assert process_slice(x, share=(1, 2)).base is x  # a view, no copy
    columns = process_slice({"x": np.arange(4), "y": ["a", "b", "c", "d"]}, share=(1, 2))
    assert columns["x"].tolist() == [2, 3] and columns["y"] == ["c", "d"]
    with pytest.raises(eqshard.MismatchError, match="equally long"):
        process_slice({"x": [1], "y": [1, 2]}, share=(0, 1))


def test_a_dataset_is_read_when_asked():
    data = Dataset(10)
    part = process_slice(data, share=(1, 2))
    assert data.asked == [] and len(part) == 5
    assert part[0] == 5 and part[-1] == 9 and list(part[1:3]) == [6, 7] and next(reversed(part)) == 9
    with pytest.raises(IndexError):
        part[5]
    assert "5 of the 10" in repr(part)


def test_a_remainder_must_be_decided():
    with pytest.raises(eqshard.IndivisibleError, match=r"10 % 3 = 1[\s\S]*drop[\s\S]*pad[\s\S]*keep"):
        process_slice(10, share=(0, 3))
    with pytest.raises(eqshard.ShardingError, match="from 0 to 1"):
        process_slice(10, share=(2, 2))
    with pytest.raises(eqshard.ShardingError, match="go together"):
        process_slice(10, mesh=MeshSpec(dp=8))


def test_one_process_has_all():
    assert eqshard.process_share(MeshSpec(dp=2, tp=4), P("dp", "tp"), dim=1) == (0, 1)
    assert process_slice([1, 2, 3], mesh=MeshSpec(dp=8), spec=P("dp")) == [1, 2, 3] == process_slice([1, 2, 3])
    with pytest.raises(eqshard.UnknownAxisError):
        eqshard.process_share(MeshSpec(dp=8), P("data"))


class Device:
    def __init__(self, process_index):
        self.process_index = process_index


class Mesh:
    """Devices of processes that are not there."""

    def __init__(self, processes, names):
        self.axis_names = names
        self.devices = np.vectorize(Device, otypes=[object])(np.array(processes))
        self.shape = dict(zip(names, self.devices.shape))


def shares(processes, names, axes):
    mesh = Mesh(processes, names)
    return [tuple(mesh_share(mesh, axes, i, "P")) for i in sorted(set(np.ravel(processes).tolist()))]


def test_shares_of_many_processes():
    assert shares([[0, 0], [1, 1], [2, 2], [3, 3]], "xy", ("x",)) == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert shares([[0, 1], [0, 1]], "xy", ("x",)) == [(0, 1), (0, 1)]  # y crosses: both hold all rows
    assert shares([[0, 1], [2, 3]], "xy", ("x",)) == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert shares([[0, 1], [2, 3]], "xy", ("x", "y")) == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert shares([[1, 1], [0, 0]], "xy", ("x",)) == [(1, 2), (0, 2)]  # processes in another order
    assert shares([[0, 1, 0, 1]], "xy", ("y",)) == [(0, 2), (1, 2)]  # blocks that do not lie together
    with pytest.raises(eqshard.ProcessError, match="overlapping"):
        shares([[0, 0], [0, 1], [1, 1], [1, 0]], "xy", ("x",))
