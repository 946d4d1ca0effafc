"""What a schedule style is asked about: one step of one parameter group."""

from __future__ import annotations

from typing import Any

from attrs import frozen

__all__ = ["LearningRatePoint", "WeightDecayPoint"]


@frozen(kw_only=True)
class LearningRatePoint:
    """What a learning-rate style knows: the step, and the settings as they hold for one parameter group.

    Args:
        step: steps taken so far, counted in the unit of the settings (optimizer steps, samples...).
        init_lr: learning rate at the first warm-up step.
        max_lr: learning rate at the end of warm-up.
        min_lr: learning rate at the end of the decay.
        lr_warmup_steps: length of warm-up.
        lr_decay_steps: the step at which the decay ends, counted from step 0, so warm-up is a part of it.
        wsd_decay_steps: for style `WSD`, length of the final decay.
        lr_wsd_decay_style: for style `WSD`, the curve of the final decay.
        settings: the style's own settings, an instance of its `settings` class; None for a style without.

    Example:
        >>> point = LearningRatePoint(step=6, max_lr=1.0, lr_warmup_steps=2, lr_decay_steps=10)
        >>> point.progress, point.between(0.25)
        (0.5, 0.25)
    """

    step: float
    init_lr: float = 0.0
    max_lr: float
    min_lr: float = 0.0
    lr_warmup_steps: float = 0
    lr_decay_steps: float
    wsd_decay_steps: float | None = None
    lr_wsd_decay_style: str | None = None
    settings: Any = None

    @property
    def in_warmup(self) -> bool:
        """Whether this is a step of warm-up: `0 < w` and `t <= w`."""
        return self.lr_warmup_steps > 0 and self.step <= self.lr_warmup_steps

    @property
    def after_decay(self) -> bool:
        """Whether the decay is over: `t > d`."""
        return self.step > self.lr_decay_steps

    @property
    def warmup_lr(self) -> float:
        """The learning rate during warm-up: `init_lr + (max_lr - init_lr) * t / w`."""
        return self.init_lr + (self.max_lr - self.init_lr) * self.step / self.lr_warmup_steps

    @property
    def progress(self) -> float:
        """How far the decay has come: `r = (t - w) / (d - w)`, 0 after warm-up and 1 at the end."""
        return (self.step - self.lr_warmup_steps) / (self.lr_decay_steps - self.lr_warmup_steps)

    def between(self, coefficient: float) -> float:
        """Return `min_lr + coefficient * (max_lr - min_lr)`."""
        return self.min_lr + coefficient * (self.max_lr - self.min_lr)


@frozen(kw_only=True)
class WeightDecayPoint:
    """What a weight-decay style knows: the step, and the settings as they hold for one parameter group.

    Args:
        step: steps taken so far, in the unit of `wd_incr_steps`.
        start_wd: weight decay at step 0, before the group's `wd_mult`.
        end_wd: weight decay at the end, before the group's `wd_mult`.
        wd_incr_steps: length of the way from one to the other.
        settings: the style's own settings; None for a style without.

    Example:
        >>> point = WeightDecayPoint(step=5, start_wd=0.0, end_wd=0.1, wd_incr_steps=10)
        >>> point.progress, point.between(0.5)
        (0.5, 0.05)
    """

    step: float
    start_wd: float
    end_wd: float
    wd_incr_steps: float
    settings: Any = None

    @property
    def progress(self) -> float:
        """How far the increments have come: `r = t / wd_incr_steps`; 1 if there are none."""
        return self.step / self.wd_incr_steps if self.wd_incr_steps else 1.0

    def between(self, coefficient: float) -> float:
        """Return `start_wd + coefficient * (end_wd - start_wd)`."""
        return self.start_wd + coefficient * (self.end_wd - self.start_wd)
