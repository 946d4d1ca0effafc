"""Every check catches the optimizers that it is for, and lets a good one pass."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from attrs import evolve
from megaopt_testing import CHECKS, CheckStatus, check_no_silent_fallback, run_checks, temporary_plugin

from megaopt_core import OptimizerEntry, build_optimizer, hookimpl
from megaopt_core.errors import PluginError

pytestmark = pytest.mark.any_python


def _module(name: str) -> ModuleType:
    """Import a file that stands beside this one, wherever the folder lies."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # one imports the other
    spec.loader.exec_module(module)
    return module


BAD, STRANGE, SUBTLE = map(_module, ("bad_optimizers", "bad_strangers", "bad_subtle"))
ENTRIES = {**BAD.ENTRIES, **STRANGE.ENTRIES, **SUBTLE.ENTRIES}

# What the message tells the author, beside the optimizer's name.
HELP = {
    "accumulates_in_half": "hold only float16 numbers",
    "reads_half_of_gradients": "the step rounds gradients first",
    "rounds_parameters": "hold only bfloat16 numbers",
    "keeps_the_gradient_itself": "and a gradient",
    "shares_state_by_shape": "Keep copies",
    "begins_once": "when its first gradient comes",
    "skips_numbers": "does not move, but one of shape",
    "divides_by_deviations": "A standard deviation of one element",
    "needs_plain_order": "raises RuntimeError: view size",
    "writes_in_memorys_order": "Use `reshape`, not `view`",
    "seeds_the_process": "Use a torch.Generator of your own",
    "sets_the_precision": "Restore it before the step returns",
    "never_maximizes": "switched_maximize does nothing: True",
    "skips_non_finite_parameters": "do not skip a parameter yourself",
    "counts_empty_steps": "count steps and decay weights only where there is a gradient",
    "uses_the_previous_gradient": "and not a kept one",
    "zeroes_gradients": "leave zero_grad() to the caller",
    "drops_gradients": "leave zero_grad() to the caller",
    "clips_in_place": "Work on a copy",
    "rebinds_data": "never `param.data = ...`",
    "uses_the_first_group": "Read `group['lr']` in every step",
    "never_decays": "Read `group['weight_decay']` in every step",
    "reads_its_constructor": "Read `group['beta']` in every step",
    "decays_as_constructed": "Read `group['weight_decay']` in every step",
    "keeps_half_precision": "`state_dtypes` does not say so",
    "normalizes_what_it_is_given": 'declare granularity="tensor"',
    "looks_at_the_model": "does it read the model instead?",
    "ascends": "give the kit one: run_checks(name, lr=...)",
    "crawls": "it must fall to 0.95 of the first at most",
    "writes_its_learning_rate": "changes or replaces the tensor that is its learning rate",
    "needs_a_number": "raises TypeError for a learning rate that is a tensor: lr must",
    "routes_by_values": "routing a model on the meta device raises",
    "routes_by_device": "a model on the meta device gets another routing",
    "scales_by_ranks": "Use neither ranks nor process groups of your own",
    "seeds_by_rank": "random numbers from torch's default generator",
    "goes_by_what_is_beside": "may not depend on other parameters of the same step",
    "averages_in_group": "may not depend on other parameters of the same step",
    "keeps_state_backwards": "Its state must have the order of the parameter's elements",
    "shares_steps_with_another": "Declare `same_as` only for shared steps",
    "counts_backwards": "the gradient of 4 micro-batches gives another step",
    "forgets_on_resume": "in `optimizer.state` or in the group, not in attributes",
    "keeps_objects_in_state": "torch.load(weights_only=True)",
    "skips_non_finite": "do not skip it yourself",
    "refuses_non_finite": "raises FloatingPointError: infinite gradient",
    "remembers_non_finite": "changes the next step",
    "steps_tied_twice": "Step only the parameters of the groups",
    "decays_without_gradient": "before weight decay too",
    "ignores_schedule": "Read `group['lr']` in every step",
    "schedules_itself": "a step changes lr of group 0 from 0.005 to 0.0045",
    "unchecked_settings": "OptimizerConfig accepts unchecked_beta='much'",
    "unbounded_settings": "accepts unbounded_beta=-1e+30 and 1e+30",
    "silent_settings": "settings without help: silent_beta",
    "ignored_settings": "no build reads the settings signum_beta",
    "falls_back_to_sgd": "as plain SGD with its learning rate does",
    "falls_back_to_adamw": "as AdamW with its learning rate does",
    "makes_state_late": "make it in init_state_fn, or declare it in the entry: state={'momentum': 'param'}",
    "declares_other_state": "declare it in the entry: state={'momentum': 'param'}",
    "starts_elsewhere": "other first steps than StartsElsewhere alone",
    "moves_parameters_at_build": "the build moves",
    "jitters_on_plateaus": "Draw random numbers from torch's default generator",
    "transforms_otherwise": "step() and its three parts over whole tensors differ",
    "promises_other_state": "init_state makes other state of slices (row-major ranges) than local_updates",
    "normalizes_slices": "local_updates returns other updates for slices (row-major ranges) than for wholes",
    "goes_by_slices": "apply gives other results for slices (row-major ranges)",
    "does_nothing": "a step with non-zero gradients does not change",
    **STRANGE.HELP,
    **SUBTLE.HELP,
}


