"""The observers of an optimizer: asked for once, called in order, their plugins named in errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import field, frozen

from megaopt_core.errors import PluginError
from megaopt_core.parallel._agreement import Comparison
from megaopt_core.plugin_api._observers import Change, ReportLine, StepObserver, StepOutcome, VoteSpec
from megaopt_core.registry._faults import call_blaming
from megaopt_core.registry._infos import PluginInfo
from megaopt_core.registry._registry import get_registry

if TYPE_CHECKING:
    from megaopt_core.optimizers._base import MegatronOptimizer

__all__ = ["Observers"]


@frozen(eq=False)
class Observers:
    """Observers with the plugins that brought them, in an order that is the same on every rank.

    Args:
        members: plugin and observer.
    """

    members: Sequence[tuple[PluginInfo, StepObserver]] = ()
    vote_specs: tuple[VoteSpec, ...] = field(init=False)
    """The votes of all."""
    _with: Mapping[str, Sequence[tuple[PluginInfo, StepObserver]]] = field(init=False)
    """Method to the observers that define it."""

    @vote_specs.default
    def _votes_of_all(self) -> tuple[VoteSpec, ...]:
        return tuple(spec for _, observer in self.members for spec in observer.vote_specs)

    @_with.default
    def _defining(self) -> Mapping[str, Sequence[tuple[PluginInfo, StepObserver]]]:
        return {
            method: [
                (plugin, observer)
                for plugin, observer in self.members
                if getattr(type(observer), method) is not getattr(StepObserver, method)
            ]
            for method in vars(StepObserver)
            if not method.startswith("_") and method != "vote_specs"
        }

    @classmethod
    def of(cls, optimizer: MegatronOptimizer) -> Observers:
        """Ask all plugins for the observers of an optimizer.

        Args:
            optimizer: the optimizer whose `step` is called.

        Raises:
            PluginError: a plugin failed, or gave something else.
        """
        members: list[tuple[PluginInfo, StepObserver]] = []
        for plugin, given in get_registry().call_each("megaopt_step_observers", optimizer=optimizer):
            if isinstance(given, StepObserver) or not all(isinstance(each, StepObserver) for each in given):
                raise PluginError(
                    f"megaopt_step_observers of {plugin} returned {given!r}; it must return a list of StepObservers"
                )
            members += [(plugin, each) for each in given]
        found = cls(members)
        found.require_own_votes()
        return found

    def require_own_votes(self) -> None:
        """Raise where two votes have one name, or a vote has the name of one of the core's.

        Raises:
            PluginError: it names both plugins.
        """
        owners: dict[str, PluginInfo] = {}
        for plugin, observer in self.members:
            for spec in observer.vote_specs:
                if "." not in spec.name:
                    raise PluginError(
                        f"{_called(observer)} of {plugin} has a vote {spec.name!r}; it is named 'plugin.question'"
                    )
                if spec.name in owners:
                    raise PluginError(
                        f"{_called(observer)} of {plugin} has a vote {spec.name!r}, as {owners[spec.name]} has"
                    )
                owners[spec.name] = plugin

    def alike(self) -> Comparison:
        """Return what all ranks must have alike: which votes there are."""
        rows = [
            (
                f"vote {spec.name!r} of {_called(observer)} of {plugin}",
                {"rule": spec.rule, "stops": str(spec.stops)},
            )
            for plugin, observer in self.members
            for spec in observer.vote_specs
        ]
        return Comparison.of_rows("the votes of step observers", rows, None)

    def built(self) -> None:
        """Tell all that the optimizer is complete."""
        self._call("built")

    def before_step(self) -> None:
        """Let all look at groups and model; the first error is raised when all have looked."""
        refused: Exception | None = None
        for plugin, observer in self._with["before_step"]:
            try:
                _ask(plugin, observer, "before_step")
            except Exception as error:  # noqa: BLE001 - kept until other ranks have heard of it
                refused = refused or error
        if refused is not None:
            raise refused

    def votes(self) -> dict[str, int | torch.Tensor]:
        """Return the votes of all on this rank.

        Raises:
            PluginError: an observer has failed, or gave a vote that it has not declared.
        """
        said: dict[str, int | torch.Tensor] = {}
        for mine in self._call("votes"):
            said |= mine
        unknown = said.keys() - {spec.name for spec in self.vote_specs}
        if unknown:
            raise PluginError(
                f"step observers gave votes that none has declared: {', '.join(sorted(unknown))}"
            )
        return said

    def decide(self, fired: Mapping[str, bool]) -> set[str]:
        """Let all act on votes; return the votes that are settled.

        Args:
            fired: every vote.
        """
        settled: set[str] = set()
        for plugin, observer in self._with["decide"]:
            mine = {spec.name: fired[spec.name] for spec in observer.vote_specs}
            settled.update(_ask(plugin, observer, "decide", mine))
        return settled

    def after_step(self, outcome: StepOutcome) -> None:
        """Tell all how a step has ended.

        Args:
            outcome: how.
        """
        self._call("after_step", outcome)

    def changing(self, what: Change) -> None:
        """Let all look before a change between steps.

        Args:
            what: the change.
        """
        self._call("changing", what)

    def changed(self, what: Change) -> None:
        """Tell all of a change between steps.

        Args:
            what: the change.
        """
        self._call("changed", what)

    def before_save(self) -> None:
        """Let all look at what is about to be saved."""
        self._call("before_save")

    def check(self) -> list[str]:
        """Return the problems that all find; a collective."""
        return [problem for found in self._call("check") for problem in found]

    def report_lines(self) -> list[ReportLine]:
        """Return the lines that all add to a report."""
        return [line for lines in self._call("report_lines") for line in lines]

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all observers that define it, in order; return their answers."""
        return [_ask(plugin, observer, method, *arguments) for plugin, observer in self._with[method]]


def _called(observer: StepObserver) -> str:
    return f"step observer {type(observer).__name__}"


def _ask(plugin: PluginInfo, observer: StepObserver, method: str, *arguments: Any) -> Any:
    """Return what a method of an observer answers; its plugin is named in an error."""
    return call_blaming(
        lambda: f"{_called(observer)} of {plugin} failed in {method}()",
        getattr(observer, method),
        *arguments,
    )
