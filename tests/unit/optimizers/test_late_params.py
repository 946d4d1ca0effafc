"""What trains after the build: unfrozen, added, replaced, excluded, frozen again, converted."""

import warnings
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megaopt_core import (
    ChainedOptimizer,
    OptimizerParamScheduler,
    ParamGroupOverride,
    ParamKey,
    ProcessGroupCollection,
)
from megaopt_core.errors import OwnershipError

pytestmark = pytest.mark.any_python

PRECISIONS = [{}, {"bf16": True}, {"bf16": True, "use_precision_aware_optimizer": True}]


def model_of(precision: Mapping[str, Any], seed: int = 0) -> nn.Sequential:
    """Three layers, in the dtype of a precision."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    return model.to(torch.bfloat16 if precision else torch.float32)


def backward(model: nn.Sequential, seed: int = 0) -> None:
    """Gradients of a loss of random inputs."""
    inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    model(inputs.to(model[0].weight.dtype)).float().square().sum().backward()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_unfrozen_layer_trains_as_if_it_had_been_built_then(build, precision) -> None:
    """With state of its own from that step on, and one warning that names it."""
    model, alone = model_of(precision), model_of(precision)
    model[0].requires_grad_(False)
    optimizer = build(model, **precision)
    for seed in range(2):
        backward(model, seed)
        optimizer.step()
        optimizer.zero_grad()
    model[0].requires_grad_(True)
    own = build(alone[0], **precision)
    for step in range(3):
        backward(model, 10 + step)
        for mine, theirs in zip(model[0].parameters(), alone[0].parameters(), strict=True):
            theirs.grad = mine.grad.clone()
        if step:
            optimizer.step()
        else:
            with pytest.warns(
                UserWarning, match=r"^'0.weight', '0.bias' trains since .*unfrozen or added"
            ) as caught:
                optimizer.step()
            assert len(caught) == 1
        own.step()
        for mine, theirs in zip(model[0].parameters(), alone[0].parameters(), strict=True):
            assert torch.equal(mine, theirs)
        optimizer.zero_grad()
    assert set(optimizer.names.values()) == {name for name, _ in model.named_parameters()}
    assert optimizer.check() == ()
    assert {row.name for row in optimizer.report().params} == set(optimizer.names.values())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_added_layer_trains(build, precision) -> None:
    """Its parameters are in the groups, in the state and in the state dict."""
    model = model_of(precision)
    optimizer = build(model, **precision)
    backward(model)
    optimizer.step()
    model.append(nn.Linear(2, 2).to(model[0].weight.dtype))
    before = model[3].weight.detach().clone()
    backward(model)
    with pytest.warns(UserWarning, match=r"'3.weight', '3.bias' trains since"):
        optimizer.step()
    assert not torch.equal(before, model[3].weight)
    assert any(model[3].weight is param for group in optimizer.param_groups for param in group["params"])
    assert optimizer.state[model[3].weight]["exp_avg"].any()
    saved = optimizer.state_dict()
    assert "3.weight" in {name for group in saved["param_groups"] for name in group["param_names"]}
    optimizer.load_state_dict(saved)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_assigned_weights_train_and_keep_their_state(build, precision) -> None:
    """As they do when the same values are copied into the parameters."""
    assigned, copied = model_of(precision), model_of(precision)
    first, second = build(assigned, lr=0.1, **precision), build(copied, lr=0.1, **precision)
    for model, optimizer in ((assigned, first), (copied, second)):
        for seed in range(2):
            backward(model, seed)
            optimizer.step()
            optimizer.zero_grad()
    other = model_of(precision, seed=3).state_dict()
    assigned.load_state_dict({name: value.clone() for name, value in other.items()}, assign=True)
    copied.load_state_dict(other)
    backward(assigned, 5)
    backward(copied, 5)
    with pytest.warns(UserWarning, match=r"replaced, as load_state_dict\(assign=True\) does") as caught:
        first.step()
    second.step()
    assert len(caught) == 1
    for mine, theirs in zip(assigned.parameters(), copied.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(first.state[mine]["exp_avg"], second.state[theirs]["exp_avg"])
    assert list(first.names) == list(assigned.parameters())
    assert first.check() == ()


def test_a_parameter_of_no_present_group_gets_one(build) -> None:
    """Without a group of its settings there is a new one, which a report names."""
    model = model_of({})
    model[0].bias.requires_grad_(False)
    overrides = {ParamKey(name="0.bias"): ParamGroupOverride(max_lr=0.5)}
    optimizer = build(model, overrides=overrides, lr=0.01)
    model[0].bias.requires_grad_(True)
    before = model[0].bias.detach().clone()
    backward(model)
    with pytest.warns(UserWarning, match=r"'0.bias' trains since .* there are 1 new parameter groups"):
        optimizer.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.5]
    assert (model[0].bias - before).abs().max().item() == pytest.approx(0.5, rel=1e-3)
    assert optimizer.check() == ()
    backward(model)
    optimizer.step()


def test_a_parameter_for_another_optimizer_is_chained(build) -> None:
    """The override of the build holds for what begins to train later."""
    model = model_of({})
    model[0].requires_grad_(False)
    overrides = {
        ParamKey(name="0.*"): ParamGroupOverride(optimizer="t_sgd"),
        ParamKey(name="2.*"): {"optimizer": "t_momentum"},
    }
    optimizer = build(model, overrides=overrides)
    assert len(optimizer.children) == 2
    model[0].requires_grad_(True)
    before = model[0].weight.detach().clone()
    backward(model)
    grad = model[0].weight.grad.clone()
    with pytest.warns(UserWarning, match="; t_sgd steps it from now on"):
        optimizer.step()
    assert len(optimizer.children) == 3
    assert torch.equal(model[0].weight, before - 0.01 * grad)
    assert {row.optimizer for row in optimizer.report().params} == {"t_adam", "t_sgd", "t_momentum"}


def test_none_leaves_a_parameter_to_another_optimizer(build) -> None:
    """It is in no group, no step moves it, nobody warns, and its gradient stays for its owner."""
    model = model_of({})
    optimizer = build(model, overrides={ParamKey(name="1.*"): ParamGroupOverride(optimizer="none")})
    other = torch.optim.SGD(model[1].parameters(), lr=0.1)
    before = model[1].weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            backward(model)
            optimizer.step()
            assert torch.equal(model[1].weight, before)
            assert model[1].weight.grad is not None
        other.step()
    assert not torch.equal(model[1].weight, before)
    assert optimizer.routing.excluded == ("1.weight", "1.bias")
    assert not {"1.weight", "1.bias"} & set(optimizer.names.values())
    assert optimizer.check() == ()


def test_none_holds_for_what_begins_to_train_later(build) -> None:
    """Unfrozen or added, it stays somebody else's."""
    model = model_of({})
    model[1].requires_grad_(False)
    optimizer = build(model, overrides={ParamKey(name="1.*"): ParamGroupOverride(optimizer="none")})
    model[1].requires_grad_(True)
    before = model[1].weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            backward(model)
            optimizer.step()
    assert torch.equal(model[1].weight, before)


