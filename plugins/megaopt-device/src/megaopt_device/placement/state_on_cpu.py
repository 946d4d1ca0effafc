"""States on the CPU, steps on the device: states come up in chunks, and go back when these are stepped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

import torch
from attrs import define, field

from megaopt_core.execution import InnerPart, StepRunner, in_turns
from megaopt_device.graphs.held import tensors_in
from megaopt_device.placement.between_phases import MovedStates
from megaopt_device.placement.choice import batches_of
from megaopt_device.placement.offload import Offload

if TYPE_CHECKING:
    from megaopt_core import OptimizerConfig, PrecisionPolicy
    from megaopt_core.plugin_api import InitState

__all__ = ["StateOnCpu"]

CHUNK_BYTES = 2**28
"""Bytes of states that are brought up together: 256 MiB, as many matrices as fill an accelerator."""

type _Homes = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Of a chunk on the device: id of a state tensor to it and its memory on the CPU; both are held, so ids are unique."""


@define(eq=False)
class StateOnCpu(Offload):
    """Brings the states of a chunk of tensors to the device, steps these, and sends the states back.

    For optimizers whose step is much slower on a CPU than the way there and back: those of whole matrices. States of
    one chunk are on the device at a time; with `overlap_cpu_optimizer_d2h_h2d` of two, since the next travels while one
    is stepped.
    """

    _moved: MovedStates = field(factory=MovedStates, init=False)

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
                self._send_down(inner, [stepped[index] for index in batch if index in self.placed], {})
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
            homes = self._bring_up(part.inner, placed[0])
            for number, (batch, _) in enumerate(zip(batches, turns, strict=True)):
                self.copies.wait_up()
                ahead: _Homes = {}
                if self.copies.overlap and number + 1 < len(batches):
                    ahead = self._bring_up(part.inner, placed[number + 1])
                yield batch
                self._send_down(part.inner, placed[number], homes)
                if not self.copies.overlap and number + 1 < len(batches):
                    ahead = self._bring_up(part.inner, placed[number + 1])
                homes = ahead
        self.copies.wait_down()

    def unused_settings(self, part: InnerPart) -> Mapping[str, str]:
        """Return the settings of offloading that change nothing here.

        Args:
            part: what is stepped.
        """
        found = dict(super().unused_settings(part))
        if self.config.use_torch_optimizer_for_cpu_offload:
            found["use_torch_optimizer_for_cpu_offload"] = (
                f"{self.name!r} steps whole tensors, on the device, by its own class"
            )
        return found

    def _batches(self, stepped: Sequence[torch.Tensor], indices: Sequence[int]) -> list[list[int]]:
        """Return the pieces that stay, then chunks of those that are placed; one empty batch when there are none.

        Tensors of equal sides are in one chunk, as far as it goes: an optimizer of matrices steps them together.
        """
        staying = [index for index in indices if index not in self.placed]
        sizes = [tensor.numel() * tensor.element_size() for tensor in stepped]
        placed = [index for index in indices if index in self.placed]
        by_shape = sorted(placed, key=lambda index: sorted(stepped[index].shape))
        chunks = batches_of(by_shape, sizes, CHUNK_BYTES)
        return [batch for batch in (staying, *chunks) if batch] or [[]]

    def _bring_up(self, inner: torch.optim.Optimizer, tensors: Sequence[torch.Tensor]) -> _Homes:
        homes: _Homes = {}
        self._moved.back(inner.state, tensors, partial(self._up, homes))
        return homes

    def _send_down(
        self, inner: torch.optim.Optimizer, tensors: Sequence[torch.Tensor], homes: _Homes
    ) -> None:
        """Send states to where they came from; what a step has put in their place takes over that memory."""
        states = [inner.state.get(tensor) or {} for tensor in tensors]
        present = {id(value) for state in states for value in tensors_in(state)}
        spare = [home for brought, home in homes.values() if id(brought) not in present]
        for tensor in tensors:
            self._moved.away(inner.state, [tensor], tensor.device, partial(self._down, homes, spare))
        homes.clear()  # what has been sent is not needed on the device any more

    def _up(self, homes: _Homes, home: torch.Tensor, device: torch.device) -> torch.Tensor:
        brought = torch.empty_like(home, device=device)
        self.copies.up(brought, home)
        homes[id(brought)] = brought, home
        return brought

    def _down(self, homes: _Homes, spare: list[torch.Tensor], value: torch.Tensor) -> torch.Tensor:
        home = homes[id(value)][1] if id(value) in homes else None
        if home is None:
            alike = [each for each in spare if _are_alike(each, value)]
            home = alike[0] if alike else self.copies.memory_like(value, pinned=self.config.pin_cpu_params)
            spare[:] = [each for each in spare if each is not home]
        self.copies.down(home, value)
        return home

    @property
    def words(self) -> str:
        """What the report says of pieces that are placed."""
        return (
            "states on the CPU" if self.params is None else "CPU, but for what whole tensors are needed for"
        )


def _are_alike(home: torch.Tensor, value: torch.Tensor) -> bool:
    return (home.shape, home.dtype, home.stride()) == (value.shape, value.dtype, value.stride())
