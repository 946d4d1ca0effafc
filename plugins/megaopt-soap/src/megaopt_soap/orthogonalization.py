"""Muon's orthogonalization, for SOAP-Muon."""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["orthogonalized"]

_STEPS: Final = 5
_COEFFICIENTS: Final = "quintic"


def orthogonalized(update: torch.Tensor) -> torch.Tensor:
    """Return the update with all singular values near 1, by Muon's Newton-Schulz iteration.

    Args:
        update: `[rows, columns]`; its size does not matter.

    Returns:
        A tensor of its shape and dtype, computed in float32.

    Source:
        K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024).
    """
    # emerging-optimizers takes seconds to import.
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz

    result: torch.Tensor = newton_schulz(update.float(), _STEPS, _COEFFICIENTS)
    return result.to(update.dtype)
