"""What a check has to say, as data."""

from collections.abc import Mapping
from typing import Any, Literal

import equinox as eqx

from ._errors import FormatError
from ._value import header, Reader, short, Value


Severity = Literal["error", "warning", "info"]

_FIELDS = ("severity", "code", "path", "message", "remedy")


class Issue(Value):
    """One thing that `validate` found.

    ```python
    import eqshard
    issue = eqshard.Issue("error", "unknown_axis", ".w", "P('modle') names no mesh axis.", "Write 'model'.")
    assert eqshard.Issue.from_json(issue.to_json()) == issue
    print(issue)
    ```
    """

    severity: Severity = eqx.field(static=True)
    """`"error"`: `apply` raises. `"warning"`: it works, and is probably not what is meant. `"info"`: worth knowing."""
    code: str = eqx.field(static=True)
    """What kind of thing, for programs: `"indivisible"`, `"unknown_axis"`, …"""
    path: str = eqx.field(static=True)
    """The leaf; empty where it is about the whole plan, or the tree is a single leaf."""
    message: str = eqx.field(static=True)
    """What is the matter, with the arithmetic."""
    remedy: str = eqx.field(static=True)
    """What to do about it."""

    def _key(self) -> Any:
        return tuple(getattr(self, name) for name in _FIELDS)

    def __str__(self) -> str:
        where = f"{self.path}: " if self.path else ""
        return f"{self.severity} ({self.code}): {where}{self.message} {self.remedy}"

    def to_dict(self) -> dict[str, Any]:
        return header("issue") | {name: getattr(self, name) for name in _FIELDS}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Issue":
        read = Reader(data, "issue")
        read.header()
        read.only("format", "version", *_FIELDS)
        severity = read.get("severity", str)
        if severity not in ("error", "warning", "info"):
            raise FormatError(f"issue: `severity` is {short(severity)}, none of 'error', 'warning', 'info'.")
        return cls(severity, *(read.get(name, str) for name in _FIELDS[1:]))
