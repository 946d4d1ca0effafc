"""Which optimizer, group and strategy every parameter gets, and why."""

from megaopt_core.routing._agreement import (
    names_of_several,
    plain_words,
    settings_alike,
    stages_of_names,
    wrong_names,
)
from megaopt_core.routing._groups import ChildSpec, GroupKey, GroupSpec
from megaopt_core.routing._overrides.from_config import (
    get_mup_config_overrides,
    get_standard_config_overrides,
    matrix_like_overrides,
    scaled_learning_rate,
    vector_like_overrides,
)
from megaopt_core.routing._roles.infer import infer_roles
from megaopt_core.routing._roles.registered_views import (
    ModuleMatch,
    ViewHandle,
    ViewSource,
    register_matrix_view,
)
from megaopt_core.routing._route import route
from megaopt_core.routing._routing import NameMap, ParamRoute, Routing
from megaopt_core.routing._stored import GivenRouting
from megaopt_core.routing._wrapped_model import require_same_ranks

__all__ = [
    "ChildSpec",
    "GivenRouting",
    "GroupKey",
    "GroupSpec",
    "ModuleMatch",
    "NameMap",
    "ParamRoute",
    "Routing",
    "ViewHandle",
    "ViewSource",
    "get_mup_config_overrides",
    "get_standard_config_overrides",
    "infer_roles",
    "matrix_like_overrides",
    "names_of_several",
    "plain_words",
    "register_matrix_view",
    "require_same_ranks",
    "route",
    "scaled_learning_rate",
    "settings_alike",
    "stages_of_names",
    "vector_like_overrides",
    "wrong_names",
]
