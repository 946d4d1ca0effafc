"""The observers of an optimizer: asked for once, called in order, their plugins named in errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from attrs import field, frozen

from megaopt_core.errors import MegaoptError, PluginError
from megaopt_core.parallel._agreement import Comparison
from megaopt_core.plugin_api._observers import Change, ReportLine, StepObserver, StepOutcome, VoteSpec
from megaopt_core.registry._faults import words_of
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
    _with: Mapping[str, Sequence[tuple[PluginInfo, StepObserver]]] = field(init=False)
    """Method to the observers that define it."""

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

    @property
    def vote_specs(self) -> tuple[VoteSpec, ...]:
        """The votes of all."""
        return tuple(spec for _, observer in self.members for spec in observer.vote_specs)

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
        for plugin, observer in self._with["built"]:
            with _blaming(plugin, observer, "built"):
                observer.built()

    def before_step(self) -> None:
        """Let all look at groups and model; the first error is raised when all have looked."""
        refused: Exception | None = None
        for plugin, observer in self._with["before_step"]:
            try:
                observer.before_step()
            except Exception as error:  # noqa: BLE001 - kept until other ranks have heard of it
                refused = refused or _named(plugin, observer, "before_step", error)
        if refused is not None:
            raise refused

    def votes(self) -> dict[str, int | torch.Tensor]:
        """Return the votes of all on this rank.

        Raises:
            PluginError: an observer has failed, or gave a vote that it has not declared.
        """
        said: dict[str, int | torch.Tensor] = {}
        for plugin, observer in self._with["votes"]:
            try:
                mine = observer.votes()
            except Exception as error:
                raise _named(plugin, observer, "votes", error) from error
            said |= mine
        unknown = said.keys() - {spec.name for _, observer in self.members for spec in observer.vote_specs}
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
            with _blaming(plugin, observer, "decide"):
                settled.update(observer.decide(mine))
        return settled

    def after_step(self, outcome: StepOutcome) -> None:
        """Tell all how a step has ended.

        Args:
            outcome: how.
        """
        for plugin, observer in self._with["after_step"]:
            with _blaming(plugin, observer, "after_step"):
                observer.after_step(outcome)

    def changing(self, what: Change) -> None:
        """Let all look before a change between steps.

        Args:
            what: the change.
        """
        for plugin, observer in self._with["changing"]:
            with _blaming(plugin, observer, "changing"):
                observer.changing(what)

    def changed(self, what: Change) -> None:
        """Tell all of a change between steps.

        Args:
            what: the change.
        """
        for plugin, observer in self._with["changed"]:
            with _blaming(plugin, observer, "changed"):
                observer.changed(what)

    def before_save(self) -> None:
        """Let all look at what is about to be saved."""
        for plugin, observer in self._with["before_save"]:
            with _blaming(plugin, observer, "before_save"):
                observer.before_save()

    def check(self) -> list[str]:
        """Return the problems that all find; a collective."""
        found: list[str] = []
        for plugin, observer in self._with["check"]:
            with _blaming(plugin, observer, "check"):
                found += observer.check()
        return found

    def report_lines(self) -> list[ReportLine]:
        """Return the lines that all add to a report."""
        found: list[ReportLine] = []
        for plugin, observer in self._with["report_lines"]:
            with _blaming(plugin, observer, "report_lines"):
                found += observer.report_lines()
        return found


def _called(observer: StepObserver) -> str:
    return f"step observer {type(observer).__name__}"


def _named(plugin: PluginInfo, observer: StepObserver, method: str, error: Exception) -> Exception:
    """Return an error that names the plugin, unless it is one of megaopt's own, which say what they are about."""
    if isinstance(error, (MegaoptError, Warning)):
        return error
    named = PluginError(f"{_called(observer)} of {plugin} failed in {method}(): {words_of(error)}")
    named.__cause__ = error
    return named


@contextmanager
def _blaming(plugin: PluginInfo, observer: StepObserver, method: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        named = _named(plugin, observer, method, error)
        if named is error:
            raise
        raise named from error
