"""Shard any Equinox model, or any PyTree, over any JAX mesh: the plan is a value."""

from ._apply import apply as apply, constrain_to as constrain_to
from ._auto import (
    auto_plan as auto_plan,
    auto_sharding as auto_sharding,
    auto_spec as auto_spec,
    fsdp_plan as fsdp_plan,
    MIN_BYTES as MIN_BYTES,
)
from ._axes import PartitionAxis as PartitionAxis
from ._chip import Chip as Chip, CHIPS as CHIPS
from ._convert import convert_plan as convert_plan
from ._errors import (
    DuplicateAxisError as DuplicateAxisError,
    FormatError as FormatError,
    IndivisibleError as IndivisibleError,
    MeshError as MeshError,
    MismatchError as MismatchError,
    RankError as RankError,
    ShardingError as ShardingError,
    UnknownAxisError as UnknownAxisError,
)
from ._gather import (
    gather as gather,
    replicate as replicate,
    shard_and_gather_fns as shard_and_gather_fns,
)
from ._layout import (
    plan_of as plan_of,
    shardings_of as shardings_of,
    specs_of as specs_of,
)
from ._like import plan_like as plan_like
from ._logical import (
    logical_plan as logical_plan,
    logical_sharding as logical_sharding,
    logical_spec as logical_spec,
    shard as shard,
)
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
from ._presets import tp_rules as tp_rules
from ._rules import parse_rules as parse_rules, rule_plan as rule_plan
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
from ._tree import is_array as is_array


__version__ = "0.1.0"
