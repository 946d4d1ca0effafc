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

from megaopt_core.errors import ConformanceError
from megaopt_core.plugin_api import OptimizerEntry
from megaopt_core.registry import get_registry

__all__ = ["BoundCheck", "Check", "CheckResult", "CheckStatus"]

type CheckFunction = Callable[..., None]
"""Takes the optimizer's name and settings; returns when the check holds, else raises `ConformanceError`."""


def _no_requirement(_: OptimizerEntry) -> None:
    return None


@frozen
class Check:
    """One thing that holds for every optimizer.

    Args:
        id: a short name, unique in a suite; it ends up in the ids of tests.
        summary: what holds, in one line.
        function: `(optimizer_name, **settings)`; it raises `ConformanceError` when the check does not hold.
        requires: the entry to None when the check can be made of this optimizer, else why not, in words. A check
            that cannot be made is reported as skipped, never as passed.

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
    requires: Callable[[OptimizerEntry], str | None] = _no_requirement


@contextmanager
def _alone() -> Iterator[None]:
    """Compute with one thread, which small models are fastest with, and put the random state back afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(threads)


class CheckStatus(StrEnum):
    """What came of a check.

    `PASSED`: it holds. `FAILED`: it does not, or the plugin raised something unexpected. `SKIPPED`: it cannot be made
    of this optimizer.
    """

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@frozen
class CheckResult:
    """What came of one check of one optimizer.

    Args:
        id: the check's id.
        summary: what should hold.
        status: what came of it.
        message: why it failed or was skipped; empty when it passed.
        traceback: of an error that is no `ConformanceError`; empty otherwise.
        seconds: how long it took.
    """

    id: str
    summary: str
    status: CheckStatus
    message: str = ""
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
        optimizer: the optimizer's registered name.
        settings: settings of the optimizer's configuration.
    """

    check: Check
    optimizer: str
    settings: Mapping[str, Any] = Factory(dict)

    def __str__(self) -> str:
        return f"{self.optimizer}-{self.check.id}"

    def __call__(self) -> None:
        """Make the check.

        Raises:
            ConformanceError: it does not hold.
            unittest.SkipTest: it cannot be made of this optimizer; test runners show that as skipped.
        """
        reason = self.check.requires(get_registry().optimizer(self.optimizer))
        if reason is not None:
            raise unittest.SkipTest(reason)
        with _alone():
            self.check.function(self.optimizer, **self.settings)

    def run(self) -> CheckResult:
        """Make the check and return what came of it, whatever the plugin raises."""
        start = time.perf_counter()
        status, message, trace = CheckStatus.PASSED, "", ""
        try:
            self()
        except unittest.SkipTest as skipped:
            status, message = CheckStatus.SKIPPED, str(skipped)
        except ConformanceError as failed:
            status, message = CheckStatus.FAILED, str(failed)
        except Exception as error:  # noqa: BLE001 - a plugin may fail in any way; the result tells how
            status, message = CheckStatus.FAILED, f"{type(error).__name__}: {error}"
            trace = traceback.format_exc()
        seconds = time.perf_counter() - start
        return CheckResult(self.check.id, self.check.summary, status, message, trace, seconds)
