"""Which parameters lie in layer-wise buffers: hidden matrices, marked before a model is wrapped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from megaopt_core.params import Doubt, Role, named_params
from megaopt_core.routing import infer_roles
from megaopt_core.sharding import BufferKey

__all__ = [
    "bucket_is_managed_by_layer_wise_optimizer",
    "is_managed_by_layer_wise_optimizer",
    "tag_params_for_buffer_routing",
]

_TAG = "is_managed_by_layer_wise_optimizer"


def is_managed_by_layer_wise_optimizer(param: torch.nn.Parameter) -> bool:
    """Return whether a parameter is a matrix that one owner steps, rather than cut over ranks by its elements.

    Where :func:`tag_params_for_buffer_routing` has marked it, the mark decides: it knows the model. Otherwise this is
    what the parameter alone tells: it has two dimensions or more, and neither its attribute
    `is_embedding_or_output_parameter` nor `use_muon` says otherwise.

    Args:
        param: the parameter.

    Example:
        >>> is_managed_by_layer_wise_optimizer(torch.nn.Parameter(torch.empty(4, 4)))
        True
        >>> is_managed_by_layer_wise_optimizer(torch.nn.Parameter(torch.empty(4)))
        False
    """
    mark = getattr(param, _TAG, None)
    if mark is not None:
        return bool(mark)
    if getattr(param, "is_embedding_or_output_parameter", False):
        return False
    return param.dim() > 1 and getattr(param, "use_muon", None) is not False


def bucket_is_managed_by_layer_wise_optimizer(bucket: Any, default_for_untagged: bool = True) -> bool:
    """Return whether a bucket belongs to a layer-wise buffer, which its buffer's key or its first parameter tells.

    Args:
        bucket: has the `key` of its buffer, or `params`: parameters, or a mapping to them.
        default_for_untagged: the answer where nothing is marked, or the bucket is empty.

    Example:
        >>> from types import SimpleNamespace
        >>> bucket_is_managed_by_layer_wise_optimizer(SimpleNamespace(params=[]), default_for_untagged=False)
        False
    """
    key = getattr(bucket, "key", None)
    if isinstance(key, BufferKey):
        return key.is_managed_by_layer_wise
    params = getattr(bucket, "params", ())
    first = next(iter(params.values() if isinstance(params, Mapping) else params), None)
    mark = getattr(first, _TAG, None)
    return default_for_untagged if mark is None else bool(mark)


def tag_params_for_buffer_routing(model_chunks: torch.nn.Module | Iterable[torch.nn.Module]) -> None:
    """Mark every trainable parameter with whether it lies in a layer-wise buffer; before the model is wrapped.

    A parameter does whose role is that of a hidden matrix, without doubt: what `route()` gives to an optimizer of whole
    matrices.

    Args:
        model_chunks: the bare model chunks, or one of them.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
        >>> tag_params_for_buffer_routing([model])
        >>> [param.is_managed_by_layer_wise_optimizer for param in (model[0].weight, model[1].weight, model[1].bias)]
        [False, True, False]
    """
    chunks = [model_chunks] if isinstance(model_chunks, torch.nn.Module) else model_chunks
    for chunk in chunks:
        roles = infer_roles(chunk)
        for named in named_params(chunk):
            if named.param.requires_grad:
                decision = roles[named.name]
                managed = decision.role is Role.MATRIX and decision.doubt is not Doubt.ROLE
                for param in (named.param, *named.twins):
                    setattr(param, _TAG, managed)
