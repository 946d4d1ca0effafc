"""Public constructors that put an existing torch optimizer under a precision policy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from megaopt_core.config._dtypes import STATE_DTYPES
from megaopt_core.config._dump import dump_config
from megaopt_core.config._optimizer_config import require_config
from megaopt_core.errors import ConfigurationError, UnsupportedSettingError
from megaopt_core.execution._step_runner import StepRunner
from megaopt_core.optimizers._base import MegatronOptimizer
from megaopt_core.optimizers._gradients.grad_scaler import ConstantGradScaler
from megaopt_core.optimizers._gradients.norm_deduplication import Counting, counting_of
from megaopt_core.optimizers._part import OptimizerPart
from megaopt_core.parallel._agreement import agree_over_ranks
from megaopt_core.parallel._groups import ProcessGroupCollection, size_of
from megaopt_core.params._parts import is_dtensor, is_marked_expert
from megaopt_core.params._shards import Shard, whole
from megaopt_core.params._specs import Granularity
from megaopt_core.plugin_api._entries import OptimizerEntry
from megaopt_core.precision._choice import precision_policy, require_possible
from megaopt_core.reporting._unused_settings import unused_settings, warn_of_unused
from megaopt_core.reporting._use import Use
from megaopt_core.sharding._layout import PieceSpec
from megaopt_core.sharding._live_model import Piece
from megaopt_core.sharding._replicated import ReplicatedParams

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from megaopt_core.config._optimizer_config import OptimizerConfig
    from megaopt_core.optimizers._gradients.grad_scaler import MegatronGradScaler
    from megaopt_core.plugin_api._entries import InitState

_SHARDED = "steps an optimizer's parameters whole on every rank; build_optimizer and get_megatron_optimizer shard them"
_PLACED = (
    "steps an optimizer that was built before, where its parameters are; build_optimizer and get_megatron_optimizer "
    "place what they build"
)
_ONLY_BUILT = {
    "sharding": _SHARDED,
    "overlap_param_gather": _SHARDED,
    "overlap_param_gather_with_optimizer_step": _SHARDED,
    "optimizer_cpu_offload": _PLACED,
    "optimizer_cuda_graph": _PLACED,
}
"""Settings that only building acts on, and what a wrapper does instead."""

__all__ = ["FP32Optimizer", "Float16OptimizerWithFloat16Params", "MixedPrecisionOptimizer"]


class _WrappedOptimizer(MegatronOptimizer):
    """An existing torch optimizer, whose parameters this rank steps whole."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig,
        grad_scaler: MegatronGradScaler | None,
        init_state_fn: InitState | None,
        process_groups: ProcessGroupCollection | DeviceMesh | None,
    ) -> None:
        _require_whole(config, type(self).__name__)
        _require_no_dtensor(optimizer, type(self).__name__)
        name = type(optimizer).__name__
        entry = _entry_of(optimizer)
        require_possible(config, {name: entry})
        precision = precision_policy(config).of(config, entry, name)
        pgs = ProcessGroupCollection.of(process_groups)
        names: dict[torch.nn.Parameter, str] = _names(optimizer)
        public = [
            {**group, "params": list(group["params"]), "param_names": [names[p] for p in group["params"]]}
            for group in optimizer.param_groups
        ]
        pieces = [
            Piece(PieceSpec.of(_shard(names[param], param), index), param, (param,))
            for index, group in enumerate(public)
            for param in group["params"]
        ]
        counting = {name: counting_of(param, pgs) for param, name in names.items()}
        stats_group = pgs.stats_group(is_expert=_holds_experts(names))
        norm_groups = _norm_groups(counting.values(), pgs)
        stepped = precision.attach(pieces)
        with _unchanged_after_errors(optimizer):
            _replace_params(
                optimizer,
                dict(zip((piece.param for piece in pieces), stepped, strict=True)),
                entry.scalar_states,
            )
            if init_state_fn is not None or not optimizer.state:
                StepRunner().init_state(optimizer, precision, stepped, init_state_fn, config)
            precision.require_state(config, optimizer, entry)
        part = OptimizerPart(
            optimizer,
            precision,
            ReplicatedParams(pieces, stats_group),
            stepped,
            public,
            config,
            counting,
            entry.scalar_states,
        )
        part.settings.guard_inner()
        super().__init__(
            [part],
            config=config,
            names=names,
            process_groups=pgs,
            grad_scaler=grad_scaler,
            norm_groups=norm_groups,
        )
        self.unused_settings = unused_settings(Use(config, names))
        warn_of_unused(self.unused_settings)
        dump_config(config)


