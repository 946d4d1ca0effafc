"""Which override keys match which parameters, and what the overrides add up to."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from attrs import define, field, frozen

from megaopt_core.errors import MegaoptError, OverrideError, RoutingError, UnmatchedKeyError, warn_user
from megaopt_core.params._keys import ParamKey, as_tuple
from megaopt_core.params._names import NamedParam
from megaopt_core.params._overrides import (
    NO_OPTIMIZER,
    ParamGroupOverride,
    combine_param_group_overrides,
    validate_override,
)
from megaopt_core.params._roles import Role, RoleDecision
from megaopt_core.registry._catalogue import ROLE_READER
from megaopt_core.registry._registry import PluginRegistry
from megaopt_core.routing._overrides.from_config import STANDARD_KEYS

__all__ = ["STANDARD", "Match", "OverrideSet", "SourcedOverride", "raise_unmatched"]

STANDARD = "standard"
"""The source of overrides that follow from the configuration."""


@frozen
class SourcedOverride:
    """One override with its key and where it came from.

    Args:
        key: matches parameters.
        override: the checked override.
        source: who gave it, for reports and errors: `"config_overrides"`, `"standard"`, `"plugin muon"`...
        must_match: a name pattern of it that matches nothing is an error.
    """

    key: ParamKey
    override: ParamGroupOverride
    source: str
    must_match: bool = False

    def __str__(self) -> str:
        return f"{self.source}: {self.key}"


@frozen
class Match:
    """What the overrides say about one parameter.

    Args:
        override: all matching overrides, combined.
        reasons: for each that matched, what matched and what it sets.
        origin: for each key of the override, who set it.
    """

    override: ParamGroupOverride
    reasons: tuple[str, ...]
    origin: Mapping[str, str]


@define
class OverrideSet:
    """All overrides of a run, in one place; remembers which patterns matched."""

    entries: list[SourcedOverride] = field(factory=list)
    matched: set[str] = field(factory=set)

    def add(
        self, overrides: Mapping[ParamKey, ParamGroupOverride], source: str, *, must_match: bool = False
    ) -> None:
        """Add overrides after checking them: all, or none where one of them is wrong.

        Args:
            overrides: `{ParamKey: ParamGroupOverride}`; it is not changed.
            source: who gave them; a mapping with an attribute `sources` tells it for each key.
            must_match: a name pattern that matches nothing is an error, but for those of the standard overrides.

        Raises:
            OverrideError: something is no ParamKey or no valid override.
        """
        if not isinstance(overrides, Mapping):
            raise OverrideError(
                f"{source}: overrides are a mapping {{ParamKey: ParamGroupOverride}}, "
                f"got {type(overrides).__name__}: {overrides!r}",
                value=overrides,
            )
        added = []
        for key, override in overrides.items():
            if not isinstance(key, ParamKey):
                raise OverrideError(
                    f"{source}: the key of an override is a ParamKey, got {key!r}{_as_key(key)}", value=key
                )
            who = getattr(overrides, "sources", {}).get(key, source)
            expected = must_match and key not in STANDARD_KEYS
            added.append(SourcedOverride(key, validate_override(override), who, expected))
        self.entries += added

    def match(self, param: NamedParam, role: Role) -> Match:
        """Return what the overrides say about a parameter; every name that it is tied under may match.

        Args:
            param: the parameter with its names.
            role: what it was found to be.

        Raises:
            OverrideConflictError: two overrides give one key unequal values.
        """
        found: list[SourcedOverride] = []
        reasons: list[str] = []
        for entry in self.entries:
            why = self._match_one(entry, param, role)
            if why is not None:
                found.append(entry)
                what = ", ".join(f"{key}={value!r}" for key, value in entry.override.items())
                reasons.append(f"{entry.source} {why}: {what}")
        excluding = [entry for entry in found if entry.override.get("optimizer") == NO_OPTIMIZER]
        if excluding:  # who leaves a parameter to somebody else has the last word
            return Match(excluding[0].override, tuple(reasons), {"optimizer": str(excluding[0])})
        override = combine_param_group_overrides(
            [entry.override for entry in found],
            sources=[str(entry) for entry in found],
            param_name=param.name,
        )
        origin = {key: str(entry) for entry in reversed(found) for key in entry.override}
        return Match(override, tuple(reasons), origin)

    def require_read(self, name: str, decision: RoleDecision, registry: PluginRegistry) -> None:
        """Raise when an override asks for roles and nothing has read what a parameter's role is.

        Args:
            name: the parameter's name.
            decision: what the core takes it for.
            registry: the plugins.

        Raises:
            PluginNotInstalledError: it would be element-wise only because no reader of models is installed.
            BrokenPluginError: because that reader has failed to load.
            RoutingError: because it has not read this model.
        """
        asking = next((entry for entry in self.entries if entry.key.role), None) if decision.unread else None
        if asking is not None:
            what = f"{asking} asks for roles, and the role of {name!r} is in doubt: the reader of roles"
            error: MegaoptError | None = registry.absent_plugin(what, name, ROLE_READER)
            if error is None:
                error = RoutingError(f"{what} comes with {ROLE_READER}, which has not read it", names=[name])
            error.args = (f"{error} (or settle the role by an attribute of the parameter: matrix_view=...)",)
            raise error

    def _match_one(self, entry: SourcedOverride, param: NamedParam, role: Role) -> str | None:
        result = None
        for name in (param.name, *param.aliases):
            why = entry.key.matched_by(param.param, name, role)
            if why is None:
                continue
            result = result or why
            if entry.must_match:
                unseen = (pattern for pattern in as_tuple(entry.key.name) if pattern not in self.matched)
                self.matched.update([pattern for pattern in unseen if fnmatchcase(name, pattern)])
                self.matched.add(str(entry.key))
        return result


def raise_unmatched(overrides: OverrideSet, matched: Iterable[str], names: Sequence[str]) -> None:
    """Raise for a name pattern that matched nothing on any rank; warn for attributes and predicates.

    Args:
        overrides: the run's overrides.
        matched: patterns and keys that matched something on some rank.
        names: every parameter name of this rank, for suggestions.

    Raises:
        UnmatchedKeyError: a name pattern matched nothing.
    """
    seen = set(matched)
    required = [(entry, as_tuple(entry.key.name)) for entry in overrides.entries if entry.must_match]
    for entry, patterns in required:
        for pattern in patterns:
            if pattern not in seen:
                close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
                hint = f"; close names: {', '.join(close)}" if close else ""
                raise UnmatchedKeyError(
                    f"{entry.source}: the name pattern {pattern!r} matches no parameter on any rank{hint}. "
                    "Run `megaopt explain` to see every name",
                    pattern=pattern,
                    close=close,
                )
    for entry, patterns in required:
        if not patterns and str(entry.key) not in seen:
            warn_user(f"the override key {entry.key} matches no parameter on any rank", UserWarning)


def _as_key(key: object) -> str:
    """Return how to write as a `ParamKey` what was given instead of one; empty where nobody knows."""
    if isinstance(key, str):
        return f": write ParamKey(name={key!r})"
    if callable(key):
        return ': write ParamKey(with_name_predicate=ParamWithNamePredicate("mine", lambda param, name: ...))'
    return ""
