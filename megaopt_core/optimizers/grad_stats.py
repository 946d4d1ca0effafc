"""Gradient norms and zero counts: accurate at size, one host read a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["count_zeros", "scale_gradients", "sum_of_squares"]

_ROW = 4096


def _square_sums(grad: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares in float64, from partial sums over rows of at most 4096 elements in fp32."""
    if grad.numel() <= _ROW or grad.dtype == torch.float64:
        return torch.linalg.vector_norm(grad, dtype=_norm_dtype(grad)).double().square()
    flat = grad.reshape(-1)
    whole = flat.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1, dtype=_norm_dtype(grad))
    total = torch.linalg.vector_norm(rows.double()).square()
    if whole < flat.numel():
        total = total + torch.linalg.vector_norm(flat[whole:], dtype=_norm_dtype(grad)).double().square()
    return total


def _norm_dtype(grad: torch.Tensor) -> torch.dtype:
    return grad.dtype if grad.dtype == torch.float64 else torch.float32


def sum_of_squares(grads: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum of the squares of all elements as a float64 scalar on `device`.

    A single fp32 reduction over many millions of elements loses digits; rows of 4096 elements are reduced in fp32 (or
    wider), the row norms in float64.

    Args:
        grads: any number of tensors, of any shapes and floating dtypes.
        device: where the result lives.
    """
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    small = [grad for grad in grads if grad.numel() <= _ROW and grad.dtype != torch.float64]
    parts: list[torch.Tensor] = []
    if small:
        norms = torch._foreach_norm([grad.float() for grad in small])
        parts.append(torch.stack([norm.to(device) for norm in norms]).double().square().sum())
    parts.extend(
        _square_sums(grad).to(device) for grad in grads if grad.numel() > _ROW or grad.dtype == torch.float64
    )
    return torch.stack(parts).sum()


def count_zeros(grads: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return how many elements are exactly zero, as a float64 scalar on `device` (exact below 2**53).

    Args:
        grads: any number of tensors.
        device: where the result lives.
    """
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([(grad.numel() - torch.count_nonzero(grad)).to(device) for grad in grads]).double().sum()


def scale_gradients(grads: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply gradients in place.

    Args:
        grads: any number of tensors.
        factor: what they are multiplied by.
    """
    if grads:
        torch._foreach_mul_(list(grads), factor)
