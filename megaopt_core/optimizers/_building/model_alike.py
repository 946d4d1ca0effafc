"""Names, shapes and dtypes that replicas must have alike, of buffers and of parameters that nothing steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch

from megaopt_core.config._dtypes import dtype_name
from megaopt_core.parallel._agreement import Comparison, Rows
from megaopt_core.parallel._groups import ProcessGroupCollection
from megaopt_core.params._names import join, named_modules, named_params
from megaopt_core.params._parts import is_marked_expert
from megaopt_core.reporting._watched_model import NamedChunk

__all__ = ["kind_of", "model_alike", "modules_of_experts"]

_WHAT = "the tensors of the model that nothing steps"


def model_alike(
    chunks: Sequence[NamedChunk],
    stepped: Collection[torch.nn.Parameter],
    pgs: ProcessGroupCollection,
    *,
    everything: bool,
) -> list[Comparison]:
    """Return what ranks must have alike of parameters that nothing steps, and of buffers.

    Args:
        chunks: the model's chunks, each with what makes a local name a global one.
        stepped: the parameters that are stepped.
        pgs: the process groups.
        everything: buffers too that no state dict has, which a forward pass may make on one rank.
    """
    found = []
    for group, is_expert in pgs.replicas:
        rows: Rows = []
        if _hold_more([chunk for _, chunk in chunks]):
            left = _left_rows(chunks, stepped, is_expert=is_expert)
            rows = [*left, *_buffer_rows(chunks, is_expert=is_expert, everything=everything)]
        found.append(Comparison.of_rows(f"{_WHAT}{', of experts' * is_expert}", rows, group))
    return found


def _hold_more(chunks: Iterable[torch.nn.Module]) -> bool:
    """Return whether modules hold buffers or parameters that do not train; names are not needed for that."""
    return any(
        module._buffers or not all(param.requires_grad for param in module.parameters(recurse=False))
        for chunk in chunks
        for module in chunk.modules()
    )


def _left_rows(
    chunks: Iterable[NamedChunk], stepped: Collection[torch.nn.Parameter], *, is_expert: bool
) -> Iterator[tuple[str, Mapping[str, str]]]:
    for name_of, chunk in chunks:
        for entry in named_params(chunk):
            if entry.param not in stepped and is_marked_expert(entry.param) is is_expert:
                trains = "trains" if entry.param.requires_grad else "is frozen"
                yield f"parameter {name_of(entry.name)!r}", {"": trains, **kind_of(entry.param)}


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
                    yield f"buffer {name_of(join(path, name))!r}", kind_of(buffer)


def kind_of(tensor: torch.Tensor) -> dict[str, str]:
    """Return shape and dtype of a tensor in words, as far as they are known.

    Args:
        tensor: a parameter or a buffer.
    """
    if torch.nn.parameter.is_lazy(tensor):
        return {"shape": "not known before its first forward pass"}
    return {"shape": str(tuple(tensor.shape)), "dtype": dtype_name(tensor.dtype)}


def modules_of_experts(chunk: torch.nn.Module) -> set[int]:
    """Return the ids of modules that hold parameters of experts, and of those below that hold none of their own.

    Args:
        chunk: a model chunk.
    """
    if not any(map(is_marked_expert, chunk.parameters())):
        return set()
    found: set[int] = set()
    for module in chunk.modules():
        params = list(module.parameters())
        if params and all(map(is_marked_expert, params)):
            found.update(map(id, module.modules()))
    return found
