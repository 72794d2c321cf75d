"""Rules that know Equinox: a start for tensor parallelism, not magic."""

import re
from typing import Any

import equinox as eqx
import jax.tree_util as jtu
from jax.sharding import PartitionSpec

from ._tree import array_leaves, is_array, path_name, Tree


# Names that people give to the layer that comes back to the residual stream.
_BACK = re.compile(r"(c_)?proj|(.*_)?(o|out|output|down|wo|w2|fc2|lin2|linear2|dense2)(_(proj|layer|linear))?")

_LAYERS = (eqx.nn.Linear, eqx.nn.Embedding, eqx.nn.Conv, eqx.nn.ConvTranspose)


def tp_rules(model: Tree, axis: str = "tp") -> list[tuple[str, PartitionSpec]]:
    """Megatron-style tensor parallel rules for a model made of `eqx.nn` layers, for `rule_plan`.

    - Of an attention, the projections to queries, keys and values are cut by columns (their outputs over `axis`), and
      the one back by rows (its inputs).
    - `Linear`s in a list (the layers of an `eqx.nn.MLP` or `Sequential`): each two that follow one another, the first
      by columns and the second by rows, so that a pair needs one all-reduce. One that is left over is a lone one.
    - Other `Linear`s of one parent go by their names: those that come back (`down`, `out_proj`, `o`, `w2`, …) are cut
      by rows and the others by columns. If no name tells, two that follow one another are a pair.
    - A lone `Linear` is cut by columns if it widens at least twofold (a head over a vocabulary); else it stays whole.
    - Embeddings are cut over the vocabulary, convolutions over their output channels. All else is whole.

    Layers stacked by `filter_vmap` keep their stacked dimensions whole, and repeated layers share their rules.

    A start, not magic: it looks at types, names and sizes, not at the program. Edit the list, or put rules first.

    ```python
    import equinox as eqx, eqshard, jax
    from jax.sharding import PartitionSpec as P
    model = eqx.filter_eval_shape(eqx.nn.MultiheadAttention, 8, 64, key=jax.random.key(0))
    plan = eqshard.rule_plan(model, eqshard.MeshSpec(tp=8), eqshard.tp_rules(model))
    assert plan[".query_proj.weight"].spec == P("tp") and plan[".output_proj.weight"].spec == P(None, "tp")
    ```

    **Arguments:**

    - `model`: the model, or its shapes.
    - `axis`: the mesh axis.

    **Returns:**

    Rules, the last of which keeps everything else whole. Pass them to `rule_plan` with `strict=False` where
    dimensions may not divide, and with `unused="ignore"` if other rules come first.
    """
    roles: dict[str, str] = {}
    _visit(model, "", roles)
    specs = {path: PartitionSpec() for path, _ in array_leaves(model)}
    for path, layer in _layers(model):
        for name in ("weight", "bias"):
            x = getattr(layer, name, None)
            if is_array(x):
                specs[f"{path}.{name}"] = _spec(layer, name, len(x.shape), roles[path], axis)
    return _folded(specs)


def _layers(model: Tree) -> list[tuple[str, Any]]:
    found = jtu.tree_flatten_with_path(model, is_leaf=lambda x: isinstance(x, _LAYERS))[0]
    return [(path_name(path), x) for path, x in found if isinstance(x, _LAYERS)]


def _visit(node: Any, path: str, roles: dict[str, str]) -> None:
    """Gives each layer at or below `node` its role, parent by parent."""
    if isinstance(node, _LAYERS):
        roles[path] = "column" if not isinstance(node, eqx.nn.Linear) else _lone(node)
        return
    children = jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
    linears = {key: x for (key, *_), x in ((p, x) for p, x in children if p) if isinstance(x, eqx.nn.Linear)}
    for key, role in _roles(linears).items():
        roles[path + path_name((key,))] = role
    for keys, x in children:
        if keys and keys[0] not in linears:
            _visit(x, path + path_name(keys), roles)


def _roles(linears: dict[Any, eqx.nn.Linear]) -> dict[Any, str]:
    """The roles of the Linears of one parent, by their keys in it."""
    names = {key: str(getattr(key, "name", getattr(key, "key", ""))) for key in linears}
    back = [key for key, name in names.items() if _BACK.fullmatch(name.strip("_").lower())]
    if back and len(linears) > 1:
        return {key: "row" if key in back else "column" for key in linears}
    roles: dict[Any, str] = {}
    keys = list(linears)
    in_a_list = all(isinstance(key, jtu.SequenceKey) for key in keys)
    while keys:
        key = keys.pop(0)
        follows = bool(keys) and linears[key].out_features == linears[keys[0]].in_features
        if follows and (in_a_list or len(linears) == 2):
            roles |= {key: "column", keys.pop(0): "row"}
        else:
            roles[key] = _lone(linears[key])
    return roles


def _lone(layer: eqx.nn.Linear) -> str:
    wide = layer.out_features if isinstance(layer.out_features, int) else 1
    narrow = layer.in_features if isinstance(layer.in_features, int) else 1
    return "column" if narrow > 1 and wide >= 2 * narrow else "whole"


def _spec(layer: Any, name: str, rank: int, role: str, axis: str) -> PartitionSpec:
    if role == "whole" or (role == "row" and name == "bias"):
        return PartitionSpec()
    if isinstance(layer, (eqx.nn.Linear, eqx.nn.Embedding)):
        own = 2 if name == "weight" else 1
    else:
        own = layer.num_spatial_dims + (2 if name == "weight" else 1)
    stacked = (None,) * (rank - own)
    return PartitionSpec(*stacked, None, axis) if role == "row" else PartitionSpec(*stacked, axis)


def _folded(specs: dict[str, PartitionSpec]) -> list[tuple[str, PartitionSpec]]:
    """Rules for the leaves that are cut, one for all that differ in their numbers alone; and one for the rest."""
    said: dict[str, set[PartitionSpec]] = {}
    for path, spec in specs.items():
        for pattern in _patterns(path):
            said.setdefault(pattern, set()).add(spec)
    rules: dict[str, PartitionSpec] = {}
    for path, spec in specs.items():
        if spec != PartitionSpec():
            rules[next(p for p in _patterns(path) if said[p] == {spec})] = spec
    rest = [(".*", PartitionSpec())] if PartitionSpec() in specs.values() else []
    return [*rules.items(), *rest]


def _patterns(path: str) -> list[str]:
    """Patterns that find a path, from the one that leaves all its numbers open to the one that finds it alone."""
    parts = re.split(r"\[(\d+)\]", path)  # text, number, text, number, text
    texts, numbers = [re.escape(t) for t in parts[::2]], parts[1::2]
    patterns = []
    for exact in range(len(numbers) + 1):
        open_ones = len(numbers) - exact
        shown = [r"\[\d+\]"] * open_ones + [rf"\[{n}\]" for n in numbers[open_ones:]]
        patterns.append("^" + "".join(t + n for t, n in zip(texts, [*shown, ""])) + "$")
    return patterns
