"""The vocabulary of parameters, as pure data: names, keys, overrides, roles, views, specs, shards."""

from megaopt_core.params._chunks import chunks_of
from megaopt_core.params._keys import ParamKey, ParamPredicate, ParamWithNamePredicate
from megaopt_core.params._names import (
    NamedParam,
    ParamOwner,
    join,
    named_modules,
    named_params,
    shown,
    unwrap,
)
from megaopt_core.params._overrides import (
    OVERRIDE_FIELDS,
    ParamGroupOverride,
    combine_param_group_overrides,
    param_group_override_to_tuple,
    validate_override,
)
from megaopt_core.params._parts import LogicalPart, is_dtensor, is_marked_expert, local_tensor, logical_part
from megaopt_core.params._roles import Doubt, Role, RoleDecision
from megaopt_core.params._shards import AxisPlacement, Box, RankCoordinates, Shard, intersect, numel_of, whole
from megaopt_core.params._specs import DEFAULT_ALIGNMENT, Granularity, ParamInfo, ParamSpec, PeerGroup
from megaopt_core.params._views import MATRIX, Fused, MatrixView
from megaopt_core.params._windows import MatrixWindow

__all__ = [
    "DEFAULT_ALIGNMENT",
    "MATRIX",
    "OVERRIDE_FIELDS",
    "AxisPlacement",
    "Box",
    "Doubt",
    "Fused",
    "Granularity",
    "LogicalPart",
    "MatrixView",
    "MatrixWindow",
    "NamedParam",
    "ParamGroupOverride",
    "ParamInfo",
    "ParamKey",
    "ParamOwner",
    "ParamPredicate",
    "ParamSpec",
    "ParamWithNamePredicate",
    "PeerGroup",
    "RankCoordinates",
    "Role",
    "RoleDecision",
    "Shard",
    "chunks_of",
    "combine_param_group_overrides",
    "intersect",
    "is_dtensor",
    "is_marked_expert",
    "join",
    "local_tensor",
    "logical_part",
    "named_modules",
    "named_params",
    "numel_of",
    "param_group_override_to_tuple",
    "shown",
    "unwrap",
    "validate_override",
    "whole",
]