def _require_both(optimizer: object, config: object, wrapper: str) -> None:
    """Raise unless what is to be wrapped is a plain optimizer of torch's, and comes with a configuration."""
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, MegatronOptimizer):
        raise ConfigurationError(
            f"{wrapper} wraps a plain torch.optim.Optimizer, got {type(optimizer).__name__}",
            setting="optimizer",
            value=optimizer,
        )
    require_config(config)


def _require_whole(config: OptimizerConfig, wrapper: str) -> None:
    """Raise if a configuration asks for what only building can do."""
    for setting, instead in _ONLY_BUILT.items():
        value = getattr(config, setting)
        if value not in (None, False, "replicated"):
            raise UnsupportedSettingError.of(setting, value, f"{wrapper} {instead}")


def _require_no_dtensor(optimizer: torch.optim.Optimizer, wrapper: str) -> None:
    """Raise if parameters are DTensors, of which this rank steps the local part only."""
    for param, name in _names(optimizer).items():
        if is_dtensor(param):
            raise ConfigurationError(
                f"{wrapper} steps parameters as they are, but {name!r} of shape {tuple(param.shape)} is a DTensor; "
                "build_optimizer and get_megatron_optimizer step what each rank holds of it",
                setting="optimizer",
                value=optimizer,
            )


def _entry_of(optimizer: torch.optim.Optimizer) -> OptimizerEntry:
    """Return what is assumed of an optimizer that no plugin describes."""
    cls = type(optimizer)
    # Torch's own step one parameter after the other; another class may look at all of a group together.
    is_torchs = cls.__module__.startswith("torch.optim.")
    return OptimizerEntry(
        cls,
        state_dtypes=dict.fromkeys(("exp_avg", "exp_avg_sq"), frozenset(STATE_DTYPES)),
        granularity=Granularity.TENSOR if is_torchs else Granularity.GROUP,
    )


def _holds_experts(params: Iterable[torch.nn.Parameter]) -> bool:
    kinds = set(map(is_marked_expert, params))
    if len(kinds) > 1:
        raise ConfigurationError(
            "one optimizer holds expert parameters (allreduce=False) and dense ones, whose norms are added up over "
            "different process groups; give each kind an optimizer of its own and chain them",
            setting="optimizer",
        )
    return kinds == {True}


def _norm_groups(counting: Iterable[Counting], pgs: ProcessGroupCollection) -> list[str]:
    """Return the names of the separate norms of every rank, sorted: all ranks reduce the same ones."""
    mine = {rule.norm_group for rule in counting if rule.norm_group is not None}
    if size_of(pgs.mp) == 1:
        return sorted(mine)
    return sorted(set().union(*agree_over_ranks(mine, pgs, "finding the separate gradient norms")))


def _names(optimizer: torch.optim.Optimizer) -> dict[torch.nn.Parameter, str]:
    names: dict[torch.nn.Parameter, str] = {}
    for index, group in enumerate(optimizer.param_groups):
        given = group.get("param_names") or [f"group{index}.param{i}" for i in range(len(group["params"]))]
        names.update(zip(group["params"], given, strict=True))
    return names


def _shard(name: str, param: torch.Tensor) -> Shard:
    return Shard(name, tuple(param.shape), whole(param.shape), 0, param.numel())


