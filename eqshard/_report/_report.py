"""One function for all reports."""

from collections.abc import Sequence
from typing import Any

from .._analyze import Analysis, analyze
from .._check import validate
from .._diff import Diff
from .._errors import ShardingError
from .._issue import Issue
from .._leaf_check import Verification
from .._plan import ShardingPlan
from .._tree import Tree
from ..compiler import CompileReport
from ._compile_page import compile_page
from ._compile_text import compile_rich, compile_text
from ._page import plan_page, text_page
from ._rich import plan_rich
from ._text import analysis_text, diff_text, issues_text, plan_text, verification_text


def report(
    x: ShardingPlan | Analysis | Diff | CompileReport | Verification | Sequence[Issue],
    tree: Tree = None,
    *,
    format: str = "text",
    width: int = 80,
    rows: int = 60,
) -> Any:
    """A plan, an analysis, a diff or issues, for people to read.

    Repeated layers are one row: `.layers[0..79].w`. The bytes of such a row are of all its leaves together.

    ```python
    import equinox as eqx, eqshard, jax, pathlib
    shape = eqx.filter_eval_shape(eqx.nn.MLP, 256, 256, 1024, 2, key=jax.random.key(0))
    plan = eqshard.auto_plan(shape, eqshard.MeshSpec(fsdp=4, tp=2))
    print(eqshard.report(plan))
    page = eqshard.report(plan, format="html")   # pathlib.Path("plan.html").write_text(page)
    ```

    **Arguments:**

    - `x`: what `auto_plan` and its like, `analyze`, `diff`, `validate`, `verify` or `compile_report` return.
    - `tree`: what a plan is for, to be checked and counted with it, as in `validate` and `analyze`.
    - `format`: `"text"`; `"rich"`, for a plan a table that a `rich.console.Console` prints (needs rich); `"html"`, one
        page that needs nothing else, neither network nor files.
    - `width`: letters in a line of text.
    - `rows`: as many rows at most in a table; the largest are shown. The page shows all.

    **Returns:**

    A string; with `format="rich"` a renderable.

    **Raises:**

    - `ShardingError`: rich is not installed, or cannot show this.
    """
    if format not in ("text", "rich", "html"):
        raise ShardingError(f"unknown `format` {format!r}: it is one of 'text', 'rich', 'html'.")
    if isinstance(x, ShardingPlan):
        analysis, issues = analyze(x, tree), validate(x, tree)
        if format == "html":
            return plan_page(x, analysis, issues)
        if format == "rich":
            return plan_rich(x, analysis, issues, rows)
        return plan_text(x, analysis, issues, width, rows)
    if isinstance(x, CompileReport):
        if format == "html":
            return compile_page(x)
        return compile_rich(x, rows) if format == "rich" else compile_text(x, width, rows)
    if isinstance(x, Analysis):
        text = analysis_text(x, width)
    elif isinstance(x, Diff):
        text = diff_text(x, width, rows)
    elif isinstance(x, Verification):
        text = verification_text(x, width, rows)
    else:
        text = issues_text(x, width)
    if format == "rich":
        raise ShardingError(f'`format="rich"` is for plans, not for a {type(x).__name__}.')
    return text_page(text, type(x).__name__) if format == "html" else text
