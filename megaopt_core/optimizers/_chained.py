"""Several optimizers as one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from megaopt_core.config._optimizer_config import OptimizerConfig
from megaopt_core.errors import ConfigurationError, OwnershipError
from megaopt_core.optimizers._base import MegatronOptimizer
from megaopt_core.optimizers._between_ranks.replicas import Replicas
from megaopt_core.optimizers._gradients.grad_scaler import MegatronGradScaler
from megaopt_core.parallel._groups import ProcessGroupCollection

__all__ = ["ChainedOptimizer"]

_ONE_FOR_ALL = (
    "clip_grad",
    "grad_norm_skip_threshold",
    "log_num_zeros_in_grad",
    "skip_nonfinite_steps",
    "fp16",
    "bf16",
)


class ChainedOptimizer(MegatronOptimizer):
    """Steps several optimizers as one: one found-inf flag, one norm, one clip, one set of groups.

    The groups are the children's own dictionaries, so that a scheduler on the chain is a scheduler on the children.
    What class a child is makes no difference. The children share one loss scaler from then on, the first one's.

    Args:
        chained_optimizers: at least one optimizer; every rank has the same list, in the same order.

    Raises:
        ConfigurationError: the list is empty or holds a plain torch optimizer, or the children disagree about
            precision, loss scaling, clipping or process groups.
        OwnershipError: two children step one parameter.

    Example:
        >>> import torch
        >>> from megaopt_core import ChainedOptimizer, FP32Optimizer, OptimizerConfig
        >>> body, head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
        >>> config = OptimizerConfig(lr=0.1)
        >>> chain = ChainedOptimizer(
        ...     [
        ...         FP32Optimizer(torch.optim.SGD(body.parameters(), lr=0.1), config),
        ...         FP32Optimizer(torch.optim.Adam(head.parameters(), lr=0.01), config),
        ...     ]
        ... )
        >>> [group["lr"] for group in chain.param_groups]
        [0.1, 0.01]
    """

    def __init__(self, chained_optimizers: Sequence[MegatronOptimizer]) -> None:
        if isinstance(chained_optimizers, torch.optim.Optimizer) or not isinstance(
            chained_optimizers, Iterable
        ):
            raise ConfigurationError(
                f"ChainedOptimizer takes a list of optimizers, got {type(chained_optimizers).__name__}",
                setting="chained_optimizers",
                value=chained_optimizers,
            )
        children = tuple(chained_optimizers)
        if not children:
            raise ConfigurationError("ChainedOptimizer needs at least one optimizer, got an empty list")
        _require_wrapped(children)
        names: dict[torch.nn.Parameter, str] = {}
        for child in children:
            twice = [name for param, name in child.names.items() if param in names]
            if twice:
                raise OwnershipError(f"two chained optimizers step {', '.join(twice)}", names=twice)
            names.update(child.names)
        if len(set(names.values())) < len(names):  # wrapped by hand, each counting from zero
            names = {
                param: f"optimizer{index}.{name}"
                for index, child in enumerate(children)
                for param, name in child.names.items()
            }
        self.chained_optimizers = list(children)
        super().__init__(
            [part for child in children for part in child.parts],
            config=_common_config(children),
            names=names,
            process_groups=_common_groups(children),
            grad_scaler=_common_scaler(children),
            norm_groups=sorted({group for child in children for group in child.norm_groups}),
            twins={param: twins for child in children for param, twins in child.twins.of.items()},
            routing=children[0].routing,
        )
        self.watched_model = children[0].watched_model
        self.replicas = Replicas.of_all([child.replicas for child in children if child.replicas is not None])
        if self.replicas is not None:
            self.before_first_step = self.require_equal_replicas
        self.unused_settings = tuple(sorted({each for child in children for each in child.unused_settings}))

    @property
    def children(self) -> tuple[MegatronOptimizer, ...]:
        """The chained optimizers."""
        return tuple(self.chained_optimizers)

    def join(self, other: MegatronOptimizer) -> None:
        """Chain another optimizer, from now on.

        Args:
            other: built like the children, of other parameters of the same model.
        """
        super().join(other)
        other.grad_scaler = self.grad_scaler
        self.chained_optimizers.append(other)


def _require_wrapped(children: Sequence[object]) -> None:
    for child in children:
        if not isinstance(child, MegatronOptimizer):
            raise ConfigurationError(
                f"ChainedOptimizer chains megaopt's optimizers, got {type(child).__name__}: wrap them in "
                "FP32Optimizer or MixedPrecisionOptimizer, or build them with build_optimizer",
                setting="chained_optimizers",
                value=child,
            )


def _common_config(children: Sequence[MegatronOptimizer]) -> OptimizerConfig:
    config = children[0].config
    for child in children[1:]:
        for name in _ONE_FOR_ALL:
            mine, other = getattr(config, name), getattr(child.config, name)
            if mine != other:
                raise ConfigurationError(
                    f"chained optimizers step as one, but one has {name}={mine!r} and another {name}={other!r}",
                    setting=name,
                    value=other,
                )
    return config


def _common_groups(children: Sequence[MegatronOptimizer]) -> ProcessGroupCollection:
    groups = children[0].process_groups
    for child in children[1:]:
        for name in ProcessGroupCollection.__annotations__:
            mine, other = getattr(groups, name), getattr(child.process_groups, name)
            if mine is not other and mine != other:
                raise ConfigurationError(
                    f"chained optimizers step as one, but they have different process groups {name!r}: give all of "
                    "them the same process_groups",
                    setting="process_groups",
                    value=child.process_groups,
                )
    return groups


def _common_scaler(children: Sequence[MegatronOptimizer]) -> MegatronGradScaler | None:
    first = children[0].grad_scaler
    for child in children[1:]:
        if child.grad_scaler is first:
            continue
        mine, other = _scale(first), _scale(child.grad_scaler)
        if mine != other:
            raise ConfigurationError(
                f"chained optimizers share one loss, but one scales it by {mine or 'nothing'} and another by "
                f"{other or 'nothing'}",
                setting="grad_scaler",
                value=child.grad_scaler,
            )
        settings, others = _scaling(first), _scaling(child.grad_scaler)
        for name in {**settings, **others}:
            if settings.get(name) != others.get(name):
                raise ConfigurationError(
                    f"chained optimizers share one loss, but one scales it with {name}={settings.get(name)!r} and "
                    f"another with {name}={others.get(name)!r}",
                    setting="grad_scaler",
                    value=child.grad_scaler,
                )
    for child in children:
        child.grad_scaler = first
    return first


def _scaling(scaler: MegatronGradScaler | None) -> dict[str, object]:
    """Return how a scaler changes its scale: its class, its settings and its trackers."""
    if scaler is None:
        return {}
    known = {key.removeprefix("_"): value for key, value in vars(scaler).items() if key != "_scale"}
    return {"class": type(scaler).__name__, **known}


def _scale(scaler: MegatronGradScaler | None) -> float | None:
    return None if scaler is None else float(scaler.scale)
