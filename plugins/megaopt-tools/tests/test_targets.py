"""Options for one optimizer or for all."""

from __future__ import annotations

import pytest
from megaopt_tools.errors import CommandError
from megaopt_tools.targets import learning_rates, settings_by_target

BOTH = ["adam", "muon"]


def test_a_learning_rate_may_be_for_one_or_for_all() -> None:
    """What names an optimizer wins over what names none, in any order."""
    assert learning_rates([], BOTH) == {}
    assert learning_rates(["0.1"], BOTH) == {"adam": 0.1, "muon": 0.1}
    assert learning_rates(["muon=2e-2", "0.1"], BOTH) == {"adam": 0.1, "muon": 0.02}
    assert learning_rates(["adam=1", "adam=2"], BOTH) == {"adam": 2.0}


def test_settings_have_the_type_that_they_are_written_in() -> None:
    """Numbers, switches, nothing, text and lists; the last one given holds."""
    given = [
        "clip_grad=0.5",
        "muon:muon_num_ns_steps=6",
        "muon:muon_nesterov=true",
        "adam:min_lr=None",
        "adam:sharding=replicated",
        "muon:muon_coefficients=[[3, -4, 2]]",
        "muon:clip_grad=2",
    ]
    assert settings_by_target(given, BOTH) == {
        "adam": {"clip_grad": 0.5, "min_lr": None, "sharding": "replicated"},
        "muon": {
            "clip_grad": 2,
            "muon_num_ns_steps": 6,
            "muon_nesterov": True,
            "muon_coefficients": [[3, -4, 2]],
        },
    }


def test_a_value_may_contain_what_separates() -> None:
    """Only what stands before the field names an optimizer."""
    assert settings_by_target(["config_logger_dir=a:b=c"], ["adam"]) == {
        "adam": {"config_logger_dir": "a:b=c"}
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("lion=0.1", "--lr lion=0.1: 'lion' is not among the optimizers adam, muon"),
        ("adam=fast", "--lr adam=fast: 'fast' is not a number"),
        ("fast", "--lr fast: 'fast' is not a number"),
    ],
)
def test_a_wrong_learning_rate_is_explained(given: str, message: str) -> None:
    """The message repeats what was given."""
    with pytest.raises(CommandError) as error:
        learning_rates([given], BOTH)
    assert str(error.value) == message


def test_a_setting_of_a_stranger_is_refused() -> None:
    """A typing error in the name of the optimizer is not taken for a setting of all."""
    with pytest.raises(CommandError) as error:
        settings_by_target(["lion:lion_beta1=0.9"], BOTH)
    assert str(error.value) == "--set lion:lion_beta1=0.9: 'lion' is not among the optimizers adam, muon"
