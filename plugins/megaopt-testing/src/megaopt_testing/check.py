"""What a check of the conformance kit is, and what came of one."""

from __future__ import annotations

import time
import traceback
import unittest
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import torch
from attrs import Factory, field, frozen

from megaopt_core.errors import ConformanceError, PluginError
from megaopt_core.registry import get_registry
from megaopt_testing.process_state import kept

__all__ = ["BoundCheck", "Check", "CheckResult", "CheckStatus", "DoesNotApply", "Kind", "subject"]

type CheckFunction = Callable[..., None]
"""Takes a name and settings; returns when the check holds, else raises `ConformanceError`."""


class Kind(StrEnum):
    """What a check looks at: what a plugin offers.

    `OPTIMIZER`: an entry of `megaopt_optimizer_entries`. `STRATEGY`: a sharding strategy. `SCHEDULE`: a style of
    learning rate or weight decay. `ROLES`: a reader of models, which is a plugin with `megaopt_annotate_params`.
    `OBSERVERS`: the step observers of a plugin, which has `megaopt_step_observers`.
    """

    OPTIMIZER = "optimizer"
    STRATEGY = "strategy"
    SCHEDULE = "schedule"
    ROLES = "roles"
    OBSERVERS = "observers"


def subject(kind: Kind, name: str) -> Any:
    """Return what a check looks at: an entry, a strategy, a style, or a loaded plugin.

    Args:
        kind: what it is.
        name: its registered name; of a reader of models, and of step observers, that of their plugin.

    Raises:
        PluginError: nobody offers it.
    """
    registry = get_registry()
    if kind is Kind.OPTIMIZER:
        return registry.optimizer(name)
    if kind is Kind.STRATEGY:
        return registry.strategy(name)
    if kind is Kind.SCHEDULE:
        return registry.schedule(name)
    hook, does = _HOOKS[kind]
    registry.load()
    for plugin in registry.loaded_plugins():
        if plugin.info.goes_by(name) and plugin.has(hook):
            return plugin
    raise PluginError(f"no plugin {name!r} {does}: none implements {hook}")


_HOOKS = {
    Kind.ROLES: ("megaopt_annotate_params", "says what parameters are"),
    Kind.OBSERVERS: ("megaopt_step_observers", "watches steps"),
}
"""Kinds that go by the name of a plugin: its hook, and what it does."""


class DoesNotApply(unittest.SkipTest):
    """Raised by a check that finds out, while it is made, that it cannot be made of this optimizer."""


def _no_requirement(_: Any) -> None:
    return None


@frozen
class Check:
    """One thing that holds for every optimizer, or for whatever else a plugin offers.

    Args:
        id: a short name, unique in a suite; it ends up in the ids of tests.
        summary: what holds, in one line.
        function: `(name, **settings)`; it raises `ConformanceError` when the check does not hold.
        requires: the entry (strategy, style, plugin) to None when the check can be made of it, else why not, in words.
            A check that cannot be made is reported as skipped, never as passed.
        hint: where to look first when it fails.
        kind: what it looks at.

    Example:
        >>> def check_described(optimizer, **settings):
        ...     if not get_registry().optimizer(optimizer).description:
        ...         raise ConformanceError("it has no description", optimizer=optimizer)
        >>> check = Check("described", "the entry has a description", check_described)
        >>> check.id
        'described'
    """

    id: str
    summary: str
    function: CheckFunction
    requires: Callable[[Any], str | None] = _no_requirement
    hint: str = ""
    kind: Kind = Kind.OPTIMIZER


@contextmanager
def _alone() -> Iterator[None]:
    """Compute with one thread, which small models are fastest with, and put back what a plugin leaves otherwise."""
    with kept(), torch.enable_grad():
        torch.set_num_threads(1)
        yield


class CheckStatus(StrEnum):
    """What came of a check.

    `PASSED`: it holds. `FAILED`: it does not, or the plugin raised something unexpected. `SKIPPED`: it cannot be made
    of this optimizer. `XFAILED`: it does not hold, as the author says with a reason.
    """

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    XFAILED = "xfailed"


@frozen
class CheckResult:
    """What came of one check of one optimizer.

    Args:
        id: the check's id.
        summary: what should hold.
        status: what came of it.
        message: why it failed or was skipped; empty when it passed.
        hint: where to look first; empty unless it failed.
        traceback: of an error that is no `ConformanceError`; empty otherwise.
        seconds: how long it took.
    """

    id: str
    summary: str
    status: CheckStatus
    message: str = ""
    hint: str = ""
    traceback: str = field(default="", repr=False)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """True unless the check failed."""
        return self.status is not CheckStatus.FAILED


@frozen
class BoundCheck:
    """A check of one optimizer with settings: call it in a test, or :meth:`run` it for a result.

    Args:
        check: the check.
        name: the registered name of the optimizer, or of what else the check looks at.
        settings: settings of the optimizer's configuration.
        xfail: why the check is known not to hold; None: it has to. One that holds all the same fails.
    """

    check: Check
    name: str
    settings: Mapping[str, Any] = Factory(dict)
    xfail: str | None = None

    def __str__(self) -> str:
        return f"{self.name}-{self.check.id}"

    def why_not(self) -> str | None:
        """Return why the check cannot be made, None when it can."""
        return self.check.requires(subject(self.check.kind, self.name))

    def __call__(self) -> None:
        """Make the check.

        Raises:
            ConformanceError: it does not hold, or holds and was not to.
            unittest.SkipTest: it cannot be made of this optimizer, or does not hold, as was expected; test runners show
                that as skipped.
        """
        reason = self.why_not()
        if reason is not None:
            raise DoesNotApply(reason)
        try:
            self._make()
        except DoesNotApply:
            raise
        except Exception as error:
            if self.xfail is None:
                raise
            raise _FailsAsExpected(f"{self.xfail} ({error})") from error
        if self.xfail is not None:
            raise ConformanceError(
                f"{self.check.id} was expected to fail ({self.xfail}), but passes: remove the xfail",
                optimizer=self.name,
            )

    def _make(self) -> None:
        import pytest

        try:
            with _alone():
                self.check.function(self.name, **self.settings)
        except DoesNotApply:
            raise
        except (unittest.SkipTest, pytest.skip.Exception) as skipped:  # the plugin's own code raised it
            raise ConformanceError(
                f"{self.check.id} skipped itself ({skipped}): only the kit decides which checks are skipped",
                optimizer=self.name,
            ) from skipped

    def run(self) -> CheckResult:
        """Make the check and return what came of it, whatever the plugin raises."""
        start = time.perf_counter()
        status, message, trace = CheckStatus.PASSED, "", ""
        try:
            self()
        except _FailsAsExpected as expected:
            status, message = CheckStatus.XFAILED, str(expected)
        except DoesNotApply as skipped:
            status, message = CheckStatus.SKIPPED, str(skipped)
        except ConformanceError as failed:
            status, message = CheckStatus.FAILED, str(failed)
        except Exception as error:  # noqa: BLE001 - a plugin may fail in any way; the result tells how
            status, message = CheckStatus.FAILED, f"{type(error).__name__}: {error}"
            trace = traceback.format_exc()
        seconds = time.perf_counter() - start
        hint = self.check.hint if status is CheckStatus.FAILED else ""
        return CheckResult(self.check.id, self.check.summary, status, message, hint, trace, seconds)


class _FailsAsExpected(DoesNotApply):
    """A check that does not hold, of which that was said."""
