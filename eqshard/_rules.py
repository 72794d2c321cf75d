"""Plans from patterns on the leaves' paths."""

from collections.abc import Callable
from typing import Any

from jax.sharding import PartitionSpec

from ._auto import stays_whole
from ._errors import MismatchError, ShardingError
from ._mesh import MeshLike, MeshSpec
from ._patterns import check_unused, check_unused_word, first_match, read_rules, Rule, Rules
from ._plan import leaf_plan, LeafPlan, ShardingPlan
from ._spec import _check_names, canonical, spec_text
from ._tree import array_leaves, dtype_name, shown, some, Tree, type_text


Default = PartitionSpec | Callable[[str, Any], PartitionSpec]


def rule_plan(
    tree: Tree,
    mesh: MeshLike,
    rules: Rules,
    *,
    default: Default | None = None,
    min_bytes: int = 0,
    strict: bool = True,
    unused: str = "error",
) -> ShardingPlan:
    """A plan from rules on the leaves' paths; the first rule that matches a leaf decides.

    ```python
    import equinox as eqx, eqshard, jax
    from jax.sharding import PartitionSpec as P
    model = eqx.filter_eval_shape(eqx.nn.MLP, 16, 16, 64, 1, key=jax.random.key(0))
    rules = [(r"layers\\[0\\].weight", P("tp", None)), (r"layers\\[1\\].weight", P(None, "tp")), ("bias", P())]
    plan = eqshard.rule_plan(model, eqshard.MeshSpec(tp=8), rules)
    assert plan[".layers[1].weight"].spec == P(None, "tp")
    ```

    **Arguments:**

    - `rules`: pairs of a regular expression, searched in the path, and a PartitionSpec (None for whole); or functions
        of (path, leaf) that return one, or None to pass the leaf on. A dictionary is read as pairs.
    - `default`: the layout of leaves that no rule matches, or a function of (path, leaf). Without it such a leaf is
        an error. (Scalars need no rule, and are whole whatever the rules say.)
    - `min_bytes`: smaller leaves stay whole whatever the rules say.
    - `strict`: whether a dimension that does not divide is an error; else it gives up axes, and the plan records it.
    - `unused`: what to do about rules that decided nothing, mostly a misspelt pattern: `"error"` or `"ignore"`.

    **Raises:**

    - `MismatchError`: leaves without a rule, or rules without a leaf.
    - `ShardingError`: a spec that does not fit, naming the rule and the leaf.
    """
    check_unused_word(unused)
    described = MeshSpec.of(mesh)
    read, leaves = read_rules(rules), array_leaves(tree)
    used: set[int] = set()
    rows: list[LeafPlan] = []
    orphans: list[str] = []
    for path, leaf in leaves:
        name, spec = _decided(read, path, leaf, default, used)
        if spec is None:
            orphans.append(f"{shown(path)} {type_text(tuple(leaf.shape), dtype_name(leaf))}")
        else:
            rows.append(_row(path, leaf, name, spec, described, min_bytes, strict))
    if orphans:
        raise MismatchError(
            f"no rule matches {len(orphans)} of {len(leaves)} leaves: {some(orphans)}.\n"
            "  Add a rule, or pass `default` (`default=P()` keeps them whole)."
        )
    if unused == "error":
        check_unused(read, used, leaves)
    return ShardingPlan(described, rows)


def _decided(
    rules: list[Rule], path: str, leaf: Any, default: Default | None, used: set[int]
) -> tuple[str, PartitionSpec | None]:
    """The name of what decides about a leaf, and the layout; None if nothing does."""
    found = first_match(rules, path, leaf)
    if found is not None:
        used.add(found[0])
        name, spec = rules[found[0]].name, PartitionSpec() if found[1] is None else found[1]
    elif default is not None:
        name, spec = "default", default(path, leaf) if callable(default) else default
    else:
        return "a scalar", PartitionSpec() if leaf.shape == () else None
    if not isinstance(spec, PartitionSpec):
        raise ShardingError(f"{name}: expected a PartitionSpec for {shown(path)}, got {spec!r}.")
    return name, spec


def _row(
    path: str, leaf: Any, name: str, spec: PartitionSpec, mesh: MeshSpec, min_bytes: int, strict: bool
) -> LeafPlan:
    try:
        _check_names(spec, mesh.shape, path)  # a typo is an error for a small leaf too
        whole = "a scalar" if leaf.shape == () else ""
        if min_bytes and not whole:
            whole = stays_whole(tuple(leaf.shape), dtype_name(leaf), min_bytes)
        if whole:
            said = f"; {name} said {spec_text(spec)}" if canonical(spec, mesh.shape) != PartitionSpec() else ""
            return leaf_plan(path, leaf, PartitionSpec(), mesh, why=whole + said)
        return leaf_plan(path, leaf, spec, mesh, why=name, strict=strict)
    except ShardingError as error:
        raise type(error)(f"{name}: {error}") from None
