"""Settings of optimizers in overrides: which there are, which values they take, and whose they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import define, field, frozen

from megaopt_core.config._constructor import (
    constructor_defaults,
    constructor_kwargs,
    constructor_parameters,
)
from megaopt_core.config._group_values import GroupChecks, group_checks, wrong_settings
from megaopt_core.config._optimizer_config import OptimizerConfig
from megaopt_core.errors import MegaoptError, OverrideError
from megaopt_core.parallel._groups import ProcessGroupCollection
from megaopt_core.params._overrides import OVERRIDE_FIELDS
from megaopt_core.plugin_api._entries import OptimizerEntry
from megaopt_core.registry._registry import PluginRegistry
from megaopt_core.routing._overrides.matching import Match

__all__ = ["OverrideSettings"]


@frozen
class _Known:
    """What is known of an optimizer's constructor and groups, looked up once."""

    kwargs: Mapping[str, Any]
    parameters: frozenset[str]
    defaults: Mapping[str, Any]
    checks: GroupChecks
    passed: list[dict[str, Any]] = field(factory=list)
    """Values that were found to be right before, for another parameter."""


@define
class OverrideSettings:
    """Judges what overrides set; looks constructors and defaults up once.

    Args:
        config: the run's configuration.
        chunks: the model chunks, which some entries look at.
        pgs: the process groups, which some entries look at.
        registry: the plugins.
    """

    config: OptimizerConfig
    chunks: Sequence[torch.nn.Module]
    pgs: ProcessGroupCollection
    registry: PluginRegistry
    _known: dict[str, _Known] = field(factory=dict)

    def split(
        self, name: str, entry: OptimizerEntry, match: Match, param: str
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what an override gives a group, and what it gives the constructor of an optimizer of its own.

        Args:
            name: the optimizer's name.
            entry: its entry.
            match: what the overrides say of a parameter.
            param: the parameter's name, for errors.

        Raises:
            OverrideError: the optimizer has no such setting, or refuses the value.
        """
        asked = {key: value for key, value in match.override.items() if key != "optimizer"}
        extra = [key for key in asked if key not in OVERRIDE_FIELDS]
        if not extra:
            return asked, {}
        known = self._known_of(name, entry)
        for key in extra:
            if key not in known.defaults and key not in known.parameters:
                allowed = sorted({*OVERRIDE_FIELDS, "lr", *known.defaults, *known.parameters})
                advice = self.registry.advice_on(key, allowed, name, kind="override")
                raise OverrideError(
                    f"{match.origin[key]}: {key!r} is no setting of optimizer {name!r}, which steps {param!r}"
                    f"{advice}{'' if advice.endswith('?') else '.'} Allowed are {', '.join(allowed)}",
                    key=key,
                    value=asked[key],
                )
        self._require_right_values(entry, known, {key: asked[key] for key in extra}, match)
        settings = {key: asked.pop(key) for key in extra if key not in known.defaults}
        return asked, settings

    def _known_of(self, name: str, entry: OptimizerEntry) -> _Known:
        if name not in self._known:
            with self.registry.blaming("optimizer", name):
                kwargs = constructor_kwargs(entry, self.config, self.chunks, self.pgs)
                defaults = constructor_defaults(entry, kwargs)
                parameters = frozenset(constructor_parameters(entry.load_class()))
            self._known[name] = _Known(kwargs, parameters, defaults, group_checks(entry, defaults))
        return self._known[name]

    def _require_right_values(
        self, entry: OptimizerEntry, known: _Known, given: dict[str, Any], match: Match
    ) -> None:
        """Raise for values that the optimizer's settings class, its own defaults or its constructor refuse."""
        if given in known.passed:
            return
        for key, value in given.items():
            wrong = known.checks[key](value) if key in known.checks else None
            if wrong is not None:
                raise OverrideError(f"{match.origin[key]}: {key}={value!r}: {wrong}", key=key, value=value)
        first = next(iter(given))
        wrong = wrong_settings(entry, self.config, given)
        if wrong is None:
            arguments = {key: value for key, value in given.items() if key in known.parameters}
            try:
                constructor_defaults(entry, {**known.kwargs, **arguments})
            except (MegaoptError, ValueError, TypeError, AssertionError) as error:
                wrong = f"{entry.load_class().__name__} refuses {arguments}: {error}"
        if wrong is not None:
            raise OverrideError(f"{match.origin[first]}: {wrong}", key=first, value=given[first])
        known.passed.append(given)
