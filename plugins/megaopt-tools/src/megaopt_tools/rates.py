"""A starting point for Muon, from the learning rate and weight decay that AdamW had."""

from __future__ import annotations

import math

from attrs import frozen

__all__ = ["MULTIPLE", "UPDATE_RMS", "Tuned", "suggested_settings"]

UPDATE_RMS = 0.2
"""AdamW's steps have a root mean square of about this much of its learning rate (arXiv 2502.16982)."""

MULTIPLE = 4.0
"""The rate of matrices in that of AdamW: the ratio of the best rates in `benchmarks/results/demo_grid.json`."""


@frozen
class Tuned:
    """AdamW's settings, and the sizes that they were found at.

    Args:
        lr: AdamW's learning rate.
        weight_decay: AdamW's weight decay.
        width_ratio: width of the new run, in that of the run that AdamW's rate was found for.
        batch_ratio: batch of the new run, in that of the run that AdamW's rate was found for.
    """

    lr: float
    weight_decay: float = 0.1
    width_ratio: float = 1.0
    batch_ratio: float = 1.0

    @property
    def lr_here(self) -> float:
        r"""AdamW's learning rate for the new run, :math:`\eta\,\sqrt{b}\,/\,w`.

        Source:
            width: Yang et al., "Tensor Programs V" (arXiv 2203.03466); batch: Malladi et al., "On the SDEs and Scaling
            Rules for Adaptive Gradient Algorithms" (arXiv 2205.10287).

        Example:
            >>> Tuned(3e-3, width_ratio=2, batch_ratio=4).lr_here
            0.003
        """
        return self.lr * math.sqrt(self.batch_ratio) / self.width_ratio


def suggested_settings(tuned: Tuned, *, multiple: float = MULTIPLE) -> dict[str, float]:
    r"""Return settings of Muon to begin with.

    A step of matrices has the size of AdamW's at the same rate, for
    :math:`0.2\sqrt{\max(r, c)}\;\mathrm{rms}(\mathrm{NS}(u)) \approx 0.2`, whatever the shape. The rate is a multiple
    of AdamW's, and :math:`\eta\lambda` stays as it was. Other parameters keep AdamW's settings.

    Args:
        tuned: AdamW's settings.
        multiple: how much larger than AdamW's the rate of matrices is.

    Example:
        >>> suggested_settings(Tuned(2e-3, weight_decay=0.1))["lr"]
        0.008
    """
    lr = tuned.lr_here
    found = {
        "lr": multiple * lr,
        "weight_decay": tuned.weight_decay / multiple,
        "muon_extra_scale_factor": UPDATE_RMS,
        "muon_scalar_lr": lr,
        "muon_scalar_weight_decay": tuned.weight_decay,
    }
    return {name: float(f"{value:.3g}") for name, value in found.items()}
