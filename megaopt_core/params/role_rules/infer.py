"""The one entry: a decision for every parameter of a model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from megaopt_core.params.names import NamedParam, named_params, unwrap
from megaopt_core.params.role_rules.decisions import elementwise, embedding, matrix, output
from megaopt_core.params.role_rules.modules import by_module_type, by_shape
from megaopt_core.params.roles import Role, RoleDecision
from megaopt_core.params.views import MatrixView

__all__ = ["infer_roles"]


def infer_roles(
    model: nn.Module, annotations: Mapping[str, Role | MatrixView] | None = None
) -> dict[str, RoleDecision]:
    """Find what every parameter of a model is."""
    entries = named_params(model)
    heads = _declared_heads(unwrap(model))
    return {entry.name: _decide(entry, heads) for entry in entries}


def _declared_heads(model: nn.Module) -> set[int]:
    found = set()
    for getter in ("get_output_embeddings", "get_classifier"):
        head = getattr(model, getter, lambda: None)()
        if isinstance(head, nn.Module):
            found.add(id(head))
    return found


def _decide(entry: NamedParam, heads: set[int]) -> RoleDecision:
    shape = tuple(entry.param.shape)
    settled = by_shape(shape, entry.param.dtype)
    if settled:
        return settled
    found = [by_module_type(module, attribute, shape) for _, module, attribute in entry.owners]
    if any(d and d.role is Role.EMBEDDING for d in found):
        if any(d and d.role is Role.MATRIX for d in found):
            return embedding("embedding table tied to the output head")
        return next(d for d in found if d and d.role is Role.EMBEDDING)
    if any(id(module) in heads for _, module, _ in entry.owners):
        return output("the model names it as its output layer")
    if found[0]:
        return found[0]
    if len(shape) == 2 and 1 not in shape:
        return matrix("two dimensions, in a module of unknown type", uncertain=True)
    return elementwise("bare parameter of a module of unknown type", uncertain=True)
