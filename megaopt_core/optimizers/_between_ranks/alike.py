"""What ranks that hold replicas have alike besides values: what is stepped, what a model holds, settings, schedules."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroup

from megaopt_core.config._dtypes import dtype_name
from megaopt_core.optimizers._between_ranks.held import is_shared_out, modules_of_experts
from megaopt_core.parallel._agreement import Comparison, Rows
from megaopt_core.parallel._groups import ProcessGroupCollection, communicates
from megaopt_core.params._names import join, named_modules, named_params
from megaopt_core.params._parts import is_marked_expert
from megaopt_core.reporting._watched_model import NamedChunk
from megaopt_core.routing._agreement import plain_words, settings_alike
from megaopt_core.state._notes import joins_of

if TYPE_CHECKING:
    from megaopt_core.optimizers._base import MegatronOptimizer

__all__ = ["held_alike", "schedules_alike", "settings_of_groups", "stepped_alike", "wrapped_alike"]

WRITTEN = frozenset(
    {"lr", "weight_decay", "max_lr", "min_lr", "wd_mult", "betas", "eps", "momentum", "clip_grad"}
)
"""Settings that people and schedulers write between steps; others an optimizer may write itself."""


def stepped_alike(optimizer: MegatronOptimizer, pgs: ProcessGroupCollection) -> list[Comparison]:
    """Return what ranks must have alike of what is stepped: which parameters, and which of them train.

    Args:
        optimizer: what this rank holds.
        pgs: the process groups.
    """
    found = []
    for what, group, is_expert in _of_replicas("the parameters that are stepped", pgs):
        rows: Rows = [
            (f"parameter {name!r}", {"": "trains" if param.requires_grad else "was frozen after the build"})
            for param, name in optimizer.names.items()
            if is_of_experts(optimizer, param, name) is is_expert
        ]
        found.append(Comparison.of_rows(what, rows, group))
    return found


def is_of_experts(optimizer: MegatronOptimizer, param: torch.Tensor, name: str) -> bool:
    """Return whether a parameter is one of experts, which have replicas of their own.

    Args:
        optimizer: steps it.
        param: the parameter.
        name: its name.
    """
    entry = None if optimizer.routing is None else optimizer.routing.params.get(name)
    return is_marked_expert(param) if entry is None else entry.spec.is_expert


def held_alike(
    chunks: Sequence[NamedChunk],
    stepped: Collection[torch.nn.Parameter],
    pgs: ProcessGroupCollection,
    *,
    everything: bool,
) -> list[Comparison]:
    """Return what ranks must have alike of a model besides what is stepped: names, shapes and dtypes.

    Args:
        chunks: the model's chunks, each with what makes a local name a global one.
        stepped: the parameters that are stepped.
        pgs: the process groups.
        everything: buffers too that no state dict has, which a forward pass may make on one rank.
    """
    found = []
    for what, group, is_expert in _of_replicas("what the model holds and nothing steps", pgs):
        rows: Rows = []
        if _hold_more([chunk for _, chunk in chunks]):
            left = _left_rows(chunks, stepped, is_expert=is_expert)
            rows = [*left, *_buffer_rows(chunks, is_expert=is_expert, everything=everything)]
        found.append(Comparison.of_rows(what, rows, group))
    return found


def _hold_more(chunks: Iterable[torch.nn.Module]) -> bool:
    """Return whether modules hold buffers or parameters that do not train; names are not needed for that."""
    return any(
        module._buffers or not all(param.requires_grad for param in module.parameters(recurse=False))
        for chunk in chunks
        for module in chunk.modules()
    )


def _of_replicas(what: str, pgs: ProcessGroupCollection) -> list[tuple[str, ProcessGroup | None, bool]]:
    """Return who compares dense parameters and who those of experts: the name of it, the group, of experts or not."""
    kinds = ((what, pgs.dense_dp, False), (f"{what}, of experts", pgs.expt_dp, True))
    return [kind for kind in kinds if communicates(kind[1])]


def _left_rows(
    chunks: Iterable[NamedChunk], stepped: Collection[torch.nn.Parameter], *, is_expert: bool
) -> Iterator[tuple[str, Mapping[str, str]]]:
    for name_of, chunk in chunks:
        for entry in named_params(chunk):
            if entry.param not in stepped and is_marked_expert(entry.param) is is_expert:
                trains = "trains" if entry.param.requires_grad else "is frozen"
                yield f"parameter {name_of(entry.name)!r}", {"": trains, **_kind(entry.param)}


def _buffer_rows(
    chunks: Iterable[NamedChunk], *, is_expert: bool, everything: bool
) -> Iterator[tuple[str, Mapping[str, str]]]:
    for name_of, chunk in chunks:
        experts = modules_of_experts(chunk)
        for path, module in named_modules(chunk):
            if (id(module) in experts) is not is_expert:
                continue
            for name, buffer in module._buffers.items():
                if buffer is not None and (everything or name not in module._non_persistent_buffers_set):
                    yield f"buffer {name_of(join(path, name))!r}", _kind(buffer)


def _kind(tensor: torch.Tensor) -> dict[str, str]:
    if torch.nn.parameter.is_lazy(tensor):
        return {"shape": "not known before its first forward pass"}
    return {"shape": str(tuple(tensor.shape)), "dtype": dtype_name(tensor.dtype)}


def settings_of_groups(
    optimizer: MegatronOptimizer, pgs: ProcessGroupCollection, *, everything: bool = True
) -> list[Comparison]:
    """Return what is to be alike of the parameter groups: what was written into them too.

    Steps may note in a group what they did with the parameters of this rank, as the class says in `noted_by_steps`.
    Where ranks step other parameters each, their notes are their own.

    Args:
        optimizer: what this rank holds.
        pgs: the process groups.
        everything: all settings; False: those that people and schedulers write.
    """
    group = pgs.dense_dp
    if not communicates(group):
        return []
    noted = {
        id(values): joins_of(part.inner)
        for part in optimizer.parts
        if is_shared_out(part, pgs)
        for values in part.groups
    }
    rows: Rows = [
        (
            f"param group {index}",
            {
                key: _plain(value)
                for key, value in sorted(values.items())
                if _is_setting(key, value)
                and (everything or key in WRITTEN)
                and key not in noted.get(id(values), ())
            },
        )
        for index, values in enumerate(optimizer.param_groups)
    ]
    return [Comparison.of_rows("the parameter groups", rows, group)]


def _is_setting(key: str, value: Any) -> bool:
    kinds = (str, bool, int, float, tuple, torch.Tensor, type(None))
    return key not in ("params", "param_names") and isinstance(value, kinds)


def _plain(value: Any) -> str:
    """Return a setting, or a tensor that holds one, in the same words on every rank, whatever kind of number it is."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = float(value)
        value = int(value) if value.is_integer() and abs(value) < 1e15 else value
    return plain_words(value)


