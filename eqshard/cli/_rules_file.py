"""Rules in a file: TOML, a pattern and a list with an entry for each dimension."""

import pathlib
import tomllib
from typing import Any

from jax.sharding import PartitionSpec

from .._errors import FormatError
from .._mesh import MeshSpec
from .._plan import ShardingPlan
from .._rule_text import parse_rules
from .._rules import rule_plan
from ._words import UsageError


_KNOWN = ("rules", "default", "strict", "min_bytes", "unused")


def plan_by_file(tree: Any, mesh: MeshSpec, source: str) -> ShardingPlan:
    """A plan by the rules in a TOML file, or in the text itself where it has an arrow: `weight->tp.fsdp, bias->`."""
    if "->" in source:
        return rule_plan(tree, mesh, parse_rules(source))
    path = pathlib.Path(source)
    if not path.is_file():
        raise UsageError(f"no file {source}; rules may also be written out, as 'weight->tp.fsdp, bias->'.")
    try:
        data = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{source}: not a TOML file ({error}).") from None
    unknown = [name for name in data if name not in _KNOWN]
    if unknown or not isinstance(data.get("rules"), dict):
        what = f"unknown field {unknown[0]!r}" if unknown else "no table [rules]"
        raise FormatError(f"{source}: {what}. Write\n  [rules]\n  'mlp.*weight' = ['tp', 'fsdp']\n  'bias' = []")
    rules = [(pattern, _spec(value, f"{source}: {pattern!r}")) for pattern, value in data["rules"].items()]
    default = _spec(data["default"], f"{source}: default") if "default" in data else None
    strict, unused = data.get("strict", True), data.get("unused", "error")
    min_bytes = data.get("min_bytes", 0)
    if type(strict) is not bool or type(min_bytes) is not int or type(unused) is not str:
        raise FormatError(f"{source}: `strict` is true or false, `min_bytes` a whole number, `unused` a text.")
    return rule_plan(tree, mesh, rules, default=default, strict=strict, min_bytes=min_bytes, unused=unused)


def _spec(value: Any, where: str) -> PartitionSpec:
    """`["tp", "_", ["fsdp", "data"]]`: an axis, `_` for a dimension that stays whole, or axes that share one."""
    if not isinstance(value, list) or not all(isinstance(e, str) or _names(e) for e in value):
        raise FormatError(
            f"{where}: expected a list with an entry for each dimension: an axis, '_' for whole, or a list of axes; "
            f"got {value!r}."
        )
    return PartitionSpec(*(None if e in ("_", "") else tuple(e) if isinstance(e, list) else e for e in value))


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
