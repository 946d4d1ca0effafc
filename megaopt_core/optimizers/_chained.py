"""Several optimizers as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product

import torch
from torch._compile import _disable_dynamo

from megaopt_core.config._optimizer_config import OptimizerConfig
from megaopt_core.errors import ConfigurationError, MegaoptError, OwnershipError
from megaopt_core.optimizers._base import MegatronOptimizer
from megaopt_core.optimizers._between_steps.group_settings import start_groups
from megaopt_core.optimizers._gradients.grad_scaler import MegatronGradScaler
from megaopt_core.optimizers._step.observers import Observers
from megaopt_core.parallel._groups import ProcessGroupCollection
from megaopt_core.plugin_api._observers import Change
from megaopt_core.routing._routing import Routing

__all__ = ["ChainedOptimizer"]

_ONE_FOR_ALL = (
    "clip_grad",
    "grad_norm_skip_threshold",
    "log_num_zeros_in_grad",
    "read_before_step",
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
        OwnershipError: two children step one parameter, or built ones have two of one name.

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
        _require_own_params(children)
        config, groups = _common_config(children), _common_groups(children)
        _require_own_names(children)
        scaler = _common_scaler(children)
        _name_apart(children)
        self.chained_optimizers = list(children)
        super().__init__(
            [part for child in children for part in child.parts],
            config=config,
            names=_names(children),
            process_groups=groups,
            grad_scaler=scaler,
            norm_groups=sorted({group for child in children for group in child.norm_groups}),
            twins=_twins(children),
            routing=_joined_routing(children),
        )
        self.watched_model = children[0].watched_model
        self.unused_settings = tuple(sorted({each for child in children for each in child.unused_settings}))
        for child in children:
            child.pipeline.observers = Observers()  # the chain is watched, not its children

    @property
    def children(self) -> tuple[MegatronOptimizer, ...]:
        """The chained optimizers."""
        return tuple(self.chained_optimizers)

    @property
    def _is_by_hand(self) -> bool:
        """Whether children were built for models of their own, which this one was not."""
        return any(child.watched_model.chunks for child in self.chained_optimizers)

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of every child, with the buffers of the model that it was built for.

        Args:
            set_to_none: drop `grad` instead of filling it with zeros; buffers (`main_grad`) are always filled.
        """
        if not self._is_by_hand:
            super().zero_grad(set_to_none)
            return
        self.has_cleared = True
        for child in self.chained_optimizers:
            child.zero_grad(set_to_none)

    def _problems(self, chunks: Sequence[torch.nn.Module] | None) -> tuple[str, ...]:
        if not self._is_by_hand or chunks is not None:
            return super()._problems(chunks)
        found: dict[str, None] = {}
        for child in self.chained_optimizers:
            present = {param for chunk in child.watched_model.alive() for param in chunk.parameters()}
            names = {
                param: name for param, name in self.names.items() if param in present or param in child.names
            }
            found.update(dict.fromkeys(child.watched_model.problems(names)))
        return tuple(found)

    def join_late_params(self) -> None:
        """Look at the models of the children, too, and step what has joined them."""
        if self.late is not None:
            super().join_late_params()
            return
        refused: MegaoptError | None = None
        for child in self.chained_optimizers:
            try:
                child.join_late_params()
            except MegaoptError as error:
                refused = refused or error
            self.parts += [part for part in child.parts if part not in self.parts]
            mine = set(map(id, self.param_groups))
            joined = [group for group in child.param_groups if id(group) not in mine]
            self.param_groups.extend(joined)
            start_groups(self, joined)
        names = _names(self.chained_optimizers)
        if any(self.names.get(param) != name for param, name in names.items()):
            self.know(names, _twins(self.chained_optimizers), _joined_routing(self.chained_optimizers))
            self.observers.changed(Change.JOINED)
        if refused is not None:
            raise refused

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
                f"ChainedOptimizer chains megaopt's optimizers, got {type(child).__name__}: wrap it in "
                "FP32Optimizer or MixedPrecisionOptimizer, or build it with build_optimizer",
                setting="chained_optimizers",
                value=child,
            )