@contextmanager
def _unchanged_after_errors(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Give an optimizer its parameters and its state back where wrapping it fails."""
    params, state = [group["params"] for group in optimizer.param_groups], dict(optimizer.state)
    try:
        yield
    except BaseException:
        for group, before in zip(optimizer.param_groups, params, strict=True):
            group["params"] = before
        optimizer.state.clear()
        optimizer.state.update(state)
        raise


def _replace_params(
    optimizer: torch.optim.Optimizer, stepped: dict[torch.Tensor, torch.Tensor], scalars: frozenset[str]
) -> None:
    for group in optimizer.param_groups:
        group["params"] = [stepped[param] for param in group["params"]]
    for param, tensor in stepped.items():
        if tensor is not param and param in optimizer.state:
            state: dict[str, Any] = optimizer.state.pop(param)
            optimizer.state[tensor] = {
                key: value.to(tensor.dtype) if _has_dtype_of(value, param) and key not in scalars else value
                for key, value in state.items()
            }


def _has_dtype_of(value: Any, param: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype == param.dtype


class FP32Optimizer(_WrappedOptimizer):
    """Steps the parameters of a torch optimizer in place, through the pipeline of norm, clip and report.

    Args:
        optimizer: a plain torch optimizer over the model's parameters; from now on it belongs to this one.
        config: the run's configuration: `clip_grad`, `log_num_zeros_in_grad`, `timers`, precision-aware states.
        init_state_fn: `(optimizer, config)`; makes its state. None: its first step does.
        process_groups: the process groups over which norms are added up, or a DeviceMesh that names them; None: the
            default group.

    Raises:
        ConfigurationError: `optimizer` is no plain torch optimizer, or the configuration asks for mixed precision, for
            sharding, or for something that would be ignored.

    Example:
        >>> import torch
        >>> from megaopt_core import FP32Optimizer, OptimizerConfig
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> config = OptimizerConfig(optimizer="sgd", lr=1.0, clip_grad=0.0)
        >>> optimizer = FP32Optimizer(torch.optim.SGD([weight], lr=1.0), config)
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
        process_groups: ProcessGroupCollection | DeviceMesh | None = None,
    ) -> None:
        _require_both(optimizer, config, type(self).__name__)
        for setting in ("fp16", "bf16"):
            if getattr(config, setting):
                raise ConfigurationError.of(
                    setting,
                    value=True,
                    why="FP32Optimizer keeps no main parameters; use MixedPrecisionOptimizer",
                )
        super().__init__(optimizer, config, None, init_state_fn, process_groups)


class MixedPrecisionOptimizer(_WrappedOptimizer):
    """Steps fp32 main copies of a torch optimizer's fp16 or bf16 parameters; fp32 ones are stepped in place.

    With `use_precision_aware_optimizer=True` they are stepped in fp32 and stored in less, as the configuration says.

    Args:
        optimizer: a plain torch optimizer over the model's parameters; its groups will hold the main copies.
        config: the run's configuration, with `bf16=True` or `fp16=True`.
        grad_scaler: the loss scaler; None: the configuration's `loss_scale`, else the loss is not scaled.
        init_state_fn: `(optimizer, config)`; makes its state. None: its first step does.
        process_groups: the process groups over which norms are added up, or a DeviceMesh that names them; None: the
            default group.

    Raises:
        ConfigurationError: `optimizer` is no plain torch optimizer, fp16 is configured without a scaler, a scaler is
            given beside another `loss_scale`, or the configuration asks for full precision, for sharding, or for
            something that would be ignored.

    Example:
        >>> import torch
        >>> from megaopt_core import MixedPrecisionOptimizer, OptimizerConfig
        >>> weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        >>> config = OptimizerConfig(optimizer="sgd", lr=0.001, bf16=True)
        >>> optimizer = MixedPrecisionOptimizer(torch.optim.SGD([weight], lr=0.001), config)
        >>> weight.grad = torch.ones_like(weight)
        >>> optimizer.step()
        StepResult(update_successful=True, grad_norm=1.0, num_zeros_in_grad=0)
        >>> weight.item(), f"{optimizer.get_main_params()[0].item():.4f}"
        (1.0, '0.9990')
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig,
        grad_scaler: MegatronGradScaler | None = None,
        init_state_fn: InitState | None = None,
        *,
        process_groups: ProcessGroupCollection | DeviceMesh | None = None,
    ) -> None:
        _require_both(optimizer, config, type(self).__name__)
        if not (config.fp16 or config.bf16):
            raise ConfigurationError(
                f"{type(self).__name__} needs fp16=True or bf16=True; use FP32Optimizer for full precision",
                setting="bf16",
                value=False,
            )
        if grad_scaler is None and config.loss_scale is not None:
            grad_scaler = ConstantGradScaler(config.loss_scale)
        elif config.loss_scale is not None and not _is_constant(grad_scaler, config.loss_scale):
            raise ConfigurationError(
                f"loss_scale={config.loss_scale!r} and a {type(grad_scaler).__name__} that may scale otherwise: keep "
                "one of the two",
                setting="loss_scale",
                value=config.loss_scale,
            )
        if config.fp16 and grad_scaler is None:
            raise ConfigurationError(
                "fp16 gradients underflow without a loss scale: give a ConstantGradScaler or a DynamicGradScaler",
                setting="grad_scaler",
                value=None,
            )
        super().__init__(optimizer, config, grad_scaler, init_state_fn, process_groups)


def _is_constant(scaler: MegatronGradScaler | None, scale: float) -> bool:
    return isinstance(scaler, ConstantGradScaler) and float(scaler.scale) == scale


class Float16OptimizerWithFloat16Params(MixedPrecisionOptimizer):
    """The reference's name for fp16 and bf16 parameters with fp32 main copies."""
