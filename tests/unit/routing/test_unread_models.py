"""Models that nothing reads: what has two dimensions is element-wise, in doubt, and the reason says who would tell."""

import re
import warnings
from collections.abc import Iterator

import pytest
import torch
from megaopt_testing import temporary_plugin
from torch import nn

from megaopt_core import MatrixView, OptimizerConfig, build_optimizer, hookimpl, route
from megaopt_core.errors import (
    BrokenPluginError,
    BrokenPluginWarning,
    DoubtfulRolesWarning,
    PluginNotInstalledError,
    RoutingError,
)
from megaopt_core.params import Doubt, Role, RoleDecision
from megaopt_core.registry import PluginRegistry, reset_registry
from megaopt_core.routing import infer_roles

HINT = "; pip install megaopt-roles reads it from the model; its attribute use_muon settles this"


PLAIN = """
@hookimpl
def megaopt_optimizer_entries():
    return {"plain": OptimizerEntry(torch.optim.SGD)}
"""


@pytest.fixture(autouse=True)
def _no_reader() -> Iterator[None]:
    reset_registry(PluginRegistry([], environ={}))
    yield
    reset_registry()


class Scaled(nn.Module):
    """A scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class Raw(nn.Module):
    """A matrix that no module type explains."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(4, 4))


@pytest.mark.parametrize(
    ("module", "name", "reason"),
    [
        (nn.Linear(4, 8), "bias", "one dimension"),
        (nn.Linear(4, 8, dtype=torch.complex64), "weight", "complex numbers"),
        (Scaled(), "scale", "a scalar"),
    ],
)
def test_what_number_type_and_shape_tell_is_certain(module: nn.Module, name: str, reason: str) -> None:
    """A reader would say no more."""
    decision = infer_roles(module)[name]
    assert (decision.role, decision.reason, decision.uncertain) == (Role.ELEMENTWISE, reason, False)


@pytest.mark.parametrize(
    ("module", "name", "reason"),
    [
        (nn.Linear(4, 8), "weight", "its use is not known"),
        (nn.Embedding(8, 4), "weight", "its use is not known"),
        (Raw(), "table", "its use is not known"),
    ],
)
def test_the_rest_is_element_wise_in_doubt_and_says_what_to_install(module, name, reason) -> None:
    """A reader knows the types of modules, and what the forward does with each parameter."""
    decision = infer_roles(module)[name]
    assert (decision.role, decision.reason, decision.uncertain) == (Role.ELEMENTWISE, reason + HINT, True)
    assert decision.view is None


def test_what_is_said_settles_what_is_in_doubt() -> None:
    """An attribute needs no reader."""
    model = nn.Linear(4, 8)
    model.weight.matrix_view = "matrix"
    assert infer_roles(model)["weight"].role is Role.MATRIX


def test_an_override_that_asks_for_a_role_in_doubt_says_what_to_install(plugins) -> None:
    """A learning rate would silently miss the head; what is settled, and overrides without roles, go through."""
    plugins.install("plain", PLAIN)
    plugins.registry()
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
    config = OptimizerConfig(optimizer="plain", lr=0.1)
    with pytest.raises(PluginNotInstalledError) as caught:
        route(config.replace(decoupled_lr=0.2), model)
    assert str(caught.value).startswith("standard: ParamKey(")
    assert str(caught.value).endswith(
        "asks for roles, and the role of '0.weight' is in doubt: the reader of roles comes with megaopt-roles, "
        "which is not installed: pip install megaopt-roles (or settle the role by an attribute of the "
        "parameter: matrix_view=...)"
    )
    assert (caught.value.name, caught.value.distribution) == ("0.weight", "megaopt-roles")
    assert route(config, model).params["1.weight"].decision.uncertain
    model[0].weight.matrix_view = "embedding"
    model[1].weight.matrix_view = "output"
    routing = route(config.replace(decoupled_lr=0.2), model)
    assert routing.groups[routing.params["1.weight"].spec.group].values["max_lr"] == 0.2


READS = """
from megaopt_core.params import RoleDecision, Role

@hookimpl
def megaopt_annotate_params(model_chunk):
    return {READ}
"""
ASKS = OptimizerConfig(optimizer="plain", lr=0.1, decoupled_lr=0.2)


