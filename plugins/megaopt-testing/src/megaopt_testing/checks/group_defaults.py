"""What a class has as defaults of its groups: a group's own value is the constructor's for that group."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen

from megaopt_core.config import constructor_kwargs
from megaopt_core.params import Granularity
from megaopt_core.registry import get_registry
from megaopt_testing.checks.settings_act import WAYS, other_values
from megaopt_testing.snapshot import same_bits
from megaopt_testing.trial import Trial

__all__ = ["require_group_defaults"]

_SCALES = (1.0, 30.0, 1e-3, 1e-2, 3.0, 1.0)
"""Gradients jump up and down, so that clipping, maxima and small addends show."""

_NOT_ASKED = {*WAYS, "lr", "weight_decay"}

type _Ends = list[torch.Tensor] | str
"""Values of all parameters, or what a step raises."""


def require_group_defaults(trial: Trial) -> None:
    """Give a class's groups values of its defaults, and compare with a constructor that was given them.

    Nothing of megaopt is between: the class is made and stepped by itself, with a tensor of every number of dimensions
    that it steps in a small GPT. What its constructor does not take by that name, or changes before it keeps it, is
    left out; so are ways to compute, and what state begins with. Two groups with the same values step as one.

    Args:
        trial: the optimizer under test.

    Raises:
        ConformanceError: a group's value has another effect than the constructor's, or none.
    """
    alone = _Alone.of(trial)
    if alone is None:
        return
    usual = alone.end({}, [{}])
    if not _same(usual, alone.end({}, [{}, {}])):
        trial.fail(
            "the same parameters with the same settings get other values in two groups than in one. A step "
            "must read the settings of each group, and not how many groups there are or which is the first"
        )
    for key, value in alone.defaults():
        for other in other_values(value):
            given = alone.end({key: other}, [{}])
            if not isinstance(given, list) or not isinstance(usual, list) or _same(given, usual):
                continue  # it is refused, or does not act with this value
            found, half = alone.end({}, [{}, {key: other}]), len(usual) // 2
            if not _same(found, [*usual[:half], *given[half:]]):
                heard = "changes nothing" if _same(found, usual) else "leads elsewhere"
                trial.fail(
                    f"{key}={other!r} in the second of two groups {heard}, but {key}={other!r} in the constructor "
                    f"acts: the constructor gives only default values. Read `group[{key!r}]` in every step"
                )
            break


@frozen
class _Alone:
    """A class with the arguments and some of the tensors that megaopt gives it.

    Args:
        cls: the class.
        kwargs: constructor arguments.
        tensors: what it steps.
        init: makes its state; None: its first step does.
        config: for `init`.
    """

    cls: type[torch.optim.Optimizer]
    kwargs: Mapping[str, Any]
    tensors: Sequence[torch.Tensor]
    init: Any
    config: Any

    @classmethod
    def of(cls, trial: Trial) -> _Alone | None:
        """Return it; None for what steps all parameters of its groups together, and may keep their sums there."""
        built = trial.build(trial.model())
        entry = get_registry().optimizer(trial.optimizer)
        if entry.configured(built.config).granularity is Granularity.GROUP:
            return None
        own = set(trial.own_names(built))
        by_dims: dict[int, torch.Tensor] = {}
        for part in built.parts:
            for tensor in part.stepped:
                if tensor.param_info.name in own:  # type: ignore[attr-defined] # build sets it
                    by_dims.setdefault(tensor.ndim, tensor)
        kwargs = constructor_kwargs(entry, built.config, [trial.model()])
        tensors = [*by_dims.values()]
        # Two of each, so that both of two groups have one.
        return cls(entry.load_class(), kwargs, [*tensors, *tensors], entry.init_state_fn, built.config)

    def defaults(self) -> Iterator[tuple[str, Any]]:
        """Yield what the constructor takes and keeps as it is, but rate, decay, ways to compute and beginnings."""
        taken = inspect.signature(self.cls).parameters
        made = self.cls([{"params": self._params()[:1]}], **self.kwargs)
        for key, value in made.defaults.items():
            # What a state begins with may be settled when the class is made, as torch's Adagrad does.
            if key in taken and key not in _NOT_ASKED and not key.startswith("init"):
                given = self.kwargs.get(key, taken[key].default)
                is_plain = isinstance(value, bool | int | float | tuple)
                if is_plain and type(given) is type(value) and given == value:
                    yield key, value

    def _params(self) -> list[torch.nn.Parameter]:
        params = [torch.nn.Parameter(tensor.detach().clone()) for tensor in self.tensors]
        for param, tensor in zip(params, self.tensors, strict=True):
            param.param_info = tensor.param_info  # type: ignore[attr-defined] # as build does
        return params

    def end(self, more: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> _Ends | None:
        """Return where steps lead; None where the constructor refuses what it is given.

        Args:
            more: further constructor arguments.
            groups: what each group says by itself.
        """
        torch.manual_seed(0)
        params = self._params()
        each = len(params) // len(groups)
        cut = [
            {"params": params[index * each : (index + 1) * each], **says} for index, says in enumerate(groups)
        ]
        try:
            made = self.cls(cut, **{**self.kwargs, **more})
        except Exception:  # noqa: BLE001 - a class may refuse a value in any way
            return None
        if callable(train := getattr(made, "train", None)):
            train()
        try:
            if self.init is not None:
                self.init(made, self.config)
            for step, scale in enumerate(_SCALES):
                chance = torch.Generator().manual_seed(step)
                for param in params:
                    param.grad = scale * torch.randn(param.shape, generator=chance)
                made.step()
        except Exception as error:  # noqa: BLE001 - a step may refuse a value in any way
            return f"{type(error).__name__}: {error}"
        return [param.detach() for param in params]


def _same(one: _Ends | None, other: _Ends | None) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return all(same_bits(left, right) for left, right in zip(one, other, strict=True))
    return type(one) is type(other)