def _names(children: Iterable[MegatronOptimizer]) -> dict[torch.nn.Parameter, str]:
    return {param: name for child in children for param, name in child.names.items()}


def _twins(
    children: Iterable[MegatronOptimizer],
) -> dict[torch.nn.Parameter, tuple[torch.nn.Parameter, ...]]:
    return {param: twins for child in children for param, twins in child.twins.of.items()}


def _joined_routing(children: Iterable[MegatronOptimizer]) -> Routing | None:
    routings = [child.routing for child in children if child.routing is not None]
    return Routing.joined(routings) if routings else None


def _require_own_params(children: Sequence[MegatronOptimizer]) -> None:
    stepped: set[torch.nn.Parameter] = set()
    for child in children:
        twice = [name for param, name in child.names.items() if param in stepped]
        if twice:
            raise OwnershipError(f"two chained optimizers step {', '.join(twice)}", names=twice)
        stepped.update(child.names)


def _require_own_names(children: Sequence[MegatronOptimizer]) -> None:
    known = Counter(name for child in children if child.routing is not None for name in child.names.values())
    twice = sorted(name for name, count in known.items() if count > 1)
    if twice:
        raise OwnershipError(
            "two chained optimizers have different parameters of one name "
            f"({', '.join(twice[:3])}{', ...' if len(twice) > 3 else ''}), so a checkpoint cannot tell them "
            "apart. Put both models into one torch.nn.ModuleDict, and build one optimizer for it; or build "
            'two, each with the override {"optimizer": "none"} for the other\'s part',
            names=twice,
        )


def _name_apart(children: Sequence[MegatronOptimizer]) -> None:
    """Give every parameter a name of its own: those wrapped by hand count from zero in each optimizer."""
    counts = Counter(name for child in children for name in child.names.values())
    for index, child in enumerate(children):
        if child.routing is None and max(counts.values(), default=0) > 1:
            new = {name: f"optimizer{index}.{name}" for name in child.names.values()}
            for part in child.parts:
                part.rename(new)
            for each in dict.fromkeys((child, *child.children)):
                each.names = {param: new[name] for param, name in each.names.items()}
                each.refresh_state()


def _common_config(children: Sequence[MegatronOptimizer]) -> OptimizerConfig:
    config = children[0].config
    for child, name in product(children[1:], _ONE_FOR_ALL):
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
    for child, name in product(children[1:], ProcessGroupCollection.__annotations__):
        mine, other = getattr(groups, name), getattr(child.process_groups, name)
        if mine is not other and mine != other:
            raise ConfigurationError(
                f"chained optimizers step as one, but they have different process groups {name!r}: give all of them "
                "the same process_groups",
                setting="process_groups",
                value=child.process_groups,
            )
    return groups


def _common_scaler(children: Sequence[MegatronOptimizer]) -> MegatronGradScaler | None:
    first = children[0].grad_scaler
    settings = _scaling(first)
    for child in children[1:]:
        others = settings if child.grad_scaler is first else _scaling(child.grad_scaler)
        for name in {**settings, **others}:
            mine, other = settings.get(name), others.get(name)
            if mine != other:
                words = f"with {name}={mine!r} and another with {name}={other!r}"
                if name == "scale":
                    words = f"by {mine or 'nothing'} and another by {other or 'nothing'}"
                raise ConfigurationError(
                    f"chained optimizers share one loss, but one scales it {words}",
                    setting="grad_scaler",
                    value=child.grad_scaler,
                )
    for child in children:
        child.grad_scaler = first
    return first


def _scaling(scaler: MegatronGradScaler | None) -> dict[str, object]:
    """Return a scaler's scale, and how it changes: its class, its settings and its trackers."""
    if scaler is None:
        return {}
    known = {key.removeprefix("_"): value for key, value in vars(scaler).items() if key != "_scale"}
    return {"scale": float(scaler.scale), "class": type(scaler).__name__, **known}
