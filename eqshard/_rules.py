"""Plans from patterns on the leaves' paths."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from ._auto import _stays_whole
from ._errors import FormatError, MismatchError, ShardingError
from ._mesh import MeshLike, MeshSpec
from ._plan import leaf_plan, LeafPlan, ShardingPlan
from ._spec import spec_text
from ._tree import array_leaves, dtype_name, shown, some, type_text


Rule = tuple[str, Any] | Callable[[str, Any], Any]
"""A regular expression on the path with its layout; or a function of path and leaf, with None for "not mine"."""


def rule_plan(
    tree: PyTree[Any],
    mesh: MeshLike,
    rules: Mapping[str, Any] | Iterable[Rule],
    *,
    default: PartitionSpec | Callable[[str, Any], PartitionSpec] | None = None,
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

    - `rules`: pairs of a regular expression, searched in the path, and a PartitionSpec; or functions of
        (path, leaf) that return one, or None to pass the leaf on.
    - `default`: the layout of leaves that no rule matches, or a function of (path, leaf). Without it such a leaf is
        an error. (Scalars need no rule, and are whole whatever the rules say.)
    - `min_bytes`: smaller leaves stay whole whatever the rules say.
    - `strict`: whether a dimension that does not divide is an error; else it gives up axes, and the plan records it.
    - `unused`: what to do about rules that decided nothing, mostly a misspelt pattern: `"error"` or `"ignore"`.

    **Raises:**

    - `MismatchError`: leaves without a rule, or rules without a leaf.
    - `ShardingError`: a spec that does not fit, naming the rule and the leaf.
    """
    if unused not in ("error", "ignore"):
        raise ShardingError(f"`unused` is 'error' or 'ignore', not {unused!r}.")
    described = MeshSpec.of(mesh)
    described.size()
    compiled = _compile(rules)
    wins, seen = [0] * len(compiled), [0] * len(compiled)
    rows: list[LeafPlan] = []
    orphans: list[str] = []
    for path, leaf in array_leaves(tree):
        found = _first(compiled, path, leaf, seen)
        if found is None and default is None and leaf.shape != ():
            orphans.append(f"{shown(path)} {type_text(tuple(leaf.shape), dtype_name(leaf))}")
            continue
        if found is not None:
            wins[found[0]] += 1
        rows.append(_row(path, leaf, found, default, described, compiled, min_bytes, strict))
    if orphans:
        raise MismatchError(
            f"no rule matches {len(orphans)} of the leaves: {some(orphans)}.\n"
            "  Add a rule, or pass `default` (`default=P()` keeps them whole)."
        )
    if unused == "error":
        _check_unused(compiled, wins, seen)
    return ShardingPlan(described, tuple(rows))


def _compile(rules: Mapping[str, Any] | Iterable[Rule]) -> list[tuple[str, Callable[[str, Any], Any]]]:
    """Each rule as a name for messages and a function of path and leaf."""
    compiled: list[tuple[str, Callable[[str, Any], Any]]] = []
    for i, rule in enumerate(rules.items() if isinstance(rules, Mapping) else rules):
        if callable(rule):
            compiled.append((f"rule {i} ({getattr(rule, '__name__', 'a function')})", rule))
            continue
        if not (isinstance(rule, Sequence) and len(rule) == 2 and isinstance(rule[0], str)):
            raise ShardingError(
                f"rule {i} must be a pair of a pattern and a PartitionSpec, or a function, got {rule!r}."
            )
        pattern, spec = str(rule[0]), rule[1]
        try:
            search = re.compile(pattern).search
        except re.error as error:
            raise ShardingError(f"rule {i}: `{pattern}` is no regular expression: {error}.") from None
        compiled.append((f"rule {i} (`{pattern}`)", _pattern_rule(search, spec)))
    return compiled


def _pattern_rule(search: Callable[[str], Any], spec: Any) -> Callable[[str, Any], Any]:
    return lambda path, leaf: (PartitionSpec() if spec is None else spec) if search(path) else None


def _first(
    compiled: list[tuple[str, Callable[[str, Any], Any]]], path: str, leaf: Any, seen: list[int]
) -> tuple[int, Any] | None:
    found: tuple[int, Any] | None = None
    for i, (_, rule) in enumerate(compiled):
        spec = rule(path, leaf)
        if spec is not None:
            seen[i] += 1
            found = found or (i, spec)
    return found