@pytest.mark.parametrize(
    ("code", "environ", "kind", "words"),
    [
        (
            "",
            {"MEGAOPT_DISABLE_PLUGINS": "roles"},
            PluginNotInstalledError,
            "MEGAOPT_DISABLE_PLUGINS=roles blocks it",
        ),
        ("raise ValueError('no')", {}, BrokenPluginError, "failed to load: ValueError: no"),
        ("", {}, RoutingError, "which has not read it"),
    ],
    ids=["blocked", "broken", "silent"],
)
def test_a_reader_that_is_there_is_not_told_to_be_installed(plugins, code, environ, kind, words) -> None:
    """It is blocked, broken, or has nothing to say: each has another remedy."""
    plugins.install("plain", PLAIN)
    plugins.install("roles", code)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BrokenPluginWarning)
        plugins.registry(**environ).load()
    with pytest.raises(kind, match=words):
        route(ASKS, nn.Linear(4, 8))
    reason = infer_roles(nn.Linear(4, 8))["weight"].reason
    assert "plugin 'roles' (megaopt-roles 1.0) would read it from the model: " in reason
    assert "pip install" not in reason


def test_a_reader_of_one_parameter_settles_no_other(plugins) -> None:
    """What it leaves out is as unread as without it, for whoever asks for roles."""
    plugins.install("plain", PLAIN)
    plugins.install("family", READS.replace("READ", "'0.weight': RoleDecision(Role.ELEMENTWISE, 'known')"))
    plugins.registry()
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    with pytest.raises(
        PluginNotInstalledError, match=r"the role of '1\.weight' is in doubt: .* pip install megaopt-roles"
    ):
        route(ASKS, model)
    assert infer_roles(model)["1.weight"].reason.endswith(HINT)


MATRICES = """
def accepts(spec, view):
    return None if view is not None else "not a hidden matrix"

@hookimpl
def megaopt_optimizer_entries():
    return {
        "plain": OptimizerEntry(torch.optim.SGD, state={}),
        "of_matrices": OptimizerEntry(torch.optim.SGD, state={}, accepts=accepts, fallback="plain"),
    }
"""


def test_an_optimizer_that_steps_nothing_for_want_of_a_reader_is_refused(plugins) -> None:
    """Whoever has asked for it would find another one's run."""
    plugins.install("matrices", MATRICES)
    plugins.registry()
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    with pytest.raises(
        RoutingError, match="'of_matrices' would step nothing on any rank: 2 of 2 weights go to plain"
    ) as caught:
        build_optimizer(model, "of_matrices", lr=0.1)
    assert "they may or may not be hidden matrices: 0.weight, 1.weight (its use is" in str(caught.value)
    assert "pip install megaopt-roles" in str(caught.value)
    model[0].weight.matrix_view = "matrix"
    with pytest.warns(DoubtfulRolesWarning, match="1 of 2 weights go to plain"):
        made = build_optimizer(model, "of_matrices", lr=0.1)
    assert made.report().params[0].optimizer == "of_matrices"


@pytest.mark.parametrize(("attribute", "value"), [("use_muon", True), ("matrix_view", Role.MATRIX)])
def test_that_it_is_a_matrix_does_not_say_which_lie_inside(attribute: str, value: object) -> None:
    """A reader would tell a fused weight from one matrix: without it that is doubtful, and the reason names it."""
    layer = nn.Linear(4, 12)
    setattr(layer.weight, attribute, value)
    decision = infer_roles(layer)["weight"]
    assert (decision.role, decision.view, decision.doubt) == (Role.MATRIX, MatrixView(), Doubt.LAYOUT)
    assert not decision.unread  # its role is known
    assert re.fullmatch(
        f"attribute {attribute}.*; the matrices inside it are not known; pip install megaopt-roles reads it from the "
        "model; its attribute matrix_view settles this",
        decision.reason,
    )
    layer.weight.matrix_view = MatrixView(split_sizes=(4, 4, 4))
    assert not infer_roles(layer)["weight"].uncertain


def test_who_read_the_matrices_of_what_is_said_to_be_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The view is the reader's, and so a checkpoint names it."""
    monkeypatch.setenv("MEGAOPT_DISABLE_PLUGINS", "roles")

    class Reader:
        megaopt_api = "1"

        @hookimpl
        def megaopt_annotate_params(self, model_chunk: nn.Module) -> dict[str, RoleDecision]:
            view = MatrixView(split_sizes=(4, 8))
            return {"weight": RoleDecision(Role.MATRIX, "guessed", view, doubt=Doubt.ROLE)}

    layer = nn.Linear(4, 12)
    layer.weight.use_muon = True  # type: ignore[assignment]
    with temporary_plugin(Reader(), name="reader"):
        decision = infer_roles(layer)["weight"]
    assert decision.view == MatrixView(split_sizes=(4, 8))
    assert (decision.reader.split()[0], decision.uncertain) == ("reader", False)
