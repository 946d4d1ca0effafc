"""What trainers and torch's own tools expect of a `torch.optim.Optimizer`."""

import copy
import json
import pickle

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.optim.swa_utils import AveragedModel

from megaopt_core import OptimizerConfig, ParamKey
from megaopt_core.errors import (
    ConfigurationError,
    OwnershipError,
    UnsupportedOperationError,
    UnsupportedSettingError,
)

CHAIN = {ParamKey(name="2.*"): {"optimizer": "t_momentum"}}


@pytest.fixture(params=[{}, CHAIN], ids=["single", "chain"])
def overrides(request: pytest.FixtureRequest) -> dict[ParamKey, dict[str, str]]:
    """None, or such that the optimizer is a chain."""
    return request.param


def test_it_is_a_torch_optimizer(mlp, build, overrides) -> None:
    """Trainers check the class."""
    assert isinstance(build(mlp(), overrides=overrides), torch.optim.Optimizer)


def test_instance_hooks_fire_once_a_step(mlp, build, give, overrides) -> None:
    """They are given the optimizer that the user has, and may be removed."""
    model = mlp()
    optimizer = build(model, overrides=overrides)
    seen = []
    handles = [
        optimizer.register_step_pre_hook(lambda opt, args, kwargs: seen.append(("pre", opt))),
        optimizer.register_step_post_hook(lambda opt, args, kwargs: seen.append(("post", opt))),
    ]
    give(model)
    optimizer.step()
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert seen == [("pre", optimizer), ("post", optimizer)]


@pytest.mark.parametrize("aware", [False, True])
def test_global_hooks_fire_once_a_step(mlp, build, give, overrides, aware, monkeypatch) -> None:
    """Not again for the optimizers inside, and not for the steps that make state."""
    monkeypatch.setattr("megaopt_lowbit.policy.BATCH_ELEMENTS", 10)
    seen = []
    handles = [
        torch_optimizer.register_optimizer_step_pre_hook(lambda opt, args, kwargs: seen.append(("pre", opt))),
        torch_optimizer.register_optimizer_step_post_hook(
            lambda opt, args, kwargs: seen.append(("post", opt))
        ),
    ]
    try:
        model = mlp(torch.bfloat16)
        optimizer = build(model, overrides=overrides, bf16=True, use_precision_aware_optimizer=aware)
        assert seen == []
        for _ in range(2):
            give(model)
            optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    assert seen == [("pre", optimizer), ("post", optimizer)] * 2


@pytest.mark.parametrize("operation", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copying_is_refused(mlp, build, operation, overrides) -> None:
    """A copy would step the same parameters with a state of its own."""
    with pytest.raises(UnsupportedOperationError) as caught:
        operation(build(mlp(), overrides=overrides))
    assert str(caught.value) == "an optimizer cannot be pickled or copied; save its state_dict() instead"


def test_groups_of_parameters_that_are_not_in_the_model_cannot_be_added(mlp, build, overrides) -> None:
    """The error says so."""
    with pytest.raises(
        OwnershipError, match="a parameter is not in the model that the optimizer was built for"
    ):
        build(mlp(), overrides=overrides).add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_state_cannot_be_replaced(mlp, build, overrides) -> None:
    """Its entries can be changed."""
    optimizer = build(mlp(), overrides=overrides)
    with pytest.raises(UnsupportedOperationError) as caught:
        optimizer.state = {}
    assert str(caught.value) == "optimizer.state cannot be replaced; change its entries, or load a state dict"


def test_repr_shows_the_groups(mlp, build, overrides) -> None:
    """As torch's optimizers do."""
    assert "Parameter Group 0" in repr(build(mlp(), overrides=overrides))


def test_state_of_an_unknown_parameter_is_a_key_error(mlp, build) -> None:
    """Nobody gets state for a parameter that is not stepped."""
    with pytest.raises(KeyError):
        build(mlp()).state[nn.Parameter(torch.ones(1))]


def test_live_state_can_be_written(mlp, build) -> None:
    """Entries are the inner optimizer's own tensors."""
    model = mlp()
    optimizer = build(model)
    state = optimizer.state[model[0].bias]
    state["exp_avg"].fill_(2.0)
    state["note"] = "mine"
    assert optimizer.state_dict()["state"][1]["exp_avg"].unique().tolist() == [2.0]
    assert optimizer.parts[0].inner.state[model[0].bias]["note"] == "mine"
    del state["note"]
    assert ("note" in state, len(state), len(optimizer.state)) == (False, 3, 4)
    assert "exp_avg" in repr(optimizer.state)


@pytest.mark.parametrize("clip_grad", [0.0, 1.0])
def test_torchs_grad_scaler_around_it(mlp, build, give, overrides, clip_grad) -> None:
    """`torch.amp.GradScaler` unscales, skips on overflow, and steps as with torch's optimizers."""
    ours, theirs = mlp(), mlp()
    optimizer = build(ours, "t_sgd", overrides=overrides, clip_grad=clip_grad)
    groups = [{"params": theirs[0].parameters()}, {"params": theirs[2].parameters()}]
    groups[1]["momentum"] = 0.9 if overrides else 0.0
    expected = torch.optim.SGD(groups, lr=0.01)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)]
    for step in range(5):
        for model, opt, scaler in ((ours, optimizer, scalers[0]), (theirs, expected, scalers[1])):
            opt.zero_grad()
            give(model, step, scale=8.0)
            if step == 2:
                model[0].bias.grad[0] = float("inf")
            scaler.scale(torch.ones(()))
            scaler.unscale_(opt)
            if opt is expected and clip_grad:
                nn.utils.clip_grad_norm_(model.parameters(), clip_grad)
            scaler.step(opt)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


