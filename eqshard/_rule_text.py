"""Rules written as one line of text."""

import re

from jax.sharding import PartitionSpec

from ._errors import FormatError


def parse_rules(text: str) -> list[tuple[str, PartitionSpec]]:
    """Rules for `rule_plan` from a text: `pattern->spec`, separated by commas or on lines of their own.

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

    - `FormatError`: a rule that cannot be read.
    """
    return [_parse_rule(part.strip()) for part in _split(text, ",\n") if part.strip()]


def _parse_rule(text: str) -> tuple[str, PartitionSpec]:
    pattern, arrow, spec = (part.strip() for part in text.rpartition("->"))
    if not arrow or not pattern:
        raise FormatError(f"`{text}` is no rule: expected `pattern->spec`.")
    try:
        re.compile(pattern)
    except re.error as error:
        raise FormatError(f"`{pattern}` is no regular expression: {error}.") from None
    if not spec:
        return pattern, PartitionSpec()
    return pattern, PartitionSpec(*(_parse_dim(dim.strip(), spec) for dim in _split(spec, ".")))


def _parse_dim(text: str, spec: str) -> str | tuple[str, ...] | None:
    if text in ("None", "_", "()"):
        return None
    if not text:
        raise FormatError(f"the spec `{spec}` has an empty dimension: write None (or _) to leave one whole.")
    inner = text[1:-1].rstrip().removesuffix(",") if text.startswith("(") and text.endswith(")") else text
    names = [name.strip() for name in re.split(r"[+,]", inner)]
    for name in names:
        if not re.fullmatch(r"\w[\w-]*", name) or name in ("None", "_"):
            raise FormatError(f"`{name}` in the spec `{spec}` is no axis name.")
    return names[0] if len(names) == 1 else tuple(names)


def _split(text: str, marks: str) -> list[str]:
    """Splits at any of `marks` that is not escaped, inside brackets, or in a set of characters."""
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        c = text[i]
        if c == "\\":
            i += 1
        elif c == "[":
            i = _end_of_set(text, i)
        elif c in "({":
            depth += 1
        elif c in ")}":
            depth -= 1
        elif c in marks and depth <= 0:
            parts.append(text[start:i])
            start = i + 1
        i += 1
    return [*parts, text[start:]]


def _end_of_set(text: str, start: int) -> int:
    """Where the `[...]` ends that begins at `start`: its first character may be a `]` that does not end it."""
    i = start + 1
    i += text[i : i + 1] == "^"
    i += text[i : i + 1] == "]"
    while i < len(text) and text[i] != "]":
        i += 1 + (text[i] == "\\")
    return i
