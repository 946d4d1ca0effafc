"""Guesses about modules whose forward cannot be read: made in a REPL, compiled, scripted, zipped."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from megaopt_core.routing import is_projection
from megaopt_roles.forward.sources.module_classes import home_of, torchs_class
from megaopt_roles.model.features import inputs_of, outputs_of

__all__ = ["guessed_ends", "is_torchs"]


def is_torchs(module: nn.Module) -> bool:
    """True for the modules that torch itself brings, made as a subclass does too, unless their forward was replaced.

    Args:
        module: any module.
    """
    kind = home_of(torchs_class(type(module)))
    return kind.startswith(("torch.nn.", "torch.ao.")) and "forward" not in module.__dict__


def guessed_ends(
    module: nn.Module, ends: Callable[[nn.Module], tuple[frozenset[int], bool]]
) -> frozenset[int]:
    """Return the projections that a module whose forward is unknown may end with.

    These are the last one that is registered, those before it that are not its input (parallel heads), and those
    whose output has as many entries as an embedding table has rows.

    Args:
        module: the module.
        ends: the same for its children.
    """
    inside = {id(part): part for part in module.modules()}
    tables = {
        part.num_embeddings for part in inside.values() if isinstance(part, nn.Embedding | nn.EmbeddingBag)
    }
    found: set[int] = set()
    taken: set[int] = set()
    for child in reversed([child for child in module._modules.values() if child is not None]):
        if not any(True for _ in child.parameters()):
            continue
        last = [inside[key] for key in ends(child)[0] if key in inside and is_projection(inside[key])]
        if not last or taken & {outputs_of(part) for part in last}:
            break
        found |= {id(part) for part in last}
        taken |= set(_inputs(last))
        if not is_projection(child):
            break
    for own in module._modules.values():
        if own is not None and is_projection(own) and outputs_of(own) in tables:
            found.add(id(own))
    return frozenset(found)


def _inputs(projections: Iterable[nn.Module]) -> set[int]:
    return {inputs_of(part) for part in projections}
