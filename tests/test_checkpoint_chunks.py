"""How large the chunks of a checkpoint are."""

import jax
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import PartitionSpec as P

import eqshard
from eqshard.checkpoint._chunks import _chunk, chunk_bytes
from eqshard.checkpoint._contents import contents
from eqshard.checkpoint._tensors import open_tensors, read_chunk


MESHES = {"one": {"x": 1}, "line": {"x": 8}, "tiles": {"x": 2, "y": 4}}


@pytest.mark.parametrize(
    ("mesh", "spec", "shape", "chunk"),
    [
        ("one", P(), (1024, 1024), (512, 512)),  # cut both ways: nobody knows how it will be restored
        ("one", P(), (256, 8192), (256, 1024)),  # the long way first
        ("line", P("x"), (1024, 2048), (128, 2048)),  # a piece of 1 MiB is not cut
        ("line", P(), (1024, 2048), (128, 2048)),  # each device writes an eighth
        ("line", P("x"), (64, 65536), (8, 65536)),  # eight parts already: no smaller for it
        ("line", P(None, "x"), (1024, 2048), (1024, 256)),  # Orbax cuts what is split, and nothing else
        ("tiles", P("x", "y"), (2048, 2048), (512, 512)),
        ("tiles", P("x"), (7, 3), (7, 3)),
        ("one", P(), (), ()),
    ],
)
def test_chunks_as_saved(tmp_path, mesh, spec, shape, chunk):
    x = np.ones(shape, "f4")
    spec = spec if len(shape) == 2 and shape[0] % 2 == 0 else P()
    plan = eqshard.replicated_plan({"x": x}, eqshard.MeshSpec(MESHES[mesh])).at("x").set(spec)
    eqshard.checkpoint.save(tmp_path / "a", eqshard.apply(plan, {"x": x}))
    (leaf,) = contents(tmp_path / "a").leaves
    (store,) = open_tensors([(leaf.path, leaf.source)])
    assert read_chunk(store) == chunk


sizes = st.sampled_from([1, 2, 3, 7, 16, 96, 100, 4096, 50257])


@given(st.lists(st.tuples(sizes, st.sampled_from([1, 2, 8])), max_size=3), st.integers(1, 2**22))
def test_chunks_divide_pieces_and_are_small_enough(dims, elements):
    piece = tuple(n for n, _ in dims)
    chunk = _chunk(tuple(n * k for n, k in dims), piece, elements)
    assert all(n % c == 0 for n, c in zip(piece, chunk)) and np.prod(chunk) <= elements


@given(st.lists(sizes, max_size=3))
def test_a_size_that_the_store_can_take(shape):
    nbytes = chunk_bytes(jax.ShapeDtypeStruct(tuple(shape), np.dtype("f4")))
    assert 2**20 <= nbytes <= 2**24
