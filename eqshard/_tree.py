"""Trees: which leaves are arrays, what they are called, how large they are."""

import difflib
import functools
import re
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, TYPE_CHECKING, TypeAlias, TypeGuard

import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree


if TYPE_CHECKING:
    Tree: TypeAlias = Any
else:
    Tree = PyTree[Any]  # type checkers know nothing of it, not even that it may be anything

# numpy kinds that no device can hold: object, text, bytes, dates.
_HOST_ONLY = frozenset("OUSMm")


def is_array(x: object) -> TypeGuard[Any]:
    """Whether `x` is a leaf that a plan lays out.

    JAX arrays, tracers, `jax.ShapeDtypeStruct`s, and numpy arrays of a dtype that a device can hold. To be used as
    the filter of `equinox.filter` and `equinox.partition`; `equinox.is_array` says no to numpy arrays and structs.

    ```python
    import eqshard, numpy as np
    assert eqshard.is_array(np.ones(3))
    assert not eqshard.is_array(np.array(["a"]))
    assert not eqshard.is_array(3.0)
    ```
    """
    if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
        return True
    return isinstance(x, np.ndarray) and x.dtype.kind not in _HOST_ONLY and x.dtype.names is None


def path_name(path: Iterable[Hashable]) -> str:
    """The name of a leaf: `.layers[0].weight`, `['a']['b']`; the empty string if the tree is a leaf."""
    return jtu.keystr(tuple(path))  # pyright: ignore[reportArgumentType]


def shown(path: str) -> str:
    """A path as errors and tables print it."""
    return f"`{path}`" if path else "the tree itself (a single leaf)"


def array_leaves(tree: Tree) -> list[tuple[str, Any]]:
    """The array leaves of `tree` with their names, in tree order."""
    return [(name, leaf) for name, leaf in named_leaves(tree) if is_array(leaf)]


def named_leaves(tree: Tree) -> Iterator[tuple[str, Any]]:
    """The leaves of `tree` with their names, in tree order.

    Level by level: a name is its parent's and a key, and no list of all the paths is made, which on large trees costs
    Python's garbage collector more than all the rest.
    """
    flatten = jtu.default_registry.flatten_one_level_with_keys
    left = [("", tree)]
    while left:
        name, node = left.pop()
        level = flatten(node)
        if level is None:
            yield name, node
        elif level[1] is type(node):  # a namedtuple: jaxlib 0.10 gives each field the name of the first
            left.extend([(f"{name}.{field}", child) for field, child in zip(node._fields, node)][::-1])
        else:
            left.extend([(name + str(key), child) for key, child in level[0]][::-1])


def map_arrays(fn: Any, tree: Tree) -> Tree:
    """A tree like `eqx.filter(tree, is_array)`, with `fn` of each array in its place."""
    return jtu.tree_map(lambda x: fn(x) if is_array(x) else None, tree)


def manual_axes(x: Any) -> frozenset[str]:
    """The mesh axes of the `shard_map` that a tracer is in; of anything else none."""
    return frozenset(jax.typeof(x).sharding.mesh.manual_axes) if isinstance(x, Tracer) else frozenset()


def struct_of(x: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype and weak type of an array, a tracer, a struct or an abstract value, as JAX holds it.

    64-bit numpy arrays and structs become 32-bit ones, unless `jax_enable_x64` is on. Without its weak type
    `jnp.asarray(0.1)` is a float32 that turns bfloat16 values into float32.
    """
    weak = bool(getattr(x, "weak_type", False))  # numpy arrays have none
    narrowed = None if isinstance(x, jax.Array) else narrow_dtype(x.dtype)
    dtype = x.dtype if narrowed is None else np.dtype(narrowed)
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding, weak_type=weak)


def dtype_name(x: Any) -> str:
    """The name of the dtype that JAX holds an array in, also of extended ones: `float32`, `int4`, `key<fry>`.

    Of numpy arrays and `jax.ShapeDtypeStruct`s of 64 bits, that is the one of 32 bits, unless `jax_enable_x64` is on.
    """
    name = _dtype_name(x.dtype)
    if name not in _WIDE or isinstance(x, jax.Array):
        return name
    return narrow_dtype(x.dtype) or name


_WIDE = {"float64": "float32", "int64": "int32", "uint64": "uint32", "complex128": "complex64"}


def narrow_dtype(dtype: Any) -> str | None:
    """The name of the dtype that JAX narrows `dtype` to; None if it leaves it alone."""
    name = _WIDE.get(_dtype_name(dtype))
    return None if jax.config.jax_enable_x64 else name  # pyright: ignore[reportAttributeAccessIssue]


def divisible_shape(shape: tuple[int, ...], dtype: str) -> tuple[int, ...]:
    """Returns `shape` with 1 for a dimension that planners must not shard.

    `jax.random.PRNGKey` makes a `uint32` array whose last dimension, of size 2 or 4, is one key. JAX refuses to use an
    array of keys that is sharded along that dimension.
    """
    raw_keys = dtype == "uint32" and bool(shape) and shape[-1] in (2, 4)
    return (*shape[:-1], 1) if raw_keys else shape


@functools.cache
def _dtype_name(dtype: Any) -> str:
    return str(dtype.name)  # numpy puts the text together anew each time


def itemsize(dtype: str) -> int:
    """Bytes that one element of a dtype takes on a device."""
    if dtype.startswith("key<"):  # typed PRNG keys: two words of threefry, four of the others that JAX ships
        return 8 if dtype == "key<fry>" else 16
    return int(np.dtype(dtype).itemsize)


_DTYPE = re.compile(r"bool|u?int\d+|b?float\w+|complex\d+")


def is_dtype_name(name: str) -> bool:
    """Whether `name` is what `dtype_name` may give; numpy itself reads many other texts as dtypes."""
    if re.fullmatch(r"key<\w+>", name):
        return True
    try:
        return _DTYPE.fullmatch(name) is not None and np.dtype(name).name == name
    except TypeError:
        return False


def type_text(shape: tuple[int, ...], dtype: str) -> str:
    """`float32[50257,768]`."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def some(names: Iterable[str], most: int = 5) -> str:
    """A list for an error message: the first few, and how many more."""
    names = list(names)
    rest = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def size_text(n: int | float) -> str:
    """Bytes for people: `135.1 MB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(n) < 1000 or unit == "TB":
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    raise AssertionError("unreachable")
