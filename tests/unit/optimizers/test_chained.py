"""Chains: any mixture steps as one."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megaopt_core import (
    ChainedOptimizer,
    ConstantGradScaler,
    DynamicGradScaler,
    FP32Optimizer,
    MixedPrecisionOptimizer,
    OptimizerConfig,
    ParamKey,
)
from megaopt_core.errors import ConfigurationError, OwnershipError, PluginNotInstalledError, UnknownNameError

pytestmark = pytest.mark.any_python

MIXED = {
    ParamKey(name="0.weight"): {"optimizer": "t_sgd", "lr": 0.1},
    ParamKey(name="2.*"): {"optimizer": "t_momentum", "lr": 0.2},
}


def test_a_mixture_is_each_optimizer_by_itself_with_one_norm(mlp, build, give) -> None:
    """Every child steps its parameters as torch would, with gradients clipped by the norm over all."""
    ours, theirs = mlp(), mlp()
    optimizer = build(ours, overrides=MIXED, clip_grad=0.1)
    alone = [
        torch.optim.AdamW([theirs[0].bias], lr=0.01, weight_decay=0.0, foreach=False),
        torch.optim.SGD([theirs[0].weight], lr=0.1),
        torch.optim.SGD(theirs[2].parameters(), lr=0.2, momentum=0.9),
    ]
    for step in range(4):
        give(ours, step)
        give(theirs, step)
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        for each in alone:
            each.step()
        assert optimizer.step().grad_norm == pytest.approx(norm.item(), rel=1e-6)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)


def test_parameters_of_one_child_travel_while_the_next_steps(mlp, build, give, monkeypatch) -> None:
    """Every child begins to bring its parameters before any is waited for."""
    model, events = mlp(), []
    optimizer = build(model, overrides=MIXED)
    kind = type(optimizer.children[0].parts[0].sharded)
    for name in ("start_param_sync", "finish_param_sync"):
        monkeypatch.setattr(kind, name, lambda self, name=name: events.append(name))
    for child in optimizer.children:
        child.parts[0].inner.register_step_pre_hook(lambda *_: events.append("step"))
    give(model)
    optimizer.step()
    assert events == ["step", "start_param_sync"] * 3 + ["finish_param_sync"] * 3


def test_groups_are_the_childrens_own_dictionaries(mlp, build) -> None:
    """What is written into the chain's groups is written into the children's."""
    optimizer = build(mlp(), overrides=MIXED)
    groups = [group for child in optimizer.children for group in child.param_groups]
    assert len(groups) == 3
    assert all(mine is other for mine, other in zip(optimizer.param_groups, groups, strict=True))


def test_state_and_parameters_are_those_of_all_children(mlp, build) -> None:
    """Each parameter is found once."""
    model = mlp()
    optimizer = build(model, overrides=MIXED)
    assert set(optimizer.state) == set(model.parameters())
    assert set(optimizer.get_parameters()) == set(model.parameters())
    assert sorted(optimizer.state[model[2].bias]) == ["momentum_buffer"]


def test_defaults_are_what_all_children_have(mlp, build) -> None:
    """A scheduler that asks for `betas` learns that not every group has them."""
    optimizer = build(mlp(), overrides=MIXED)
    assert "betas" not in optimizer.defaults
    assert optimizer.defaults["lr"] == 0.01


def test_a_chain_of_chains_steps_everything_once(mlp, give) -> None:
    """Children are asked to step, not what they are."""
    model = mlp()
    config = OptimizerConfig(lr=1.0, clip_grad=0.0)
    singles = [FP32Optimizer(torch.optim.SGD([param], lr=1.0), config) for param in model.parameters()]
    chain = ChainedOptimizer([ChainedOptimizer(singles[:2]), *singles[2:]])
    before = [param.detach().clone() for param in model.parameters()]
    give(model)
    assert chain.step().update_successful
    for old, param in zip(before, model.parameters(), strict=True):
        assert torch.equal(param, old - param.grad)
    assert sorted(chain.state_dict()["param_groups"][0]["param_names"]) == [
        "optimizer0.optimizer0.group0.param0"
    ]


def test_children_share_one_scaler(mlp, give) -> None:
    """Scaling, skipping and growing happens once a step."""
    model = mlp(torch.float16)
    config = OptimizerConfig(lr=0.1, fp16=True, clip_grad=0.0)
    children = [
        MixedPrecisionOptimizer(torch.optim.SGD([param], lr=0.1), config, ConstantGradScaler(4.0))
        for param in model.parameters()
    ]
    chain = ChainedOptimizer(children)
    assert {id(child.grad_scaler) for child in children} == {id(chain.grad_scaler)}
    give(model)
    expected = [param.detach().float() - 0.1 * param.grad.float() / 4.0 for param in model.parameters()]
    chain.step()
    for want, main in zip(expected, chain.get_main_params(), strict=True):
        torch.testing.assert_close(main.detach(), want)


def test_an_empty_chain_is_refused() -> None:
    """There is nothing to step."""
    with pytest.raises(ConfigurationError) as caught:
        ChainedOptimizer([])
    assert str(caught.value) == "ChainedOptimizer needs at least one optimizer, got an empty list"


def test_plain_torch_optimizers_are_refused_with_what_to_do() -> None:
    """A chain steps through its children's parts, which torch's optimizers do not have."""
    with pytest.raises(ConfigurationError) as caught:
        ChainedOptimizer([torch.optim.Adam([nn.Parameter(torch.ones(2))])])
    assert str(caught.value) == (
        "ChainedOptimizer chains megaopt's optimizers, got Adam: wrap it in FP32Optimizer or "
        "MixedPrecisionOptimizer, or build it with build_optimizer"
    )


def test_two_children_of_one_parameter_are_refused() -> None:
    """It would be stepped twice."""
    weight = nn.Parameter(torch.ones(2))
    children = [FP32Optimizer(torch.optim.SGD([weight], lr=1.0), OptimizerConfig()) for _ in range(2)]
    with pytest.raises(OwnershipError) as caught:
        ChainedOptimizer(children)
    assert str(caught.value) == "two chained optimizers step group0.param0"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ({"clip_grad": 1.0}, {"clip_grad": 2.0}),
            "chained optimizers step as one, but one has clip_grad=1.0 and another clip_grad=2.0",
        ),
        (
            ({"bf16": True}, {}),
            "chained optimizers step as one, but one has bf16=True and another bf16=False",
        ),
    ],
)
def test_children_that_disagree_are_refused(settings, message) -> None:
    """One step has one precision and one limit."""
    children = [
        (MixedPrecisionOptimizer if "bf16" in each else FP32Optimizer)(
            torch.optim.SGD(
                [nn.Parameter(torch.ones(1, dtype=torch.bfloat16 if "bf16" in each else None))], lr=1.0
            ),
            OptimizerConfig(**each),
        )
        for each in settings
    ]
    with pytest.raises(ConfigurationError) as caught:
        ChainedOptimizer(children)
    assert str(caught.value) == message


def test_scalers_that_disagree_are_refused() -> None:
    """One loss has one scale."""
    config = OptimizerConfig(bf16=True)
    children = [
        MixedPrecisionOptimizer(
            torch.optim.SGD([nn.Parameter(torch.ones(1).bfloat16())], lr=1.0), config, scaler
        )
        for scaler in (None, ConstantGradScaler(2.0))
    ]
    with pytest.raises(ConfigurationError) as caught:
        ChainedOptimizer(children)
    assert (
        str(caught.value)
        == "chained optimizers share one loss, but one scales it by nothing and another by 2.0"
    )


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (
            DynamicGradScaler(4.0, 1.0, growth_interval=3),
            "growth_interval=1000 and another with growth_interval=3",
        ),
        (DynamicGradScaler(4.0, 2.0), "min_scale=1.0 and another with min_scale=2.0"),
        (ConstantGradScaler(4.0), "class='DynamicGradScaler' and another with class='ConstantGradScaler'"),
    ],
)
def test_scalers_that_will_disagree_are_refused(other, difference) -> None:
    """An equal scale now is not an equal scale after an overflow."""
    config = OptimizerConfig(bf16=True)
    children = [
        MixedPrecisionOptimizer(
            torch.optim.SGD([nn.Parameter(torch.ones(1).bfloat16())], lr=1.0), config, scaler
        )
        for scaler in (DynamicGradScaler(4.0, 1.0), other)
    ]
    with pytest.raises(ConfigurationError) as caught:
        ChainedOptimizer(children)
    assert str(caught.value) == f"chained optimizers share one loss, but one scales it with {difference}"


def test_process_groups_that_disagree_are_refused() -> None:
    """One norm is added up over one group."""
    children = [
        FP32Optimizer(
            torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), OptimizerConfig(), process_groups=groups
        )
        for groups in ({}, {"dp": SimpleNamespace(size=lambda: 1, rank=lambda: 0)})
    ]
    with pytest.raises(ConfigurationError) as caught:
        ChainedOptimizer(children)
    assert str(caught.value) == (
        "chained optimizers step as one, but they have different process groups 'dp': give all of them the same "
        "process_groups"
    )


def test_muon_adam_and_sgd_in_one_chain(build, give) -> None:
    """Matrices to Muon, the rest to adam but for one bias, which SGD steps with settings of its own."""
    model = nn.Sequential(
        nn.Embedding(11, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 11)
    )
    try:
        overrides = {ParamKey(name="1.bias"): {"optimizer": "sgd", "lr": 0.5}}
        optimizer = build(model, "muon", overrides=overrides, clip_grad=1.0, sgd_momentum=0.0)
    except (PluginNotInstalledError, UnknownNameError):
        pytest.skip("needs megaopt-muon")
    give(model)
    expected = math.sqrt(sum(param.grad.double().square().sum().item() for param in model.parameters()))
    bias, grad = model[1].bias.detach().clone(), model[1].bias.grad.clone()
    assert optimizer.step().grad_norm == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(model[1].bias.detach(), bias - 0.5 * grad / expected, rtol=1e-4, atol=1e-6)
    assert len(optimizer.children) == 3
    assert all(part.changed == part.stepped for part in optimizer.report(after_step=True).parts)


def wrapped_chain() -> tuple[nn.Module, ChainedOptimizer]:
    """Two layers, each under an optimizer that was wrapped by hand."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    kinds = (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)), torch.optim.AdamW
    config = OptimizerConfig(lr=0.1, clip_grad=0.0)
    return model, ChainedOptimizer(
        [FP32Optimizer(kind(layer.parameters()), config) for kind, layer in zip(kinds, model, strict=True)]
    )


