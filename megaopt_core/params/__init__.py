"""The vocabulary of parameters, as pure data: names, keys, overrides, roles, views, specs, shards."""

from typing import TYPE_CHECKING

from megaopt_core import resolve_lazily

if TYPE_CHECKING:
    from megaopt_core.params._keys import ParamKey, ParamPredicate, ParamWithNamePredicate
    from megaopt_core.params._names import NamedParam, ParamOwner, named_modules, named_params, unwrap
    from megaopt_core.params._overrides import (
        ParamGroupOverride,
        combine_param_group_overrides,
        param_group_override_to_tuple,
    )
    from megaopt_core.params._parts import is_dtensor, local_tensor
    from megaopt_core.params._roles import Doubt, Role, RoleDecision
    from megaopt_core.params._specs import (
        DEFAULT_ALIGNMENT,
        AxisPlacement,
        Box,
        Granularity,
        ParamInfo,
        ParamSpec,
        PeerGroup,
        RankCoordinates,
        Shard,
        whole,
    )
    from megaopt_core.params._views import MATRIX, Fused, MatrixView
else:
    __getattr__, __dir__ = resolve_lazily(
        __name__,
        {
            "Fused": "_views",
            "Doubt": "_roles",
            "AxisPlacement": "_specs",
            "Box": "_specs",
            "DEFAULT_ALIGNMENT": "_specs",
            "Granularity": "_specs",
            "MATRIX": "_views",
            "MatrixView": "_views",
            "NamedParam": "_names",
            "ParamGroupOverride": "_overrides",
            "ParamInfo": "_specs",
            "ParamKey": "_keys",
            "ParamOwner": "_names",
            "ParamPredicate": "_keys",
            "ParamSpec": "_specs",
            "ParamWithNamePredicate": "_keys",
            "PeerGroup": "_specs",
            "RankCoordinates": "_specs",
            "Role": "_roles",
            "RoleDecision": "_roles",
            "Shard": "_specs",
            "combine_param_group_overrides": "_overrides",
            "is_dtensor": "_parts",
            "local_tensor": "_parts",
            "named_modules": "_names",
            "named_params": "_names",
            "param_group_override_to_tuple": "_overrides",
            "unwrap": "_names",
            "whole": "_specs",
        },
    )

__all__ = [
    "DEFAULT_ALIGNMENT",
    "MATRIX",
    "AxisPlacement",
    "Box",
    "Doubt",
    "Fused",
    "Granularity",
    "MatrixView",
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
    "combine_param_group_overrides",
    "is_dtensor",
    "local_tensor",
    "named_modules",
    "named_params",
    "param_group_override_to_tuple",
    "unwrap",
    "whole",
]
