"""What a run does where nobody says otherwise."""

from __future__ import annotations

import json
from importlib.resources import files

from megaopt_tools.recipe import Recipe, tuned

from megaopt_core import OptimizerConfig, get_registry


def test_warmup_is_a_tenth_unless_it_is_given() -> None:
    """Also for runs that are too short for any."""
    assert [Recipe("adam", steps=steps).warmup for steps in (1, 9, 10, 250)] == [0, 0, 1, 25]
    assert Recipe("adam", steps=250, warmup=3).warmup == 3


def test_what_the_grid_found_can_be_built() -> None:
    """Every optimizer in the packaged file is offered by somebody, and takes the settings that it was tuned with."""
    packaged = json.loads(files("megaopt_tools").joinpath("learning_rates.json").read_text(encoding="utf-8"))
    assert set(packaged["optimizers"]) <= set(get_registry().optimizers())
    for name in packaged["optimizers"]:
        found = tuned(name)
        assert found.lr is not None
        assert OptimizerConfig(optimizer=name, lr=found.lr, **found.settings).lr == found.lr


def test_an_optimizer_that_was_not_tuned_gets_nothing() -> None:
    """It begins with its own defaults."""
    assert (tuned("newcomer").lr, dict(tuned("newcomer").settings)) == (None, {})
