"""Which optimizer one parameter gets: what overrides ask for, what the optimizer accepts, where the rest goes."""

from __future__ import annotations

import copy
from typing import cast

from attrs import define, field, frozen

from megaopt_core.config._optimizer_config import OptimizerConfig
from megaopt_core.errors import PluginError, RoutingError
from megaopt_core.params._overrides import (
    ParamGroupOverride,
    param_group_override_to_tuple,
    validate_override,
)
from megaopt_core.params._roles import Doubt
from megaopt_core.params._specs import Granularity
from megaopt_core.plugin_api._stored_routing import StoredRouting
from megaopt_core.registry._registry import PluginRegistry
from megaopt_core.routing._groups import GroupKey
from megaopt_core.routing._inventory import InventoryItem
from megaopt_core.routing._overrides.matching import Match
from megaopt_core.routing._overrides.settings import OverrideSettings
from megaopt_core.routing._stored import stored_param

__all__ = ["Assigner", "Assignment"]


@frozen
class Assignment:
    """The optimizer and group of one parameter, before ranks agree on indices."""

    key: GroupKey
    override: ParamGroupOverride
    matched: tuple[str, ...]
    reason: str


@define
class Assigner:
    """Assigns parameters to optimizers; looks entries and defaults up once.

    Args:
        config: the run's configuration.
        settings: judges what overrides set.
        registry: the plugins.
        followed: the routing to follow; None: none.
    """

    config: OptimizerConfig
    settings: OverrideSettings
    registry: PluginRegistry
    followed: StoredRouting | None = None
    _keys: dict[GroupKey, GroupKey] = field(factory=dict)
    _following: dict[str, str | None] = field(factory=dict)
    _of_fallback: ParamGroupOverride | None = None

    def assign(self, item: InventoryItem, match: Match) -> Assignment:
        """Return where a parameter goes.

        Args:
            item: the parameter.
            match: what the overrides say about it.

        Raises:
            RoutingError: nobody takes it, or an override asks for an optimizer that does not, or for another than
                the routing that is followed.
            OverrideError: an override has a key that the optimizer does not know.
        """
        asked = match.override.get("optimizer")
        if self.followed is None:
            name, reason = self._optimizer_for(item, match)
        else:
            name, reason = self._as_followed(self.followed, item, match), f"as in {self.followed.name}"
        if asked is None and name != self.config.optimizer:
            match, added = self._with_fallback_override(match)
            reason += added
        entry = self.registry.optimizer(name)
        group, settings = self.settings.split(name, entry, match, item.name)
        # Who is sent to an optimizer shares no group with who is there anyway.
        if "optimizer" in match.override:
            group["optimizer"] = match.override["optimizer"]
        override = param_group_override_to_tuple(cast("ParamGroupOverride", group)) if group else None
        key = GroupKey(name, item.is_expert, tuple(sorted(settings.items())), override)
        # A model has many parameters and few keys.
        key = self._keys.setdefault(key, key)
        return Assignment(key, match.override, match.reasons, reason)

    def _as_followed(self, followed: StoredRouting, item: InventoryItem, match: Match) -> str:
        name = stored_param(followed, item).optimizer
        asked = match.override.get("optimizer", name)
        if asked != name:
            raise RoutingError(
                f"{match.origin['optimizer']} sends {item.name!r} to {asked!r}, but routing= sends it to "
                f"{name!r}, as in {followed.name}; leave out one of the two",
                names=[item.name],
            )
        refusal = self._refusal(name, item, asked=True)
        if refusal is not None:
            raise RoutingError(
                f"{followed.name} gives {item.name!r} to {name!r}, which does not take it here (shape "
                f"{item.part.shape}): {refusal}. Its roles were read by {followed.readers or 'no plugin'} "
                f"there, and by {item.decision.reader or 'no plugin'} here. Set its matrix_view, or install the "
                "reader of the roles",
                names=[item.name],
            )
        return name

    def _optimizer_for(self, item: InventoryItem, match: Match) -> tuple[str, str]:
        asked, why = match.override.get("optimizer"), item.decision.reason
        if asked is not None:
            refusal = self._refusal(asked, item, asked=True)
            if refusal is not None:
                raise RoutingError(
                    f"{match.origin['optimizer']} sends {item.name!r} (shape {item.part.shape}) to {asked!r}, which "
                    f"does not take it: {refusal}. Set its matrix_view, or send it to another optimizer",
                    names=[item.name],
                )
            return asked, f"{match.origin['optimizer']} asks for {asked!r}"
        name, tried = self.config.optimizer, list[str]()
        while (refusal := self._refusal(name, item)) is not None:
            tried.append(name)
            following = self._fallback_of(name)
            if following is None:
                raise RoutingError(
                    f"{name!r} does not take {item.name!r} (shape {item.part.shape}): {refusal}; it has no fallback. "
                    f'Give an override such as {{ParamKey(name="{item.name}"): {{"optimizer": ...}}}}',
                    names=[item.name],
                )
            if following in tried:
                raise RoutingError(
                    f"none of {tried} takes {item.name!r} (shape {item.part.shape}): {refusal}",
                    names=[item.name],
                )
            name, why = following, f"{item.decision.reason}; not for {tried[0]}: {refusal}"
        return name, why

    def _fallback_of(self, name: str) -> str | None:
        """Return the optimizer that steps what another refuses: the configuration's, so asked for once."""
        if name not in self._following:
            fallback = self.registry.optimizer(name).fallback
            if fallback is not None:
                with self.registry.blaming("optimizer", name):
                    fallback = fallback(copy.deepcopy(self.config)) if callable(fallback) else fallback
                    if not isinstance(fallback, str):
                        raise PluginError(
                            f"fallback of optimizer {name!r} returned {fallback!r}; it must return the name "
                            "of another optimizer"
                        )
                self.registry.require_fallback(name, fallback)
            self._following[name] = fallback
        return self._following[name]

    def _with_fallback_override(self, match: Match) -> tuple[Match, str]:
        """Return a match with what the run's optimizer says of what it leaves to its fallback, and a note."""
        primary = self.config.optimizer
        if self._of_fallback is None:
            rule = self.registry.optimizer(primary).fallback_override
            with self.registry.blaming("optimizer", primary):
                self._of_fallback = validate_override(
                    {} if rule is None else rule(copy.deepcopy(self.config))
                )
        added = {key: value for key, value in self._of_fallback.items() if key not in match.override}
        if not added:
            return match, ""
        shown = ", ".join(f"{key}={value}" for key, value in added.items())
        override = cast("ParamGroupOverride", {**added, **match.override})
        origin = {**dict.fromkeys(added, f"fallback of {primary}"), **match.origin}
        return Match(override, match.reasons, origin), f"; {primary} gives its fallback {shown}"

    def _refusal(self, name: str, item: InventoryItem, *, asked: bool = False) -> str | None:
        entry = self.registry.optimizer(name)
        if entry.accepts is None:
            return None
        # Element-wise steps are safe for whatever a parameter is; those of a matrix optimizer are not.
        whole = entry.granularity is not Granularity.ELEMENT
        doubtful = whole and item.decision.doubt is Doubt.ROLE and not asked
        if doubtful and item.decision.view is not None:
            return "its role is doubtful"
        # What it costs is not known of a parameter that may not be accepted.
        spec = item.spec_without_cost(name, entry)
        with self.registry.blaming("optimizer", name):
            reason = entry.accepts(spec, item.decision.view)
            if reason is not None and not isinstance(reason, str):
                raise PluginError(
                    f"accepts of optimizer {name!r} returned {reason!r} for {item.name!r}; it must return None, or a "
                    "reason in words"
                )
            return reason
