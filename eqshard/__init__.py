"""Shard any Equinox model, or any PyTree, over any JAX mesh: the plan is a value."""

from ._apply import (
    apply as apply,
    axis_index as axis_index,
    axis_size as axis_size,
    constrain_to as constrain_to,
    gather as gather,
    plan_of as plan_of,
    replicate as replicate,
    shard_and_gather_fns as shard_and_gather_fns,
    shardings_of as shardings_of,
    specs_of as specs_of,
)
from ._axes import (
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
    PartitionAxis as PartitionAxis,
    QUERY_LENGTH as QUERY_LENGTH,
    SP as SP,
    TP as TP,
    VOCAB as VOCAB,
)
from ._chip import Chip as Chip, CHIPS as CHIPS
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
from ._mesh import MeshLike as MeshLike, MeshSpec as MeshSpec
from ._plan import LeafPlan as LeafPlan, replicated_plan as replicated_plan, ShardingPlan as ShardingPlan
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
