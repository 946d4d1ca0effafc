"""The entry that is generated for any optimizer class."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from attrs import evolve, frozen

from megaopt_bridge.arguments import Argument, arguments_of
from megaopt_bridge.initial_state import needs_closure
from megaopt_bridge.names import SOURCES, BridgedName
from megaopt_bridge.notes import param_notes
from megaopt_bridge.prepared import prepared
from megaopt_bridge.probing import SHAPES, Probe, probe
from megaopt_bridge.recipe import Recipe
from megaopt_bridge.recipes import recipe_of
from megaopt_bridge.sameness import first_steps_of
from megaopt_bridge.settings import settings_class
from megaopt_core import OptimizerEntry
from megaopt_core.errors import PluginError
from megaopt_core.params import Granularity

if TYPE_CHECKING:
    from megaopt_core import OptimizerConfig, ProcessGroupCollection
    from megaopt_core.params import MatrixView, ParamSpec

__all__ = ["bridged_entry"]

_COARSENESS = (Granularity.ELEMENT, Granularity.TENSOR, Granularity.GROUP)


@frozen(eq=False)
class _Bridged:
    """A class with what is known about it.

    Args:
        name: its name.
        defined: the class as its module has it.
        cls: what is made of it.
        arguments: of its constructor.
        settings: the settings class; None: it has no settings.
        recipe: what no probe can find out.
    """

    name: BridgedName
    defined: type[torch.optim.Optimizer]
    cls: type[torch.optim.Optimizer]
    arguments: Mapping[str, Argument]
    settings: type | None
    recipe: Recipe

    def kwargs(
        self,
        config: OptimizerConfig,
        model_chunks: Sequence[torch.nn.Module] = (),
        pg_collection: ProcessGroupCollection | None = None,
    ) -> dict[str, Any]:
        """Return the constructor arguments that a configuration means."""
        self._require_current()
        kwargs = dict(self.recipe.always)
        values = None if self.settings is None else config.settings(self.settings)
        for name, argument in self.arguments.items():
            if name in kwargs:
                continue
            if argument.core_field is not None:
                value = getattr(config, argument.core_field)
                if value is not None:
                    kwargs[name] = value
            elif argument.is_setting:
                kwargs[name] = getattr(values, name)
        return kwargs

    def _require_current(self) -> None:
        """Raise where the name has come to stand for another class: whoever kept this entry would step the old one."""
        module = None if self.name.source in SOURCES else sys.modules.get(self.name.source)
        if getattr(module, self.name.class_name, self.defined) is not self.defined:
            raise PluginError(
                f"optimizer '{self.name}' has been defined anew since it was first asked for; "
                "megaopt_core.registry.reset_registry() makes megaopt take the new one"
            )

    @property
    def usual_lr(self) -> float:
        """The class's own learning rate, where it has one."""
        own = self.arguments["lr"].default if "lr" in self.arguments else None
        return own if isinstance(own, float) and own > 0 else 1e-3

    def probe(self, kwargs: Mapping[str, Any]) -> Probe:
        """Probe the class as it is made with these arguments, once."""
        usual = {"lr": self.usual_lr, "weight_decay": 0.01}
        tried = {name: usual.get(name, value) for name, value in kwargs.items()}
        key = tuple(sorted((name, repr(value)) for name, value in tried.items()))
        if key not in _probes.setdefault(self.cls, {}):
            _probes[self.cls][key] = self._at_least(probe(self.cls, tried))
        return _probes[self.cls][key]

    def _at_least(self, found: Probe) -> Probe:
        least = self.recipe.granularity or Granularity.ELEMENT
        return evolve(found, granularity=max(found.granularity, least, key=_COARSENESS.index))

    def granularity_for(self, config: OptimizerConfig) -> Granularity:
        """Return the granularity with a configuration's settings."""
        return self.probe(self.kwargs(config)).granularity


_probes: WeakKeyDictionary[type[torch.optim.Optimizer], dict[tuple[tuple[str, str], ...], Probe]] = (
    WeakKeyDictionary()
)
_entries: dict[BridgedName, tuple[type[torch.optim.Optimizer], OptimizerEntry]] = {}


