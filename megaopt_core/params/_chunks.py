"""A model, as users give it: a module or its chunks, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from megaopt_core.errors import ConfigurationError

__all__ = ["chunks_of"]


def chunks_of(model: Any) -> list[torch.nn.Module]:
    """Return the chunks of a model that a user gives.

    Args:
        model: a module, or a sequence of modules.

    Raises:
        ConfigurationError: it is something else; the message says what to give.

    Example:
        >>> chunks_of(torch.nn.Linear(1, 1))
        [Linear(in_features=1, out_features=1, bias=True)]
        >>> chunks_of(None)
        Traceback (most recent call last):
        megaopt_core.errors.ConfigurationError: model: got None; give a torch.nn.Module, or a sequence of them
    """
    if isinstance(model, torch.nn.Module):
        return [model]
    given: list[Any] = []
    what = _words(model)
    if what is None and isinstance(model, Iterable):
        given = list(model)
        if given and all(isinstance(chunk, torch.nn.Module) for chunk in given):
            return given
        what = _words_of_items(given)
    advice = "give a torch.nn.Module, or a sequence of them"
    if what in _PARAMETERS:
        advice = (
            "give the model itself: which optimizer and group each parameter gets depends on the modules that own "
            'them, and overrides={ParamKey(name="..."): {...}} changes it'
        )
    raise ConfigurationError.got("model", model, advice, shown=what)


_PARAMETERS = ("parameters", "parameter groups", "named parameters", "a tensor")


def _words(model: Any) -> str | None:
    """Return what was given in place of a model; None for what may hold chunks."""
    if isinstance(model, type):
        return f"the class {model.__name__}, not an instance of it"
    if isinstance(model, torch.Tensor):
        return "a tensor"
    if isinstance(model, torch.optim.Optimizer):
        return f"the optimizer {type(model).__name__}"
    if isinstance(model, (set, frozenset)):
        return f"a {type(model).__name__}, which has no order"
    if isinstance(model, (str, Mapping)):
        return f"{type(model).__name__} {str(model)[:60]!r}"
    return "None" if model is None else None


def _words_of_items(given: list[Any]) -> str:
    wrong = next((item for item in given if not isinstance(item, torch.nn.Module)), None)
    if not given:
        return "an empty sequence"
    if isinstance(wrong, torch.Tensor):
        return "parameters"
    if isinstance(wrong, Mapping) and "params" in wrong:
        return "parameter groups"
    if isinstance(wrong, tuple) and len(wrong) == 2 and isinstance(wrong[1], torch.Tensor):
        return "named parameters"
    return f"a sequence with {type(wrong).__name__} among its items"
