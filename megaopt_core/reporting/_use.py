"""What a configuration is used for, and the settings of optimizers that nothing in use reads."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import Factory, field, frozen

from megaopt_core.config._constructor import constructor_kwargs
from megaopt_core.config._dtypes import shown
from megaopt_core.config._fields import CORE_FIELD_NAMES, core_field_info
from megaopt_core.config._optimizer_config import OptimizerConfig
from megaopt_core.errors import MegaoptError, PluginError
from megaopt_core.registry._registry import PluginRegistry, get_registry
from megaopt_core.registry._setting_owners import SettingInfo

if TYPE_CHECKING:
    from megaopt_core.parallel._groups import ProcessGroupCollection
    from megaopt_core.params._specs import ParamSpec
    from megaopt_core.plugin_api._entries import OptimizerEntry
    from megaopt_core.routing._routing import Routing

__all__ = ["Use", "unread_by_optimizers"]

_DECAY = ("decoupled_weight_decay", "cautious_weight_decay")
_DEFAULTS = {info.name: info.default for info in core_field_info()}


def _float_dtypes(params: Iterable[torch.Tensor]) -> frozenset[torch.dtype]:
    return frozenset(param.dtype for param in params if param.is_floating_point())


@frozen
class Use:
    """What a configuration is used for.

    Args:
        config: the configuration.
        dtypes: given as the trainable parameters of this rank, the dtypes of the floating-point ones; empty: nobody
            can say.
        routing: where every parameter goes; None for an optimizer that was wrapped.
        chunks: the model chunks, which some entries look at.
        pgs: the process groups, which some entries look at.
        scales_dynamically: the loss scale follows the configuration.
        by_runners: setting to why what runs the inner steps does not act on it.
        registry: the plugins.
        owners: every setting that a plugin adds, by its full name.
        entries: registered name to entry, of every optimizer in use; empty: one that was built by hand is wrapped.
    """

    config: OptimizerConfig
    dtypes: frozenset[torch.dtype] = field(converter=_float_dtypes)
    routing: Routing | None = None
    chunks: Sequence[torch.nn.Module] = ()
    pgs: ProcessGroupCollection | None = None
    scales_dynamically: bool = False
    by_runners: Mapping[str, str] = Factory(dict)
    registry: PluginRegistry = field(init=False, factory=get_registry)
    owners: Mapping[str, SettingInfo] = field(init=False)
    entries: Mapping[str, OptimizerEntry] = field(init=False)

    @owners.default
    def _owners_of_settings(self) -> Mapping[str, SettingInfo]:
        return self.registry.setting_owners()

    @entries.default
    def _entries_in_use(self) -> Mapping[str, OptimizerEntry]:
        used = () if self.routing is None else self.routing.children
        return {child.optimizer: self.registry.optimizer(child.optimizer) for child in used}

    @property
    def governing(self) -> set[str]:
        """The settings that govern in which dtypes optimizers in use keep their states."""
        return {key for entry in self.entries.values() for key in entry.state_dtype_settings.values()}

    def is_set(self, name: str) -> bool:
        """Return whether a core field differs from its default.

        Args:
            name: the field.
        """
        return bool(getattr(self.config, name) != _DEFAULTS[name])

    def says(self, name: str, why: str) -> str:
        """Return the sentence about one setting.

        Args:
            name: the setting.
            why: why nothing acts on it.
        """
        return f"{name}={shown(getattr(self.config, name))}: {why}"

    def says_of_set(self, names: Iterable[str], why: str) -> list[str]:
        """Return the sentences about those of some core fields that differ from their defaults.

        Args:
            names: the fields.
            why: why nothing acts on them.
        """
        return [self.says(name, why) for name in names if self.is_set(name)]


def unread_by_optimizers(use: Use) -> Iterator[str]:
    """Yield a sentence for every setting of optimizers that none in use reads, or that they say changes nothing.

    Args:
        use: the configuration, and what it is used for.
    """
    yield from _decay(use)
    yield from _of_other_optimizers(use)
    yield from (use.says(name, why) for name, why in _told_by_entries(use).items())


def _decay(use: Use) -> Iterator[str]:
    """Yield kinds of weight decay that an optimizer in use does not read: its constructor gets the same without."""
    for name in _DECAY:
        if not use.is_set(name):
            continue
        if use.routing is None:
            yield use.says(name, "the wrapped optimizer was built with its own")
            continue
        plain = use.config.replace(**{name: _DEFAULTS[name]})
        deaf = [each for each, entry in use.entries.items() if not _differs(use, entry, plain)]
        others = "".join(f", {each} does" for each in sorted(use.entries.keys() - set(deaf)))
        if deaf:
            yield use.says(name, f"{', '.join(sorted(deaf))} does not read it{others}")


def _of_other_optimizers(use: Use) -> Iterator[str]:
    if use.routing is None:
        return
    owners = use.owners
    prefixes = {prefix for entry in use.entries.values() for prefix in entry.setting_prefixes}
    used = ", ".join(sorted(use.entries))
    for name, value in use.config.plugin_settings.items():
        prefix = owners[name].prefix if name in owners else None
        if prefix is None or not (prefix in prefixes or _is_read(use, prefix) or _moves_fallback(use, name)):
            yield f"{name}={value!r}: no optimizer in use reads it ({used})"


def _told_by_entries(use: Use) -> dict[str, str]:
    """Return what optimizers say of their own settings: what all of those say that read a setting."""
    if use.routing is None:
        return {}
    specs = [route.spec for route in use.routing.params.values()]
    told = {name: _told_by(use, name, entry, specs) for name, entry in use.entries.items()}
    return {
        setting: why
        for said in told.values()
        for setting, why in said.items()
        if all(
            setting in told[name]
            for name, entry in use.entries.items()
            if use.owners[setting].prefix in entry.setting_prefixes
        )
    }


def _told_by(use: Use, name: str, entry: OptimizerEntry, specs: Sequence[ParamSpec]) -> Mapping[str, str]:
    if entry.unused_settings is None:
        return {}
    with use.registry.blaming("optimizer", name):
        told = entry.unused_settings(use.config, [spec for spec in specs if spec.optimizer == name])
        if not isinstance(told, Mapping) or any(setting not in use.owners for setting in told):
            raise PluginError(
                f"unused_settings returned {told!r}; it must map settings of plugins to reasons"
            )
    return told


def _is_read(use: Use, prefix: str) -> bool:
    """Whether an optimizer in use is built with settings of another's prefix, as SOAP is with Adam's."""
    without = _without(
        use,
        {
            name
            for name in use.config.plugin_settings
            if name in use.owners and use.owners[name].prefix == prefix
        },
    )
    return any(_differs(use, entry, without) for entry in use.entries.values())


def _moves_fallback(use: Use, name: str) -> bool:
    """Whether the run's optimizer, which steps nothing itself, chooses or sets its fallback by a setting."""
    entry, without = use.registry.optimizer(use.config.optimizer), _without(use, {name})
    with use.registry.blaming("optimizer", use.config.optimizer):
        rules = [rule for rule in (entry.fallback, entry.fallback_override) if callable(rule)]
        return any(rule(use.config) != rule(without) for rule in rules)


def _without(use: Use, names: Collection[str]) -> OptimizerConfig:
    """Return the configuration with some of its plugins' settings left at their defaults."""
    core = {name: getattr(use.config, name) for name in CORE_FIELD_NAMES}
    rest = {name: value for name, value in use.config.plugin_settings.items() if name not in names}
    return OptimizerConfig(**core, **rest)


def _differs(use: Use, entry: OptimizerEntry, other: OptimizerConfig) -> bool:
    """Whether an optimizer is built otherwise with another configuration."""
    try:
        mine, theirs = (
            constructor_kwargs(entry, config, use.chunks, use.pgs) for config in (use.config, other)
        )
    except (MegaoptError, ValueError):
        return True
    return not _equal(mine, theirs)


def _equal(left: Any, right: Any) -> bool:
    try:
        return left is right or bool(left == right)
    except (RuntimeError, ValueError):
        return False
