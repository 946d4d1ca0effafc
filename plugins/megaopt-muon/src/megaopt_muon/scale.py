"""How large the orthogonalized update is made, from the shape of its matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from megaopt_core.errors import ConfigurationError

__all__ = ["SCALE_MODES", "get_muon_scale_factor", "validate_scale_mode"]

SCALE_MODES: Mapping[str, Callable[[int, int], float]] = MappingProxyType(
    {
        "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
        "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
        "shape_scaling": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    }
)
"""Scale modes and their formulas of `(rows, columns)`, the outputs and inputs of the whole logical matrix."""


def validate_scale_mode(mode: str) -> None:
    """Raise unless there is a scale mode of this name.

    Args:
        mode: the name.

    Raises:
        ConfigurationError: there is none (a `ValueError`).
    """
    if not isinstance(mode, str) or mode not in SCALE_MODES:
        raise ConfigurationError(
            f"scale_mode={mode!r}: must be one of {list(SCALE_MODES)}", setting="muon_scale_mode", value=mode
        )


def get_muon_scale_factor(size_out: int, size_in: int, mode: str = "spectral") -> float:
    r"""Return the factor on the orthogonalized update.

    `spectral`: :math:`\sqrt{\max(r, c)}`; `unit_rms_norm`: :math:`\sqrt{r/c}`; `shape_scaling`:
    :math:`\sqrt{\max(1, r/c)}`, for `r` rows (outputs) and `c` columns (inputs).

    Args:
        size_out: rows of the whole logical matrix.
        size_in: its columns.
        mode: one of :data:`SCALE_MODES`.

    Raises:
        ConfigurationError: the mode is unknown.

    Source:
        spectral: Liu et al., "Muon is Scalable for LLM Training" (arXiv:2502.16982), up to their factor 0.2;
        unit_rms_norm: Pethick et al., "Training Deep Learning Models with Norm-Constrained LMOs" (arXiv:2502.07529);
        shape_scaling: K. Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024).

    Example:
        >>> get_muon_scale_factor(64, 16, "unit_rms_norm")
        2.0
    """
    validate_scale_mode(mode)
    return SCALE_MODES[mode](size_out, size_in)
