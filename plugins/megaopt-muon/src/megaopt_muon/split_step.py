"""Steps in three parts: of Muon, of adaptive Muon, and of any optimizer that orthogonalizes its momentum."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import evolve
from emerging_optimizers import utils
from emerging_optimizers.orthogonalized_optimizers import OrthogonalizedOptimizer

from megaopt_core.errors import PluginError
from megaopt_core.params import ParamInfo
from megaopt_muon.adaptive import TensorParallelAdaptiveMuon, _wide
from megaopt_muon.elementwise import squared_norm, subtract
from megaopt_muon.execution import is_single, merged, orthogonalize_pieces, scales_of
from megaopt_muon.muon import TensorParallelMuon, decay_of, gradient_of
from megaopt_muon.plans import MatrixPlan, plan_parameter, view_of

__all__ = ["AdaptiveMuonSplit", "MuonSplit", "OrthogonalizedSplit"]

_OVERRIDDEN = ("step", "pre_weight_update_fn_inplace", "post_weight_update_fn_inplace")


class OrthogonalizedSplit:
    """The step of an emerging-optimizers class, split where it orthogonalizes.

    The class's own `step` runs on the slices; what it hands to `orthogonalize` is the update. Where `orthogonalize`
    reads attributes of the parameter, it finds `param_info` and no others.

    Args:
        inner: an `OrthogonalizedOptimizer`.

    Raises:
        PluginError: the class does more than to orthogonalize with whole tensors: see :meth:`refusal`.

    Example:
        >>> from emerging_optimizers.orthogonalized_optimizers import Muon
        >>> weight = torch.nn.Parameter(torch.zeros(4, 8))
        >>> weight.grad = torch.eye(4, 8)
        >>> split = OrthogonalizedSplit(Muon([weight], lr=0.1, momentum=0.9, weight_decay=0.0, nesterov=False))
        >>> (update,) = split.local_updates([weight])
        >>> round(update[0, 0].item(), 6)
        0.1
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        reason = self.refusal(type(inner))
        if reason is not None:
            raise PluginError(f"the step of {type(inner).__name__} cannot be split: {reason}")
        self.inner: Any = inner

    @staticmethod
    def refusal(optimizer_cls: type) -> str | None:
        """Return why a class cannot be split here, None when it can.

        Args:
            optimizer_cls: the class.

        Example:
            >>> from emerging_optimizers.orthogonalized_optimizers import Muon, MuonHyperball
            >>> OrthogonalizedSplit.refusal(Muon) is None
            True
            >>> OrthogonalizedSplit.refusal(MuonHyperball)
            'it has its own pre_weight_update_fn_inplace, post_weight_update_fn_inplace, which may see whole tensors'
        """
        if not issubclass(optimizer_cls, OrthogonalizedOptimizer):
            return "it is no OrthogonalizedOptimizer of emerging-optimizers"
        own = [
            name
            for name in _OVERRIDDEN
            # torch wraps `step` of every class anew.
            if inspect.unwrap(getattr(optimizer_cls, name))
            is not inspect.unwrap(getattr(OrthogonalizedOptimizer, name))
        ]
        return f"it has its own {', '.join(own)}, which may see whole tensors" if own else None

    def local_updates(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what the class would orthogonalize.

        Args:
            params: slices with gradients.
        """
        captured: dict[int, torch.Tensor] = {}

        def capture(p: torch.Tensor, grad: torch.Tensor, **_: Any) -> torch.Tensor:
            captured[id(p)] = grad
            # The step adds it times -lr: -0.0, which changes no bit.
            return grad.new_zeros(()).expand_as(grad)

        self.inner.orthogonalize = capture
        try:
            with _holding(self.inner, params):
                self.inner.step()
        finally:
            del self.inner.orthogonalize
        return [captured[id(param)] for param in params]

    def transform(self, updates: Sequence[torch.Tensor], infos: Sequence[ParamInfo]) -> list[torch.Tensor]:
        """Return orthogonalized updates.

        Args:
            updates: whole matrices.
            infos: what each is.
        """
        done = []
        for update, info in zip(updates, infos, strict=True):
            settings = {
                key: value for key, value in self.inner.param_groups[info.group].items() if key != "params"
            }
            with utils.fp32_matmul_precision(self.inner.fp32_matmul_prec):
                done.append(self.inner.orthogonalize(_stand_in(update, info), update, **settings))
        return done

    def apply(self, params: Sequence[torch.Tensor], updates: Sequence[torch.Tensor]) -> None:
        """Subtract the updates times the learning rate.

        Args:
            params: slices.
            updates: of their shapes.
        """
        group_of = _groups(self.inner)
        for param, update in zip(params, updates, strict=True):
            param.add_(update.to(param.dtype), alpha=-group_of[id(param)]["lr"])


class MuonSplit:
    """Muon's step in three parts.

    Args:
        inner: a Muon.
    """

    def __init__(self, inner: TensorParallelMuon) -> None:
        self.inner = inner
        self._plans: dict[str, tuple[ParamInfo, MatrixPlan]] = {}

    def local_updates(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Decay the parameters, update their momentum, and return it, with Nesterov one step ahead.

        Args:
            params: slices with gradients.

        Raises:
            GradientError: a gradient is sparse or complex.
        """
        inner, group_of = self.inner, _groups(self.inner)
        done = {id(param): param.detach() for param in params if not param.numel()}
        for group in inner.param_groups:
            mine = [param for param in params if group_of[id(param)] is group and param.numel()]
            if not mine:
                continue
            momenta = [self._momentum(param) for param in mine]
            grads, decayed = [gradient_of(param) for param in mine], mine
            if group["cautious_weight_decay"]:
                decayed = []  # the update is not known yet
            updates = inner._foreach_updates(group, mine, grads, momenta, decayed=decayed)
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
        done = [torch.empty_like(update, dtype=_wide(update.dtype)) for update in updates]
        for number, group in enumerate(inner.param_groups):
            mine = [index for index, info in enumerate(infos) if info.group == number]
            plans, book = [self._plan(infos[index]) for index in mine], inner._book(group)
            given = [self._as_swept(plan, updates[index]) for plan, index in zip(plans, mine, strict=True)]
            squares = [
                None if update is updates[index] else squared_norm(updates[index])
                for update, index in zip(given, mine, strict=True)
            ]
            for position, of_plan, o in orthogonalize_pieces(
                inner.newton_schulz, plans, given, book, squares
            ):
                piece, scale = plans[position].pieces[of_plan], plans[position].scales[of_plan] * o.scale
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
        group_of, workspace = _groups(self.inner), self.inner.newton_schulz.workspace
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

    def _plan(self, info: ParamInfo) -> MatrixPlan:
        """Return what is to be done with a whole parameter, which no other rank holds a part of here."""
        known = self._plans.get(info.name)
        if known is not None and known[0] == info:
            return known[1]
        inner, whole = self.inner, _stand_in(torch.empty(()).expand(info.shape), info)
        view = view_of(
            whole,
            split=inner.split,
            split_qkv=inner.split_qkv,
            is_qkv_fn=inner.is_qkv_fn,
            qkv_split_shapes=inner.qkv_split_shapes,
        )
        plan = plan_parameter(whole, view, None, inner.tp_mode, inner._scale)
        self._plans[info.name] = (info, plan)
        inner.plans_of_others[info.name] = plan
        return plan


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
            shape = self.moment.state_shape(self._plan(info))
            zeros = torch.zeros(shape, dtype=_wide(update.dtype), device=update.device)
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
            group, plan = self.inner.param_groups[info.group], self._plan(info)
            book = self.inner._book(group)
            o = merged(self.inner.newton_schulz, plan, update, book).to(_wide(update.dtype))
            group["ns_plan"] = book.text
            state = self.transform_state[info.name]["moment2_buffer"]
            change = self.moment.normalize(
                o, state, plan, grad=update, update=update, beta2=group["beta2"], eps=group["eps"]
            )
            done.append(change.mul_(scales_of(plan, change.device)))
        return done


def _groups(inner: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """Return the group of every parameter by the parameter's identity."""
    return {id(param): group for group in inner.param_groups for param in group["params"]}


def _stand_in(update: torch.Tensor, info: ParamInfo) -> torch.Tensor:
    """Return a tensor that stands for a whole parameter: its shape and `param_info`, uncut."""
    whole = torch.empty((), dtype=update.dtype, device=update.device).expand(update.shape)
    whole.param_info = evolve(info, partition_dim=-1)  # type: ignore[attr-defined] # read from there
    return whole


@contextmanager
def _holding(inner: torch.optim.Optimizer, params: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let the groups of an optimizer hold only some of their parameters inside the block."""
    chosen = {id(param) for param in params}
    members = [group["params"] for group in inner.param_groups]
    try:
        for group in inner.param_groups:
            group["params"] = [param for param in group["params"] if id(param) in chosen]
        yield
    finally:
        for group, all_of_it in zip(inner.param_groups, members, strict=True):
            group["params"] = all_of_it
