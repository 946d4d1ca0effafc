"""State dicts in torch's schema for optimizers whose parameters are cut over ranks."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from megaopt_core.state._pieces import collect_state, state_key
from megaopt_core.state._values.sliced import SlicedTensor

if TYPE_CHECKING:
    from megaopt_core.optimizers._base import MegatronOptimizer

__all__ = ["with_slices"]


def with_slices(
    optimizer: MegatronOptimizer, state_dict: dict[str, Any], cut: Collection[str]
) -> dict[str, Any]:
    """Return a state dict in which state of cut parameters tells which part of the whole parameter it is.

    `torch.distributed.checkpoint` saves every part once and reads what a rank needs on any number of ranks; nothing
    else can be done with the result, so that no part can be taken for the whole.

    Args:
        optimizer: a built optimizer.
        state_dict: what it exports; changed in place.
        cut: names of the parameters of which this rank does not step everything.
    """
    tensors = collect_state(optimizer, with_placeholders=True).tensors
    for group in state_dict["param_groups"]:
        for index, name in zip(group["params"], group["param_names"], strict=True):
            values = state_dict["state"].get(index, {}) if name in cut else {}
            for key in values:
                part = tensors.get(state_key(name, key))
                if isinstance(part, SlicedTensor):
                    values[key] = part.read_once()
    return state_dict
