"""States and main parameters of Megatron's own optimizers, by the model's parameters and whole on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from attrs import field, frozen

from megaopt_core.errors import UnsupportedOperationError
from megaopt_core.parallel import gather_objects

__all__ = ["OfMegatron", "of_megatron"]


@frozen(eq=False)
class _Place:
    """Where Megatron keeps the state of a parameter on this rank.

    Args:
        param: the model's parameter.
        group: which group it is in; -1: other ranks know.
        main: the tensor that is stepped; None: other ranks have all of it.
        part: which of the parameter's elements that tensor has.
    """

    param: torch.nn.Parameter
    group: int
    main: torch.Tensor | None
    part: slice


@frozen(eq=False)
class OfMegatron:
    """Groups and states as a torch optimizer over the model's parameters would have them.

    Args:
        param_groups: settings, and the model's parameters under `params`.
        state: each parameter's state, in its shape.
        main_values: each parameter's value in float32, where Megatron keeps one.
    """

    param_groups: list[dict[str, Any]] = field(factory=list)
    state: dict[torch.nn.Parameter, dict[str, Any]] = field(factory=dict)
    main_values: dict[torch.nn.Parameter, torch.Tensor] = field(factory=dict)


def of_megatron(old: Any) -> OfMegatron | None:
    """Return what an optimizer of Megatron's keeps, None for any other: a collective of its data-parallel ranks.

    Args:
        old: an optimizer that `megatron.core.optimizer.get_megatron_optimizer` has built.

    Raises:
        UnsupportedOperationError: whole tensors of it have owners.
    """
    if not type(old).__module__.startswith("megatron."):
        return None
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

    if isinstance(old, LayerWiseDistributedOptimizer):
        raise UnsupportedOperationError(
            "take_over(): each rank has the states of some tensors alone in Megatron's LayerWiseDistributedOptimizer: "
            "load its checkpoint into an optimizer of Megatron's without use_layer_wise_distributed_optimizer, and "
            "give that one"
        )
    found = OfMegatron()
    for each in getattr(old, "chained_optimizers", [old]):
        if each.optimizer is not None:  # a rank without parameters
            _add(found, each)
    return found


def _add(found: OfMegatron, old: Any) -> None:
    inner, places = old.optimizer.state, list(_places(old))
    cut = old.data_parallel_group if hasattr(old, "gbuf_ranges") else None
    kept = {key: value for each in places if each.main is not None for key, value in inner[each.main].items()}
    for group in old.optimizer.param_groups:
        if "step" in group:  # where fused kernels count
            kept["step"] = torch.tensor(float(group["step"]))
    dtypes = {
        key: value.dtype for key, value in kept.items() if isinstance(value, torch.Tensor) and value.dim()
    }
    numbers = {key: value for key, value in kept.items() if key not in dtypes}
    numbering = [each.group for each in places]
    if cut is not None:
        told = gather_objects((dtypes, numbers, numbering), cut, "reading the states of Megatron's optimizer")
        dtypes, numbers, _ = max(told, key=lambda each: len(each[0]))
        numbering = [max(known) for known in zip(*(each for *_, each in told), strict=True)]
    groups = [{**group, "params": []} for group in old.optimizer.param_groups]
    for place, number in zip(places, numbering, strict=True):
        groups[number]["params"].append(place.param)
        mine = {} if place.main is None else inner[place.main]
        state = {key: _whole(place, mine.get(key), dtype, cut) for key, dtype in dtypes.items()}
        found.state[place.param] = {**numbers, **state}
        if place.param.dtype != torch.float32:
            found.main_values[place.param] = _whole(place, place.main, torch.float32, cut)
    found.param_groups.extend(groups)


def _places(old: Any) -> Iterator[_Place]:
    """Go through the parameters of one optimizer of Megatron's, in an order that is the same on all ranks."""
    if hasattr(old, "gbuf_ranges"):
        yield from _places_in_buffers(old)
        return
    halves, mains = getattr(old, "float16_groups", ()), getattr(old, "fp32_from_float16_groups", ())
    model = {
        main: param
        for group, main_group in zip(halves, mains, strict=True)
        for param, main in zip(group, main_group, strict=True)
    }
    for number, group in enumerate(old.optimizer.param_groups):
        for main in group["params"]:
            yield _Place(model.get(main, main), number, main, slice(0, main.numel()))


def _places_in_buffers(old: Any) -> Iterator[_Place]:
    for param in (param for buffer in old.buffers for param in buffer.params):
        if param not in old.model_param_group_index_map:
            yield _Place(param, -1, None, slice(0, 0))
            continue
        number, place = old.model_param_group_index_map[param]
        index, dtype, bucket = old.model_param_gbuf_map[param]
        own = old.gbuf_ranges[index][dtype][bucket]["param_map"][param]["param"]
        main = old.optimizer.param_groups[number]["params"][place]
        yield _Place(param, number, main, slice(own.start, own.end))


def _whole(
    place: _Place, values: torch.Tensor | None, dtype: torch.dtype, cut: dist.ProcessGroup | None
) -> torch.Tensor:
    """Return the values of all elements, of which the ranks of a group may have parts."""
    whole = torch.zeros(place.param.numel(), dtype=dtype, device=place.param.device)
    if values is not None:
        whole[place.part] = values.detach().flatten()
    if cut is not None:
        dist.all_reduce(whole, group=cut)
    return whole.view(place.param.shape)
