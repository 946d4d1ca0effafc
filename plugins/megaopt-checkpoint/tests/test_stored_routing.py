"""An optimizer that is built by a checkpoint's routing is the one that was saved, whoever reads roles here."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from megaopt_checkpoint.manifest import read_manifest
from megaopt_checkpoint.plugin import megaopt_commands
from megaopt_testing import run_command, temporary_plugin
from torch import nn
from training import rewrite_manifest

from megaopt_core import MatrixView, OptimizerEntry, ParamKey, Role, build_optimizer, hookimpl, route
from megaopt_core.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    DoubtfulRolesWarning,
    PluginNotInstalledError,
    RoutingError,
)
from megaopt_core.optimizers import MegatronOptimizer
from megaopt_core.params import MATRIX, RoleDecision
from megaopt_core.registry import reset_registry

pytestmark = pytest.mark.any_python

VIEW = MatrixView(split_sizes=(4, 2, 2), label="qkv", fused="qkv", head_sizes=(2, 2, 2))


class Optimizers:
    """`matrices` for what has a view, `rest` for the rest."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        return {
            "rest": OptimizerEntry(
                torch.optim.AdamW, state={"step": "scalar", "exp_avg": "param", "exp_avg_sq": "param"}
            ),
            "matrices": OptimizerEntry(
                torch.optim.SGD,
                state={"momentum_buffer": "param"},
                config_to_kwargs=lambda config, chunks, pgs: {"lr": config.lr, "momentum": 0.9},
                accepts=lambda spec, view: None if view is not None else "no matrix",
                fallback="rest",
            ),
        }


class Reader:
    """Has read that the first weight is fused query, key and value."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_annotate_params(self, model_chunk: nn.Module) -> dict[str, RoleDecision]:
        return {"0.weight": RoleDecision(Role.MATRIX, "attention takes its output", VIEW)}


@pytest.fixture(autouse=True)
def optimizers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Offer the two, and leave out a reader that may be installed."""
    monkeypatch.setenv("MEGAOPT_DISABLE_PLUGINS", "roles,bridge")
    reset_registry()
    with temporary_plugin(Optimizers(), name="optimizers"):
        yield
    monkeypatch.undo()
    reset_registry()


def build(**settings: Any) -> tuple[nn.Sequential, MegatronOptimizer]:
    """Return layers and their optimizer: the first awaits a reader, the others say what they are."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2), torch.nn.Linear(2, 2))
    model[1].weight.use_muon, model[2].weight.matrix_view = False, MATRIX
    return model, build_optimizer(model, "matrices", lr=0.1, **settings)


def build_unread() -> tuple[nn.Sequential, MegatronOptimizer]:
    """Return the same where nobody has read what the weights are, which the build warns of."""
    with pytest.warns(DoubtfulRolesWarning, match="'matrices': 1 of 3 weights go to rest"):
        return build()


def step(model: nn.Module, optimizer: MegatronOptimizer) -> None:
    """Take one step."""
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Save a run whose roles were read."""
    with temporary_plugin(Reader(), name="reader"):
        model, optimizer = build()
        step(model, optimizer)
        save_checkpoint(tmp_path / "last", model, optimizer)
        step(model, optimizer)
    torch.save(model.state_dict(), tmp_path / "next.pt")
    return tmp_path / "last"


def test_a_run_goes_on_as_it_was_without_who_read_its_roles(folder) -> None:
    """Without the reader the routing is another one and a load refuses; with the stored one all is as before."""
    model, otherwise = build_unread()
    assert otherwise.routing.params["0.weight"].spec.optimizer == "rest"
    with pytest.raises(CheckpointMismatchError, match=r"routes 1 parameters otherwise.*routing="):
        load_checkpoint(folder, model, otherwise)
    model, optimizer = build(routing=folder)
    entry = optimizer.routing.params["0.weight"]
    assert (entry.spec.optimizer, entry.decision.role, entry.decision.view) == ("matrices", Role.MATRIX, VIEW)
    assert (entry.decision.view.label, entry.decision.view.fused) == ("qkv", "qkv")
    assert entry.reason == f"as in {folder}"
    load_checkpoint(folder, model, optimizer)
    step(model, optimizer)
    expected = torch.load(folder.parent / "next.pt")
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    save_checkpoint(folder.parent / "again", model, optimizer)
    written = read_manifest(folder.parent / "again")
    assert written.written["roles"] == read_manifest(folder).written["roles"]
    assert written.parameters["0.weight"]["view"] == read_manifest(folder).parameters["0.weight"]["view"]


def test_a_matrix_that_was_stepped_by_the_fallback_stays_there(tmp_path) -> None:
    """A reader that is installed since then changes nothing."""
    model, optimizer = build_unread()
    step(model, optimizer)
    save_checkpoint(tmp_path / "last", model, optimizer)
    with temporary_plugin(Reader(), name="reader"):
        model, optimizer = build(routing=str(tmp_path / "last"))
        assert optimizer.routing.params["0.weight"].spec.optimizer == "rest"
        load_checkpoint(tmp_path / "last", model, optimizer)


def test_roles_that_a_checkpoint_lacks_are_those_found_here(folder) -> None:
    """Its routing is followed as far as it is stored."""
    manifest = read_manifest(folder)
    for described in manifest.parameters.values():
        described.pop("role")
        described.pop("view", None)
    rewrite_manifest(folder, manifest)
    with temporary_plugin(Reader(), name="reader"):
        model, optimizer = build(routing=folder)
        assert optimizer.routing.params["0.weight"].spec.optimizer == "matrices"
        load_checkpoint(folder, model, optimizer)
    with pytest.raises(
        RoutingError, match=r"gives '0.weight' to 'matrices', which does not take it here.*by reader"
    ):
        build(routing=folder)


