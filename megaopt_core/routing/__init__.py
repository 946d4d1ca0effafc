"""Which optimizer, group and strategy every parameter gets, and why."""

from typing import TYPE_CHECKING

from megaopt_core import resolve_lazily

if TYPE_CHECKING:
    from megaopt_core.routing._roles.decisions import doubted, elementwise, embedding, matrix, output
    from megaopt_core.routing._roles.infer import infer_roles
    from megaopt_core.routing._roles.module_types import (
        by_module_type,
        by_shape,
        inputs_of,
        is_conv1d,
        is_linear,
        is_projection,
        outputs_of,
        stated,
    )
    from megaopt_core.routing._roles.parametrized import target_of
    from megaopt_core.routing._roles.registered_views import ViewHandle, register_matrix_view
    from megaopt_core.routing._roles.tied import tied_role
    from megaopt_core.routing._routing import NameMap, ParamRoute, Routing, route
    from megaopt_core.routing._standard import (
        get_mup_config_overrides,
        get_standard_config_overrides,
        scaled_learning_rate,
    )
else:
    __getattr__, __dir__ = resolve_lazily(
        __name__,
        {
            "stated": "_roles.module_types",
            "doubted": "_roles.decisions",
            "NameMap": "_routing",
            "ParamRoute": "_routing",
            "Routing": "_routing",
            "ViewHandle": "_roles.registered_views",
            "by_module_type": "_roles.module_types",
            "by_shape": "_roles.module_types",
            "elementwise": "_roles.decisions",
            "embedding": "_roles.decisions",
            "get_mup_config_overrides": "_standard",
            "get_standard_config_overrides": "_standard",
            "infer_roles": "_roles.infer",
            "inputs_of": "_roles.module_types",
            "is_conv1d": "_roles.module_types",
            "is_linear": "_roles.module_types",
            "is_projection": "_roles.module_types",
            "matrix": "_roles.decisions",
            "output": "_roles.decisions",
            "outputs_of": "_roles.module_types",
            "register_matrix_view": "_roles.registered_views",
            "route": "_routing",
            "scaled_learning_rate": "_standard",
            "target_of": "_roles.parametrized",
            "tied_role": "_roles.tied",
        },
    )

__all__ = [
    "NameMap",
    "ParamRoute",
    "Routing",
    "ViewHandle",
    "by_module_type",
    "by_shape",
    "doubted",
    "elementwise",
    "embedding",
    "get_mup_config_overrides",
    "get_standard_config_overrides",
    "infer_roles",
    "inputs_of",
    "is_conv1d",
    "is_linear",
    "is_projection",
    "matrix",
    "output",
    "outputs_of",
    "register_matrix_view",
    "route",
    "scaled_learning_rate",
    "stated",
    "target_of",
    "tied_role",
]