class Plugin:
    """The good optimizer and all bad ones."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        bad = {name: entry for name, (_, entry) in ENTRIES.items()}
        return {"signum": OptimizerEntry(**BAD.GOOD), **bad}


@pytest.fixture(autouse=True, scope="module")
def _plugin() -> Iterator[None]:
    with temporary_plugin(Plugin(), name="bad-optimizers"):
        yield


def test_a_good_optimizer_passes_everything() -> None:
    """No check fails, or skips, an optimizer that does all as it should."""
    assert {result.id: result.status for result in run_checks("signum")} == {
        check.id: CheckStatus.PASSED for check in CHECKS
    }


@pytest.mark.parametrize("name", ENTRIES)
def test_a_bad_optimizer_fails_the_check_that_it_is_for(name: str) -> None:
    """The message names the optimizer and says what to mend; nothing unexpected is raised on the way."""
    # Other checks are spared it: what they refuse without a reason, honest optimizers show.
    intended = ENTRIES[name][0]
    (result,) = run_checks(name, checks=[check for check in CHECKS if check.id == intended])
    assert result.status is CheckStatus.FAILED
    assert result.message.startswith(f"{name!r}: ")
    assert HELP[name] in result.message
    assert result.traceback == ""
    assert result.hint


def test_an_optimizer_that_says_whose_steps_it_shares_is_no_silent_fallback() -> None:
    """The report says it too."""
    entry = evolve(
        ENTRIES["falls_back_to_adamw"][1], same_as="torch.optim:AdamW", settings=None, setting_prefixes=()
    )

    class Plugin:
        megaopt_api = "1"

        @hookimpl
        def megaopt_optimizer_entries(self):
            return {"open_variant": entry}

    with temporary_plugin(Plugin(), name="open-variant"):
        check_no_silent_fallback("open_variant")
        report = build_optimizer(torch.nn.Linear(3, 3), "open_variant", lr=0.1).report()
    assert [part.same_as for part in report.parts] == ["torch.optim:AdamW"]
    assert "(as torch.optim:AdamW)" in report.summary()


@pytest.mark.parametrize("wrong", ["AdamW", 3, "torch.optim:", torch.optim.AdamW])
def test_same_as_names_a_class(wrong) -> None:
    """Another form would be compared with nothing, silently."""
    with pytest.raises(PluginError, match=r"same_as=.*must be \"module:Class\""):
        OptimizerEntry(torch.optim.SGD, same_as=wrong)


def test_every_check_has_an_optimizer_that_it_catches() -> None:
    """A check that nothing can fail proves nothing."""
    assert {intended for intended, _ in ENTRIES.values()} == {check.id for check in CHECKS}
