"""Whoever types torch's name for a setting, or another script's, is told what it is called here."""

import pytest
import torch
from megaopt_tools import main

from megaopt_core import OptimizerConfig, ParamKey, route
from megaopt_core.errors import ConfigurationError, OverrideError, UnknownSettingError

pytestmark = pytest.mark.any_python


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
    plugins.registry("tools")
    with pytest.raises(UnknownSettingError, match=f"has no setting '{name}'.*; it is called ") as caught:
        OptimizerConfig(optimizer="like", **{name: 1})
    assert f"; it is called {ours} here" in str(caught.value)


TWO = """
@frozen
class Settings:
    beta1: float = 0.9
    beta2: float = 0.99
    momentum: float = 0.5


@hookimpl
def megaopt_optimizer_entries():
    entry = OptimizerEntry(torch.optim.SGD, settings=Settings, setting_prefixes=("mine",))
    return {"mine": entry, "sgd": OptimizerEntry(torch.optim.SGD, setting_prefixes=("sgd",))}
"""


@pytest.mark.parametrize(
    ("optimizer", "name", "advice"),
    [
        (
            "sgd",
            "nesterov",
            "it is called muon_nesterov here, and is muon's; it is an argument of torch's SGD",
        ),
        ("sgd", "ns_steps", "it is called muon_num_ns_steps here, and is muon's"),
        ("sgd", "momentum", "it is called sgd_momentum here"),
        ("sgd", "wd", "it is called weight_decay here"),
        ("mine", "momentum", "it is called mine_momentum here"),
        ("mine", "betas", "it is called mine_beta1 and mine_beta2 here"),
        ("mine", "eps", "it is called adam_eps here, and is adam's"),
        ("adamw", "eps", "it is called adam_eps here"),
        ("adamw", "nesterov", "it is called muon_nesterov here, and is muon's"),
    ],
)
def test_advice_is_of_what_the_runs_optimizer_has_or_says_whose_it_is(
    plugins, optimizer, name, advice
) -> None:
    """A setting of another optimizer changes nothing in this run."""
    plugins.install("two", TWO)
    plugins.registry("tools")
    with pytest.raises(UnknownSettingError) as caught:
        OptimizerConfig(optimizer=optimizer, **{name: 1})
    told = str(caught.value).partition("in an installed plugin; ")[2]
    assert told.startswith(advice)
    assert ("'s" in told) == ("'s" in advice)


def test_what_is_advised_for_torchs_classes_is_a_setting_of_theirs(plugins) -> None:
    """By the full name, whether the class is asked for or one of ours."""
    plugins.registry("tools")
    for optimizer in ("adam", "torch:Adam"):
        with pytest.raises(UnknownSettingError, match=r"(takes|called) torch_adam_amsgrad"):
            OptimizerConfig(optimizer=optimizer, amsgrad=True)


def test_what_is_advised_for_torchs_classes_is_taken(plugins) -> None:
    """By the distribution that brings them."""
    pytest.importorskip("megaopt_bridge")
    plugins.registry("bridge", "tools")
    assert OptimizerConfig(optimizer="torch:Adam", torch_adam_amsgrad=True).torch_adam_amsgrad


def test_on_the_command_line_too(plugins, capsys) -> None:
    """In one line."""
    plugins.registry("tools")
    assert main(["explain", "torch.nn:Identity", "--set", "ns_steps=5"]) == 2
    assert "; it is called muon_num_ns_steps here" in capsys.readouterr().err


ELSEWHERE = {
    "params": "overrides={ParamKey(name=...): {...}} changes the settings of one",
    "adamw_params": "overrides={ParamKey(name=...): {...}} changes the settings of one",
    "num_warmup_steps": "make the schedule from the built optimizer: OptimizerParamScheduler",
    "rank": "pg_collection= or torch.distributed gives the ranks",
    "dtype": "bf16=True or fp16=True sets the precision",
    "optim_bits": "exp_avg_dtype and exp_avg_sq_dtype choose states of fewer bits",
    "config_overrides": "build_optimizer takes overrides=",
    "dampening": "it is an argument of torch's SGD: optimizer='torch:SGD' (megaopt-bridge) takes torch_sgd_dampening",
    "initial_accumulator_value": "it is an argument of torch's Adagrad: optimizer='torch:Adagrad'",
    "nothing_like_it": "`megaopt describe sgd` lists the settings",
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_is_no_setting_here_is_told_where_it_is_set(plugins, name) -> None:
    """Schedules, parameters, precision and ranks are said elsewhere; torch's own arguments reach torch's classes."""
    plugins.registry("tools")
    with pytest.raises(UnknownSettingError) as caught:
        OptimizerConfig(optimizer="sgd", **{name: 1})
    assert ELSEWHERE[name] in str(caught.value)


@pytest.mark.parametrize("name", ["amsgrad", "fused", "foreach", "capturable", "maximize", "differentiable"])
def test_arguments_of_torchs_optimizers_name_the_class_of_that_name(plugins, name) -> None:
    """`adamw` is torch's AdamW, though others take the argument too."""
    plugins.registry("tools")
    with pytest.raises(
        UnknownSettingError, match=rf"argument of torch's AdamW: .* takes torch_adamw_{name}, and an override"
    ):
        OptimizerConfig(optimizer="adamw", **{name: True})


@pytest.mark.parametrize("given", [None, "muon", 3, ["lr"]])
def test_a_configuration_is_made_of_a_mapping(given) -> None:
    """Anything else is named."""
    with pytest.raises(
        ConfigurationError, match=rf"^from_dict: got {type(given).__name__}; give a mapping of names"
    ):
        OptimizerConfig.from_dict(given)


PLAIN = """
@hookimpl
def megaopt_optimizer_entries():
    return {"plain": OptimizerEntry(torch.optim.SGD)}
"""


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("learning_rate", "; it is called lr here."),
        ("wd", "; it is called weight_decay here."),
        ("sgd_momentum", "; it is called momentum here."),
        ("weigth_decay", "; did you mean 'weight_decay'?"),
        ("zzz", "."),
    ],
)
def test_a_key_that_others_use_is_told_as_it_is_called_here(plugins, key, meant):
    """Under torch's names, under the full name of a setting, and misspelt."""
    plugins.install("plain", PLAIN)
    plugins.registry("tools")
    with pytest.raises(OverrideError) as caught:
        route(
            OptimizerConfig(optimizer="plain", lr=0.1),
            torch.nn.Linear(2, 2),
            {ParamKey(name="weight"): {key: 1.0}},
        )
    assert f", which steps 'weight'{meant} Allowed are " in str(caught.value)
