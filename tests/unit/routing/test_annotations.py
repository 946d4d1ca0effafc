"""What plugins say about parameters: who knows wins over who reads, who is certain over who guesses."""

from collections.abc import Callable

import pytest
import torch
from megaopt_testing.fake_plugins import FakePlugins

from megaopt_core.errors import PluginHookError, RoutingError
from megaopt_core.params import MATRIX, Doubt, Role, RoleDecision
from megaopt_core.routing import infer_roles

SAYS = """
from megaopt_core.params import MATRIX, Doubt, MatrixView, Role, RoleDecision

@hookimpl
def megaopt_annotate_params(model_chunk):
    return {answer}
"""
READ = "{'0.weight': RoleDecision(Role.OUTPUT, 'its result is returned')}"
READ_OTHERWISE = "{'0.weight': RoleDecision(Role.EMBEDDING, 'a table')}"
GUESSED = "{'0.weight': RoleDecision(Role.MATRIX, 'it looks like one', MATRIX, doubt=Doubt.ROLE)}"
KNOWN = "{'0.weight': Role.ELEMENTWISE}"
KNOWN_OTHERWISE = "{'0.weight': MatrixView(split_sizes=(4, 4))}"


@pytest.fixture
def decide(plugins: FakePlugins) -> Callable[..., RoleDecision]:
    """Return what `0.weight` of a small model is, when these plugins and no others answer."""

    def decided(*answers):
        for name, answer in zip(("first", "second"), answers, strict=False):
            plugins.install(name, SAYS.replace("{answer}", answer))
        plugins.registry()
        return infer_roles(torch.nn.Sequential(torch.nn.Linear(4, 8)))["0.weight"]

    return decided


def test_a_certain_reading_is_taken_with_its_reason(decide) -> None:
    """As it was given."""
    assert decide(READ) == RoleDecision(Role.OUTPUT, "its result is returned")


def test_a_guess_is_taken_and_stays_a_guess(decide) -> None:
    """Reports mark it."""
    reason = "it looks like one; its attribute use_muon settles this"
    assert decide(GUESSED) == RoleDecision(Role.MATRIX, reason, MATRIX, doubt=Doubt.ROLE)


@pytest.mark.parametrize("answers", [(READ, GUESSED), (GUESSED, READ)])
def test_the_reader_that_is_certain_wins(decide, answers) -> None:
    """In either order."""
    assert decide(*answers) == RoleDecision(Role.OUTPUT, "its result is returned")


@pytest.mark.parametrize("answers", [(READ, KNOWN), (KNOWN, READ)])
def test_what_a_plugin_knows_wins_over_what_another_has_read(decide, answers) -> None:
    """It knows models of this kind."""
    assert decide(*answers) == RoleDecision(Role.ELEMENTWISE, "a plugin's annotation of '0.weight'")


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ((READ, READ_OTHERWISE), "output by plugin 'first' and as embedding by plugin 'second'"),
        (
            (KNOWN, KNOWN_OTHERWISE),
            "elementwise by plugin 'first' and as MatrixView(split rows (4, 4)) by plugin 'second'",
        ),
    ],
)
def test_two_that_contradict_each_other_are_an_error(decide, answers, words) -> None:
    """It names the parameter and both plugins."""
    with pytest.raises(RoutingError) as caught:
        decide(*answers)
    assert str(caught.value) == (
        f"parameter '0.weight' is annotated as {words}; an attribute on the parameter decides (matrix_view=...)"
    )


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            "[1]",
            "megaopt_annotate_params returned list; it must return {name: Role, MatrixView or RoleDecision}",
        ),
        (
            "{'0.weight': 'matrix'}",
            "megaopt_annotate_params says 'matrix' of '0.weight'; it must be a Role, a MatrixView or a RoleDecision",
        ),
    ],
)
def test_an_answer_of_another_kind_is_an_error(decide, answer, message) -> None:
    """It names the plugin."""
    with pytest.raises(PluginHookError) as caught:
        decide(answer)
    assert str(caught.value) == f"plugin 'first' (megaopt-first 1.0): {message}"


def test_an_annotation_of_no_parameter_is_an_error(decide) -> None:
    """A name that was changed is found out."""
    with pytest.raises(
        PluginHookError,
        match=r"^plugin 'first' .* names parameters that the model does not have: \['1.weight'\]",
    ):
        decide("{'1.weight': Role.MATRIX}")


def test_a_decision_names_the_reader(plugins) -> None:
    """Distribution and version, also where a doubt about it is told."""
    plugins.install("first", SAYS.format(answer=READ))
    plugins.registry()
    model = torch.nn.Sequential(torch.nn.Linear(4, 8))
    assert infer_roles(model)["0.weight"].reader == "megaopt-first 1.0"
    assert infer_roles(model)["0.bias"].reader == ""
