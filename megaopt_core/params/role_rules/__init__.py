"""Rules that find what each parameter of a model is; `infer_roles` is the one entry."""

from megaopt_core.params.role_rules.infer import infer_roles
from megaopt_core.params.role_rules.registered import ViewHandle, register_matrix_view

__all__ = ["ViewHandle", "infer_roles", "register_matrix_view"]
