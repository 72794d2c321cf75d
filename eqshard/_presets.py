"""Rules that know Equinox: a start for tensor parallelism, not magic."""

import re
from typing import Any

import equinox as eqx
import jax.tree_util as jtu
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from ._tree import is_array, path_name


# Names that people give to the layer that comes back to the residual stream.
_ROW = re.compile(r"(^|_)(o|out|output|down|proj|wo|w2|fc2|linear2|c_proj|fc_out)(_|$)")


def tp_rules(model: PyTree[Any], axis: str = "tp") -> list[tuple[str, PartitionSpec]]:
    """Megatron-style tensor parallel rules for a model made of `eqx.nn` layers, for `rule_plan`.

    Of each attention, the projections to queries, keys and values are cut by columns (their outputs over `axis`) and
    the one back by rows (its inputs); so are the layers of an `eqx.nn.MLP`, in pairs, and the `Linear`s that share a
    parent, by their names (`down`, `out`, `proj`, `o`, `w2`, … come back) or, if they are two, by their order. A
    lone `Linear` is cut by columns if it widens by two or more (a head over a vocabulary), and else whole. Embeddings
    are cut over the vocabulary, convolutions over their output channels; all else is whole. Layers stacked by
    `filter_vmap` keep their stacked dimensions whole.

    A start, not magic: it looks at types, names and positions, not at the program. Edit the list, or put rules first.

    ```python
    import equinox as eqx, eqshard, jax
    from jax.sharding import PartitionSpec as P
    model = eqx.filter_eval_shape(eqx.nn.MultiheadAttention, 8, 64, key=jax.random.key(0))
    plan = eqshard.rule_plan(model, eqshard.MeshSpec(tp=8), eqshard.tp_rules(model))
    assert plan[".query_proj.weight"].spec == P("tp") and plan[".output_proj.weight"].spec == P(None, "tp")
    ```

    **Arguments:**

    - `axis`: the mesh axis.

    **Returns:**

    Rules, the last of which keeps everything else whole. Pass them to `rule_plan` with `strict=False` where
    dimensions may not divide, and with `unused="ignore"` if other rules come first.
    """
    roles: dict[str, str] = {}
    _visit(model, "", roles)
    rules = []
    for path, layer in _layers(model):
        for name in ("weight", "bias"):
            x = getattr(layer, name, None)
            spec = _spec(layer, name, x, roles.get(path, "whole"), axis)
            if spec != PartitionSpec():
                rules.append((f"^{re.escape(f'{path}.{name}')}$", spec))
    return [*rules, (".", PartitionSpec())] if _has_other(model, rules) else rules


def _is_layer(x: Any) -> bool:
    return isinstance(x, (eqx.nn.Linear, eqx.nn.Embedding, eqx.nn.Conv))


def _layers(model: PyTree[Any]) -> list[tuple[str, Any]]:
    found = jtu.tree_flatten_with_path(model, is_leaf=_is_layer)[0]
    return [(path_name(path), x) for path, x in found if _is_layer(x)]


def _visit(node: Any, path: str, roles: dict[str, str]) -> None:
    """Gives each layer below `node` its role, parent by parent."""
    if isinstance(node, (eqx.nn.Embedding, eqx.nn.Conv)):
        roles[path] = "column"
        return
    children = _children(node)
    linears = [(path_name((key,)), x) for key, x in children if isinstance(x, eqx.nn.Linear)]
    names = [name for name, _ in linears]
    if isinstance(node, eqx.nn.MultiheadAttention):
        rows = [name for name in names if name == ".output_proj"]
    elif names and all(name.startswith("[") for name in names):  # the layers of an MLP, or a list: in pairs
        rows = names[1::2]
        linears = linears[: len(linears) // 2 * 2]
    else:
        rows = [name for name in names if _ROW.search(name.strip("."))]
        rows = rows or (names[1:] if len(names) == 2 else [])
    for name, layer in linears:
        lone = len(names) == 1 and not (_wide(layer))
        roles[path + name] = "whole" if lone else "row" if name in rows else "column"
    for key, x in children:
        if not isinstance(x, eqx.nn.Linear):
            _visit(x, path + path_name((key,)), roles)


def _wide(layer: eqx.nn.Linear) -> bool:
    return layer.out_features != "scalar" and layer.in_features != "scalar" and (
        int(layer.out_features) >= 2 * int(layer.in_features)
    )  # fmt: skip


def _children(node: Any) -> list[tuple[Any, Any]]:
    """The direct children of a node with their keys; none of a leaf."""
    top = jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
    return [(path[0], x) for path, x in top if path]


def _spec(layer: Any, name: str, x: Any, role: str, axis: str) -> PartitionSpec:
    if role == "whole" or not is_array(x):
        return PartitionSpec()
    if isinstance(layer, eqx.nn.Linear):
        rank = 2 if name == "weight" else 1
    else:
        rank = 2 if isinstance(layer, eqx.nn.Embedding) else layer.num_spatial_dims + (2 if name == "weight" else 1)
    stacked = (None,) * (len(x.shape) - rank)
    if role == "row":
        return PartitionSpec(*stacked, None, axis) if name == "weight" else PartitionSpec()
    return PartitionSpec(*stacked, axis)


def _has_other(model: PyTree[Any], rules: list[tuple[str, PartitionSpec]]) -> bool:
    patterns = [re.compile(pattern) for pattern, _ in rules]
    arrays = [path_name(path) for path, x in jtu.tree_flatten_with_path(model)[0] if is_array(x)]
    return any(not any(p.search(a) for p in patterns) for a in arrays)
