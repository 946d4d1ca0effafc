"""The suite: every check that an optimizer has to hold, and running them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from megaopt_core import OptimizerConfig
from megaopt_core.errors import UnknownNameError, UnknownSettingError
from megaopt_testing.check import BoundCheck, Check, CheckResult, Kind, subject
from megaopt_testing.checks.full_precision import check_full_precision
from megaopt_testing.checks.gradients import check_gradient_accumulation, check_non_finite_gradients
from megaopt_testing.checks.granularity import check_granularity, requires_elements
from megaopt_testing.checks.groups import check_group_settings
from megaopt_testing.checks.identity import check_no_silent_fallback, check_report
from megaopt_testing.checks.late_gradients import check_late_gradients
from megaopt_testing.checks.memory import check_own_memory, check_process_untouched
from megaopt_testing.checks.ownership import check_frozen_parameters, check_tied_parameters
from megaopt_testing.checks.reproducible import check_bit_exact_resume, check_deterministic
from megaopt_testing.checks.routing import check_meta_routing
from megaopt_testing.checks.schedule import check_one_schedule
from megaopt_testing.checks.settings import (
    check_settings_documented,
    check_settings_used,
    check_settings_validated,
    requires_settings,
)
from megaopt_testing.checks.settings_act import check_settings_act
from megaopt_testing.checks.shapes import check_shapes
from megaopt_testing.checks.split_step import check_split_step, requires_split_step
from megaopt_testing.checks.state import check_state_before_first_step
from megaopt_testing.checks.strides import check_strides
from megaopt_testing.checks.tensor_lr import check_tensor_lr
from megaopt_testing.checks.tensors import (
    check_gradients_untouched,
    check_no_gradients,
    check_state_dtypes,
    check_this_gradient,
    check_written_in_place,
)
from megaopt_testing.checks.training import check_learns, check_precision
from megaopt_testing.observer_checks import OBSERVER_CHECKS
from megaopt_testing.over_ranks.checks import (
    check_resume_over_ranks,
    check_sharded,
    check_world_sizes,
    requires_shards,
)
from megaopt_testing.processes import processes_missing
from megaopt_testing.role_checks import ROLE_CHECKS
from megaopt_testing.schedule_checks import SCHEDULE_CHECKS
from megaopt_testing.strategy_checks import STRATEGY_CHECKS

__all__ = ["CHECKS", "CHECKS_OF", "bound_checks", "require_settings", "run_checks"]

CHECKS: tuple[Check, ...] = (
    Check(
        "gradient_accumulation",
        "accumulated micro-batches step as the whole batch does",
        check_gradient_accumulation,
        hint="look at gradients in `step` alone: no hooks, no counting of backward passes",
    ),
    Check(
        "bit_exact_resume",
        "5 + 5 steps over a checkpoint are 10 steps, bit for bit",
        check_bit_exact_resume,
        hint="keep what a later step needs in `self.state[param]` or the group, as tensors, numbers and strings",
    ),
    Check(
        "non_finite_gradients",
        "an infinite gradient steps in fp32, and is skipped without a trace in bf16",
        check_non_finite_gradients,
        hint="make every step; the core decides which steps are skipped",
    ),
    Check(
        "tied_parameters",
        "a parameter that two modules share is stepped once",
        check_tied_parameters,
        hint="step the parameters of the groups, and draw random numbers per parameter",
    ),
    Check(
        "frozen_parameters",
        "parameters that do not train are left alone",
        check_frozen_parameters,
        hint="skip a parameter whose `grad` is None before anything is done to it",
    ),
    Check(
        "no_gradients",
        "a step without gradients changes nothing",
        check_no_gradients,
        hint="count steps and decay weights where there is a gradient",
    ),
    Check(
        "this_gradient",
        "every step uses the gradient of that step",
        check_this_gradient,
        hint="read `param.grad` of the step that is made",
    ),
    Check(
        "gradients_untouched",
        "a step only reads gradients",
        check_gradients_untouched,
        hint="work on a copy of `param.grad`, and leave zero_grad() to the caller",
    ),
    Check(
        "late_gradients",
        "a parameter whose first gradient comes late moves from then on",
        check_late_gradients,
        hint="make the state of a parameter when its first gradient comes",
    ),
    Check(
        "own_memory",
        "state shares memory with no gradient, parameter or other state",
        check_own_memory,
        hint="keep clones, one for each parameter",
    ),
    Check(
        "written_in_place",
        "parameters keep their memory",
        check_written_in_place,
        hint="write with `add_` and `copy_`, never `param.data = ...`",
    ),
    Check(
        "group_settings",
        "each group is stepped with its own settings",
        check_group_settings,
        hint='read every setting from the group in every step: `group["lr"]`',
    ),
    Check(
        "one_schedule",
        "one schedule moves every group, inner optimizers included",
        check_one_schedule,
        hint='read `group["lr"]` in every step, and write nothing into the group',
    ),
    Check(
        "settings_validated",
        "settings that cannot be are refused at construction",
        check_settings_validated,
        hint="give every field a validator of megaopt_core.config",
    ),
    Check(
        "settings_documented",
        "every setting has help",
        check_settings_documented,
        requires_settings,
        hint='write `field(..., metadata={"help": "what it does"})`',
    ),
    Check(
        "settings_used",
        "every setting is read",
        check_settings_used,
        requires_settings,
        hint="pass settings on in `config_to_kwargs`, or name the prefix in `setting_prefixes`",
    ),
    Check(
        "settings_act",
        "another value of a setting leads elsewhere",
        check_settings_act,
        requires_settings,
        hint='pass settings on, and use them in `step`; or say in metadata={"elsewhere": ...} where they act',
    ),
    Check(
        "no_silent_fallback",
        "it steps what it accepts in its own way, not as SGD or AdamW would",
        check_no_silent_fallback,
        hint="refuse in `accepts` what it cannot step, and name a `fallback`; or say `same_as`",
    ),
    Check(
        "state_before_first_step",
        "state is complete before the first step, and begins where the class would",
        check_state_before_first_step,
        hint="declare `state` in the entry, write an `init_state_fn`, or neither",
    ),
    Check(
        "state_dtypes",
        "state is kept in the dtypes that are declared",
        check_state_dtypes,
        hint="make state with `zeros_like(param)`, or declare `state_dtypes`",
    ),
    Check(
        "full_precision",
        "state in float32 is computed in float32",
        check_full_precision,
        hint="compute in the dtype of the parameter, and read gradients in their own",
    ),
    Check(
        "shapes",
        "numbers, single elements, rows and columns are stepped, or refused in words",
        check_shapes,
        hint="look at what a mean, a deviation or a product is for one element",
    ),
    Check(
        "strides",
        "the order of elements in memory does not matter",
        check_strides,
        hint="use `reshape` instead of `view`, and `zeros_like` for state",
    ),
    Check(
        "process_untouched",
        "a step changes no setting of the process, and seeds no random generator",
        check_process_untouched,
        hint="put back what a step needs otherwise, and use generators of your own",
    ),
    Check(
        "granularity",
        "slices of a tensor step as the whole, where it works element by element",
        check_granularity,
        requires_elements,
        hint='declare granularity="tensor" or "group", or a larger `alignment`',
    ),
    Check(
        "precision",
        "bf16 with main parameters steps as fp32 does",
        check_precision,
        hint="look at the tensors that are stepped, never at the model",
    ),
    Check(
        "learns",
        "the loss of a small GPT falls",
        check_learns,
        hint="give the kit a learning rate that suits: run_checks(name, lr=...)",
    ),
    Check(
        "deterministic",
        "the same seed gives the same bits",
        check_deterministic,
        hint="take random numbers from torch's default generator",
    ),
    Check(
        "split_step",
        "the step in three parts is the step, and its local parts are the same on any slice",
        check_split_step,
        requires_split_step,
        hint="let `local_updates` and `apply` do to slices what they do to wholes",
    ),
    Check(
        "report",
        "the report names every parameter and proves that a step changed it",
        check_report,
        hint="step every parameter that has a gradient",
    ),
    Check(
        "tensor_lr",
        "a learning rate that is a tensor steps as its number does, and is only read",
        check_tensor_lr,
        hint='multiply copies: `lr = group["lr"] * factor`, never `lr *= factor`',
    ),
    Check(
        "meta_routing",
        "a model on the meta device is routed as one with values",
        check_meta_routing,
        hint="let `accepts`, overrides and predicates go by names, shapes and roles",
    ),
    Check(
        "world_sizes",
        "1, 2 and 4 ranks with the same gradients step as one process",
        check_world_sizes,
        processes_missing,
        hint="use neither ranks nor process groups of your own",
    ),
    Check(
        "sharded",
        "shared out over 2 and 4 ranks, uneven and empty shares too, it steps as one process",
        check_sharded,
        requires_shards,
        hint="let the step of a parameter depend on nothing that is stepped beside it",
    ),
    Check(
        "resume_over_ranks",
        "saved by 2 ranks, loaded by 4 and then by 1, it goes on as if nothing had happened",
        check_resume_over_ranks,
        requires_shards,
        hint="keep state in `optimizer.state`, in the order of the parameter's elements",
    ),
)
"""Every check of optimizers, in the order in which they are run."""

CHECKS_OF: Mapping[Kind, tuple[Check, ...]] = {
    Kind.OPTIMIZER: CHECKS,
    Kind.STRATEGY: STRATEGY_CHECKS,
    Kind.SCHEDULE: SCHEDULE_CHECKS,
    Kind.ROLES: ROLE_CHECKS,
    Kind.OBSERVERS: OBSERVER_CHECKS,
}
"""Every check of each kind."""


def bound_checks(
    name: str,
    settings: Mapping[str, Any] | None = None,
    checks: Iterable[Check] | None = None,
    *,
    xfail: Mapping[str, str] | None = None,
    kind: Kind = Kind.OPTIMIZER,
) -> list[BoundCheck]:
    """Return the checks of one optimizer, or of what else it is, to be called one by one.

    Args:
        name: registered name; it is looked up when a check is made.
        settings: fields of the configuration.
        checks: the checks; by default all of the kind.
        xfail: check id to the reason why it is known not to hold.
        kind: what the name stands for.

    Raises:
        UnknownNameError: `xfail` names no such check.
        UnknownSettingError: a setting is given to what is checked without any: a strategy, say.

    Example:
        >>> [str(check) for check in bound_checks("mine")][:2]
        ['mine-gradient_accumulation', 'mine-bit_exact_resume']
    """
    listed = list(CHECKS_OF[kind] if checks is None else checks)
    expected, known = dict(xfail or {}), {check.id for check in listed}
    for unknown in sorted(set(expected) - known):
        raise UnknownNameError(
            f"xfail={unknown!r}: there is no such check; there are {', '.join(sorted(known))}", name=unknown
        )
    _require_taken(name, kind, settings or {}, listed)
    return [BoundCheck(check, name, settings or {}, expected.get(check.id)) for check in listed]


def require_settings(kind: Kind, name: str, settings: Mapping[str, Any]) -> None:
    """Raise at once for settings that no configuration takes, rather than in every check.

    Args:
        kind: what the name stands for; only optimizers are configured.
        name: registered name.
        settings: what was given for all checks.

    Raises:
        ConfigurationError: a setting that nobody has, or a value that it does not take.
    """
    if kind is Kind.OPTIMIZER and settings:
        OptimizerConfig(optimizer=name, **settings)


def _require_taken(name: str, kind: Kind, settings: Mapping[str, Any], checks: Iterable[Check]) -> None:
    for check in checks if settings else ():
        taken = inspect.signature(check.function).parameters
        if all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in taken.values()):
            for setting in settings:
                if setting not in taken:
                    raise UnknownSettingError(
                        f"{setting}: {name!r} is a {kind.value}, whose checks take no such setting",
                        setting=setting,
                    )


def run_checks(
    name: str,
    *,
    checks: Iterable[Check] | None = None,
    xfail: Mapping[str, str] | None = None,
    kind: Kind | str = Kind.OPTIMIZER,
    **settings: Any,
) -> list[CheckResult]:
    """Make every check of one optimizer, or of what else it is, and return what came of each.

    Args:
        name: registered name; of a reader of models, and of step observers, the name of their plugin.
        checks: the checks; by default all of the kind.
        xfail: check id to the reason why it is known not to hold; a check that holds all the same fails.
        kind: `"optimizer"`, `"strategy"`, `"schedule"`, `"roles"` or `"observers"`.
        **settings: fields of the configuration, such as `lr` and the optimizer's own.

    Returns:
        One result a check, in order. A failed check does not stop the others.

    Raises:
        PluginError: nobody offers this name.
        UnknownNameError: `xfail` names no such check.
        ConfigurationError: a setting that nobody has, or a value that it does not take.

    Example:
        >>> from megaopt_core import get_registry
        >>> for name in get_registry().optimizers():
        ...     assert all(result.ok for result in run_checks(name, checks=CHECKS[:1]))
    """
    subject(Kind(kind), name)
    require_settings(Kind(kind), name, settings)
    return [check.run() for check in bound_checks(name, settings, checks, xfail=xfail, kind=Kind(kind))]
