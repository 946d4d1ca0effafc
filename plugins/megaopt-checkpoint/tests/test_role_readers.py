"""A checkpoint tells who read the roles that its routing rests on, and a load says where they are read otherwise."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from megaopt_checkpoint.manifest import read_manifest
from megaopt_checkpoint.ranks import Ranks
from megaopt_checkpoint.restore.plan import plan_load
from megaopt_checkpoint.state_dicts.source import torch_source
from megaopt_testing import temporary_plugin
from torch import nn

from megaopt_core import OptimizerEntry, build_optimizer, hookimpl
from megaopt_core.errors import CheckpointMismatchError, DoubtfulRolesWarning, StateDictError
from megaopt_core.optimizers import MegatronOptimizer
from megaopt_core.params import MATRIX, MatrixView, Role, RoleDecision
from megaopt_core.registry import reset_registry
from megaopt_core.state import names_in


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
    """Return layers and an optimizer of matrices for them: the first awaits a reader, the others say what they are."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    model[1].weight.matrix_view, model[2].weight.use_muon = MATRIX, False
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
        with pytest.warns(DoubtfulRolesWarning, match="'matrices': 1 of 3 weights go to rest"):
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


class WholeMatrices:
    """`whole` steps whole tensors, as they are seen; `plain` elements, and `together` those of a group."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        return {
            "plain": OptimizerEntry(torch.optim.SGD),
            "whole": OptimizerEntry(torch.optim.SGD, granularity="tensor"),
            "together": OptimizerEntry(torch.optim.SGD, granularity="group"),
        }


class Sees:
    """Sees the first weight in one way or another."""

    megaopt_api = "1"

    def __init__(self, view: MatrixView) -> None:
        self.view = view

    @hookimpl
    def megaopt_annotate_params(self, model_chunk: nn.Module) -> dict[str, RoleDecision]:
        return {"0.weight": RoleDecision(Role.MATRIX, "it was told so", self.view)}


SPLIT = MatrixView(split_sizes=(2, 2))
OTHERS = [
    MATRIX,
    MatrixView(transposed=True),
    MatrixView(split_sizes=(2, 2), split_dim=1),
    MatrixView(split_sizes=(1, 1)),
    MatrixView(split_sizes=(2, 2), head_sizes=(1, 1)),
]


def seen(view: MatrixView, name: str = "whole") -> tuple[nn.Sequential, MegatronOptimizer]:
    """Return two layers and their optimizer, with a view of the first weight."""
    with temporary_plugin(Sees(view), name="reader"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        return model, build_optimizer(model, name, lr=0.1)


def load_each_way(
    saved: MegatronOptimizer, model: nn.Module, optimizer: MegatronOptimizer, path: Path
) -> str:
    """Load what one optimizer has into another in three ways, and return what they say; all say something or none."""
    said = []
    ways: list[Callable[[], Any]] = [
        lambda: optimizer.load_state_dict(saved.state_dict()),
        lambda: optimizer.checkpoint_state().load_state_dict(saved.checkpoint_state().state_dict()),
        lambda: load_checkpoint(path, model, optimizer),
    ]
    for way in ways:
        try:
            way()
        except CheckpointMismatchError as error:
            said.append(str(error))
    assert len(said) in {0, len(ways)}
    return "\n".join(said)


@pytest.mark.usefixtures("no_other_reader")
@pytest.mark.parametrize("view", OTHERS)
def test_a_load_says_that_matrices_are_seen_otherwise(tmp_path: Path, view: MatrixView) -> None:
    """Whichever way it is loaded; what is stepped element by element is not seen at all."""
    with temporary_plugin(WholeMatrices(), name="optimizers"):
        for name, refused in (("plain", False), ("together", False), ("whole", True)):
            model, optimizer = seen(SPLIT, name)
            optimizer.step()
            save_checkpoint(tmp_path / name, model, optimizer)
            assert load_each_way(optimizer, *seen(SPLIT, name), tmp_path / name) == ""
            said = load_each_way(optimizer, *seen(view, name), tmp_path / name)
            assert ("0.weight" in said) is refused
            assert "1.weight" not in said
        model, other = seen(view)
        report = load_checkpoint(tmp_path / "whole", model, other, strict=False)
        assert report.reset["0.weight"].startswith("it was seen as ")
        followed = build_optimizer(model, "whole", lr=0.1, routing=tmp_path / "whole")
        assert load_each_way(optimizer, model, followed, tmp_path / "whole") == ""


@pytest.mark.usefixtures("no_other_reader")
def test_views_are_compared_where_other_parameters_are_gone() -> None:
    """A state dict tells of each: what is seen otherwise starts anew, and the rest is loaded."""
    with temporary_plugin(WholeMatrices(), name="optimizers"):
        _, optimizer = seen(SPLIT)
        optimizer.step()
        saved = optimizer.state_dict()
        for group in saved["param_groups"]:
            group["param_names"] = [name.replace("1.bias", "gone") for name in group["param_names"]]
        optimizer.load_state_dict(saved, strict=False)
        _, other = seen(MATRIX)
        source = torch_source(other, saved, names_in(saved) or [])
        found = plan_load(source, other, strict=False, ranks=Ranks()).found
        assert list(found.reset) == ["0.weight"]
        assert sorted(found.same) == ["0.bias", "1.weight"]


@pytest.mark.parametrize(
    "views", [{"0.weight": 3}, {"0.weight": {"color": 1}}, {"0.weight": {"shape": "ab"}}]
)
@pytest.mark.usefixtures("no_other_reader")
def test_views_of_strangers_are_checked(views: dict[str, Any]) -> None:
    """A state dict may say anything."""
    with temporary_plugin(WholeMatrices(), name="optimizers"):
        _, optimizer = seen(SPLIT)
        saved = optimizer.state_dict()
        for group in saved["param_groups"]:
            group["routed"] = {**group["routed"], "views": views}
        with pytest.raises(StateDictError, match="is no view of a parameter as matrices"):
            optimizer.load_state_dict(saved)
