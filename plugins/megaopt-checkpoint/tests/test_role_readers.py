"""A checkpoint tells who read the roles that its routing rests on, and a load says where they are read otherwise."""

from collections.abc import Iterator

import pytest
import torch
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from megaopt_checkpoint.manifest import read_manifest
from megaopt_testing import temporary_plugin
from torch import nn

from megaopt_core import OptimizerEntry, build_optimizer, hookimpl
from megaopt_core.errors import CheckpointMismatchError
from megaopt_core.optimizers import MegatronOptimizer
from megaopt_core.params import MATRIX, Role, RoleDecision
from megaopt_core.registry import reset_registry


class Optimizers:
    """`matrices` for what has a view, `rest` for the rest."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        return {
            "rest": OptimizerEntry(torch.optim.AdamW),
            "matrices": OptimizerEntry(
                torch.optim.SGD,
                accepts=lambda spec, view: None if view is not None else "no matrix",
                fallback="rest",
            ),
        }


class Reader:
    """Has read that the first weight is a hidden matrix."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_annotate_params(self, model_chunk: nn.Module) -> dict[str, RoleDecision]:
        return {"0.weight": RoleDecision(Role.MATRIX, "another layer takes its output", MATRIX)}


@pytest.fixture
def no_other_reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave out the reader that may be installed."""
    monkeypatch.setenv("MEGAOPT_DISABLE_PLUGINS", "roles")
    reset_registry()
    yield
    monkeypatch.undo()
    reset_registry()


def build() -> tuple[nn.Sequential, MegatronOptimizer]:
    """Return two layers and an optimizer of matrices for them."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    return model, build_optimizer(model, "matrices", lr=0.1)


def test_a_load_says_that_roles_were_read_otherwise(tmp_path, no_other_reader) -> None:
    """The parameter is named, with the reader there and here."""
    with temporary_plugin(Optimizers(), name="optimizers"):
        with temporary_plugin(Reader(), name="reader"):
            model, optimizer = build()
            optimizer.step()
            assert "roles read by reader" in str(optimizer.report())
            save_checkpoint(tmp_path / "last", model, optimizer)
        assert read_manifest(tmp_path / "last").written["roles"].startswith("reader")
        with pytest.warns(UserWarning, match="'matrices' steps no parameter, rest all"):
            other_model, other = build()
        assert other.routing.params["0.weight"].spec.optimizer == "rest"
        with pytest.raises(
            CheckpointMismatchError, match=r"routes 1 parameters otherwise \(roles read by reader.*'0.weight'"
        ):
            load_checkpoint(tmp_path / "last", other_model, other)
        report = load_checkpoint(tmp_path / "last", other_model, other, strict=False)
    said = report.reset["0.weight"]
    assert said.startswith("it was stepped by 'matrices', here by 'rest' (roles read by reader")
    assert "there, by" in said
