"""A plan as one HTML page that needs nothing else."""

import html
import importlib.resources
import json
import re
from collections.abc import Sequence
from typing import Any

from .._analyze import Analysis
from .._explain import given_up_text
from .._fold import fold_leaves
from .._issue import Issue
from .._kinds import Kind
from .._mesh import MeshSpec
from .._plan import ShardingPlan
from .._spec import spec_text
from ._words import fold_issues, mesh_text, short_type


# One key of a folded path: `['a.b']`, `[0..79]`, `.name`.
_KEY = re.compile(r"""\['(?:[^'\\]|\\.)*'\]|\["(?:[^"\\]|\\.)*"\]|\[[^\]]*\]|\.(?:[^.\[]|\.\.)+|.+""", re.DOTALL)


def plan_page(plan: ShardingPlan, analysis: Analysis, issues: Sequence[Issue]) -> str:
    """The page of a plan: numbers, issues, a map of a device's memory, the tree, and where each piece lies."""
    # No "<" inside the script element: a leaf may be called "</script>".
    data = json.dumps(plan_data(plan, analysis, issues), separators=(",", ":")).replace("<", "\\u003c")
    body = (
        '<div id="app"><noscript>This page draws itself with JavaScript, all of which is in this file.</noscript></div>'
        f'<script type="application/json" id="data">{data}</script><script>{_file("_page.js")}</script>'
    )
    return _page(f"Sharding plan: {mesh_text(plan.mesh)}", body)


def text_page(text: str, title: str) -> str:
    """Plain text as a page."""
    return _page(title, f"<main><pre>{html.escape(text)}</pre></main>")


def _page(title: str, body: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{html.escape(title)}</title><style>{_file('_page.css')}</style></head><body>{body}</body></html>\n"
    )


def _file(name: str) -> str:
    return importlib.resources.files("eqshard._report").joinpath(name).read_text(encoding="utf-8")


def plan_data(plan: ShardingPlan, analysis: Analysis, issues: Sequence[Issue]) -> dict[str, Any]:
    """What the page shows, as JSON; each kind of leaf and each key of a path once."""
    kinds: dict[Any, int] = {}
    tokens: dict[str, int] = {}
    rows: list[list[int]] = []
    described: list[list[Any]] = []
    row_of: dict[str, int] = {}
    axis_number = {name: i for i, name in enumerate(plan.mesh.names)}
    for path, leaves in fold_leaves(plan):
        leaf = leaves[0]
        key = leaf.shape, leaf.dtype, leaf.spec, leaf.use, leaf.memory_kind, leaf.why, leaf.given_up
        if key not in kinds:
            kinds[key] = len(described)
            described.append(_kind(Kind(leaf, plan.mesh.shape), axis_number, plan.mesh))
        row_of.update((member.path, len(rows)) for member in leaves)
        rows.append([kinds[key], len(leaves), *(tokens.setdefault(t, len(tokens)) for t in _KEY.findall(path))])
    return {
        "mesh": [[name, max(size, 1)] for name, size in plan.mesh.axes],
        "dcn": list(plan.mesh.dcn),
        "chip": None if plan.mesh.chip is None else [plan.mesh.chip.name, plan.mesh.chip.hbm_bytes],
        "totals": _totals(analysis),
        "axes": [[axis.leaves, axis.share] for axis in analysis.axes],
        "tokens": list(tokens),
        "kinds": described,
        "rows": rows,
        "issues": [
            [issue.severity, issue.code, path, times, issue.message, issue.remedy, row_of.get(issue.path, -1)]
            for issue, path, times in fold_issues(issues)
        ],
    }


def _totals(analysis: Analysis) -> dict[str, Any]:
    held, use = analysis.bytes_per_device, analysis.use_bytes_per_device
    return {
        "leaves": analysis.leaves,
        "params": analysis.params,
        "bytes": analysis.nbytes,
        "whole": analysis.replicated_bytes,
        "least": min(held, default=0),
        "most": max(held, default=0),
        "use": max(use, default=0),
        "gathered": analysis.gathered_bytes,
        "replication": analysis.replication,
        "balance": analysis.balance,
    }


def _kind(kind: Kind, axis_number: dict[str, int], mesh: MeshSpec) -> list[Any]:
    leaf = kind.leaf
    at_rest = [[axis_number[a] for a in axes] for axes in kind.axes]
    in_use = 0 if leaf.use == leaf.spec else [[axis_number[a] for a in axes] for axes in kind.use_axes]
    return [
        short_type(leaf),
        list(leaf.shape),
        kind.item,
        at_rest,
        in_use,
        spec_text(leaf.spec),
        spec_text(leaf.use) if in_use else 0,
        leaf.memory_kind or 0,
        leaf.why,
        [given_up_text(leaf, lost, mesh) for lost in leaf.given_up],
    ]
