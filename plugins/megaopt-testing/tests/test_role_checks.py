"""Checks of readers of models: one that only looks passes, and each check catches a reader that it is for."""

from typing import Any

import pytest
import torch
from megaopt_testing import CheckStatus, run_checks, temporary_plugin
from megaopt_testing.role_checks import ROLE_CHECKS
from torch import nn

from megaopt_core import MatrixView, Role, get_registry, hookimpl
from megaopt_core.params import RoleDecision


class Reader:
    """Says that the weights of linear layers are matrices."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_annotate_params(self, model_chunk: nn.Module, example: Any = None) -> dict[str, Any]:
        return {
            f"{name}.weight" if name else "weight": self.says(module)
            for name, module in model_chunk.named_modules()
            if type(module) is nn.Linear
        }

    def says(self, module: nn.Linear) -> Any:
        return RoleDecision(Role.MATRIX, "the weight of a linear layer")


class NeedsTransformers(Reader):
    def says(self, module: nn.Linear) -> Any:
        return module.config


class SaysText(Reader):
    def says(self, module: nn.Linear) -> Any:
        return "matrix"


class WrongView(Reader):
    def says(self, module: nn.Linear) -> Any:
        return MatrixView(split_dim=0, split_sizes=(1, 1, 1))


class ReadsValues(Reader):
    def says(self, module: nn.Linear) -> Any:
        return RoleDecision(
            Role.MATRIX if module.weight.device.type == "cpu" else Role.ELEMENTWISE, "by its device"
        )


class LeavesMarks(Reader):
    def says(self, module: nn.Linear) -> Any:
        module.weight.seen = True
        return super().says(module)


class Draws(Reader):
    def says(self, module: nn.Linear) -> Any:
        torch.rand(())
        return super().says(module)


class Silent(Reader):
    def says(self, module: nn.Linear) -> Any:
        return RoleDecision(Role.MATRIX, " ")


BAD = {
    NeedsTransformers: ("any_model", "say nothing of what it does not know"),
    SaysText: ("any_model", "says what a parameter is"),
    WrongView: ("any_model", "its view of"),
    ReadsValues: ("meta_alike", "on the meta device"),
    LeavesMarks: ("model_untouched", "a reader only looks"),
    Draws: ("model_untouched", "draws random numbers"),
    Silent: ("reasons", "it gives no reason"),
}
"""Reader to the check that it fails, and what the message says."""


def test_a_good_reader_passes() -> None:
    """It says what it knows, and nothing else."""
    with temporary_plugin(Reader(), name="reader"):
        assert {result.status for result in run_checks("reader", kind="roles")} == {CheckStatus.PASSED}


@pytest.mark.parametrize("reader", BAD, ids=lambda reader: reader.__name__)
def test_a_bad_reader_fails_the_check_that_it_is_for(reader: type[Reader]) -> None:
    """The message says what to mend."""
    intended, told = BAD[reader]
    with temporary_plugin(reader(), name="reader"):
        failed = {result.id: result for result in run_checks("reader", kind="roles") if not result.ok}
    assert intended in failed, failed
    assert told in failed[intended].message, failed[intended].message
    assert failed[intended].hint


def test_every_check_has_a_reader_that_it_catches() -> None:
    """A check that nothing can fail proves nothing."""
    assert {intended for intended, _ in BAD.values()} == {check.id for check in ROLE_CHECKS}


def test_the_installed_reader_passes() -> None:
    """Where megaopt-roles is there."""
    pytest.importorskip("megaopt_roles")
    registry = get_registry()
    registry.load()
    assert any(plugin.info.goes_by("roles") for plugin in registry.loaded_plugins())
    results = run_checks("roles", kind="roles")
    assert {result.id: result.message for result in results if result.status is not CheckStatus.PASSED} == {}
