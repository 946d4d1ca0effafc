"""Public constructors that put an existing torch optimizer under a precision policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from megaopt_core.errors import ConfigurationError
from megaopt_core.optimizers.base import MegatronOptimizer
from megaopt_core.optimizers.inner import init_state_by_step
from megaopt_core.optimizers.precision import Fp32, MainParams, PrecisionPolicy
from megaopt_core.parallel.groups import ProcessGroupCollection
from megaopt_core.params.specs import Granularity, ParamSpec, whole
from megaopt_core.sharding.base import Piece
from megaopt_core.sharding.layout import PieceSpec
from megaopt_core.sharding.replicated import ReplicatedParams

if TYPE_CHECKING:
    from megaopt_core.config import OptimizerConfig
    from megaopt_core.entries import InitState
    from megaopt_core.optimizers.grad_scaler import MegatronGradScaler

__all__ = ["FP32Optimizer", "Float16OptimizerWithFloat16Params", "MixedPrecisionOptimizer"]


class _WrappedOptimizer(MegatronOptimizer):
    """An existing torch optimizer, whose parameters this rank steps whole."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig,
        precision: PrecisionPolicy,
        grad_scaler: MegatronGradScaler | None,
        init_state_fn: InitState | None,
        process_groups: ProcessGroupCollection | None,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, MegatronOptimizer):
            raise ConfigurationError(
                f"{type(self).__name__} wraps a plain torch.optim.Optimizer, got {type(optimizer).__name__}",
                setting="optimizer",
                value=optimizer,
            )
        pgs = process_groups or ProcessGroupCollection()
        names = _names(optimizer)
        public = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
        pieces = [
            Piece(_piece_spec(names[param], param, index), param, (param,))
            for index, group in enumerate(public)
            for param in group["params"]
        ]
        stepped = precision.attach(pieces)
        _replace_params(optimizer, dict(zip((piece.param for piece in pieces), stepped, strict=True)))
        for _ in precision.batches(optimizer):
            if init_state_fn is not None:
                init_state_fn(optimizer, config)
            elif not optimizer.state:
                init_state_by_step(optimizer)
        super().__init__(
            optimizer,
            precision,
            ReplicatedParams(pieces, pgs.mp),
            config=config,
            param_groups=public,
            names=names,
            stepped=stepped,
            process_groups=pgs,
            grad_scaler=grad_scaler,
        )


def _names(optimizer: torch.optim.Optimizer) -> dict[torch.nn.Parameter, str]:
    names = {}
    for index, group in enumerate(optimizer.param_groups):
        given = group.get("param_names") or [f"group{index}.param{i}" for i in range(len(group["params"]))]
        names.update(zip(group["params"], given, strict=True))
    return names


def _piece_spec(name: str, param: torch.Tensor, group: int) -> PieceSpec:
    shape = tuple(param.shape)
    spec = ParamSpec(name, shape, whole(shape), param.dtype, param.dtype, "", group, Granularity.TENSOR, 0.0)
    return PieceSpec(group, shape, ((0, spec.shard()),))


def _replace_params(optimizer: torch.optim.Optimizer, stepped: dict[torch.Tensor, torch.Tensor]) -> None:
    for group in optimizer.param_groups:
        group["params"] = [stepped[param] for param in group["params"]]
    for param, tensor in stepped.items():
        if tensor is not param and param in optimizer.state:
            state: Any = optimizer.state.pop(param)
            optimizer.state[tensor] = state


class FP32Optimizer(_WrappedOptimizer):
    """Steps the parameters of a torch optimizer in place, through the pipeline of norm, clip and report.

    Args:
        optimizer: a plain torch optimizer over the model's parameters; from now on it belongs to this one.
        config: the run's configuration: `clip_grad`, `log_num_zeros_in_grad`, `timers`.
        init_state_fn: `(optimizer, config)`; makes its state. None: a step on zero gradients does.
        process_groups: the process groups over which norms are added up.

    Raises:
        ConfigurationError: `optimizer` is no plain torch optimizer.

    Example:
        >>> import torch
        >>> from megaopt_core import FP32Optimizer, OptimizerConfig
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = FP32Optimizer(torch.optim.SGD([weight], lr=1.0), OptimizerConfig(optimizer="sgd", lr=1.0, clip_grad=0.0))
        >>> weight.grad = torch.tensor([1.0, 0.5])
        >>> optimizer.step()
        StepResult(update_successful=True, grad_norm=None, num_zeros_in_grad=None)
        >>> weight.tolist()
        [0.0, 0.5]
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig,
        init_state_fn: InitState | None = None,
        *,
        process_groups: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(optimizer, config, Fp32(), None, init_state_fn, process_groups)


class MixedPrecisionOptimizer(_WrappedOptimizer):
    """Steps fp32 main copies of a torch optimizer's fp16 or bf16 parameters; fp32 ones are stepped in place.

    Args:
        optimizer: a plain torch optimizer over the model's parameters; its groups will hold the main copies.
        config: the run's configuration.
        grad_scaler: the loss scaler; None: the loss is not scaled.
        init_state_fn: `(optimizer, config)`; makes its state. None: a step on zero gradients does.
        process_groups: the process groups over which norms are added up.

    Raises:
        ConfigurationError: `optimizer` is no plain torch optimizer, or fp16 is configured without a scaler.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig,
        grad_scaler: MegatronGradScaler | None = None,
        init_state_fn: InitState | None = None,
        *,
        process_groups: ProcessGroupCollection | None = None,
    ) -> None:
        if config.fp16 and grad_scaler is None:
            raise ConfigurationError(
                "fp16 gradients underflow without a loss scale: give a ConstantGradScaler or a DynamicGradScaler",
                setting="grad_scaler",
                value=None,
            )
        super().__init__(optimizer, config, MainParams(), grad_scaler, init_state_fn, process_groups)


class Float16OptimizerWithFloat16Params(MixedPrecisionOptimizer):
    """The reference's name for fp16 and bf16 parameters with fp32 main copies."""
