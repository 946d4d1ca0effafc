"""A routing that was stored is followed, whatever is found in the model here."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megaopt_testing.plugins import temporary_plugin

from megaopt_core import MatrixView, OptimizerConfig, ParamKey, Role, build_optimizer, hookimpl, route
from megaopt_core.errors import (
    CheckpointError,
    DuplicateNameError,
    PluginHookError,
    PluginNotInstalledError,
    RoutingError,
    UnknownNameError,
)
from megaopt_core.plugin_api import StoredParam, StoredRouting
from megaopt_core.registry import get_registry, reset_registry

NAMES = ("embed.weight", "hidden.weight", "hidden.bias", "head.weight")


class Model(torch.nn.Module):
    """What the stand-in reader knows: `hidden` is a matrix, `head` is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.hidden = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 7, bias=False)


def stored(**changes: StoredParam) -> StoredRouting:
    """Return a routing that is found nowhere: the head is stepped as a matrix, the hidden layer by `plain`."""
    params = {name: StoredParam("plain", Role.ELEMENTWISE) for name in NAMES}
    params["head.weight"] = StoredParam("whole", Role.MATRIX, MatrixView(transposed=True), (7, 4))
    return StoredRouting(
        "last week", {**params, **changes}, readers="reader 9", plugins={"rare": "megaopt-rare"}
    )


def config(**settings: Any) -> OptimizerConfig:
    """Return a configuration whose own routing is another one."""
    return OptimizerConfig(optimizer="whole", lr=0.1, **settings)


def test_optimizers_roles_and_views_are_the_stored_ones() -> None:
    """A matrix that was stepped by `plain` is; what only the stored routing takes for a matrix is one."""
    found = route(config(), Model())
    assert found.params["hidden.weight"].spec.optimizer == "whole"
    assert found.params["head.weight"].spec.optimizer == "plain"
    followed = route(config(), Model(), routing=stored())
    assert {name: entry.spec.optimizer for name, entry in followed.params.items()} == {
        "embed.weight": "plain", "hidden.weight": "plain", "hidden.bias": "plain", "head.weight": "whole",
    }  # fmt: skip
    head = followed.params["head.weight"]
    assert head.decision.role is Role.MATRIX
    assert head.spec.view == head.decision.view == MatrixView(transposed=True)
    assert head.reason == "as in last week"
    assert followed.readers == ("reader 9",)


def test_what_is_built_steps_by_it() -> None:
    """The inner optimizers are those of the stored routing, and the report says why."""
    model = Model()
    optimizer = build_optimizer(model, "whole", lr=0.1, routing=stored())
    assert [type(part.inner).__name__ for part in optimizer.parts] == ["Whole", "SGD"]
    assert [optimizer.names[param] for param in optimizer.parts[0].groups[0]["params"]] == ["head.weight"]
    assert "as in last week" in str(optimizer.report())


def test_settings_by_role_follow_the_stored_roles() -> None:
    """`decoupled_lr` goes to what was an embedding or an output then."""
    routing = stored(**{"hidden.weight": StoredParam("plain", Role.OUTPUT)})
    followed = route(config(decoupled_lr=0.5), Model(), routing=routing)
    rates = {name: followed.groups[entry.spec.group].values["lr"] for name, entry in followed.params.items()}
    assert rates == {"embed.weight": 0.1, "hidden.weight": 0.5, "hidden.bias": 0.1, "head.weight": 0.1}


def test_without_stored_roles_those_of_here_hold() -> None:
    """Checkpoints of old formats have optimizers only."""
    routing = StoredRouting("old", {name: StoredParam("plain") for name in NAMES})
    followed = route(config(), Model(), routing=routing)
    assert {entry.spec.optimizer for entry in followed.params.values()} == {"plain"}
    assert followed.params["hidden.weight"].decision.role is Role.MATRIX
    wrong = StoredRouting("old", {**routing.params, "head.weight": StoredParam("whole")})
    with pytest.raises(
        RoutingError,
        match=r"old gives 'head.weight' to 'whole', which does not take it here \(shape \(7, 4\)\): not a matrix\. Its "
        r"roles were read by no plugin there, and by .*stand_in.* here\. Set its matrix_view",
    ):
        route(config(), Model(), routing=wrong)