def trained(model: nn.Module, optimizer: ChainedOptimizer, steps: int) -> list[torch.Tensor]:
    """Step on what a model makes of ones, and return its parameters."""
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def test_a_chain_of_wrapped_optimizers_resumes(tmp_path) -> None:
    """Parameters that count from zero in each child have names of their own, in every form of a checkpoint."""
    model, chain = wrapped_chain()
    trained(model, chain, 2)
    stored = chain.checkpoint_state().state_dict()
    assert len({name.rsplit(".", 1)[0] for name in stored["state"]}) == 4
    saved = copy.deepcopy((model.state_dict(), chain.state_dict()))
    expected = trained(model, chain, 2)
    other, again = wrapped_chain()
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    assert all(map(torch.equal, expected, trained(other, again, 2)))
    assert set(chain.children[0].state_dict()["param_groups"][0]["param_names"]) < set(chain.names.values())


def test_built_children_with_two_parameters_of_one_name_are_refused(build) -> None:
    """A checkpoint could not tell them apart; nothing has changed then."""
    children = [build(nn.Linear(2, 2)), build(nn.Linear(2, 2))]
    with pytest.raises(OwnershipError, match=r"of one name \(bias, weight\).*ModuleDict"):
        ChainedOptimizer(children)
    assert set(children[0].names.values()) == {"weight", "bias"}


def test_what_begins_to_train_in_a_childs_model_is_stepped(build) -> None:
    """A chain looks at the models of its children; what joined is in the chain's groups and state dict."""
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight.requires_grad_(False)
    rest = {ParamKey(name=f"{other}.*"): {"optimizer": "none"} for other in "ab"}
    (only_b, only_a) = ({key: value} for key, value in rest.items())
    chain = ChainedOptimizer([build(model, overrides=only_a), build(model, overrides=only_b)])
    before = model["b"].weight.detach().clone()
    model["b"].weight.requires_grad_(True)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with pytest.warns(UserWarning, match=r"b\.weight' trains since"):
        chain.step()
    assert not torch.equal(model["b"].weight, before)
    assert "b.weight" in chain.names.values()
    assert len(chain.param_groups) == sum(len(child.param_groups) for child in chain.children)
    assert chain.state[model["b"].weight]
    assert chain.check() == ()
    chain.load_state_dict(chain.state_dict())
    chain.zero_grad()
    assert all(param.grad is None for param in model.parameters())