def test_none_wins_over_another_optimizer(build) -> None:
    """An optimizer's own defaults and wider patterns do not contradict it."""
    model = model_of({})
    overrides = {
        ParamKey(name="*.weight"): ParamGroupOverride(optimizer="t_sgd"),
        ParamKey(name="1.weight"): ParamGroupOverride(optimizer="none"),
    }
    assert build(model, overrides=overrides).routing.excluded == ("1.weight",)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_is_frozen_again_is_skipped_and_keeps_its_state(build, precision) -> None:
    """Also where its last gradient is still there, and momentum and weight decay would move it."""
    model = model_of(precision)
    optimizer = build(model, weight_decay=0.1, **precision)
    backward(model)
    optimizer.step()
    model[0].requires_grad_(False)
    values = [param.detach().clone() for param in model[0].parameters()]
    state = {key: torch.as_tensor(value).clone() for key, value in optimizer.state[model[0].weight].items()}
    for _ in range(2):
        backward(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert all(torch.equal(*pair) for pair in zip(values, model[0].parameters(), strict=True))
    assert all(torch.equal(value, optimizer.state[model[0].weight][key]) for key, value in state.items())
    model[0].requires_grad_(True)
    backward(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert not torch.equal(values[0], model[0].weight)
    steps = {
        name: optimizer.state[param]["step"] for param, name in optimizer.names.items() if "weight" in name
    }
    assert {name: float(step) for name, step in steps.items()} == {
        "0.weight": 2.0,
        "1.weight": 4.0,
        "2.weight": 4.0,
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_converted_model_is_refused(build, precision, dtype) -> None:
    """By name, with both dtypes, before anything is stepped; its own dtype is no conversion."""
    model = model_of(precision)
    was = model[0].weight.dtype
    optimizer = build(model, **precision)
    model.to(dtype)
    backward(model)
    if dtype == was:
        assert optimizer.step().update_successful
        return
    values = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(OwnershipError, match=rf"'0.weight' is {str(dtype)[6:]} now, but was {str(was)[6:]}"):
        optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(values, model.parameters(), strict=True))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_weight_of_another_shape_is_refused(build, precision) -> None:
    """A fused kernel would read and write its states behind their end."""
    model = model_of(precision)
    optimizer = build(model, **precision)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    was = tuple(model[2].weight.shape)
    model[2].weight.data = torch.zeros(was[0] + 2, *was[1:], dtype=model[2].weight.dtype)
    model[2].bias.data = torch.zeros(was[0] + 2, dtype=model[2].bias.dtype)
    backward(model)
    values = [param.detach().clone() for param in model.parameters()]
    said = (
        rf"'2.weight' has shape \({was[0] + 2}, .* now, but had \({was[0]}, .* before .*, or build it again"
    )
    with pytest.raises(OwnershipError, match=said):
        optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(values, model.parameters(), strict=True))


def test_a_model_that_went_to_meta_is_refused(build) -> None:
    """There is nothing left to step."""
    model = model_of({})
    optimizer = build(model)
    model.to("meta")
    model(torch.zeros(1, 4, device="meta")).sum().backward()
    with pytest.raises(
        OwnershipError, match=r"'0.weight' trains since .* it is on the meta device and holds no values"
    ):
        optimizer.step()


def test_another_shape_under_an_old_name_is_refused(build) -> None:
    """A vocabulary that grew needs an optimizer that knows of it."""
    model = model_of({})
    optimizer = build(model)
    model[2] = nn.Linear(4, 3)
    backward(model)
    with pytest.raises(
        OwnershipError,
        match=r"'2.weight' .* it is float32 \(3, 4\) on cpu now and was float32 \(2, 4\) on cpu",
    ):
        optimizer.step()


class Buffered(nn.Module):
    """A wrapper that keeps gradients of what trained when it was made."""

    megaopt_wrapper = True
    process_groups = ProcessGroupCollection()
    full_param_layout = SimpleNamespace(routing=None, buffers={})
    scatters_grads = forward_waits = False

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Call the module."""
        return self.module(inputs)

    def finish_grad_sync(self) -> None:
        """Nothing is reduced."""

    finish_param_sync = zero_grad_buffer = finish_grad_sync


@pytest.mark.parametrize("settings", [{}, {"clip_grad": 1.0}])
def test_under_buffers_it_raises_before_anything_changes(build, settings) -> None:
    """The buffer has no room for its gradient: the error names it, and says what to do."""
    model = model_of({})
    model[0].requires_grad_(False)
    wrapped = Buffered(model)
    optimizer = build(wrapped, **settings)
    model[0].requires_grad_(True)
    backward(model)
    values = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(
        OwnershipError,
        match=(
            r"^'0.weight' trains since the optimizer was built \(unfrozen or added\), and cannot be stepped: "
            r"sharding='replicated': Buffered reduces only gradients of the parameters "
            r"that trained when it was made\. Build"
        ),
    ):
        optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(values, model.parameters(), strict=True))
    model[0].requires_grad_(False)
    assert optimizer.step().update_successful


def test_schedulers_go_on_where_groups_stay_the_same(build) -> None:
    """A parameter that joins a group follows its schedule."""
    model = model_of({})
    model[0].requires_grad_(False)
    optimizer = build(model, lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    backward(model)
    optimizer.step()
    scheduler.step()
    model[0].requires_grad_(True)
    before = model[0].weight.detach().clone()
    backward(model)
    with pytest.warns(UserWarning, match="trains since"):
        optimizer.step()
    scheduler.step()
    assert (model[0].weight - before).abs().max().item() == pytest.approx(0.05, rel=1e-3)
    assert [group["lr"] for group in optimizer.param_groups] == [0.025]


def test_a_model_that_was_moved_to_another_device_is_refused_with_both_names(build, mlp, give) -> None:
    """Tried from the other side, for want of a device: the optimizer believes that it was built on one."""
    model = mlp()
    optimizer = build(model)
    give(model)
    optimizer.late.look._kinds["device"][0] = torch.device("cuda", 0)
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(
        OwnershipError, match=r"'0\.weight' is on cpu now, but was on cuda:0 .* before you build"
    ):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


SETTINGS = {"init_lr": 0.0, "max_lr": 0.1, "min_lr": 0.0, "lr_warmup_steps": 0, "lr_decay_steps": 10}
NO_DECAY = {ParamKey(name="*.bias"): {"wd_mult": 0.0}}
DECAY = {"start_wd": 0.2, "end_wd": 0.2, "wd_incr_steps": 0, "wd_incr_style": "constant"}


@pytest.mark.parametrize("who", ["schedule", "torch", "by hand"])
def test_a_new_group_begins_where_the_others_are(build, who) -> None:
    """A tenth of the learning rate is left for those that train, and for those that begin to."""
    model = model_of({})
    for name, param in model.named_parameters():
        param.requires_grad_(not name.endswith("bias"))
    optimizer = build(model, lr=0.1, weight_decay=0.1, overrides=NO_DECAY)
    if who == "schedule":
        schedule = OptimizerParamScheduler(optimizer, **SETTINGS, **DECAY, lr_decay_style="linear")
        schedule.step(9)
    elif who == "torch":
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.1)
    else:
        optimizer.param_groups[0]["lr"] = 0.01
    model.requires_grad_(True)
    backward(model)
    with pytest.warns(UserWarning, match="1 new parameter group"):
        optimizer.step()
    old, new = optimizer.param_groups
    assert old["lr"] == pytest.approx(0.01)
    assert new["lr"] == pytest.approx(0.01)
    assert (new["weight_decay"], new["wd_mult"]) == (0.0, 0.0)


def test_a_new_group_of_a_chained_child_follows_the_chains_schedule(build) -> None:
    """The schedule is the chain's, the group is born in the child."""
    model = model_of({})
    model[0].bias.requires_grad_(False)
    model[2].requires_grad_(False)
    model[1].requires_grad_(False)
    chain = ChainedOptimizer([build(model, lr=0.1, overrides=NO_DECAY)])
    schedule = OptimizerParamScheduler(chain, **SETTINGS, **DECAY, lr_decay_style="linear")
    schedule.step(9)
    model[0].bias.requires_grad_(True)
    backward(model)
    with pytest.warns(UserWarning, match="1 new parameter group"):
        chain.step()
    assert [group["lr"] for group in chain.param_groups] == pytest.approx([0.01, 0.01])
