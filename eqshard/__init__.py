"""Shard any Equinox model, or any PyTree, over any JAX mesh: the plan is a value."""

import importlib
from typing import Any, TYPE_CHECKING

from ._apply import apply as apply, constrain_to as constrain_to
from ._auto import (
    auto_plan as auto_plan,
    auto_sharding as auto_sharding,
    auto_spec as auto_spec,
    MIN_BYTES as MIN_BYTES,
)
from ._axes import PartitionAxis as PartitionAxis
from ._chip import Chip as Chip, CHIPS as CHIPS
from ._errors import (
    DonatedError as DonatedError,
    DuplicateAxisError as DuplicateAxisError,
    FormatError as FormatError,
    IndivisibleError as IndivisibleError,
    MeshError as MeshError,
    MismatchError as MismatchError,
    ProcessError as ProcessError,
    RankError as RankError,
    ShardingError as ShardingError,
    UnknownAxisError as UnknownAxisError,
)
from ._fsdp import fsdp_plan as fsdp_plan
from ._gather import (
    gather as gather,
    replicate as replicate,
    shard_and_gather_fns as shard_and_gather_fns,
)
from ._init import init as init, init_array as init_array
from ._issue import Issue as Issue
from ._jit import filter_jit as filter_jit, PlannedJit as PlannedJit
from ._layout import (
    plan_of as plan_of,
    shardings_of as shardings_of,
    specs_of as specs_of,
)
from ._like import plan_like as plan_like
from ._logical import (
    logical_sharding as logical_sharding,
    logical_spec as logical_spec,
    shard as shard,
)
from ._logical_plan import logical_plan as logical_plan
from ._manual import axis_index as axis_index, axis_size as axis_size
from ._memory import BudgetError as BudgetError, memory_plan as memory_plan
from ._mesh import MeshLike as MeshLike, MeshSpec as MeshSpec
from ._names import (
    BATCH as BATCH,
    BIAS_HEAD_SEQ as BIAS_HEAD_SEQ,
    BIAS_KV_SEQ as BIAS_KV_SEQ,
    DP as DP,
    EMBED as EMBED,
    EMPTY as EMPTY,
    EP as EP,
    EXPERT as EXPERT,
    EXPERT_GATE as EXPERT_GATE,
    FSDP as FSDP,
    HEAD as HEAD,
    HEAD_DIM as HEAD_DIM,
    KV_HEAD as KV_HEAD,
    KV_HEAD_DIM as KV_HEAD_DIM,
    KV_LENGTH as KV_LENGTH,
    LENGTH as LENGTH,
    LogicalAxes as LogicalAxes,
    MLP_INTERMEDIATE as MLP_INTERMEDIATE,
    Mode as Mode,
    QUERY_LENGTH as QUERY_LENGTH,
    SP as SP,
    TP as TP,
    VOCAB as VOCAB,
)
from ._plan import LeafPlan as LeafPlan, replicated_plan as replicated_plan, ShardingPlan as ShardingPlan
from ._rule_text import parse_rules as parse_rules
from ._rules import rule_plan as rule_plan
from ._spec import (
    axis_names as axis_names,
    canonical as canonical,
    Fit as Fit,
    fit_sharding as fit_sharding,
    fit_spec as fit_spec,
    GivenUp as GivenUp,
    misfits as misfits,
    shard_factor as shard_factor,
    shard_shape as shard_shape,
)
from ._stray import StrayError as StrayError
from ._tree import is_array as is_array
from ._use import sequenced as sequenced, use as use


if TYPE_CHECKING:
    from . import checkpoint as checkpoint, compiler as compiler, program as program
    from ._agree import check_processes as check_processes
    from ._analyze import Analysis as Analysis, analyze as analyze, AxisUse as AxisUse, LeafBytes as LeafBytes
    from ._batch import shard_batch as shard_batch
    from ._check import validate as validate
    from ._convert import convert_plan as convert_plan
    from ._diff import Diff as Diff, diff as diff, Move as Move
    from ._explain import explain as explain
    from ._leaf_check import LeafCheck as LeafCheck, Verification as Verification
    from ._parallel import parallel_map as parallel_map
    from ._prefetch import prefetch as prefetch
    from ._presets import tp_rules as tp_rules
    from ._report import report as report, visualize_leaf as visualize_leaf
    from ._shard_info import (
        batch_statistics as batch_statistics,
        ShardedLeaf as ShardedLeaf,
        ShardInfo as ShardInfo,
        ShardStats as ShardStats,
    )
    from ._share import process_share as process_share, process_slice as process_slice, Share as Share
    from ._verify import verify as verify
    from .compiler import (
        Collective as Collective,
        collectives as collectives,
        compile_report as compile_report,
        compile_reports as compile_reports,
        CompileReport as CompileReport,
        Program as Program,
        TargetError as TargetError,
    )
    from .program import (
        best_mesh as best_mesh,
        BestMesh as BestMesh,
        constrain as constrain,
        step_plan as step_plan,
        StepPlan as StepPlan,
    )


__version__ = "0.1.0"

# What most programs do not need is imported when it is first asked for: `import eqshard` takes little more time than
# `import equinox`.
_LATER = {
    "_agree": "check_processes",
    "_analyze": "Analysis analyze AxisUse LeafBytes",
    "_batch": "shard_batch",
    "_check": "validate",
    "_convert": "convert_plan",
    "_diff": "Diff diff Move",
    "_explain": "explain",
    "_parallel": "parallel_map",
    "_prefetch": "prefetch",
    "_presets": "tp_rules",
    "_shard_info": "batch_statistics ShardedLeaf ShardInfo ShardStats",
    "_share": "process_share process_slice Share",
    "_report": "report visualize_leaf",
    "_leaf_check": "LeafCheck Verification",
    "_verify": "verify",
    "checkpoint": "",
    "compiler": "Collective collectives compile_report compile_reports CompileReport Program TargetError",
    "program": "best_mesh BestMesh constrain step_plan StepPlan",
}


if not TYPE_CHECKING:  # to a type checker, a name that is not there shall be an error

    def __getattr__(name: str) -> Any:
        for module, names in _LATER.items():
            if name == module or name in names.split():
                found = importlib.import_module(f".{module}", __name__)
                value = globals()[name] = found if name == module else getattr(found, name)
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        later = [name for module, names in _LATER.items() for name in (module, *names.split())]
        return sorted({*globals(), *later} - {"Any", "TYPE_CHECKING", "importlib"})
