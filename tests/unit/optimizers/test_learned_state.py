"""State that nobody declares: a plugin learns it, or the error names megaopt-bridge."""

import importlib

import pytest
import torch
from torch import nn

from megaopt_core import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MixedPrecisionOptimizer,
    OptimizerConfig,
    build_optimizer,
)
from megaopt_core.errors import PluginNotInstalledError

pytestmark = pytest.mark.any_python

ENTRIES = """
class Untold(torch.optim.Adam):
    pass

@hookimpl
def megaopt_optimizer_entries():
    kinds = {"exp_avg": "param", "exp_avg_sq": "param", "step": "scalar"}
    return {"told": OptimizerEntry(torch.optim.Adam, state=kinds), "untold": OptimizerEntry(Untold)}
"""

LEARNS = """
@hookimpl
def megaopt_learn_state(optimizer):
    def make(optimizer, config=None):
        for group in optimizer.param_groups:
            for param in group["params"]:
                optimizer.state[param]["exp_avg"] = torch.ones_like(param)

    return make
"""

WRAPPERS = {
    FP32Optimizer: {},
    MixedPrecisionOptimizer: {"bf16": True},
    Float16OptimizerWithFloat16Params: {"bf16": True},
}


def _model(is_narrow: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2, bias=False, dtype=torch.bfloat16 if is_narrow else torch.float32)


def _refusal(name: str) -> str:
    return (
        f"^learning the state of {name}, which neither init_state_fn nor its entry's state tells, comes with "
        "megaopt-bridge, which is not installed: pip install megaopt-bridge$"
    )


def test_a_built_optimizer_without_declared_state_names_the_plugin_that_learns_it(plugins) -> None:
    """An entry that declares its state needs no plugin."""
    plugins.install("entries", ENTRIES)
    plugins.registry()
    with pytest.raises(PluginNotInstalledError, match=_refusal("Untold")) as caught:
        build_optimizer(_model(), "untold", lr=0.1)
    assert caught.value.distribution == "megaopt-bridge"
    optimizer = build_optimizer(_model(), "told", lr=0.1)
    assert [set(state) for state in optimizer.state.values()] == [{"exp_avg", "exp_avg_sq", "step"}]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_of_a_class_that_no_entry_describes_names_the_plugin(plugins, wrapper) -> None:
    """It takes a described class, and one whose state is made by a function; a refused optimizer is as it was."""
    module = importlib.import_module(plugins.install("entries", ENTRIES))
    plugins.registry()
    config = OptimizerConfig(**WRAPPERS[wrapper])
    model = _model(bool(WRAPPERS[wrapper]))
    inner = module.Untold(model.parameters())
    with pytest.raises(PluginNotInstalledError, match=_refusal("Untold")):
        wrapper(inner, config)
    assert inner.param_groups[0]["params"] == [model.weight]
    assert not inner.state

    def make(optimizer, config):
        for param in optimizer.param_groups[0]["params"]:
            optimizer.state[param]["made"] = torch.ones_like(param)

    made = wrapper(inner, config, init_state_fn=make)
    described = wrapper(torch.optim.Adam(_model(bool(WRAPPERS[wrapper])).parameters()), config)
    (by_function,), (by_entry,) = made.state.values(), described.state.values()
    assert "made" in by_function
    assert {"exp_avg", "exp_avg_sq", "step"} <= set(by_entry)
    assert not by_entry["exp_avg"].any()
    chained = ChainedOptimizer([made, described])
    assert [{"made", "exp_avg"} & state.keys() for state in chained.state.values()] == [{"made"}, {"exp_avg"}]


def test_any_plugin_may_learn_state(plugins) -> None:
    """Its result stands in for the state; the class's first step makes its own."""
    plugins.install("entries", ENTRIES)
    plugins.install("learner", LEARNS)
    plugins.registry()
    model, plain = _model(), _model()
    optimizer = build_optimizer(model, "untold", lr=0.1, weight_decay=0.0, clip_grad=0.0)
    (state,) = optimizer.state.values()
    assert {key: value.unique().tolist() for key, value in state.items()} == {"exp_avg": [0.0]}
    alone = torch.optim.Adam(plain.parameters(), lr=0.1)
    for stepped, module in ((optimizer, model), (alone, plain)):
        module.weight.grad = torch.full_like(module.weight, 0.5)
        stepped.step()
    assert torch.equal(model.weight, plain.weight)
    assert {"exp_avg", "exp_avg_sq", "step"} == set(optimizer.state[model.weight])


def test_a_plugin_that_is_left_out_learns_nothing(plugins) -> None:
    """The error says why it is left out."""
    plugins.install("entries", ENTRIES)
    plugins.install("bridge", LEARNS, dist="megaopt-bridge")
    plugins.registry(MEGAOPT_DISABLE_PLUGINS="bridge")
    with pytest.raises(
        PluginNotInstalledError, match=r"learning the state of Untold.*which is installed, but"
    ):
        build_optimizer(_model(), "untold", lr=0.1)
