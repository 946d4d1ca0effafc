"""The conformance kit: what holds for every optimizer, as checks that a plugin's author runs.

In a test file::

    from megaopt_testing import parametrize_with_checks

    @parametrize_with_checks("mine", lr=0.01, mine_beta=0.5)
    def test_conformance(check):
        check()

On the command line: `python -m megaopt_testing mine`, or with megaopt-tools `megaopt check-plugin mine`.

Public names are imported when they are first used: adding a command needs no torch.
"""

from typing import TYPE_CHECKING

from megaopt_core.plugin_api import resolve_lazily

if TYPE_CHECKING:
    from megaopt_testing.check import BoundCheck, Check, CheckResult, CheckStatus, Kind
    from megaopt_testing.checks.full_precision import check_full_precision
    from megaopt_testing.checks.gradients import check_gradient_accumulation, check_non_finite_gradients
    from megaopt_testing.checks.granularity import check_granularity
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
    )
    from megaopt_testing.checks.settings_act import check_settings_act
    from megaopt_testing.checks.shapes import check_shapes
    from megaopt_testing.checks.split_step import check_split_step
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
    from megaopt_testing.formula import formula_check
    from megaopt_testing.models import SharedBlocks, TinyGPT
    from megaopt_testing.over_ranks.checks import check_resume_over_ranks, check_sharded, check_world_sizes
    from megaopt_testing.parametrize import parametrize_with_checks
    from megaopt_testing.partition import require_partition
    from megaopt_testing.plugins import temporary_plugin
    from megaopt_testing.processes import run_ranks
    from megaopt_testing.run_command import run_command
    from megaopt_testing.suite import CHECKS, CHECKS_OF, run_checks

__all__ = [
    "CHECKS",
    "CHECKS_OF",
    "BoundCheck",
    "Check",
    "CheckResult",
    "CheckStatus",
    "Kind",
    "SharedBlocks",
    "TinyGPT",
    "check_bit_exact_resume",
    "check_deterministic",
    "check_frozen_parameters",
    "check_full_precision",
    "check_gradient_accumulation",
    "check_gradients_untouched",
    "check_granularity",
    "check_group_settings",
    "check_late_gradients",
    "check_learns",
    "check_meta_routing",
    "check_no_gradients",
    "check_no_silent_fallback",
    "check_non_finite_gradients",
    "check_one_schedule",
    "check_own_memory",
    "check_precision",
    "check_process_untouched",
    "check_report",
    "check_resume_over_ranks",
    "check_settings_act",
    "check_settings_documented",
    "check_settings_used",
    "check_settings_validated",
    "check_shapes",
    "check_sharded",
    "check_split_step",
    "check_state_before_first_step",
    "check_state_dtypes",
    "check_strides",
    "check_tensor_lr",
    "check_this_gradient",
    "check_tied_parameters",
    "check_world_sizes",
    "check_written_in_place",
    "formula_check",
    "parametrize_with_checks",
    "require_partition",
    "run_checks",
    "run_command",
    "run_ranks",
    "temporary_plugin",
]

_HOME = {
    "BoundCheck": "check",
    "CHECKS": "suite",
    "CHECKS_OF": "suite",
    "Check": "check",
    "CheckResult": "check",
    "CheckStatus": "check",
    "Kind": "check",
    "SharedBlocks": "models",
    "TinyGPT": "models",
    "check_bit_exact_resume": "checks.reproducible",
    "check_deterministic": "checks.reproducible",
    "check_frozen_parameters": "checks.ownership",
    "check_full_precision": "checks.full_precision",
    "check_gradient_accumulation": "checks.gradients",
    "check_gradients_untouched": "checks.tensors",
    "check_granularity": "checks.granularity",
    "check_group_settings": "checks.groups",
    "check_late_gradients": "checks.late_gradients",
    "check_learns": "checks.training",
    "check_meta_routing": "checks.routing",
    "check_no_gradients": "checks.tensors",
    "check_no_silent_fallback": "checks.identity",
    "check_non_finite_gradients": "checks.gradients",
    "check_one_schedule": "checks.schedule",
    "check_own_memory": "checks.memory",
    "check_precision": "checks.training",
    "check_process_untouched": "checks.memory",
    "check_report": "checks.identity",
    "check_resume_over_ranks": "over_ranks.checks",
    "check_settings_act": "checks.settings_act",
    "check_settings_documented": "checks.settings",
    "check_settings_used": "checks.settings",
    "check_settings_validated": "checks.settings",
    "check_shapes": "checks.shapes",
    "check_sharded": "over_ranks.checks",
    "check_split_step": "checks.split_step",
    "check_state_before_first_step": "checks.state",
    "check_state_dtypes": "checks.tensors",
    "check_strides": "checks.strides",
    "check_tensor_lr": "checks.tensor_lr",
    "check_this_gradient": "checks.tensors",
    "check_tied_parameters": "checks.ownership",
    "check_world_sizes": "over_ranks.checks",
    "check_written_in_place": "checks.tensors",
    "formula_check": "formula",
    "parametrize_with_checks": "parametrize",
    "require_partition": "partition",
    "run_checks": "suite",
    "run_command": "run_command",
    "run_ranks": "processes",
    "temporary_plugin": "plugins",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = resolve_lazily(__name__, _HOME)
