"""Which of torch's implementations is the fastest for a model: fused, foreach or the plain loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

__all__ = ["fastest_implementation", "has_sparse_gradients"]


def _trainable(model_chunks: Sequence[torch.nn.Module]) -> Iterable[torch.nn.Parameter]:
    return (param for chunk in model_chunks for param in chunk.parameters() if param.requires_grad)


def fastest_implementation(model_chunks: Sequence[torch.nn.Module]) -> dict[str, bool]:
    """Return `{"fused": True}` where torch has a fused kernel for every parameter, else nothing.

    Without an answer torch chooses foreach on accelerators and the plain loop on CPU. Fused kernels need floating
    real parameters on a device that torch lists; complex or meta parameters have none.

    Args:
        model_chunks: the model; an empty sequence means parameters that are not known, and gets no fused kernel.

    Example:
        >>> import torch
        >>> fastest_implementation([torch.nn.Linear(2, 2)])
        {'fused': True}
        >>> fastest_implementation([torch.nn.Linear(2, 2, device="meta")])
        {}
    """
    supported = set(_get_fused_kernels_supported_devices())
    params = list(_trainable(model_chunks))
    if params and all(param.device.type in supported and param.is_floating_point() for param in params):
        return {"fused": True}
    return {}


def has_sparse_gradients(model_chunks: Sequence[torch.nn.Module]) -> bool:
    """Return whether a trainable embedding was built with `sparse=True`.

    Args:
        model_chunks: the model.

    Example:
        >>> import torch
        >>> has_sparse_gradients([torch.nn.Embedding(3, 2, sparse=True)])
        True
    """
    return any(
        isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        and module.sparse
        and module.weight.requires_grad
        for chunk in model_chunks
        for module in chunk.modules()
    )
