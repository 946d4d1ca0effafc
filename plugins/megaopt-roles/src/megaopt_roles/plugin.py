"""Entry point of megaopt-roles: it answers what the parameters of a model are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megaopt_core.plugin_api import hookimpl

if TYPE_CHECKING:
    import torch

    from megaopt_core.params import RoleDecision

__all__ = ["megaopt_annotate_params", "megaopt_api"]

megaopt_api = "1"


@hookimpl
def megaopt_annotate_params(
    model_chunk: torch.nn.Module, example: Any, no_forward: str
) -> Mapping[str, RoleDecision]:
    """Return a decision for every parameter, with its reason and whether it is certain."""
    from megaopt_roles.reading import read_roles  # it watches a forward, which nothing but routing needs

    return read_roles(model_chunk, example, no_forward=no_forward)
