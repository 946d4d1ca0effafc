"""A class by its name trains as by itself, reports, saves and resumes; what it does not take goes to Adam."""

from collections.abc import Iterable

import pytest
import torch
from megaopt_testing import TinyGPT
from torch import nn

from megaopt_core import OptimizerConfig, ParamGroupOverride, ParamKey, build_optimizer, get_registry
from megaopt_core.errors import ConfigurationError, PluginError, PluginNotInstalledError, UnknownNameError

files = pytest.importorskip("megaopt_checkpoint")


def model_of(seed: int = 0) -> TinyGPT:
    """Return a small GPT."""
    torch.manual_seed(seed)
    return TinyGPT()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Step with gradients that depend on the step alone."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter, copied."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def test_it_steps_as_the_class_by_itself() -> None:
    """Bit for bit, with its own settings and the core's learning rate and weight decay."""
    ours, alone = model_of(), model_of()
    settings = {"betas": (0.8, 0.95), "momentum_decay": 2e-3}
    built = build_optimizer(
        ours, "torch:NAdam", lr=1e-2, weight_decay=0.1, clip_grad=0.0, overrides={}, **settings
    )
    by_itself = torch.optim.NAdam(
        alone.parameters(), lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True, **settings
    )
    train(ours, built, range(5))
    train(alone, by_itself, range(5))
    expected = values(alone)
    assert [name for name, value in values(ours).items() if not torch.equal(value, expected[name])] == []


def test_the_report_names_the_bridge_and_the_class() -> None:
    """Who steps, from where."""
    built = build_optimizer(model_of(), "torch:NAdam", lr=1e-2)
    (part,) = built.report().parts
    assert (part.optimizer, part.optimizer_class) == ("torch:NAdam", "NAdam")
    assert part.plugin.startswith("megaopt-bridge ")


@pytest.mark.parametrize("name", ["torch:NAdam", "torch:Adafactor", "torch:ASGD", "torch:Muon"])
@pytest.mark.parametrize("steps", [0, 3])
def test_it_resumes_from_files(name, steps, tmp_path) -> None:
    """Three steps, or none, saved, loaded into a new optimizer, and four more have the bits of an unbroken run."""
    through = model_of()
    built = build_optimizer(through, name, lr=1e-2)
    train(through, built, range(steps))
    files.save_checkpoint(tmp_path / "saved", through, built)
    train(through, built, range(steps, 7))
    again = model_of(1)
    resumed = build_optimizer(again, name, lr=1e-2)
    files.load_checkpoint(tmp_path / "saved", again, resumed)
    train(again, resumed, range(steps, 7))
    expected = values(through)
    assert [key for key, value in values(again).items() if not torch.equal(value, expected[key])] == []


def test_what_a_class_refuses_goes_to_adam() -> None:
    """Torch's Muon takes matrices: biases and norms by their dimensions, the embedding by what it is."""
    built = build_optimizer(model_of(), "torch:Muon", lr=1e-2)
    routes = {name: entry.spec.optimizer for name, entry in built.routing.params.items()}
    assert routes["blocks.0.up.weight"] == "torch:Muon"
    assert {routes[name] for name in ("embedding.weight", "head.weight", "norm.bias")} == {"adam"}
    assert "torch:Muon is meant for matrices" in built.routing.params["norm.bias"].reason


def test_one_parameter_can_be_sent_to_a_class() -> None:
    """By an override, which may set what the class keeps for a group, or only takes in its constructor."""
    overrides = {
        ParamKey(name="head.weight"): ParamGroupOverride(optimizer="torch:Adamax", betas=(0.7, 0.8)),
    }
    built = build_optimizer(model_of(), "adam", lr=1e-2, overrides=overrides)
    (group,) = [group for group in built.param_groups if group.get("betas") == (0.7, 0.8)]
    assert [built.names[param] for param in group["params"]] == ["head.weight"]
    assert built.routing.params["head.weight"].spec.optimizer == "torch:Adamax"


def test_classes_that_cannot_be_stepped_are_refused_with_the_reason() -> None:
    """In words, when they are asked for."""
    for name, why in {
        "torch:LBFGS": "its step needs a closure: it evaluates the model several times a step",
        "torch:SparseAdam": "it takes sparse gradients only, and megaopt collects dense ones",
    }.items():
        with pytest.raises(PluginError) as raised:
            get_registry().optimizer(name)
        assert str(raised.value) == f"optimizer '{name}' cannot be used: {why}"


def test_names_that_lead_nowhere_say_what_there_is() -> None:
    """A class, a module, a package or half of the name may be missing."""
    registry = get_registry()
    with pytest.raises(
        UnknownNameError, match=r"^optimizer 'torch:NAdan': 'torch' has no torch.optim.Optimizer"
    ):
        registry.optimizer("torch:NAdan")
    with pytest.raises(UnknownNameError, match=r"It has: ASGD, Adadelta, "):
        registry.optimizer("torch.optim:Nadam")
    with pytest.raises(
        UnknownNameError, match=r"^optimizer 'no.such:Class': module 'no.such' cannot be imported"
    ):
        registry.optimizer("no.such:Class")
    with pytest.raises(
        UnknownNameError, match=r"must read 'source:Class'; a source is one of torch, emerging, po"
    ):
        registry.optimizer("torch:")
    assert registry.optimizer("torch:nadam") is registry.optimizer("torch:NAdam")
    assert registry.optimizer("torch.optim:NAdam").setting_prefixes == ("torch_optim_nadam",)


def test_a_package_that_is_not_installed_is_named_with_the_pip_line(monkeypatch) -> None:
    """And settings given for its optimizer are kept: a saved configuration outlives it."""
    import sys

    monkeypatch.setitem(sys.modules, "prodigyopt", None)
    with pytest.raises(PluginNotInstalledError) as raised:
        get_registry().optimizer("prodigyopt:Missing")
    assert str(raised.value) == (
        "optimizer 'prodigyopt:Missing' comes with prodigyopt, which is not installed: pip install prodigyopt"
    )
    config = OptimizerConfig(optimizer="prodigyopt:Missing", prodigyopt_missing_d0=1e-5)
    assert config.to_dict()["prodigyopt_missing_d0"] == 1e-5


def test_settings_are_checked_by_type_sign_and_the_class() -> None:
    """Each error names the setting, the value and what is allowed."""
    for settings, message in {
        ("betas", "fast"): "torch_nadam_betas='fast': must be a tuple of which each is a number in [0, 1)",
        ("eps", -1.0): "torch_nadam_eps=-1.0: must be a number of at least 0",
        ("maximize", 1): "torch_nadam_maximize=1: must be True or False",
    }.items():
        with pytest.raises(ConfigurationError) as raised:
            build_optimizer(model_of(), "torch:NAdam", lr=0.1, **dict([settings]))
        assert str(raised.value) == message
    with pytest.raises(
        ConfigurationError, match=r"^torch_sgd_nesterov=True: SGD refuses it: Nesterov momentum req"
    ):
        OptimizerConfig(optimizer="torch:SGD", torch_sgd_nesterov=True)
    config = OptimizerConfig(optimizer="torch:NAdam", torch_nadam_betas=[0.7, 0.8])
    assert OptimizerConfig.from_dict(config.to_dict()) == config
    assert config.torch_nadam_betas == (0.7, 0.8)
