"""Checks of readers of models: one that only looks passes, and each check catches a reader that it is for."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from megaopt_testing import CheckStatus, run_checks, temporary_plugin
from megaopt_testing.role_checks import ROLE_CHECKS
from torch import nn

from megaopt_core import MatrixView, Role, get_registry, hookimpl
from megaopt_core.params import RoleDecision

pytestmark = pytest.mark.any_python


class Reader:
    """Says that the weights of linear layers are matrices."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_annotate_params(self, model_chunk: nn.Module, example: Any) -> dict[str, Any]:
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


class DrawsFromPython(Reader):
    def says(self, module: nn.Linear) -> Any:
        random.random()  # noqa: S311 - nothing is kept secret
        return super().says(module)


class DrawsFromNumpy(Reader):
    def says(self, module: nn.Linear) -> Any:
        np.random.rand()  # noqa: NPY002 - the one of the process
        return super().says(module)


class EveryTableIsAMatrix(Reader):
    """Goes by dimensions, and is certain."""

    @hookimpl
    def megaopt_annotate_params(self, model_chunk: nn.Module, example: Any) -> dict[str, Any]:
        return {
            name: RoleDecision(Role.MATRIX, "two dimensions")
            for name, param in model_chunk.named_parameters()
            if param.ndim == 2
        }


class EveryVectorIsAMatrix(Reader):
    @hookimpl
    def megaopt_annotate_params(self, model_chunk: nn.Module, example: Any) -> dict[str, Any]:
        return {
            name: RoleDecision(Role.MATRIX, "its name")
            for name, param in model_chunk.named_parameters()
            if param.ndim == 1
        }


class NormsAreHeads(Reader):
    @hookimpl
    def megaopt_annotate_params(self, model_chunk: nn.Module, example: Any) -> dict[str, Any]:
        return {
            f"{name}.weight": RoleDecision(Role.OUTPUT, "it comes last")
            for name, module in model_chunk.named_modules()
            if isinstance(module, nn.LayerNorm)
        }


class ViewsOfNoMatrix(Reader):
    def says(self, module: nn.Linear) -> Any:
        return RoleDecision(Role.ELEMENTWISE, "a gain", MatrixView())


class Contradicts(Reader):
    """Says something else under each name of a tied layer."""

    @hookimpl
    def megaopt_annotate_params(self, model_chunk: nn.Module, example: Any) -> dict[str, Any]:
        roles = {"first.weight": Role.MATRIX, "second.weight": Role.ELEMENTWISE}
        known = dict(model_chunk.named_parameters(remove_duplicate=False))
        return {name: RoleDecision(role, "its name") for name, role in roles.items() if name in known}


class RemembersClasses(Reader):
    """Answers for a class what it has answered for the first model of it."""

    def __init__(self) -> None:
        self.known: dict[type, dict[str, Any]] = {}

    @hookimpl
    def megaopt_annotate_params(self, model_chunk: nn.Module, example: Any) -> dict[str, Any]:
        answer = {
            f"{name}.weight": MatrixView(split_dim=0, split_sizes=(module.out_features,))
            for name, module in model_chunk.named_modules()
            if name and type(module) is nn.Linear
        }
        return self.known.setdefault(type(model_chunk), answer)


class SetsAttributes(Reader):
    @hookimpl
    def megaopt_annotate_params(self, model_chunk: nn.Module, example: Any) -> dict[str, Any]:
        for module in model_chunk.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = 1e-3
        return {}


class ReplacesWeights(Reader):
    def says(self, module: nn.Linear) -> Any:
        module.weight = nn.Parameter(module.weight.detach().clone())
        return super().says(module)


class HooksParameters(Reader):
    def says(self, module: nn.Linear) -> Any:
        module.weight.register_hook(lambda grad: grad)
        return super().says(module)


class SwitchesGradientsOff(Reader):
    def says(self, module: nn.Linear) -> Any:
        torch.set_grad_enabled(False)
        return super().says(module)


class Silent(Reader):
    def says(self, module: nn.Linear) -> Any:
        return RoleDecision(Role.MATRIX, " ")


BAD = {
    NeedsTransformers: ("any_model", "leave out parameters that it does not know"),
    SaysText: ("any_model", "it must return a Role, a MatrixView or a RoleDecision"),
    WrongView: ("any_model", "its view of"),
    ReadsValues: ("meta_alike", "on the meta device"),
    LeavesMarks: ("model_untouched", "a reader must change nothing"),
    Draws: ("model_untouched", "draws random numbers (torch)"),
    DrawsFromPython: ("model_untouched", "draws random numbers (random)"),
    DrawsFromNumpy: ("model_untouched", "draws random numbers (numpy)"),
    EveryTableIsAMatrix: ("any_model", "a table that Embedding indexes"),
    EveryVectorIsAMatrix: ("any_model", "has 1 dimensions"),
    NormsAreHeads: ("any_model", "is a gain or bias of LayerNorm"),
    ViewsOfNoMatrix: ("any_model", "only matrices have a view"),
    Contradicts: ("any_model", "they are one parameter"),
    RemembersClasses: ("any_model", "does not fit the shape (24, 8)"),
    SetsAttributes: ("model_untouched", "the attribute eps of"),
    ReplacesWeights: ("model_untouched", "which tensor"),
    HooksParameters: ("model_untouched", "the hooks of"),
    SwitchesGradientsOff: ("model_untouched", "a setting of the whole process: torch.set_grad_enabled"),
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
