"""Loss scalers for fp16 training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from megaopt_core.config._validators import FINITE, FP32_SCALE
from megaopt_core.errors import ConfigurationError, StateDictError

__all__ = ["ConstantGradScaler", "DynamicGradScaler", "MegatronGradScaler"]


def _scale(name: str, value: float) -> torch.Tensor:
    _require(name, value, FP32_SCALE.allows, FP32_SCALE.words)
    return torch.tensor([value], dtype=torch.float32)


def _require(name: str, value: Any, holds: Callable[[Any], bool], allowed: str) -> None:
    if not (FINITE.allows(value) and holds(value)):
        raise ConfigurationError.of(name, value, f"must be {allowed}")


def _is_count(value: float) -> bool:
    return value >= 1 and float(value).is_integer()


class MegatronGradScaler(ABC):
    """A loss scale and the rule by which it changes.

    Args:
        initial_scale: the scale at the first step; above 0 and finite in fp32, as is 1 over it.

    Raises:
        ConfigurationError: it is not.
    """

    is_constant: ClassVar[bool] = False
    """The scale never changes, so that no step need be known before the next."""

    def __init__(self, initial_scale: float) -> None:
        self._scale = _scale("initial_scale", initial_scale)

    @property
    def scale(self) -> torch.Tensor:
        """The scale, an fp32 tensor of one element."""
        return self._scale

    @property
    def inv_scale(self) -> torch.Tensor:
        """One over the scale, computed in float64 and rounded once."""
        return self._scale.double().reciprocal().float()

    @abstractmethod
    def update(self, found_inf: bool) -> None:
        """Take note of a step.

        Args:
            found_inf: the step was skipped, because a gradient was not finite.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what a resume needs."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned.

        Args:
            state_dict: the saved values.
        """


class ConstantGradScaler(MegatronGradScaler):
    """A scale that never changes.

    Example:
        >>> ConstantGradScaler(128.0).scale
        tensor([128.])
    """

    is_constant = True

    def update(self, found_inf: bool) -> None:
        """Do nothing.

        Args:
            found_inf: the step was skipped.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dictionary: the scale comes from the configuration."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing.

        Args:
            state_dict: what `state_dict` returned.
        """


class DynamicGradScaler(MegatronGradScaler):
    """A scale that halves when gradients overflow and doubles when they have not for a while.

    On a non-finite gradient the growth tracker becomes 0 and the hysteresis tracker falls by 1; once that is 0 or less,
    `scale = max(scale * backoff_factor, min_scale)`, on every further overflow too. On a good step the growth tracker
    rises by 1; when it reaches `growth_interval` both trackers are reset and `scale *= growth_factor`, unless that is
    more than fp32 holds.

    Args:
        initial_scale: the scale at the first step.
        min_scale: the scale never falls below it; at most `initial_scale`.
        growth_factor: above 1.
        backoff_factor: between 0 and 1.
        growth_interval: good steps between growths; a whole number.
        hysteresis: overflows that are tolerated before the scale falls; a whole number, at least 1.

    Raises:
        ConfigurationError: a value is out of range.

    Example:
        >>> scaler = DynamicGradScaler(4.0, 1.0, 2.0, 0.5, growth_interval=2, hysteresis=1)
        >>> scaler.update(True)
        >>> scaler.scale
        tensor([2.])
    """

    def __init__(
        self,
        initial_scale: float,
        min_scale: float,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
    ) -> None:
        super().__init__(initial_scale)
        self.min_scale = float(_scale("min_scale", min_scale))
        if self.min_scale > float(self._scale):
            raise ConfigurationError.of(
                "min_scale", min_scale, f"must not be above initial_scale={initial_scale!r}"
            )
        _require("growth_factor", growth_factor, lambda value: value > 1.0, "a number above 1")
        _require(
            "backoff_factor", backoff_factor, lambda value: 0.0 < value < 1.0, "a number between 0 and 1"
        )
        _require("growth_interval", growth_interval, _is_count, "a whole number of at least 1")
        _require("hysteresis", hysteresis, _is_count, "a whole number of at least 1")
        self.growth_factor = float(growth_factor)
        self.backoff_factor = float(backoff_factor)
        self.growth_interval = int(growth_interval)
        self.hysteresis = int(hysteresis)
        self._growth_tracker = 0
        self._hysteresis_tracker = self.hysteresis

    def update(self, found_inf: bool) -> None:
        """Take note of a step.

        Args:
            found_inf: the step was skipped, because a gradient was not finite.
        """
        if found_inf:
            self._growth_tracker = 0
            self._hysteresis_tracker -= 1
            if self._hysteresis_tracker <= 0:
                self._scale = (self._scale * self.backoff_factor).clamp(min=self.min_scale)
            return
        self._growth_tracker += 1
        if self._growth_tracker >= self.growth_interval:  # above it after a resume with a shorter interval
            self._growth_tracker = 0
            self._hysteresis_tracker = self.hysteresis
            grown = self._scale * self.growth_factor
            if FP32_SCALE.allows(float(grown)):
                self._scale = grown

    def state_dict(self) -> dict[str, Any]:
        """Return scale and trackers."""
        return {
            "scale": self._scale.clone(),
            "growth_tracker": self._growth_tracker,
            "hysteresis_tracker": self._hysteresis_tracker,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over scale and trackers.

        Args:
            state_dict: what `state_dict` returned.

        Raises:
            StateDictError: a key is missing, a value is no number, or the scale is none that a loss can be multiplied
                by; nothing has been changed.
        """
        missing = [key for key in self.state_dict() if key not in state_dict]
        if missing:
            raise StateDictError(f"the gradient scaler's state lacks {missing}", names=missing)
        try:
            scale = (
                torch.as_tensor(state_dict["scale"], dtype=torch.float32).detach().cpu().reshape(1).clone()
            )
            trackers = int(state_dict["growth_tracker"]), int(state_dict["hysteresis_tracker"])
        except (TypeError, ValueError, RuntimeError) as error:
            raise StateDictError(f"the gradient scaler's state cannot be read: {error}") from error
        if not FP32_SCALE.allows(float(scale)):
            raise StateDictError(
                f"the gradient scaler's state has scale={float(scale)!r}: it must be {FP32_SCALE.words}"
            )
        self._scale = scale
        self._growth_tracker, self._hysteresis_tracker = trackers