def test_what_holds_no_routing_is_an_error(folder) -> None:
    """Each has its own words."""
    model, optimizer = build_unread()
    save_checkpoint(folder.parent / "bare", model, None)
    (folder.parent / "empty").mkdir()
    (folder.parent / "file").write_text("x")
    for name, words in {
        "bare": "was saved without an optimizer: it holds no routing",
        "empty": "is no checkpoint: it has no manifest.json",
        "file": r"routing='.*file': must be a checkpoint that an installed plugin reads; none reads this",
        "gone": r"routing='.*gone': must be a checkpoint that an installed plugin reads; none reads this",
    }.items():
        with pytest.raises(CheckpointError, match=words):
            build(routing=folder.parent / name)
    with pytest.raises(RoutingError, match=r"last holds no routing of 2 trainable parameters: weight, bias"):
        route(optimizer.config, torch.nn.Linear(2, 2), routing=folder)


def test_an_optimizer_that_is_not_installed_is_named_with_its_distribution(folder) -> None:
    """The checkpoint knows who brought it."""
    manifest = read_manifest(folder)
    manifest.parameters["1.bias"]["optimizer"] = "rare"
    manifest.plugins["rare"] = "megaopt-rare"
    rewrite_manifest(folder, manifest)
    with pytest.raises(
        PluginNotInstalledError, match=r"steps '1.bias' in .*last, comes with megaopt-rare.*pip"
    ):
        build(routing=folder)


@pytest.mark.parametrize(
    ("role", "view"),
    [
        ("matron", None),
        (7, None),
        ("output", {"shape": [8, 4]}),
        ("matrix", {}),
        ("matrix", {"shape": [8, 4], "split_sizes": [3]}),
        ("matrix", {"shape": [8, 4], "split_sizes": [0, 8]}),
        ("matrix", {"shape": [8, 4], "split_sizes": "44"}),
        ("matrix", {"shape": [8, 4], "split_dim": 2}),
        ("matrix", {"shape": [8], "batch_dims": 0}),
        ("matrix", {"shape": [8, 4], "batch_dims": -1}),
        ("matrix", {"shape": [8, 4], "transposed": 1}),
        ("matrix", {"shape": [8, 4], "fused": "all"}),
        ("matrix", {"shape": [8, 4], "label": 1}),
        ("matrix", {"shape": [8, 4], "head_sizes": ["2"]}),
        ("matrix", {"shape": [8, 4], "color": "red"}),
    ],
)
def test_roles_and_views_of_strangers_are_checked(folder, role, view) -> None:
    """One error names file, place and value."""
    manifest = read_manifest(folder)
    manifest.parameters["0.weight"].update({"role": role, **({} if view is None else {"view": view})})
    if view is None:
        manifest.parameters["0.weight"].pop("view")
    rewrite_manifest(folder, manifest)
    with pytest.raises(
        CheckpointCorruptError, match=r"no valid manifest: optimizer.parameters.0.weight.(role|view)"
    ):
        build(routing=folder)
    assert json.loads((folder / "manifest.json").read_text())["version"] == 4


class Resolver:
    """Imports the module that a name has, as megaopt-bridge does."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_resolve_optimizer(self, name: str) -> OptimizerEntry | None:
        module, _, attribute = name.partition(":")
        return OptimizerEntry(getattr(importlib.import_module(module), attribute)) if attribute else None


@pytest.fixture
def strangers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let the checkpoint name a module that nobody has imported."""
    (folder.parent / "strangers_module.py").write_text("from torch.optim import AdamW as Class\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    manifest = read_manifest(folder)
    for described in manifest.parameters.values():
        described["optimizer"] = STRANGERS
    manifest.plugins[STRANGERS] = "megaopt-checkpoint"
    rewrite_manifest(folder, manifest)
    with temporary_plugin(Resolver(), name="resolver"):
        yield folder
    sys.modules.pop("strangers_module", None)


STRANGERS = "strangers_module:Class"


def test_names_of_a_file_are_looked_up_and_never_imported(strangers, capsys) -> None:
    """Neither a build, nor loads, nor verification import what a file names."""
    with pytest.raises(
        RoutingError, match=r"a name in a file is not imported by itself.*trusted_names=\['stra"
    ):
        build(routing=strangers)
    model, optimizer = build_unread()
    with pytest.raises(CheckpointMismatchError, match="it was stepped by 'strangers_module:Class', here by"):
        load_checkpoint(strangers, model, optimizer)
    load_checkpoint(strangers, model, optimizer, strict=False)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group["routed"] |= {"optimizer": STRANGERS, "distribution": "megaopt-checkpoint"}
    with pytest.raises(CheckpointMismatchError, match="it was stepped by 'strangers_module:Class'"):
        optimizer.load_state_dict(state)
    assert run_command(megaopt_commands, ["verify-checkpoint", str(strangers)]) == 0
    assert STRANGERS in capsys.readouterr().out
    assert "strangers_module" not in sys.modules


@pytest.mark.parametrize("by", ["trusted_names", "optimizer", "override"])
def test_names_that_the_user_gives_are_resolved(strangers, by) -> None:
    """In `trusted_names`, as the optimizer, or in an override."""
    given = {
        "trusted_names": {"trusted_names": [STRANGERS]},
        "optimizer": {},
        "override": {"overrides": {ParamKey(name="*"): {"optimizer": STRANGERS}}},
    }[by]
    manifest = read_manifest(strangers)
    del manifest.plugins[STRANGERS]
    rewrite_manifest(strangers, manifest)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    name = STRANGERS if by == "optimizer" else "rest"
    optimizer = build_optimizer(model, name, lr=0.1, routing=strangers, **given)
    assert {entry.spec.optimizer for entry in optimizer.routing.params.values()} == {STRANGERS}