def test_a_view_of_a_part_of_another_size_is_left_to_what_is_found_here() -> None:
    """At another tensor-parallel size the sizes of its split are others; the matrices are the same, or it is said."""
    sizes = MatrixView(split_sizes=(8, 8))
    other = stored(**{"hidden.weight": StoredParam("whole", Role.MATRIX, sizes, (16, 4))})
    found_plain = (
        r"'hidden.weight' had the view .*\(8, 8\).*; here it has the view MatrixView\(plain\).*reader 9"
    )
    with pytest.raises(RoutingError, match=found_plain):
        route(config(), Model(), routing=other)
    model = Model()
    model.hidden.weight.matrix_view = MatrixView(split_sizes=(2, 2))
    decision = route(config(), model, routing=other).params["hidden.weight"].decision
    assert decision.view == MatrixView(split_sizes=(2, 2))
    same = stored(
        **{"hidden.weight": StoredParam("whole", Role.MATRIX, MatrixView(split_sizes=(2, 2)), (4, 4))}
    )
    view = route(config(), Model(), routing=same).params["hidden.weight"].decision.view
    assert view.split_sizes == (2, 2)


def test_tied_parameters_are_found_under_each_name() -> None:
    """Which of the names comes first may have changed."""
    model = Model()
    model.head.weight = model.embed.weight
    params = {
        name: StoredParam("plain", Role.EMBEDDING) for name in ("head.weight", "hidden.weight", "hidden.bias")
    }
    followed = route(config(), model, routing=StoredRouting("tied", params))
    assert followed.params["embed.weight"].decision.role is Role.EMBEDDING


def test_a_parameter_that_is_not_named_is_an_error() -> None:
    """With its name; nothing is guessed."""
    routing = StoredRouting("small", {"embed.weight": StoredParam("plain")})
    with pytest.raises(
        RoutingError,
        match=r"small holds no routing of 3 trainable parameters: hidden\.weight, hidden\.bias, head\.w",
    ) as raised:
        route(config(), Model(), routing=routing)
    assert raised.value.names == ("hidden.weight", "hidden.bias", "head.weight")
    model = Model()
    for name in ("hidden", "head"):
        getattr(model, name).requires_grad_(False)
    assert list(route(config(), model, routing=routing).params) == ["embed.weight"]


def test_an_optimizer_that_is_not_installed_is_an_error() -> None:
    """With the line that installs it, where the checkpoint knows the distribution."""
    rare = stored(**{"hidden.bias": StoredParam("rare", Role.ELEMENTWISE)})
    with pytest.raises(
        PluginNotInstalledError,
        match=r"'rare', which steps 'hidden.bias' in last week, comes with megaopt-rare.*pip install megaopt-rare",
    ):
        route(config(), Model(), routing=rare)
    unknown = stored(**{"hidden.bias": StoredParam("UserClass", Role.ELEMENTWISE)})
    with pytest.raises(UnknownNameError, match="unknown optimizer 'UserClass'"):
        route(config(), Model(), routing=unknown)


def test_an_override_that_asks_for_another_optimizer_is_an_error() -> None:
    """Neither of the two wins in silence; what agrees, and what sets something else, is fine."""
    overrides = {ParamKey(name="hidden.*"): {"optimizer": "whole"}}
    with pytest.raises(
        RoutingError,
        match=r"sends 'hidden.weight' to 'whole', but routing= sends it to 'plain', as in last week; leave",
    ):
        route(config(), Model(), overrides, routing=stored())
    overrides = {ParamKey(name="hidden.*"): {"optimizer": "plain", "momentum": 0.5}}
    followed = route(config(), Model(), overrides, routing=stored())
    assert followed.groups[followed.params["hidden.bias"].spec.group].values["momentum"] == 0.5


