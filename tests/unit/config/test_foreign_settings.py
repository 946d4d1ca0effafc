"""Whoever types torch's name for a setting, or another script's, is told what it is called here."""

import pytest

from megaopt_core import OptimizerConfig
from megaopt_core.cli import main
from megaopt_core.errors import ConfigurationError, UnknownSettingError


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
        ("LR", "lr"),
        ("muon_lr", "lr"),
        ("adam_epsilon", "adam_eps"),
        ("max_norm", "clip_grad"),
        ("embed_lr", "decoupled_lr"),
        ("weight_decouple", "decoupled_weight_decay"),
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


ELSEWHERE = {
    "params": "overrides={ParamKey(name=...): {...}} changes what one gets",
    "adamw_params": "overrides={ParamKey(name=...): {...}} changes what one gets",
    "num_warmup_steps": "a schedule is made of the built optimizer: OptimizerParamScheduler",
    "rank": "ranks are told by pg_collection=",
    "dtype": "precision is set by bf16=True or fp16=True",
    "optim_bits": "states of few bits are asked for by exp_avg_dtype and exp_avg_sq_dtype",
    "config_overrides": "build_optimizer takes overrides=",
    "dampening": "it is an argument of torch's SGD: optimizer='torch:SGD' (megaopt-bridge) takes torch_dampening",
    "initial_accumulator_value": "it is an argument of torch's Adagrad: optimizer='torch:Adagrad'",
    "nothing_like_it": "`megaopt describe sgd` lists what can be set",
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_is_no_setting_here_is_told_where_it_is_set(plugins, name) -> None:
    """Schedules, parameters, precision and ranks are said elsewhere; torch's own arguments reach torch's classes."""
    plugins.registry()
    with pytest.raises(UnknownSettingError) as caught:
        OptimizerConfig(optimizer="sgd", **{name: 1})
    assert ELSEWHERE[name] in str(caught.value)


@pytest.mark.parametrize("name", ["amsgrad", "fused", "foreach", "capturable", "maximize", "differentiable"])
def test_arguments_of_torchs_optimizers_name_the_class_of_that_name(plugins, name) -> None:
    """`adamw` is torch's AdamW, though others take the argument too."""
    plugins.registry()
    with pytest.raises(
        UnknownSettingError, match=rf"argument of torch's AdamW: .* takes torch_{name}, and an override"
    ):
        OptimizerConfig(optimizer="adamw", **{name: True})


@pytest.mark.parametrize("given", [None, "muon", 3, ["lr"]])
def test_a_configuration_is_made_of_a_mapping(given) -> None:
    """Anything else is named."""
    with pytest.raises(
        ConfigurationError, match=rf"^from_dict: got {type(given).__name__}; give a mapping of names"
    ):
        OptimizerConfig.from_dict(given)
