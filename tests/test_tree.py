"""Names of leaves: those of `jax.tree_util.keystr`."""

import collections

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
from hypothesis import given, strategies as st

from eqshard._tree import named_leaves


Pair = collections.namedtuple("Pair", ["left", "right"])
INNER = lambda below: st.one_of(
    st.lists(below, max_size=3),
    st.lists(below, max_size=3).map(tuple),
    st.tuples(below, below).map(lambda xs: Pair(*xs)),
    st.dictionaries(st.text(max_size=3), below, max_size=3),
    st.dictionaries(st.integers(), below, max_size=3).map(collections.OrderedDict),
)
TREES = st.recursive(st.none() | st.integers() | st.text(max_size=2), INNER, max_leaves=20)


def expected(tree):
    return [(jtu.keystr(path), leaf) for path, leaf in jtu.tree_flatten_with_path(tree)[0]]


@given(TREES)
def test_names_and_order_are_those_of_jax(tree):
    assert list(named_leaves(tree)) == expected(tree)


def test_names_of_models_and_optimizer_states():
    model = eqx.nn.MLP(4, 4, 8, 2, key=jax.random.key(0))
    state = optax.chain(optax.clip(1.0), optax.adamw(1e-3)).init(eqx.filter(model, eqx.is_array))
    for tree in (model, state, (model, {"s": state}), jnp.ones(3)):
        assert [name for name, _ in named_leaves(tree)] == [name for name, _ in expected(tree)]


def test_names_of_a_deep_tree():
    tree = 1
    for _ in range(900):
        tree = [tree]
    assert list(named_leaves(tree)) == [("[0]" * 900, 1)]
