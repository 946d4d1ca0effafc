"""One inner optimizer with its precision policy and its sharded parameters: what a step pipeline runs over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field, frozen

from megaopt_core.optimizers.changes import ChangeRecord
from megaopt_core.optimizers.precision import PrecisionPolicy
from megaopt_core.optimizers.stages import stage
from megaopt_core.sharding.base import Piece, ShardedParams

if TYPE_CHECKING:
    from megaopt_core.config import OptimizerConfig

__all__ = ["Counting", "OptimizerPart"]

_NOT_COPIED = ("params", "param_names")


@frozen
class Counting:
    """How one parameter enters norms and counts.

    Args:
        counted: False for a duplicate that another rank counts.
        norm_group: name of the norm that it enters; None: the main one.
    """

    counted: bool = True
    norm_group: str | None = None


_MAIN = Counting()


@define(eq=False)
class OptimizerPart:
    """An inner optimizer, its precision policy and this rank's pieces; composition, nothing inherited.

    Args:
        inner: the torch optimizer; its groups hold the stepped tensors.
        precision: brings gradients to the stepped tensors and their values back.
        sharded: this rank's live pieces.
        stepped: the tensor that is stepped for each piece, in order.
        groups: the public group dictionaries, in the order of the inner groups.
        config: the run's configuration.
        counting: parameter name to how it is counted; absent names are counted in the main norm.
    """

    inner: torch.optim.Optimizer
    precision: PrecisionPolicy
    sharded: ShardedParams
    stepped: Sequence[torch.Tensor]
    groups: Sequence[dict[str, Any]]
    config: OptimizerConfig
    counting: Mapping[str, Counting] = field(factory=dict)
    changes: ChangeRecord = field(factory=ChangeRecord, init=False)
    _pending: dict[str | None, float] = field(factory=dict, init=False)

    @property
    def pieces(self) -> Sequence[Piece]:
        """This rank's pieces."""
        return self.sharded.pieces

    def collect_grads(self) -> None:
        """Bring this step's gradients to the stepped tensors."""
        self._pending.clear()
        with stage(self.config, "optimizer-copy-to-main-grad"):
            self.sharded.collect_grads()
            self.precision.load_grads()

    def discard_grads(self) -> None:
        """Give up this step's gradients without stepping."""
        self.precision.discard_grads()

    def all_grads(self) -> list[torch.Tensor]:
        """Return the gradient of every stepped tensor that has one."""
        grads = (self.precision.grad(index) for index in range(len(self.pieces)))
        return [grad for grad in grads if grad is not None]

    def counted_grads(self) -> Iterator[tuple[str | None, torch.Tensor]]:
        """Yield `(norm group, gradient)` of everything that this rank counts."""
        for index, piece in enumerate(self.pieces):
            grad = self.precision.grad(index)
            if grad is None:
                continue
            rules = [self.counting.get(shard.name, _MAIN) for _, shard in piece.spec.members]
            if all(rule == rules[0] for rule in rules):
                if rules and rules[0].counted:
                    yield rules[0].norm_group, grad
                continue
            flat = grad.reshape(-1)
            for (offset, shard), rule in zip(piece.spec.members, rules, strict=True):
                if rule.counted:
                    yield rule.norm_group, flat[offset : offset + shard.numel]

    def scale_later(self, coefficients: Mapping[str | None, float]) -> None:
        """Remember clip coefficients; the inner step takes them over where it can.

        Args:
            coefficients: norm group to coefficient; groups that are not clipped are absent.
        """
        self._pending = dict(coefficients)

    def step(self) -> None:
        """Step the inner optimizer with the collected gradients and write its result back."""
        self._copy_settings_inward()
        watched = self.precision.watched()
        before = self.changes.before(watched)
        with stage(self.config, "optimizer-inner-step"), self._scaled_grads():
            for _ in self.precision.batches(self.inner):
                self.inner.step()
        with stage(self.config, "optimizer-copy-main-to-model-params"):
            self.precision.write_back()
        self.changes.after(watched, before)
        self._copy_settings_outward()

    def _scaled_grads(self) -> _Scaling:
        if not self._pending or not self.pieces:
            return _Scaling(self.inner, None)
        factors = {self._factor(shard.name) for piece in self.pieces for _, shard in piece.spec.members}
        devices = {tensor.device for tensor in self.stepped}
        factor = next(iter(factors))
        takes_divisor = getattr(self.inner, "_step_supports_amp_scaling", False)
        if takes_divisor and len(factors) == len(devices) == 1 and factor is not None:
            return _Scaling(self.inner, torch.tensor(1.0 / factor, device=next(iter(devices))))
        for index, piece in enumerate(self.pieces):
            self._scale_piece(piece, self.precision.grad(index))
        return _Scaling(self.inner, None)

    def _factor(self, name: str) -> float | None:
        return self._pending.get(self.counting.get(name, _MAIN).norm_group)

    def _scale_piece(self, piece: Piece, grad: torch.Tensor | None) -> None:
        if grad is None:
            return
        flat = grad.view(-1)
        for offset, shard in piece.spec.members:
            factor = self._factor(shard.name)
            if factor is not None:
                flat[offset : offset + shard.numel].mul_(factor)

    def _copy_settings_inward(self) -> None:
        for outer, inner in zip(self.groups, self.inner.param_groups, strict=True):
            for key, value in outer.items():
                if key not in _NOT_COPIED:
                    inner[key] = value

    def _copy_settings_outward(self) -> None:
        for outer, inner in zip(self.groups, self.inner.param_groups, strict=True):
            for key, value in inner.items():
                if key not in _NOT_COPIED and outer.get(key, _NOT_COPIED) is not value:
                    outer[key] = value


@define
class _Scaling:
    """Hands a divisor of the gradients to a fused inner step for the time of one step."""

    inner: Any
    divisor: torch.Tensor | None

    def __enter__(self) -> None:
        if self.divisor is not None:
            self.inner.grad_scale = self.divisor

    def __exit__(self, *_: object) -> None:
        if self.divisor is not None:
            del self.inner.grad_scale
