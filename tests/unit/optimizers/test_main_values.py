"""Main parameters that start from a model's state dict."""

import pytest
import torch
from torch import nn

from megaopt_core import FP32Optimizer, MixedPrecisionOptimizer, OptimizerConfig
from megaopt_core.errors import StateDictError

pytestmark = pytest.mark.any_python


@pytest.mark.parametrize("settings", [{}, {"use_precision_aware_optimizer": True}])
def test_main_values_start_from_what_was_loaded(build, settings) -> None:
    """A checkpoint in fp32 loses nothing by way of a bf16 model."""
    model = nn.Linear(3, 2).bfloat16()
    optimizer = build(model, bf16=True, **settings)
    full = {name: torch.randn(param.shape) for name, param in model.named_parameters()}
    model.load_state_dict(full)
    optimizer.reload_model_params(state_dict={f"module.{name}": value for name, value in full.items()})
    for param, name in optimizer.names.items():
        torch.testing.assert_close(optimizer.state[param]["main_param"], full[name], rtol=0, atol=0)


def test_without_a_state_dict_the_model_is_taken() -> None:
    """`reload_model_params()` and `reload_model_params(state_dict=None)` are one."""
    model = nn.Linear(3, 2).bfloat16()
    config = OptimizerConfig(lr=0.1, bf16=True)
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), config)
    with torch.no_grad():
        model.weight.fill_(3.0)
    optimizer.reload_model_params(state_dict=None)
    assert optimizer.get_main_params()[0].tolist() == [[3.0] * 3] * 2


@pytest.mark.parametrize(
    ("state_dict", "message"),
    [
        ({}, "reload_model_params(state_dict): the state dict lacks 2 parameters, such as weight, bias"),
        (
            {"weight": torch.zeros(2, 3), "bias": torch.zeros(3)},
            "reload_model_params(state_dict): 'bias' is (3,) in the state dict and of shape (2,) in the model",
        ),
        (
            {"weight": torch.zeros(2, 3), "bias": None},
            "reload_model_params(state_dict): 'bias' is NoneType in the state dict and of shape (2,) in the model",
        ),
        ([1], "reload_model_params(state_dict) takes a mapping of parameter names to tensors, got list"),
    ],
)
def test_a_state_dict_that_does_not_fit_changes_nothing(build, state_dict, message) -> None:
    """Everything is checked before the first value is taken."""
    model = nn.Linear(3, 2).bfloat16()
    optimizer = build(model, bf16=True)
    before = [main.clone() for main in optimizer.get_main_params()]
    with torch.no_grad():
        model.weight.fill_(3.0)
    with pytest.raises(StateDictError) as caught:
        optimizer.reload_model_params(state_dict)
    assert str(caught.value) == message
    for main, old in zip(optimizer.get_main_params(), before, strict=True):
        assert torch.equal(main, old)


def test_parameters_that_are_stepped_in_place_keep_the_models_values() -> None:
    """In fp32 the model's parameter is the main one."""
    model = nn.Linear(3, 2)
    optimizer = FP32Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), OptimizerConfig(lr=0.1))
    optimizer.names = {param: name for name, param in model.named_parameters()}
    before = model.weight.detach().clone()
    optimizer.reload_model_params({name: param.detach() for name, param in model.named_parameters()})
    assert torch.equal(model.weight, before)
