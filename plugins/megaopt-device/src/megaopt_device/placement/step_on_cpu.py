"""Stepping on the CPU: gradients come down, parameters go up, states never leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from attrs import define, field

from megaopt_core.errors import UnsupportedSettingError
from megaopt_core.execution import InnerPart, in_turns
from megaopt_core.params import Granularity
from megaopt_core.sharding import ShardedParams
from megaopt_device.placement.choice import batches_of
from megaopt_device.placement.offload import CHUNK_BYTES, Offload
from megaopt_device.placement.torch_class import TorchStep, torch_class

__all__ = ["StepOnCpu"]


@define(eq=False)
class StepOnCpu(Offload):
    """Steps what stays on the device first, and while that runs, what is on the CPU.

    With `overlap_cpu_optimizer_d2h_h2d`, the pieces on the CPU are stepped a few at a time, and each goes up while the
    next is stepped.
    """

    _torch: TorchStep | None = field(default=None, init=False)

    def place(self, sharded: ShardedParams) -> ShardedParams:
        """Choose the pieces that are stepped on the CPU, and bring them there.

        Args:
            sharded: what the strategy attached.

        Raises:
            UnsupportedSettingError: the optimizer steps a group as one, of which a part cannot be elsewhere.
        """
        share = self.config.optimizer_offload_fraction
        if self._steps_groups and share < 1.0:
            raise UnsupportedSettingError.of(
                "optimizer_offload_fraction",
                share,
                f"{self.name!r} steps a group of parameters as one, all of it on "
                "one device; offload all of it (1.0), or nothing",
            )
        return super().place(sharded)

    @property
    def _steps_groups(self) -> bool:
        return self.entry.configured(self.config).granularity is Granularity.GROUP

    def turns(self, part: InnerPart, indices: Sequence[int]) -> Iterator[Sequence[int]]:
        """Yield the pieces on the device, then those on the CPU; bring each up when it is stepped.

        Args:
            part: what is stepped.
            indices: positions of the pieces that the groups hold now.
        """
        batches = [batch for batch in self._batches(part, indices) if batch] or [[]]
        tensors = [[part.stepped[index] for index in batch] for batch in batches]
        with closing(in_turns(part.inner, tensors)) as turns:
            for batch, _ in zip(batches, turns, strict=True):
                yield batch
                if self.params is not None and self.config.overlap_cpu_optimizer_d2h_h2d:
                    self.params.send_up(batch)

    def _batches(self, part: InnerPart, indices: Sequence[int]) -> list[list[int]]:
        on_device = [index for index in indices if index not in self.placed]
        on_cpu = [index for index in indices if index in self.placed]
        if self._steps_groups or not self.config.overlap_cpu_optimizer_d2h_h2d:
            return [on_device, on_cpu]
        sizes = [piece.param.numel() * piece.param.element_size() for piece in part.pieces]
        return [on_device, *batches_of(on_cpu, sizes, CHUNK_BYTES)]

    def call(self, part: InnerPart, action: Callable[[], Any]) -> None:
        """Step a batch: by torch's own class where that is asked for, and the batch is on the CPU.

        Args:
            part: what is stepped.
            action: the inner optimizer's step.
        """
        chosen = self._chosen(part)
        if chosen is not None and self._is_placed(part):
            super().call(part, chosen)
        else:
            super().call(part, action)

    def _chosen(self, part: InnerPart) -> TorchStep | None:
        """Return the step of torch's class, None where none is asked for or torch has none."""
        if not self.config.use_torch_optimizer_for_cpu_offload or torch_class(part.inner) is None:
            return None
        if self._torch is None:
            self._torch = TorchStep(part.inner, self.name)
        return self._torch

    def _is_placed(self, part: InnerPart) -> bool:
        held = [tensor for group in part.inner.param_groups for tensor in group["params"]]
        placed = {id(part.stepped[index]) for index in self.placed}
        return bool(held) and all(id(tensor) in placed for tensor in held)

    def unused_settings(self, part: InnerPart) -> Mapping[str, str]:
        """Return the settings of offloading that change nothing here.

        Args:
            part: what is stepped.

        Raises:
            UnsupportedSettingError: torch's class was asked for, and would step otherwise.
        """
        found = dict(super().unused_settings(part))
        if self.config.use_torch_optimizer_for_cpu_offload:
            if torch_class(part.inner) is None:
                found["use_torch_optimizer_for_cpu_offload"] = (
                    f"torch has no class that steps as {self.name!r} does"
                )
            else:
                self._chosen(part)
        return found

    @property
    def words(self) -> str:
        """What the report says of pieces that are placed."""
        return "CPU" if self._torch is None else f"CPU, by {self._torch.title}"

    def places(self, part: InnerPart) -> Mapping[str, str]:
        """Return which parameters are stepped on the CPU, and by which class.

        Args:
            part: what is stepped.
        """
        self._chosen(part)
        return super().places(part)
