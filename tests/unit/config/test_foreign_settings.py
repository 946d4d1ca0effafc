"""Whoever types torch's name for a setting, or another script's, is told what it is called here."""

import pytest

from megaopt_core import OptimizerConfig
from megaopt_core.cli import main
from megaopt_core.errors import UnknownSettingError


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("ns_steps", "muon_num_ns_steps"),
        ("muon_ns_steps", "muon_num_ns_steps"),
        ("betas", "adam_beta1 and adam_beta2"),
        ("adam_betas", "adam_beta1 and adam_beta2"),
        ("adam_lr", "muon_scalar_lr"),
        ("adjust_lr_fn", "muon_scale_mode (with muon_extra_scale_factor)"),
        ("max_grad_norm", "clip_grad"),
        ("learning_rate", "lr"),
    ],
)
def test_a_setting_under_its_name_elsewhere(plugins, name, ours) -> None:
    """The message says ours, whether or not the plugin is installed."""
    plugins.install(
        "muon_like",
        """
@hookimpl
def megaopt_optimizer_entries():
    return {"like": OptimizerEntry(torch.optim.SGD, setting_prefixes=("muon", "adam"))}
""",
    )
    plugins.registry()
    with pytest.raises(UnknownSettingError, match=f"has no setting '{name}'.*; it is called ") as caught:
        OptimizerConfig(optimizer="like", **{name: 1})
    assert f"; it is called {ours} here" in str(caught.value)


def test_on_the_command_line_too(plugins, capsys) -> None:
    """In one line."""
    plugins.registry()
    assert main(["explain", "torch.nn:Identity", "--set", "ns_steps=5"]) == 2
    assert "; it is called muon_num_ns_steps here" in capsys.readouterr().err
