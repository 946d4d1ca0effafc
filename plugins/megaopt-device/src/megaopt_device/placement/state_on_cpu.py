"""States on the CPU, steps on the device: states come up in chunks, and go back when these are stepped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import torch
from attrs import define, field

from megaopt_core.execution import InnerPart, MovedStates, StepRunner, in_turns
from megaopt_device.placement.choice import batches_of
from megaopt_device.placement.offload import CHUNK_BYTES, Offload

if TYPE_CHECKING:
    from megaopt_core import OptimizerConfig, PrecisionPolicy
    from megaopt_core.plugin_api import InitState

__all__ = ["StateOnCpu"]


@define(eq=False)
class StateOnCpu(Offload):
    """Brings the states of a chunk of tensors to the device, steps these, and sends the states back.

    For optimizers whose step is much slower on a CPU than the way there and back: those of whole matrices. States of
    one chunk are on the device at a time; with `overlap_cpu_optimizer_d2h_h2d` of two, since the next travels while one
    is stepped.
    """

    _moved: MovedStates = field(factory=MovedStates, init=False)
    _homes: dict[int, torch.Tensor] = field(factory=dict, init=False)

    def init_state(
        self,
        inner: torch.optim.Optimizer,
        precision: PrecisionPolicy,
        stepped: Sequence[torch.Tensor],
        init_state_fn: InitState | None,
        config: OptimizerConfig,
    ) -> None:
        """Make the states of a chunk, and send them to the CPU before those of the next are made.

        Args:
            inner: the inner optimizer.
            precision: gives the tensors their memory.
            stepped: the tensor that is stepped for each piece.
            init_state_fn: what makes the state; None: all of it is made at once, by a step that is undone.
            config: the run's configuration.
        """
        batches = (
            self._batches(stepped, range(len(stepped)))
            if init_state_fn is not None
            else [[*range(len(stepped))]]
        )
        with closing(in_turns(inner, [[stepped[index] for index in batch] for batch in batches])) as turns:
            for batch, _ in zip(batches, turns, strict=True):
                StepRunner.init_state(self, inner, precision, stepped, init_state_fn, config)
                self._send_down(inner, [stepped[index] for index in batch if index in self.placed])
        self.copies.wait_down()

    def turns(self, part: InnerPart, indices: Sequence[int]) -> Iterator[Sequence[int]]:
        """Yield the pieces whose states stay on the device, then the others, a chunk at a time with its states there.

        Args:
            part: what is stepped.
            indices: positions of the pieces that the groups hold now.
        """
        batches = self._batches(part.stepped, indices)
        placed = [[part.stepped[index] for index in batch if index in self.placed] for batch in batches]
        tensors = [[part.stepped[index] for index in batch] for batch in batches]
        with closing(in_turns(part.inner, tensors)) as turns:
            self._bring_up(part.inner, placed[0])
            for number, (batch, _) in enumerate(zip(batches, turns, strict=True)):
                self.copies.wait_up()
                if self.copies.overlap and number + 1 < len(batches):
                    self._bring_up(part.inner, placed[number + 1])
                yield batch
                self._send_down(part.inner, placed[number])
                if not self.copies.overlap and number + 1 < len(batches):
                    self._bring_up(part.inner, placed[number + 1])
        self.copies.wait_down()

    def _batches(self, stepped: Sequence[torch.Tensor], indices: Sequence[int]) -> list[list[int]]:
        """Return the pieces that stay, then chunks of those that are placed; one empty batch when there are none."""
        staying = [index for index in indices if index not in self.placed]
        sizes = [tensor.numel() * tensor.element_size() for tensor in stepped]
        chunks = batches_of([index for index in indices if index in self.placed], sizes, CHUNK_BYTES)
        return [batch for batch in (staying, *chunks) if batch] or [[]]

    def _bring_up(self, inner: torch.optim.Optimizer, tensors: Sequence[torch.Tensor]) -> None:
        self._moved.back(inner.state, tensors, self._up)

    def _send_down(self, inner: torch.optim.Optimizer, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            self._moved.away(inner.state, [tensor], tensor.device, self._down)

    def _up(self, home: torch.Tensor, device: torch.device) -> torch.Tensor:
        brought = torch.empty_like(home, device=device)
        self.copies.up(brought, home)
        self._homes[id(brought)] = home
        return brought

    def _down(self, value: torch.Tensor) -> torch.Tensor:
        home = self._homes.pop(id(value), None)
        if home is None or home.shape != value.shape or home.dtype != value.dtype:
            home = self.copies.memory_like(value, pinned=self.config.pin_cpu_params)
        self.copies.down(home, value)
        return home

    @property
    def words(self) -> str:
        """What the report says of pieces that are placed."""
        return (
            "states on the CPU" if self.params is None else "CPU, but for what whole tensors are needed for"
        )
