"""Steps in three parts: of Muon and of adaptive Muon."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megaopt_core.errors import PluginError
from megaopt_core.params import ParamInfo
from megaopt_muon.adaptive import TensorParallelAdaptiveMuon
from megaopt_muon.captured_step import groups_of
from megaopt_muon.muon import TensorParallelMuon
from megaopt_muon.pieces.batches import is_single
from megaopt_muon.pieces.execution import merged, orthogonalize_pieces, scales_of
from megaopt_muon.pieces.plans import MatrixPlan
from megaopt_muon.products.precision import at_least_float32
from megaopt_muon.step.elementwise import squared_norm, subtract
from megaopt_muon.step.local_step import decay_of, gradient_of

__all__ = ["AdaptiveMuonSplit", "MuonSplit"]


class MuonSplit:
    """Muon's step in three parts.

    Args:
        inner: a Muon.
    """

    def __init__(self, inner: TensorParallelMuon) -> None:
        self.inner = inner

    def init_state(self, params: Sequence[torch.Tensor]) -> None:
        """Make the momentum of slices that have elements.

        Args:
            params: slices.
        """
        for param in params:
            if param.numel():
                self._momentum(param)

    def local_updates(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Decay the parameters, update their momentum, and return it, with Nesterov one step ahead.

        Args:
            params: slices with gradients.

        Raises:
            GradientError: a gradient is sparse or complex.
        """
        inner, group_of = self.inner, groups_of(self.inner)
        done = {id(param): param.detach() for param in params if not param.numel()}
        for group in inner.param_groups:
            mine = [param for param in params if group_of[id(param)] is group and param.numel()]
            if not mine:
                continue
            momenta = [self._momentum(param) for param in mine]
            grads, decayed = [gradient_of(param) for param in mine], mine
            if group["cautious_weight_decay"]:
                decayed = []  # the update is not known yet
            updates = inner.local_step.together(group, mine, grads, momenta, decayed=decayed)
            done.update((id(param), update) for param, update in zip(mine, updates, strict=True))
        return [done[id(param)] for param in params]

    def transform(self, updates: Sequence[torch.Tensor], infos: Sequence[ParamInfo]) -> list[torch.Tensor]:
        """Return orthogonalized and scaled updates.

        Args:
            updates: whole matrices.
            infos: what each is.
        """
        inner = self.inner
        # Wide, as `subtract` computes: a narrow product would be rounded once more than in a whole step.
        done = [torch.empty_like(update, dtype=at_least_float32(update.dtype)) for update in updates]
        for number, group in enumerate(inner.param_groups):
            mine = [index for index, info in enumerate(infos) if info.group == number]
            plans, book = (
                [self.inner.planner.plan_whole(infos[index]) for index in mine],
                inner.books.of(group),
            )
            given = [self._as_swept(plan, updates[index]) for plan, index in zip(plans, mine, strict=True)]
            squares = [
                None if update is updates[index] else squared_norm(updates[index])
                for update, index in zip(given, mine, strict=True)
            ]
            for position, of_plan, o in orthogonalize_pieces(
                inner.newton_schulz, plans, given, book, squares
            ):
                piece, scale = plans[position].pieces[of_plan], o.scale
                window = piece.window(done[mine[position]])
                # As `subtract` does it: torch rounds a bfloat16 product otherwise where memory has gaps.
                values = torch.empty(window.shape, dtype=window.dtype, device=window.device)
                values.copy_(piece.fold(o.values))
                window.copy_(values.mul_(scale) if scale != 1.0 else values)
            if mine:
                group["ns_plan"] = book.text
        return done

    def apply(self, params: Sequence[torch.Tensor], updates: Sequence[torch.Tensor]) -> None:
        """Subtract the updates times the learning rate.

        Args:
            params: slices.
            updates: of their shapes.
        """
        group_of, workspace = groups_of(self.inner), self.inner.newton_schulz.workspace
        for param, update in zip(params, updates, strict=True):
            if param.numel():
                group = group_of[id(param)]
                decay = decay_of(group) if group["weight_decay"] and group["cautious_weight_decay"] else None
                subtract(param, update, group["lr"], 1.0, workspace, decay=decay)

    def _as_swept(self, plan: MatrixPlan, update: torch.Tensor) -> torch.Tensor:
        """Return an update in the 16 bits in which `step` writes it where it is iterated in them."""
        shapes = [piece.shape for piece in plan.pieces]
        ns, is_wide = self.inner.newton_schulz, update.dtype is torch.float32
        narrow = is_wide and all(is_single(ns, shape, update.dtype, update.device) for shape in shapes)
        return update.to(torch.bfloat16) if narrow else update

    def _momentum(self, param: torch.Tensor) -> torch.Tensor:
        state = self.inner.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param)
        momentum: torch.Tensor = state["momentum_buffer"]
        return momentum


class AdaptiveMuonSplit(MuonSplit):
    """Adaptive Muon's step in three parts; the second moment of a matrix lives with its owner.

    Args:
        inner: an adaptive Muon, with another second moment than `"namo"`, which measures gradients.

    Raises:
        PluginError: it is `"namo"`.
    """

    transform_keys = frozenset({"moment2_buffer"})

    def __init__(self, inner: TensorParallelAdaptiveMuon) -> None:
        super().__init__(inner)
        if inner.moment2_method == "namo":
            raise PluginError(
                "the step of adaptive Muon cannot be split with 'namo', which measures whole gradients"
            )
        self.moment, self.transform_state = inner.moment, dict[str, dict[str, Any]]()

    def init_transform_state(self, updates: Sequence[torch.Tensor], infos: Sequence[ParamInfo]) -> None:
        """Make second moments of zeros.

        Args:
            updates: tell dtypes and devices.
            infos: what each is.
        """
        for update, info in zip(updates, infos, strict=True):
            shape = self.moment.state_shape(self.inner.planner.plan_whole(info))
            zeros = torch.zeros(shape, dtype=at_least_float32(update.dtype), device=update.device)
            self.transform_state[info.name] = {"moment2_buffer": zeros}

    def transform(self, updates: Sequence[torch.Tensor], infos: Sequence[ParamInfo]) -> list[torch.Tensor]:
        """Return orthogonalized, normalized and scaled updates.

        Args:
            updates: whole matrices.
            infos: what each is.
        """
        fresh = [
            pair for pair in zip(updates, infos, strict=True) if pair[1].name not in self.transform_state
        ]
        if fresh:
            self.init_transform_state(*zip(*fresh, strict=True))
        done = []
        for update, info in zip(updates, infos, strict=True):
            group, plan = self.inner.param_groups[info.group], self.inner.planner.plan_whole(info)
            book = self.inner.books.of(group)
            o = merged(self.inner.newton_schulz, plan, update, book, scaled=False).to(
                at_least_float32(update.dtype)
            )
            group["ns_plan"] = book.text
            state = self.transform_state[info.name]["moment2_buffer"]
            change = self.moment.normalize(
                o,
                state,
                plan,
                grad=update,
                update=update,
                beta2=float(group["beta2"]),
                eps=float(group["eps"]),
            )
            done.append(change.mul_(scales_of(plan, change)))
        return done