def schedules_alike(optimizer: MegatronOptimizer) -> list[Comparison]:
    """Return what all ranks must have alike of the schedulers that write into an optimizer's groups.

    Args:
        optimizer: what this rank holds.
    """
    alive = [schedule for schedule in (each() for each in optimizer.schedules) if schedule is not None]
    rows: Rows = [
        (
            f"scheduler {index}" if len(alive) > 1 else "the scheduler",
            {key: _plain(value) for key, value in schedule.state_dict().items()},
        )
        for index, schedule in enumerate(alive)
    ]
    return [Comparison.of_rows("the schedules", rows, None)]


def wrapped_alike(
    inner: torch.optim.Optimizer, wrapper: MegatronOptimizer, pgs: ProcessGroupCollection
) -> list[Comparison]:
    """Return what is to be alike of an optimizer that was wrapped by hand, besides values.

    Args:
        inner: what was wrapped.
        wrapper: what it was wrapped in.
        pgs: the process groups.
    """
    found, group = [settings_alike(wrapper.config)], pgs.dense_dp
    if communicates(group):
        rows: Rows = [
            (f"parameter {name!r}", {**_kind(param), "optimizer": type(inner).__name__})
            for param, name in wrapper.names.items()
        ]
        found.append(Comparison.of_rows(f"the parameters of {type(wrapper).__name__}", rows, group))
    return found
