"""A distribution whose entry tells no state requires what learns it: else its users could not build it."""

import pytest
from megaopt_testing import check_state_before_first_step

from megaopt_core.errors import ConformanceError

pytestmark = pytest.mark.any_python

CODE = """
@hookimpl
def megaopt_optimizer_entries():
    def kwargs(config, chunks, pgs):
        return {{"lr": config.lr, "momentum": 0.9, "weight_decay": config.weight_decay}}

    return {{"mine": OptimizerEntry(torch.optim.SGD, config_to_kwargs=kwargs{told})}}
"""


def test_untold_state_fails_with_the_declaration_to_write(plugins) -> None:
    """The class is built here only because the plugin that learns states is installed."""
    plugins.install("untold", CODE.format(told=""))
    plugins.registry("bridge")
    with pytest.raises(
        ConformanceError,
        match=(
            r"^'mine': its entry has neither state nor init_state_fn, and megaopt-untold does not require "
            r"megaopt-bridge, .* declare it in the entry: state=\{'momentum_buffer': 'param'\}"
        ),
    ):
        check_state_before_first_step("mine", lr=0.01)


@pytest.mark.parametrize("told", ["", ", state={'momentum_buffer': 'param'}"])
def test_state_is_declared_or_the_learner_is_required(plugins, told) -> None:
    """Either is enough."""
    plugins.install("told", CODE.format(told=told))
    if not told:
        with (plugins.folder / "megaopt_told-1.0.dist-info" / "METADATA").open("a") as metadata:
            metadata.write("Requires-Dist: megaopt-bridge>=0.1\n")
    plugins.registry("bridge")
    check_state_before_first_step("mine", lr=0.01)
