"""Output heads: what the model names as such, and the projections that its output comes from."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from megaopt_core.params import RoleDecision
from megaopt_core.routing import doubted, is_projection, output
from megaopt_roles.forward.analysis import returned_by
from megaopt_roles.judged import find_judged
from megaopt_roles.model.analyses import HOLDERS
from megaopt_roles.model.features import makes_alone
from megaopt_roles.model.reading import ModelReading
from megaopt_roles.model.unread import is_torchs
from megaopt_roles.stream import Stream
from megaopt_roles.widths import Widths

__all__ = ["find_heads"]


def find_heads(
    model: nn.Module, modules: dict[str, nn.Module], reading: ModelReading, stream: Stream
) -> dict[int, RoleDecision]:
    """Return the decisions for output heads, by identity of the projection (or of a weight used by hand).

    Args:
        model: the model, unwrapped.
        modules: its modules by canonical name.
        reading: what its sources say.
        stream: what shows that a projection adds to a residual stream.
    """
    found = dict.fromkeys(_of_adaptive_softmax(modules), output("classes of AdaptiveLogSoftmaxWithLoss"))
    for module, getter in _declared(modules):
        for projection in _projections(module, reading):
            found.setdefault(projection, output(f"the model names it as its output layer ({getter})"))
    if isinstance(model, nn.MultiheadAttention):  # a layer alone, which has no head
        return found
    judged, returned = find_judged(model, modules, reading), _returned(model, modules, reading, stream, found)
    return {**judged, **returned, **{key: head for key, head in judged.items() if not head.uncertain}}


def _returned(
    model: nn.Module,
    modules: dict[str, nn.Module],
    reading: ModelReading,
    stream: Stream,
    found: dict[int, RoleDecision],
) -> dict[int, RoleDecision]:
    """Return the decisions for what a model returns, with those that are known before."""
    ends, _ = reading.ends(model)
    tables = {id(part) for part in modules.values() if isinstance(part, nn.Embedding | nn.EmbeddingBag)}
    outside = _outside_base(modules)
    candidates = (set(ends - tables) | outside) - set(found)
    beside_others = stream.joined | reading.used_as("indexed")
    stacks = {
        id(param)
        for part in modules.values()
        for param in part._parameters.values()
        if param is not None and param.dim() != 2
        if id(param) in beside_others or not makes_alone(param, reading.uses)
    }
    candidates -= stacks | reading.used_as("passed")
    kept = {key for key in candidates - reading.consumed if not stream.weighs(key)}
    also_taken = _but_layers(candidates & ends & reading.consumed, modules, reading)
    also_taken -= stream.in_losses - reading.scored - reading.against  # a penalty is made of it
    if kept:  # what multiplies itself, part by part, holds gates or queries and keys: it is a state that is returned
        also_taken -= reading.used_as("paired") | reading.used_as("gating") | reading.used_as("weighing")
        also_taken -= reading.used_as("rectified")  # features, of which a head made the output
    if not kept and not also_taken:
        return found
    alone = stream.alone
    widths = Widths(model, modules, reading, kept | (also_taken & alone) | set(found))
    for projection in kept:
        if projection in outside:
            head = output("stands outside the base model, and no other layer takes its output")
            found[projection] = head if projection in ends else doubted(head, "no forward returns it")
        elif projection in reading.scored or not widths.is_hidden(
            projection, residual=stream.takes(projection)
        ):
            found[projection] = _last(projection, reading, stream)
    sure = {key for key in kept & found.keys() & alone if not found[key].uncertain}
    beside = {
        key
        for key in (kept & alone) - found.keys()
        if not stream.takes(key) and sure & stream.made_beside(key)
    }
    # as wide as something hidden, and yet no matrices
    found |= {key: _last(key, reading, stream) for key in beside}
    read_back = doubted(output("the model returns its output, and other layers take it"))
    visible = (
        part
        for part in also_taken
        if not stream.takes(part)
        and (
            not widths.is_hidden(part)
            or (part in alone and not widths.is_handed_on(part))
            or (part in alone - reading.scaled and widths.is_of_last_norm(part))
        )
    )
    return {**found, **dict.fromkeys(visible, read_back)}


def _last(projection: int, reading: ModelReading, stream: Stream) -> RoleDecision:
    """Return the decision for a projection behind which no layer stands."""
    if projection in reading.guessed:
        return doubted(output("probably the last projection: no forward says so"))
    head = output("the last projection before the model's output")
    # A softmax of a sum that is all that is returned is a distribution: it weighed nothing.
    choosing = reading.used_as("choosing")
    if projection in choosing and not stream.makes_alone(projection, choosing - reading.compared):
        return doubted(head, "a softmax chooses by it")
    if projection in reading.weighing:
        return doubted(head, "it weighs what other layers made")
    if projection in reading.used_as("proportioning") - stream.alone - reading.scored:
        return doubted(head, "a softmax of it weighs what other layers made, and adds it up")
    # Directions are compared as they are: nothing stands behind them.
    if projection in reading.compared - reading.unit:
        return doubted(head, "the output of another layer is compared with it")
    return head


def _but_layers(projections: set[int], modules: dict[str, nn.Module], reading: ModelReading) -> set[int]:
    """Return projections without those in torch's own layers, and without those that attention weighs with.

    A model may return its weights. A softmax chooses by these projections, or they are shaped into heads.
    """
    if not projections:
        return projections
    of_torch = {
        id(child)
        for module in modules.values()
        if is_torchs(module) and not isinstance(module, HOLDERS)
        for child in module._modules.values()
    }
    shaped = {key for key, sizes in reading.heads.items() if sizes}
    return projections - of_torch - shaped - reading.used_as("choosing")


def _of_adaptive_softmax(modules: dict[str, nn.Module]) -> Iterator[int]:
    """Yield the projections that torch's adaptive softmax takes for classes: its first one, and the last of each tail.

    The first one of each tail only makes its input smaller.
    """
    for module in modules.values():
        if isinstance(module, nn.AdaptiveLogSoftmaxWithLoss):
            yield id(module.head)
            yield from (id(layer) for tail in module.tail for layer in [*tail.modules()][-1:])


def _declared(modules: dict[str, nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    for name, module in modules.items():
        for getter in ("get_output_embeddings", "get_classifier"):
            if getter == "get_classifier" and not _is_root(name):
                continue
            head = returned_by(module, getter)
            for part in head if isinstance(head, list | tuple) else (head,):
                if isinstance(part, nn.Module):
                    yield part, f"{getter}()"


def _is_root(name: str) -> bool:
    return name in ("", "base_model", "base_model.model", "model")


def _projections(module: nn.Module, reading: ModelReading) -> set[int]:
    """Return the projections that a head consists of, seen through adapters and copies of it."""
    if is_projection(module):
        return {id(module)}
    copies = module._modules.get("modules_to_save")
    if isinstance(copies, nn.ModuleDict):
        copied = [*copies.values(), module.get_submodule("original_module")]
        return set[int]().union(*(_projections(part, reading) for part in copied))
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return set[int]().union(*(_projections(part, reading) for part in module.children()))
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return set()
    return set(reading.ends(module)[0])


def _outside_base(modules: dict[str, nn.Module]) -> set[int]:
    """Return the projections of transformers models that stand outside their base model."""
    found: set[int] = set()
    for name, module in modules.items():
        prefix = getattr(type(module), "base_model_prefix", None)
        if not isinstance(prefix, str) or not prefix or not _is_root(name):
            continue
        base = module._modules.get(prefix)
        if base is None:
            continue
        inside = {id(part) for part in base.modules()}
        found |= {id(part) for part in module.modules() if id(part) not in inside and is_projection(part)}
    return found
