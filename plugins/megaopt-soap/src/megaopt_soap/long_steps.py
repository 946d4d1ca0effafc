"""A warning, once, of a step that is far longer than the learning rate allows."""

from __future__ import annotations

import warnings
from typing import Final

import torch
from attrs import define, field

__all__ = ["LONG", "LongSteps"]

LONG: Final = 10.0
"""Adam's updates have a root mean square of about the learning rate; a step of more than this multiple is warned of."""


@define(eq=False)
class LongSteps:
    """Reads the sizes of updates and warns of the first that is above :data:`LONG` times the learning rate.

    On a CPU a step's sizes are read at its end. From an accelerator they travel to the host while it goes on, and are
    read at the end of the next step.
    """

    _named: list[tuple[str, torch.Tensor]] = field(factory=list)
    _travelling: list[tuple[list[str], torch.Tensor, torch.Event | None]] = field(factory=list)
    _has_warned: bool = False

    def add(self, param: torch.Tensor, size: torch.Tensor | None) -> None:
        """Take note of one matrix's update.

        Args:
            param: whose matrix it is; its attribute `param_info` has its name.
            size: root mean square of the update as a multiple of the learning rate, on its device; None: none was made.
        """
        if size is not None and not self._has_warned:
            info = getattr(param, "param_info", None)
            name = f"a parameter of shape {tuple(param.shape)}" if info is None else repr(info.name)
            self._named.append((name, size))

    def end_step(self) -> None:
        """Warn if a size that has arrived is too large."""
        arrived, self._travelling = self._travelling, []
        for device in {size.device for _, size in self._named}:
            some = [(name, size) for name, size in self._named if size.device == device]
            names, sizes = [name for name, _ in some], torch.stack([size for _, size in some])
            if device.type == "cpu":
                arrived.append((names, sizes, None))
            else:
                host = sizes.to("cpu", non_blocking=True)
                event = torch.Event(device)
                event.record()
                self._travelling.append((names, host, event))
        self._named.clear()
        for names, sizes, copied in arrived:
            if copied is not None:
                copied.synchronize()
            for name, size in zip(names, sizes.tolist(), strict=True):
                if size > LONG:
                    self._warn(name, size)
                    return

    def _warn(self, name: str, size: float) -> None:
        self._has_warned, self._travelling = True, []
        warnings.warn(
            f"SOAP moved {name} by {size:.0f} times the learning rate in one step (root mean square; 1 is usual). "
            "Gradients of low rank cause this when they refresh the bases, such as those of a batch with fewer rows "
            "than the matrix. Set soap_precondition_frequency=10, or bound updates by soap_max_update_rms=1. There "
            "is no warning for further long steps",
            UserWarning,
            stacklevel=3,
        )