def _row(
    path: str,
    leaf: Any,
    found: tuple[int, Any] | None,
    default: PartitionSpec | Callable[[str, Any], PartitionSpec] | None,
    mesh: MeshSpec,
    compiled: list[tuple[str, Callable[[str, Any], Any]]],
    min_bytes: int,
    strict: bool,
) -> LeafPlan:
    if found is not None:
        name, spec = compiled[found[0]][0], found[1]
    elif default is None:
        name, spec = "a scalar", PartitionSpec()
    else:
        name, spec = "default", default if isinstance(default, PartitionSpec) else default(path, leaf)
    if not isinstance(spec, PartitionSpec):
        raise ShardingError(f"{name}: expected a PartitionSpec for {shown(path)}, got {spec!r}.")
    if leaf.shape == ():
        return leaf_plan(path, leaf, PartitionSpec(), mesh, why="a scalar")
    small = _stays_whole(tuple(leaf.shape), dtype_name(leaf), min_bytes) if min_bytes else ""
    if small and spec != PartitionSpec():
        return leaf_plan(path, leaf, PartitionSpec(), mesh, why=f"{small}; {name} said {spec_text(spec)}")
    try:
        return leaf_plan(path, leaf, spec, mesh, why=name, strict=strict)
    except ShardingError as error:
        raise type(error)(f"{name}: {error}") from None


def _check_unused(compiled: list[tuple[str, Any]], wins: list[int], seen: list[int]) -> None:
    idle = [
        f"{name} {'comes after rules that took all its leaves' if seen[i] else 'matches no leaf'}"
        for i, (name, _) in enumerate(compiled)
        if not wins[i]
    ]
    if idle:
        raise MismatchError(f"{some(idle)}.\n  Correct the pattern, or pass `unused='ignore'`.")


def parse_rules(text: str) -> list[tuple[str, PartitionSpec]]:
    """Rules for `rule_plan` from one line of text: `pattern->spec` between commas.

    In a spec a dot separates dimensions; `None` or `_` leaves one whole; `fsdp+dp` or `(fsdp,dp)` puts two axes on one.
    A pattern is any regular expression.

    ```python
    import eqshard
    from jax.sharding import PartitionSpec as P
    assert eqshard.parse_rules("attention|mlp->data, (up|gate)w->None.fsdp+tp, bias->") == [
        ("attention|mlp", P("data")),
        ("(up|gate)w", P(None, ("fsdp", "tp"))),
        ("bias", P()),
    ]
    ```

    **Raises:**

    - `FormatError`: a rule that cannot be read, with its place.
    """
    rules = []
    for part in _split(text, ",\n"):
        if not part.strip():
            continue
        pattern, arrow, spec = part.rpartition("->")
        if not arrow or not pattern.strip():
            raise FormatError(f"`{part.strip()}` is no rule: expected `pattern->spec`.")
        try:
            re.compile(pattern.strip())
        except re.error as error:
            raise FormatError(f"`{pattern.strip()}` is no regular expression: {error}.") from None
        rules.append((pattern.strip(), _parse_spec(spec.strip())))
    return rules


def _parse_spec(text: str) -> PartitionSpec:
    return PartitionSpec(*(_parse_dim(dim.strip(), text) for dim in _split(text, "."))) if text else PartitionSpec()


def _parse_dim(text: str, spec: str) -> str | tuple[str, ...] | None:
    inner = text[1:-1] if text.startswith("(") and text.endswith(")") else text
    names = [name.strip() for name in re.split(r"[+,]", inner) if name.strip()]
    if names in (["None"], ["_"], []) and not (not names and text == ""):
        return None
    for name in names:
        if not re.fullmatch(r"\w[\w-]*", name) or name in ("None", "_"):
            raise FormatError(f"`{name}` in the spec `{spec}` is no axis name.")
    if not names:
        raise FormatError(f"the spec `{spec}` has an empty dimension: write None (or _) to leave one whole.")
    return names[0] if len(names) == 1 else tuple(names)


def _split(text: str, marks: str) -> list[str]:
    """Splits at any of `marks` that is not inside brackets or escaped."""
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        c = text[i]
        if c == "\\":
            i += 1
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        elif c in marks and depth <= 0:
            parts.append(text[start:i])
            start = i + 1
        i += 1
    return [*parts, text[start:]]