def bridged_entry(name: str) -> OptimizerEntry:
    """Return the entry of the optimizer class of a name.

    It is made once for a class, and anew where the name has come to stand for another one, as it does when a cell of a
    notebook is run again.

    Args:
        name: `source:Class`.

    Raises:
        UnknownNameError: there is no such class.
        PluginNotInstalledError: its package is not installed.
        PluginError: it cannot be stepped; the message says why.

    Example:
        >>> entry = bridged_entry("torch:NAdam")
        >>> entry.granularity.value, entry.setting_prefixes
        ('element', ('torch_nadam',))
    """
    # `torch:nadam` and `torch:NAdam` are one optimizer, with one settings class.
    found, cls = BridgedName.parse(name).find()
    known = _entries.get(found)
    if known is None or known[0] is not cls:
        known = _entries[found] = cls, _entry(found, cls)
    return known[1]


def _entry(name: BridgedName, cls: type[torch.optim.Optimizer]) -> OptimizerEntry:
    recipe = recipe_of(name.source, name.class_name)
    if recipe.refused:
        raise _refusal(name, recipe.refused)
    arguments = {key: value for key, value in arguments_of(cls).items() if key not in recipe.hidden}
    required = [arg.name for arg in arguments.values() if arg.is_required and arg.core_field is None]
    missing = [argument for argument in required if argument not in recipe.always]
    if missing:
        raise _refusal(
            name, f"its constructor needs {', '.join(map(repr, missing))}, which megaopt cannot give"
        )
    if needs_closure(cls):
        raise _refusal(name, "its step needs a closure: it evaluates the model several times a step")
    made = prepared(cls, {}, recipe.groups)
    settings = settings_class(made, arguments, recipe.always)
    bridged = _Bridged(name, cls, made, arguments, settings, recipe)
    kwargs = _default_kwargs(bridged)
    try:
        found = bridged.probe(kwargs)
    except Exception as error:
        raise _refusal(name, f"it fails on small tensors: {type(error).__name__}: {error}") from error
    if found.takes_nothing:
        raise _refusal(
            name, f"it steps no dense tensor: {found.refused.get(2, next(iter(found.refused.values())))}"
        )
    return OptimizerEntry(
        prepared(cls, found.presets, recipe.groups, waits=found.counts_empty),
        config_to_kwargs=bridged.kwargs,
        settings=settings,
        setting_prefixes=(name.setting_prefix,),
        granularity=found.granularity,
        granularity_for=bridged.granularity_for,
        alignment=found.alignment,
        accepts=partial(_accepts, name, found, recipe) if found.refused or recipe.matrices_only else None,
        fallback=recipe.fallback,
        scalar_states=found.scalars | {"step"},
        same_as=recipe.same_as or _same_as(made, kwargs, found),
        param_notes=param_notes(recipe, found, decays="weight_decay" in arguments),
        description=_description(name, cls),
        example=f'build_optimizer(model, "{name}", lr=1e-3)',
    )


def _same_as(cls: type[torch.optim.Optimizer], kwargs: Mapping[str, Any], found: Probe) -> str | None:
    """Return whose first steps a class shares; torch's own say by their name what they are."""
    if cls.__module__.partition(".")[0] == "torch":
        return None
    return first_steps_of(cls, kwargs, [shape for shape in SHAPES if len(shape) not in found.refused])


def _default_kwargs(bridged: _Bridged) -> dict[str, Any]:
    values = None if bridged.settings is None else bridged.settings()
    kwargs = {
        name: getattr(values, name)
        for name, argument in bridged.arguments.items()
        if argument.is_setting and name not in bridged.recipe.always
    }
    core = {"lr": 1e-3, "weight_decay": 0.01, "decoupled_weight_decay": True}
    for name, argument in bridged.arguments.items():
        if argument.core_field is not None:
            kwargs[name] = core[argument.core_field]
    return {**kwargs, **bridged.recipe.always}


def _accepts(
    name: BridgedName, found: Probe, recipe: Recipe, spec: ParamSpec, view: MatrixView | None
) -> str | None:
    if recipe.matrices_only and view is None:
        return f"{name} is meant for matrices"
    dims = len(spec.shape)
    refusal = found.refused.get(dims)
    return None if refusal is None else f"{name} takes no tensors of {dims} dimensions ({refusal})"


def _description(name: BridgedName, cls: type[torch.optim.Optimizer]) -> str:
    lines = inspect.cleandoc(cls.__doc__ or "").splitlines() or [""]
    first = lines[0].strip().rstrip(".")
    said = (
        first
        if 0 < len(first) < 100 and not first.startswith(('r"', ".."))
        else f"{name.class_name}, bridged"
    )
    return f"{said} ({name.origin})"


def _refusal(name: BridgedName, why: str) -> PluginError:
    return PluginError(f"optimizer '{name}' cannot be used: {why}")
