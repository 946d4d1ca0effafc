"""What both ways of offloading share: the share of pieces, the copies, what is told of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from attrs import define, field

from megaopt_core.errors import UnsupportedSettingError
from megaopt_core.execution import InnerPart, StepRunner
from megaopt_core.params import Granularity
from megaopt_core.sharding import ShardedParams
from megaopt_device.placement.choice import nearest_share
from megaopt_device.placement.copies import Copies
from megaopt_device.placement.placed_params import PlacedParams, placed_params

if TYPE_CHECKING:
    from megaopt_core import OptimizerConfig, OptimizerEntry

__all__ = ["CHUNK_BYTES", "Offload"]

CHUNK_BYTES = 2**26
"""Bytes of states that are copied together: 64 MiB, which a bus moves in a few milliseconds."""


@define(eq=False)
class Offload(StepRunner):
    """Keeps a share of an optimizer's pieces, or of their states, on the CPU.

    Args:
        config: the run's configuration.
        entry: the optimizer's entry.
        name: its registered name.
    """

    honours_noop: ClassVar[bool] = False

    config: OptimizerConfig
    entry: OptimizerEntry
    name: str
    placed: frozenset[int] = field(factory=frozenset, init=False)
    copies: Copies = field(init=False)
    params: PlacedParams | None = field(default=None, init=False)

    def place(self, sharded: ShardedParams) -> ShardedParams:
        """Choose what lies on the CPU. Pieces of a split step do so: only their updates are needed on the device.

        Args:
            sharded: what the strategy attached.

        Raises:
            UnsupportedSettingError: parameters are on several devices.
        """
        devices = {
            str(param.device): param.device for piece in sharded.pieces for param in piece.model_params
        }
        if len(devices) > 1:
            raise UnsupportedSettingError.of(
                "optimizer_cpu_offload",
                value=True,
                why=f"the parameters of {self.name!r} are on {' and '.join(sorted(devices))}, "
                "and copies to the CPU are ordered for one device; have one process for each",
            )
        device = next(iter(devices.values()), torch.device("cpu"))
        self.copies = Copies(device, self.config.overlap_cpu_optimizer_d2h_h2d)
        sizes = [piece.param.numel() * piece.param.element_size() for piece in sharded.pieces]
        self.placed = nearest_share(sizes, self.config.optimizer_offload_fraction)
        if not (self.moves_params or sharded.exchange is not None):
            return sharded
        self.params = placed_params(
            sharded,
            self.placed,
            self.copies,
            pin_grads=self.config.pin_cpu_grads,
            pin_params=self.config.pin_cpu_params,
        )
        return self.params

    @property
    def moves_params(self) -> bool:
        """Whether parameters are stepped on the CPU; else they are stepped on the device, and their states move."""
        return self.entry.configured(self.config).granularity is not Granularity.TENSOR

    def unused_settings(self, part: InnerPart) -> Mapping[str, str]:
        """Return the settings of offloading that change nothing here.

        Args:
            part: what is stepped.
        """
        found: dict[str, str] = {}
        share = self.config.optimizer_offload_fraction
        if not self.placed:
            found["optimizer_offload_fraction"] = (
                f"no set of whole pieces comes nearer to {share:g} than none, of the {len(part.pieces)} that there are"
            )
        if self.copies.device.type != "cuda":
            where = f"the model is on {self.copies.device.type!r}"
            if self.copies.device.type == "cpu":
                found["optimizer_cpu_offload"] = (
                    f"{where} already, so that memory is copied, and none is saved"
                )
            found["overlap_cpu_optimizer_d2h_h2d"] = f"{where}, and only CUDA has streams"
            found["pin_cpu_grads"] = found["pin_cpu_params"] = f"{where}, and memory is pinned for CUDA"
        elif self.params is None:
            found["pin_cpu_grads"] = f"{self.name!r} steps on the device, where gradients stay"
        return {name: why for name, why in found.items() if _is_set(self.config, name)}

    def places(self, part: InnerPart) -> Mapping[str, str]:
        """Return for each parameter whether its states lie on the CPU, and where it is stepped.

        Args:
            part: what is stepped.
        """
        inside, outside = _names(part, self.placed), _names(part, set(range(len(part.pieces))) - self.placed)
        words = self.words
        return {name: f"{words}, in part" if name in outside else words for name in inside}

    @property
    def words(self) -> str:
        """What the report says of pieces that are placed."""
        return "CPU"


def _is_set(config: OptimizerConfig, name: str) -> bool:
    return bool(getattr(config, name)) is not name.startswith("pin_")


def _names(part: InnerPart, indices: Collection[int]) -> set[str]:
    return {shard.name for index in indices for _, shard in part.pieces[index].spec.members if shard.numel}
