"""One inner optimizer with its precision policy and its sharded parameters: what a step pipeline runs over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field, frozen

from megaopt_core.optimizers.changes import ChangeRecord
from megaopt_core.optimizers.grad_stats import scale_gradients
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
        return [tensor.grad for tensor in self.stepped if tensor.grad is not None]

    def counted_grads(self) -> Iterator[tuple[str | None, torch.Tensor]]:
        """Yield `(norm group, gradient)` of everything that this rank counts."""
        for piece, tensor in zip(self.pieces, self.stepped, strict=True):
            grad = tensor.grad
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
        before = self.changes.before(self.stepped)
        with stage(self.config, "optimizer-inner-step"):
            with self._scaled_grads():
                self.inner.step()
        with stage(self.config, "optimizer-copy-main-to-model-params"):
            self.precision.write_back()
        self.changes.after(self.stepped, before)
        self._copy_settings_outward()

    def _scaled_grads(self) -> _Scaling:
        coefficients = {
            self.counting.get(piece.spec.members[0][1].name, _MAIN).norm_group for piece in self.pieces if piece.spec.members
        }
        uniform = len(coefficients) <= 1 and len({tensor.device for tensor in self.stepped}) <= 1
        factor = self._pending.get(next(iter(coefficients), None))
        if not self._pending:
            return _Scaling(self.inner, None)
        if uniform and factor is not None and getattr(self.inner, "_step_supports_amp_scaling", False):
            return _Scaling(self.inner, torch.tensor(1.0 / factor, device=self.stepped[0].device))
        for piece, tensor in zip(self.pieces, self.stepped, strict=True):
            self._scale_piece(piece, tensor)
        return _Scaling(self.inner, None)

    def _scale_piece(self, piece: Piece, tensor: torch.Tensor) -> None:
        if tensor.grad is None:
            return
        factors = [
            self._pending.get(self.counting.get(shard.name, _MAIN).norm_group) for _, shard in piece.spec.members
        ]
        if all(factor == factors[0] for factor in factors):
            if factors and factors[0] is not None:
                scale_gradients([tensor.grad], factors[0])
            return
        flat = tensor.grad.view(-1)
        for (offset, shard), factor in zip(piece.spec.members, factors, strict=True):
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