def test_a_path_is_read_by_a_plugin() -> None:
    """What it raises of ours is raised as it is."""

    class Reader:
        megaopt_api = "1"

        @hookimpl
        def megaopt_stored_routing(self, path):
            if path == "broken":
                raise CheckpointError("broken is damaged", path=path)
            if path == "odd":
                raise KeyError(path)
            return {"here": stored(), "nonsense": "adam"}.get(path)

    with temporary_plugin(Reader(), name="archive"):
        followed = route(config(), Model(), routing="here")
        assert followed.params["head.weight"].spec.optimizer == "whole"
        with pytest.raises(CheckpointError, match=r"^broken is damaged$"):
            route(config(), Model(), routing="broken")
        with pytest.raises(
            PluginHookError, match=r"'archive'.* failed in hook megaopt_stored_routing: KeyError"
        ):
            route(config(), Model(), routing="odd")
        with pytest.raises(RoutingError, match=r"'archive'.*returned str; it must return a StoredRouting"):
            route(config(), Model(), routing="nonsense")


def reader(answer: Callable[[str], Any]) -> object:
    """Return a plugin that reads stored routings."""

    class Reader:
        megaopt_api = "1"

        @hookimpl
        def megaopt_stored_routing(self, path):
            return answer(path)

    return Reader()


@pytest.mark.parametrize("other", [CheckpointError("not mine", path="here"), ZeroDivisionError("oops")])
def test_a_reader_that_fails_does_not_stop_one_that_reads(other) -> None:
    """Whichever comes first: folders may be of a kind that another plugin takes for a damaged one of its own."""

    def fail(path: str) -> None:
        raise other

    for first, second in ((fail, lambda path: stored()), (lambda path: stored(), fail)):
        with temporary_plugin(reader(first), name="a"), temporary_plugin(reader(second), name="b"):
            followed = route(config(), Model(), routing="here")
            assert followed.params["head.weight"].spec.optimizer == "whole"


def test_two_readers_of_one_place_are_an_error() -> None:
    """Which of them is asked would depend on what is installed."""
    with (
        temporary_plugin(reader(lambda path: stored()), name="a"),
        temporary_plugin(reader(lambda path: stored()), name="b"),
        pytest.raises(DuplicateNameError, match=r"both plugin 'a'.* and plugin 'b'.* read routing='here'"),
    ):
        route(config(), Model(), routing="here")


@pytest.mark.parametrize(
    ("what", "odd"),
    [
        ("name", StoredRouting(None, {})),
        ("params", StoredRouting("odd", None)),
        ("params", StoredRouting("odd", {"embed.weight": "adam"})),
        ("params", StoredRouting("odd", {"embed.weight": StoredParam(None)})),
        ("params", StoredRouting("odd", {"embed.weight": StoredParam("plain", "matrix")})),
        ("readers", StoredRouting("odd", {}, readers=None)),
        ("plugins", StoredRouting("odd", {}, plugins={"plain": None})),
    ],
)
def test_a_routing_that_holds_nonsense_is_its_readers_fault(what, odd) -> None:
    """The error names the plugin and the field."""
    with (
        temporary_plugin(reader(lambda path: odd), name="odd"),
        pytest.raises(RoutingError, match=rf"plugin 'odd'.* whose {what} cannot be used: "),
    ):
        route(config(), Model(), routing="here")


def test_without_a_reader_the_error_says_what_to_install(monkeypatch, stand_in) -> None:
    """The core knows no files."""
    pytest.importorskip("megaopt_adam")
    monkeypatch.setenv("MEGAOPT_DISABLE_PLUGINS", "checkpoint")
    installed = any(info.name == "checkpoint" for info in get_registry().plugins())
    reset_registry()
    with pytest.raises(
        PluginNotInstalledError, match=r"the reader of routing='run/step-1' comes with"
    ) as raised:
        route(OptimizerConfig(lr=0.1), torch.nn.Linear(2, 2), routing="run/step-1")
    assert raised.value.distribution == "megaopt-checkpoint"
    assert installed or "pip install megaopt-checkpoint" in str(raised.value)
    monkeypatch.undo()
    reset_registry()