class Tied(nn.Module):
    """Two parameter objects of one memory, as loading by hand can make them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(3, 2))
        self.head = nn.Parameter(self.table.data)


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("overflows", [False, True])
def test_torchs_grad_scaler_reaches_twins(build, unscales, overflows) -> None:
    """Their gradients are unscaled and checked with those of the parameters that are stepped."""
    model = Tied()
    optimizer = build(model, "t_sgd", lr=1.0, clip_grad=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    weights = torch.full((3, 2), 2.0)
    weights[0, 0] = float("inf") if overflows else 2.0
    scaler.scale(model.table.sum() + (weights * model.head).sum()).backward()
    if unscales:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.table, torch.full((3, 2), 1.0 if overflows else -2.0))
    assert scaler.get_scale() == (512.0 if overflows else 1024.0)


def test_averaged_models_follow(mlp, build, give) -> None:
    """A copy of a model that has an optimizer is an ordinary model, and averages what was stepped."""
    model = mlp()
    optimizer = build(model)
    averaged = AveragedModel(model)
    history = []
    for step in range(3):
        give(model, step)
        optimizer.step()
        averaged.update_parameters(model)
        history.append(model[0].weight.detach().clone())
    torch.testing.assert_close(averaged.module[0].weight.detach(), torch.stack(history).mean(0))
    assert not hasattr(averaged.module[0].weight, "param_info")


@pytest.mark.filterwarnings("ignore:.*3\\.13\\.0")  # torch remarks that its guards are slower on that Python
def test_a_compiled_model_trains(mlp, build) -> None:
    """Names are those of the bare model; forward and backward may be compiled."""
    plain, inside = mlp(), mlp()
    compiled = torch.compile(inside, backend="aot_eager")
    first, second = build(plain), build(compiled)
    assert list(first.names.values()) == list(second.names.values())
    for _ in range(3):
        for model, optimizer in ((plain, first), (compiled, second)):
            optimizer.zero_grad()
            model(torch.ones(2, 5)).square().sum().backward()
            optimizer.step()
    for mine, other in zip(plain.parameters(), inside.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def test_twins_are_stepped_once_with_the_sum_of_their_gradients(build) -> None:
    """Autograd gives each object a gradient of its own."""
    model = Tied()
    optimizer = build(model, "t_sgd", lr=1.0, clip_grad=100.0)
    assert optimizer.get_parameters() == [model.table]
    for _ in range(2):
        before = model.table.detach().clone()
        (model.table.sum() + 2.0 * model.head.sum()).backward()
        result = optimizer.step()
        assert torch.equal(model.table, before - 3.0)
        assert model.head.data_ptr() == model.table.data_ptr()
        assert result.grad_norm == pytest.approx(3.0 * 6**0.5, rel=1e-6)
        optimizer.zero_grad()
        assert (model.table.grad, model.head.grad) == (None, None)
    model.head.sum().backward()
    optimizer.step()
    assert torch.equal(model.table, before - 3.0 - 1.0)
    model.head.grad = torch.ones(3, 2)
    optimizer.zero_grad()
    assert model.head.grad is None


def test_the_configuration_is_written_down(mlp, build, tmp_path) -> None:
    """`config_logger_dir` gets a JSON file that makes the same configuration again."""
    folder = tmp_path / "logs" / "run"
    optimizer = build(mlp(), config_logger_dir=str(folder), clip_grad=0.5)
    written = json.loads((folder / "optimizer_config.json").read_text())
    assert [file.name for file in folder.iterdir()] == ["optimizer_config.json"]
    assert OptimizerConfig.from_dict(written["config"]) == optimizer.config
    assert written["torch"] == torch.__version__


def test_a_folder_that_cannot_be_written_to_is_an_error(mlp, build, tmp_path) -> None:
    """It names the setting."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"config_logger_dir=.*: cannot be written to") as caught:
        build(mlp(), config_logger_dir=str(tmp_path / "file"))
    assert caught.value.setting == "config_logger_dir"


@pytest.mark.parametrize("setting", ["overlap_param_gather", "overlap_param_gather_with_optimizer_step"])
def test_settings_without_effect_are_refused(mlp, build, setting) -> None:
    """A strategy that gathers nothing overlaps nothing."""
    with pytest.raises(UnsupportedSettingError) as caught:
        build(mlp(), **{setting: True})
    assert str(caught.value) == (
        f"{setting}=True: has no effect with the sharding strategy 'replicated', which gathers no parameters; leave it "
        "out, or choose a strategy that overlaps"
    )


def test_a_trainer_like_accelerates_moves_the_state_through_itself(mlp, build, give, snapshot) -> None:
    """Wrappers load what they have just read; nothing changes."""
    model = mlp()
    optimizer = build(model, overrides=CHAIN)
    give(model)
    optimizer.step()
    before = snapshot(model, optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert snapshot(model, optimizer) == before


def test_a_trainer_like_lightnings_derives_a_class_from_it(mlp, build) -> None:
    """A wrapper that takes over class and attributes steps with its closure."""
    model = mlp()
    optimizer = build(model, "t_sgd")

    class Wrapper:
        def __init__(self, inside) -> None:
            vars(self).update({key: value for key, value in vars(inside).items() if key != "step"})
            self.__class__ = type("Wrapped", (self.__class__, inside.__class__), {})
            self.inside = inside

        def step(self, closure):
            return self.inside.step(closure=closure)

    wrapper = Wrapper(optimizer)

    def closure():
        wrapper.zero_grad()
        loss = model(torch.ones(1, 5)).sum()
        loss.backward()
        return loss

    before = model[2].bias.detach().clone()
    assert wrapper.step(closure).update_successful
    assert isinstance(wrapper, torch.optim.Optimizer)
    assert not torch.equal(before, model[2].bias)
