"""The suite: every check that an optimizer has to hold, and running them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megaopt_core.registry import get_registry
from megaopt_testing.check import BoundCheck, Check, CheckResult
from megaopt_testing.checks.gradients import check_gradient_accumulation, check_non_finite_gradients
from megaopt_testing.checks.granularity import check_granularity, requires_elements
from megaopt_testing.checks.groups import check_group_settings
from megaopt_testing.checks.identity import check_no_silent_fallback, check_report
from megaopt_testing.checks.ownership import check_frozen_parameters, check_tied_parameters
from megaopt_testing.checks.reproducible import check_bit_exact_resume, check_deterministic
from megaopt_testing.checks.schedule import check_one_schedule
from megaopt_testing.checks.settings import (
    check_settings_documented,
    check_settings_used,
    check_settings_validated,
    requires_settings,
)
from megaopt_testing.checks.split_step import check_split_step, requires_split_step
from megaopt_testing.checks.state import check_state_before_first_step
from megaopt_testing.checks.tensors import (
    check_gradients_untouched,
    check_no_gradients,
    check_state_dtypes,
    check_this_gradient,
    check_written_in_place,
)
from megaopt_testing.checks.training import check_learns, check_precision

__all__ = ["CHECKS", "bound_checks", "run_checks"]

CHECKS: tuple[Check, ...] = (
    Check(
        "gradient_accumulation",
        "accumulated micro-batches step as the whole batch does",
        check_gradient_accumulation,
    ),
    Check(
        "bit_exact_resume", "5 + 5 steps over a checkpoint are 10 steps, bit for bit", check_bit_exact_resume
    ),
    Check(
        "non_finite_gradients",
        "an infinite gradient steps in fp32, and is skipped without a trace in bf16",
        check_non_finite_gradients,
    ),
    Check("tied_parameters", "a parameter that two modules share is stepped once", check_tied_parameters),
    Check("frozen_parameters", "parameters that do not train are left alone", check_frozen_parameters),
    Check("no_gradients", "a step without gradients changes nothing", check_no_gradients),
    Check("this_gradient", "every step uses the gradient of that step", check_this_gradient),
    Check("gradients_untouched", "a step only reads gradients", check_gradients_untouched),
    Check("written_in_place", "parameters keep their memory", check_written_in_place),
    Check("group_settings", "each group is stepped with its own settings", check_group_settings),
    Check("one_schedule", "one schedule moves every group, inner optimizers included", check_one_schedule),
    Check(
        "settings_validated", "settings that cannot be are refused at construction", check_settings_validated
    ),
    Check("settings_documented", "every setting has help", check_settings_documented, requires_settings),
    Check("settings_used", "every setting is read", check_settings_used, requires_settings),
    Check(
        "no_silent_fallback",
        "it steps what it accepts in its own way, not as SGD or AdamW would",
        check_no_silent_fallback,
    ),
    Check(
        "state_before_first_step",
        "state is complete before the first step, and begins where the class would",
        check_state_before_first_step,
    ),
    Check("state_dtypes", "state is kept in the dtypes that are declared", check_state_dtypes),
    Check(
        "granularity",
        "slices of a tensor step as the whole, where it works element by element",
        check_granularity,
        requires_elements,
    ),
    Check("precision", "bf16 with main parameters steps as fp32 does", check_precision),
    Check("learns", "the loss of a small GPT falls", check_learns),
    Check("deterministic", "the same seed gives the same bits", check_deterministic),
    Check(
        "split_step",
        "the step in three parts is the step, and its local parts are the same on any slice",
        check_split_step,
        requires_split_step,
    ),
    Check("report", "the report names every parameter and proves that a step changed it", check_report),
)
"""Every check, in the order in which they are run."""


def bound_checks(
    optimizer: str, settings: dict[str, Any] | None = None, checks: Iterable[Check] = CHECKS
) -> list[BoundCheck]:
    """Return the checks of one optimizer, to be called one by one.

    Args:
        optimizer: registered name; it is looked up when a check is made.
        settings: fields of the configuration.
        checks: the checks; by default all.

    Example:
        >>> [str(check) for check in bound_checks("mine")][:2]
        ['mine-gradient_accumulation', 'mine-bit_exact_resume']
    """
    return [BoundCheck(check, optimizer, settings or {}) for check in checks]


def run_checks(name: str, *, checks: Iterable[Check] = CHECKS, **settings: Any) -> list[CheckResult]:
    """Make every check of one optimizer and return what came of each.

    Args:
        name: registered name.
        checks: the checks; by default all.
        **settings: fields of the configuration, such as `lr` and the optimizer's own.

    Returns:
        One result a check, in order. A failed check does not stop the others.

    Raises:
        PluginError: no optimizer of this name is installed.

    Example:
        >>> from megaopt_core import get_registry
        >>> for name in get_registry().optimizers():
        ...     assert all(result.ok for result in run_checks(name, checks=CHECKS[:1]))
    """
    get_registry().optimizer(name)
    return [check.run() for check in bound_checks(name, settings, checks)]
