"""Adaptive Muon: a second moment after orthogonalization."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, override

import torch
from emerging_optimizers.orthogonalized_optimizers import AdaptiveMuon
from torch.optim.optimizer import ParamsT

from megaopt_core.errors import ConfigurationError
from megaopt_muon.arguments import held_number, validate_numbers
from megaopt_muon.loading import require_shape
from megaopt_muon.moments import MOMENTS, Moment, validate_moment2_method
from megaopt_muon.muon import TensorParallelMuon
from megaopt_muon.pieces.execution import merged, merged_together, scales_of
from megaopt_muon.products.precision import at_least_float32
from megaopt_muon.step.changes import Change
from megaopt_muon.step.local_step import gradient_of

__all__ = ["TensorParallelAdaptiveMuon"]


class TensorParallelAdaptiveMuon(TensorParallelMuon, AdaptiveMuon):  # type: ignore[misc] # `step` returns what torch's does
    r"""Muon with a second moment of the orthogonalized update, which evens out its elements, rows or matrices.

    For the orthogonalized and unscaled update :math:`o = \mathrm{NS}(u)`, with :math:`u` and the weight decay of
    :class:`~megaopt_muon.muon.TensorParallelMuon`:

    - `"adamuon"`: :math:`v \leftarrow \beta_2 v + (1 - \beta_2) o^2`, :math:`d = o / (\sqrt v + \epsilon)`;
    - `"normuon"`: `v` follows the mean of :math:`o^2` over the columns of a matrix that has at least as many rows, else
      over its rows; :math:`d = o / \sqrt{\max(v, \epsilon)}`, rescaled to :math:`\lVert o \rVert_F`;
    - `"namo"`: `v` follows :math:`\lVert g \rVert_F^2`; :math:`d = o \, \lVert u \rVert_F / (\sqrt v + \epsilon)`.

    Then :math:`p \leftarrow p - \eta \, s(r, c) \, d`: the scale is applied once, after the second moment. Means and
    norms run over the whole logical matrix, so that under `tp_mode` duplicated and distributed the result does not
    depend on the number of tensor-parallel ranks but for rounding. Of that, `"adamuon"` makes more than the others:
    what is nearly zero is divided by its own size, so that its last bits become a step as large as any.

    The second moment is kept in float32 also for narrower parameters, that of `"namo"` in float64: squares of their
    numbers, and of norms, do not fit.

    Args:
        params: parameters, or dicts that define groups.
        lr: learning rate.
        momentum: decay rate of the momentum, in [0, 1).
        nesterov: look one step of momentum ahead.
        weight_decay: weight decay coefficient.
        use_decoupled_weight_decay: shrink the parameter instead of adding to the gradient.
        split_qkv: orthogonalize query, key and value of a fused weight each by itself.
        is_qkv_fn: says which parameters without `param_info` are such weights.
        qkv_split_shapes: their rows of query, key and value in one query group.
        fp32_matmul_prec: precision of the iteration.
        coefficient_type: coefficient set of the iteration.
        num_ns_steps: number of its steps.
        scale_mode: how the update grows with its matrix.
        extra_scale_factor: factor on every update.
        pg_collection: process groups.
        tp_mode: how matrices that are cut over ranks are orthogonalized.
        moment2_method: `"adamuon"`, `"normuon"` or `"namo"`.
        beta2: decay rate of the second moment, in [0, 1).
        eps: keeps divisions finite. `"namo"` adds it to a norm of gradients as they come: where clipping with an
            exploding layer makes those small, 1e-8 is more than they are and stops them; 1e-20 does not.
        norm_eps: least norm that an update is divided by before the iteration.
        ns_method: how the iteration is computed.
        ns_plan: how each shape is iterated, as far as it is known.
        split: `"fused"`: each matrix of a fused weight by itself; `"per_head"`: each attention head too, where the view
            knows heads; `"none"`: weights as they are stored.
        cautious_weight_decay: decay only where update and weight agree in sign, as published by Chen et al.
            (arXiv:2510.12402); also a key of groups.
        coefficients: `(a, b, c)` of each step, for `coefficient_type="custom"`.

    Raises:
        ConfigurationError: an argument is out of range, or namo is combined with L2 weight decay.

    Source:
        Si et al. (arXiv:2507.11005), Li et al. (arXiv:2510.05491); Carlson et al., "Preconditioned Spectral Descent
        for Deep Learning" (NeurIPS 2015).

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(4, 8))
        >>> optimizer = TensorParallelAdaptiveMuon([weight], lr=0.1, moment2_method="normuon")
        >>> weight.grad = torch.eye(4, 8)
        >>> _ = optimizer.step()
        >>> optimizer.state[weight]["moment2_buffer"].shape
        torch.Size([1, 8])
    """

    _heads_alone: ClassVar[bool] = False  # moments are summed over the ranks

    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-4,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.01,
        use_decoupled_weight_decay: bool = True,
        split_qkv: bool = False,
        is_qkv_fn: Callable[[torch.Tensor], bool] | None = None,
        qkv_split_shapes: tuple[int, int, int] | None = None,
        fp32_matmul_prec: str = "medium",
        coefficient_type: str = "quintic",
        num_ns_steps: int = 5,
        scale_mode: str = "spectral",
        extra_scale_factor: float = 1.0,
        pg_collection: Any | None = None,
        tp_mode: Literal["blockwise", "duplicated", "distributed", "auto"] = "duplicated",
        moment2_method: str = "adamuon",
        beta2: float = 0.95,
        eps: float = 1e-8,
        *,
        split: str = "fused",
        cautious_weight_decay: bool = False,
        norm_eps: float = 1e-15,
        ns_method: str = "auto",
        ns_plan: str = "",
        coefficients: Sequence[Sequence[float]] | None = None,
    ) -> None:
        validate_moment2_method(moment2_method)
        validate_numbers({"beta2": beta2, "eps": eps})
        if moment2_method == "namo" and not use_decoupled_weight_decay:
            raise ConfigurationError(
                "moment2_method='namo' measures the gradient, to which use_decoupled_weight_decay=False would add; "
                "use decoupled weight decay",
                setting="adaptive_muon_moment2_method",
                value=moment2_method,
            )
        self.moment2_method: Any = moment2_method
        self._second_moment = {"beta2": held_number("beta2", beta2), "eps": held_number("eps", eps)}
        super().__init__(
            params,
            lr,
            momentum,
            nesterov,
            weight_decay,
            use_decoupled_weight_decay,
            split_qkv,
            is_qkv_fn,
            qkv_split_shapes,
            fp32_matmul_prec,
            coefficient_type,
            num_ns_steps,
            scale_mode,
            extra_scale_factor,
            pg_collection,
            tp_mode,
            split=split,
            cautious_weight_decay=cautious_weight_decay,
            norm_eps=norm_eps,
            ns_method=ns_method,
            ns_plan=ns_plan,
            coefficients=coefficients,
        )

    @override
    def _parent_arguments(self) -> dict[str, Any]:
        return {"moment2_method": self.moment2_method, **self._second_moment}

    @override
    def _own_group_defaults(self) -> dict[str, float]:
        return getattr(self, "_second_moment", {})  # not there while one is unpickled

    @override
    def _kept(self) -> dict[str, Any]:
        names = ("moment2_method", "_second_moment", "scale_mode", "extra_scale_factor")
        return {**super()._kept(), **{name: getattr(self, name) for name in names}}

    @property
    def moment(self) -> Moment:
        """The second moment of `moment2_method`."""
        return MOMENTS[self.moment2_method]

    @torch.no_grad()
    @override
    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        for param in group["params"]:
            if (skip_non_grad_params and param.grad is None) or not param.numel():
                continue
            state = self.state[param]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(param)
            if "moment2_buffer" in state:
                continue
            shape = self.moment.state_shape(self.planner.plan(param))
            dtype = self.moment.state_dtype(param.dtype)
            state["moment2_buffer"] = torch.zeros(shape, dtype=dtype, device=param.device)

    @torch.no_grad()
    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned; second moments keep their precision.

        Args:
            state_dict: of an optimizer with the same groups.
        """
        super().load_state_dict(state_dict)
        keys = (key for group in state_dict["param_groups"] for key in group["params"])
        params = (param for group in self.param_groups for param in group["params"])
        for key, param in zip(keys, params, strict=True):
            saved = state_dict["state"].get(key, {})
            if "moment2_buffer" in saved:  # torch has cut it to the parameter's dtype
                self.state[param]["moment2_buffer"] = saved["moment2_buffer"].to(
                    param.device, self.moment.state_dtype(param.dtype), copy=True
                )

    @override
    def _validate_loaded(self, state: Mapping[str, Any]) -> None:
        super()._validate_loaded(state)
        for param, values in state["state"].items():
            if "moment2_buffer" in values:
                shape = self.moment.state_shape(self.planner.plan(param))
                require_shape(param, "moment2_buffer", values["moment2_buffer"], shape)

    @override
    def orthogonalize(self, p: torch.Tensor, grad: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return the orthogonalized update of one parameter, unscaled: the scale follows the second moment.

        Args:
            p: the parameter; only its attributes and its shape matter.
            grad: the momentum, of the parameter's shape.
            **kwargs: settings of its group; not read.

        Returns:
            A new tensor of the parameter's shape, float32 (float64 for float64 momentum).
        """
        return merged(self.newton_schulz, self.planner.plan(p), grad, self._active_book, scaled=False)

    @property
    def _is_plain(self) -> bool:
        """Whether no subclass orthogonalizes otherwise."""
        return type(self).orthogonalize is TensorParallelAdaptiveMuon.orthogonalize

    @override
    def _goes_by_shape(self, param: torch.Tensor) -> bool:
        return False  # second moments need the update, too

    @override
    def _is_swept(self, param: torch.Tensor, grad: torch.Tensor) -> bool:
        return False  # second moments are measured on updates of full precision

    @override
    def _transform(
        self, group: dict[str, Any], params: Sequence[torch.Tensor], updates: Sequence[torch.Tensor]
    ) -> Iterator[Change]:
        settings = {key: value for key, value in group.items() if key != "params"}
        book = self._active_book = self.books.of(group)
        plans = [self.planner.plan(param) for param in params]
        together = [index for index, plan in enumerate(plans) if not plan.gather_first and self._is_plain]
        found = merged_together(
            self.newton_schulz,
            [plans[index] for index in together],
            [updates[index] for index in together],
            book,
            scaled=False,
        )
        made = dict(zip(together, found, strict=True))
        for index, (param, plan, update) in enumerate(zip(params, plans, updates, strict=True)):
            o = made.pop(index) if index in made else self.orthogonalize(param, update, **settings)
            change = self.moment.normalize(
                o.to(at_least_float32(param.dtype)),
                self.state[param]["moment2_buffer"],
                plan,
                grad=gradient_of(param),
                update=update,
                beta2=float(group["beta2"]),
                eps=float(group["eps"]),
            )
            yield Change(index, None, change.mul_(scales_of(plan, change)))
        group["ns_plan"] = book.text
