"""What people give by habit: parameters, classes, dictionaries; schedulers with their defaults, a compiled step."""

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from megaopt_core import (
    FP32Optimizer,
    OptimizerConfig,
    ParamKey,
    build_optimizer,
    get_megatron_optimizer,
    route,
)
from megaopt_core.errors import ConfigurationError
from megaopt_core.optimizers import MegatronOptimizer

CONFIG = {"lr": 0.1}


def net() -> nn.Sequential:
    """Two layers."""
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


MODELS = {
    "parameters": (lambda model: model.parameters(), "got parameters; give the model itself"),
    "a list of parameters": (lambda model: list(model.parameters()), "got parameters; give the model itself"),
    "a tensor": (lambda model: model[0].weight, "got a tensor; give the model itself"),
    "named parameters": (
        lambda model: model.named_parameters(),
        "got named parameters; give the model itself",
    ),
    "groups": (
        lambda model: [{"params": list(model.parameters())}],
        "got parameter groups; give the model itself",
    ),
    "none": (lambda _: None, "got None; give a torch.nn.Module, or a sequence of them"),
    "a class": (lambda _: nn.Linear, "got the class Linear, not an instance of it; give a torch.nn.Module"),
    "a name": (lambda _: "gpt2", "got str 'gpt2'; give a torch.nn.Module"),
    "an optimizer": (
        lambda model: torch.optim.SGD(model.parameters(), 0.1),
        "got the optimizer SGD; give a torch.nn",
    ),
    "a state dict": (lambda model: model.state_dict(), "got OrderedDict"),
    "nothing": (lambda _: [], "got an empty sequence; give a torch.nn.Module"),
    "a mixture": (lambda model: [model, 3], "got a sequence with int among its items"),
    "a number": (lambda _: 3, "got int; give a torch.nn.Module"),
}


@pytest.mark.parametrize("given", MODELS)
def test_what_is_no_model_is_named(given) -> None:
    """With what to give instead, by every entry that takes a model."""
    make, words = MODELS[given]
    for ask in (
        lambda model: build_optimizer(model, "t_adam", **CONFIG),
        lambda model: get_megatron_optimizer(OptimizerConfig(**CONFIG, optimizer="t_adam"), model),
        lambda model: route(OptimizerConfig(**CONFIG, optimizer="t_adam"), model),
    ):
        with pytest.raises(ConfigurationError) as caught:
            ask(make(net()))
        assert str(caught.value).startswith(f"model: {words}")


NAMES = {
    "a class": (
        torch.optim.AdamW,
        "optimizer: got AdamW; give a registered name: the name of torch's class is 'torch:AdamW'",
    ),
    "none": (None, "optimizer: got NoneType; give a registered name"),
    "a dictionary": ({"lr": 0.1}, "its settings as keywords: lr=..."),
    "a configuration": (
        OptimizerConfig(lr=0.1),
        "pass a configuration to get_megatron_optimizer(config, model)",
    ),
    "an optimizer": (
        torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1),
        "wrap an optimizer that exists already: FP32Optimizer(optimizer, con",
    ),
}


@pytest.mark.parametrize("given", NAMES)
def test_what_is_no_name_is_named(given) -> None:
    """With where it belongs."""
    name, words = NAMES[given]
    with pytest.raises(ConfigurationError) as caught:
        build_optimizer(net(), name, lr=0.1)
    assert words in str(caught.value)


CONFIGS = {
    "a dictionary": (
        {"lr": 0.1},
        "config: got dict, not an OptimizerConfig; OptimizerConfig.from_dict(settings)",
    ),
    "a class": (
        OptimizerConfig,
        "config: got the class OptimizerConfig, not an OptimizerConfig; give an instance",
    ),
    "the model": (
        nn.Linear(1, 1),
        "config: got Linear, not an OptimizerConfig; the configuration comes first",
    ),
    "none": (None, "config: got NoneType, not an OptimizerConfig"),
}


@pytest.mark.parametrize("given", CONFIGS)
def test_what_is_no_configuration_is_named(given) -> None:
    """With how to make one."""
    config, words = CONFIGS[given]
    with pytest.raises(ConfigurationError) as caught:
        get_megatron_optimizer(config, net())
    assert str(caught.value).startswith(words)


def test_a_model_without_anything_to_train_is_named() -> None:
    """Frozen or empty, with what to do."""
    with pytest.raises(ConfigurationError, match=r"of the model's 4 parameters 4 are frozen \(requires"):
        build_optimizer(net().requires_grad_(False), "t_adam", **CONFIG)
    with pytest.raises(ConfigurationError, match="nothing to train: the model has no parameters"):
        build_optimizer(nn.ReLU(), "t_adam", **CONFIG)


@pytest.fixture
def mixed() -> tuple[nn.Sequential, MegatronOptimizer]:
    """A chain of which one optimizer has momentum and the other betas, as Muon and Adam are."""
    model = net()
    overrides = {"1.*": "t_adam"}

    return model, build_optimizer(
        model,
        "t_momentum",
        lr=0.1,
        clip_grad=0.0,
        overrides={ParamKey(name=name): {"optimizer": optimizer} for name, optimizer in overrides.items()},
    )


SCHEDULERS = {
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6),
    "cyclic": lambda optimizer: torch.optim.lr_scheduler.CyclicLR(
        optimizer, base_lr=0.01, max_lr=0.1, step_size_up=3
    ),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_momentum_cycles_on_a_mixed_chain(mixed, kind) -> None:
    """As on torch's own optimizers of each kind, where groups have momentum and where they have betas."""
    model, chain = mixed
    scheduler = SCHEDULERS[kind](chain)
    plain = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    reference = SCHEDULERS[kind](plain)
    for _ in range(5):
        model(torch.ones(1, 3)).sum().backward()
        chain.step()
        plain.step()
        momentum = plain.param_groups[0]["momentum"]
        inner = {part.inner.__class__.__name__: part.inner.param_groups[0] for part in chain.parts}
        assert inner["SGD"]["momentum"] == momentum
        assert inner["AdamW"]["betas"] == (momentum, 0.999)
        assert "momentum" not in inner["AdamW"]
        assert [group["lr"] for group in chain.param_groups] == [plain.param_groups[0]["lr"]] * len(
            chain.param_groups
        )
        scheduler.step()
        reference.step()


def test_a_compiled_step_is_the_step() -> None:
    """`torch.compile` of it falls back by itself: the same values, no error."""
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = net()
        optimizer = build_optimizer(model, "t_adam", lr=0.1)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for _ in range(2):
            model(torch.ones(2, 3)).square().sum().backward()
            assert step().update_successful
            optimizer.zero_grad()
        results.append([param.detach() for param in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


class _Product(torch.optim.Optimizer):
    """Multiplies gradients by themselves, which autocast would do in 16 bits."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data -= group["lr"] * (param.grad @ param.grad)


def test_a_step_inside_of_autocast_computes_as_one_outside() -> None:
    """Whoever steps before the block ends gets no other numbers."""
    gradient = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    results = []
    for enabled in (False, True):
        weight = nn.Parameter(torch.zeros(4, 4))
        optimizer = FP32Optimizer(_Product([weight]), OptimizerConfig(lr=0.1, clip_grad=0.0))
        weight.grad = gradient.clone()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            optimizer.step()
            assert torch.is_autocast_enabled("cpu") is enabled
        results.append(weight.detach())
    assert torch.equal(*results)
