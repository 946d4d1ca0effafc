"""Whether ranks are about to step alike: one number of each, compared before every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import define, field
from torch.distributed import ProcessGroup

from megaopt_core.errors import MegaoptError, OwnershipError
from megaopt_core.optimizers._between_ranks.alike import WRITTEN, is_of_experts
from megaopt_core.optimizers._between_ranks.gradients import Compared, compared_params
from megaopt_core.optimizers._grad_norm import stats_device
from megaopt_core.optimizers._gradients.statistics import is_read_freely
from megaopt_core.optimizers._gradients.unread import ToHost
from megaopt_core.parallel._agreement import fingerprint
from megaopt_core.parallel._groups import ProcessGroupCollection
from megaopt_core.parallel._meeting import gather_over_ranks
from megaopt_core.parallel._reduction import all_reduce
from megaopt_core.sharding._live_model import has_gradient

if TYPE_CHECKING:
    from megaopt_core.optimizers._base import MegatronOptimizer

__all__ = ["StepAgreement"]

_WHAT = "the comparison of ranks before a step"


@define(eq=False)
class StepAgreement:
    """Compares before each step a number that says how a rank is about to step.

    It is made of what can change after the build: which parameters are stepped, how many of them joined or were
    replaced, which are frozen, which have no gradient, whether gradients were cleared, the settings that a schedule or
    a user writes into groups, and whether this rank refuses to step. With it goes whether there is any gradient at all.
    On an accelerator the answer is read one step later, so that the host waits for nothing.

    Args:
        group: ranks that hold replicas of dense parameters.
    """

    group: ProcessGroup
    has_gradients: bool = field(default=True, init=False)
    """Whether some rank had a gradient, when ranks compared last."""
    compared: Compared = field(factory=list, init=False)
    """The parameters whose gradients replicas have alike."""
    _clears_alike: bool = field(default=True, init=False)
    _names: object = field(default=None, init=False)
    _names_digest: bytes = field(default=b"", init=False)
    _on_the_way: ToHost | None = field(default=None, init=False)

    @property
    def pgs(self) -> ProcessGroupCollection:
        """The ranks that compare, as a collection."""
        return ProcessGroupCollection(dp=self.group)

    def differs(self, optimizer: MegatronOptimizer, refused: MegaoptError | None) -> bool:
        """Return whether ranks are about to step unlike each other; the same on all of them; a collective.

        Args:
            optimizer: what this rank holds.
            refused: why this rank cannot step; None: it can.
        """
        if _joins_unevenly(optimizer):
            return False
        number = self.number(optimizer, refused)
        device = stats_device(optimizer.parts)
        has_any = any(map(has_gradient, optimizer.names))
        mine = torch.tensor([number, -number, has_any], dtype=torch.int64, device=device)
        all_reduce(mine, self.group, _WHAT, dist.ReduceOp.MAX)
        if is_read_freely(device):
            return self._read(mine.tolist())
        before, self._on_the_way = self._on_the_way, ToHost(mine)
        return before is not None and self._read(before.numbers)

    def _read(self, numbers: Sequence[int]) -> bool:
        largest, negated_smallest, has_any = numbers
        self.has_gradients = bool(has_any)
        return largest + negated_smallest != 0

    def passed(self) -> None:
        """Note that ranks differed in nothing that matters: some clear gradients in another way, which is no fault."""
        self._clears_alike = False

    def told_of_refusals(self, refused: MegaoptError | None) -> MegaoptError | None:
        """Return why this rank cannot step, or that another one cannot; None where all can; a collective.

        Args:
            refused: why this rank cannot step.
        """
        told = gather_over_ranks(None if refused is None else str(refused), self.pgs, _WHAT)
        if refused is not None:
            return refused
        for rank, message in told.items():
            if message is not None:
                return OwnershipError(
                    "another rank cannot step what trains now, or as its settings are; no rank has stepped. "
                    f"Rank {rank}: {message}"
                )
        return None

    def number(self, optimizer: MegatronOptimizer, refused: MegaoptError | None) -> int:
        """Return the number that says how this rank is about to step.

        Args:
            optimizer: what this rank holds.
            refused: why this rank cannot step; None: it can.
        """
        if optimizer.names is not self._names:
            self._names = optimizer.names
            dense = [
                name for param, name in optimizer.names.items() if not is_of_experts(optimizer, param, name)
            ]
            self._names_digest = fingerprint(dense)
            self.compared = compared_params(optimizer)
        frozen = [optimizer.names[param] for param in _frozen(optimizer)]
        joined = 0 if optimizer.late is None else optimizer.late.joined
        settings = [
            [(key, _comparable(value)) for key, value in sorted(group.items()) if key in WRITTEN]
            for group in optimizer.param_groups
        ]
        lacks = frozen or True in [param.grad is None for param, _, _ in self.compared]
        without = [name for param, name, _ in self.compared if not has_gradient(param)] if lacks else []
        cleared = self._clears_alike and bool(self.compared) and optimizer.has_cleared
        said = (self._names_digest, joined, frozen, without, cleared, settings, refused is not None)
        return int.from_bytes(fingerprint(said)[:7])


def _frozen(optimizer: MegatronOptimizer) -> list[torch.nn.Parameter]:
    """Return the stepped parameters that do not train: as the look before the step has found them, if there was one."""
    if optimizer.late is not None:
        return optimizer.late.frozen
    return [param for param in optimizer.names if not param.requires_grad]


def _comparable(value: Any) -> Any:
    """Return a setting as plain data; what lies on a device is not read."""
    if isinstance(value, torch.Tensor):
        return value.tolist() if is_read_freely(value.device) else None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, (tuple, list)):
        return [_comparable(each) for each in value]
    return value if isinstance(value, (str, bool, type(None))) else None


def _joins_unevenly(optimizer: MegatronOptimizer) -> bool:
    """Return whether ranks step unequal numbers of times, and torch's `Join` stands in for those that have ended."""
    configs = [getattr(chunk, "_join_config", None) for chunk in optimizer.watched_model.alive()]
    return any(getattr(config, "enable", False) for config in configs)
