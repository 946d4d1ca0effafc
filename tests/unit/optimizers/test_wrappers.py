"""Optimizers that were made by hand, under a policy."""

import pytest
import torch
from torch import nn

from megaopt_core import (
    ConstantGradScaler,
    DynamicGradScaler,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MixedPrecisionOptimizer,
    OptimizerConfig,
)
from megaopt_core.errors import ConfigurationError, PluginError, UnsupportedOperationError

pytestmark = pytest.mark.any_python


def test_an_fp32_wrapper_is_its_optimizer(mlp, give) -> None:
    """Bit for bit, without clipping."""
    ours, theirs = mlp(), mlp()
    optimizer = FP32Optimizer(torch.optim.AdamW(ours.parameters()), OptimizerConfig(clip_grad=0.0))
    alone = torch.optim.AdamW(theirs.parameters())
    for step in range(3):
        give(ours, step)
        give(theirs, step)
        optimizer.step()
        alone.step()
    assert all(torch.equal(*pair) for pair in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_an_optimizer_that_has_stepped_keeps_its_state(mlp, give) -> None:
    """Moments of bf16 parameters become fp32 with their main parameters."""
    model = mlp(torch.bfloat16)
    inner = torch.optim.AdamW(model.parameters())
    give(model)
    inner.step()
    moment = inner.state[model[0].bias]["exp_avg"].clone()
    optimizer = MixedPrecisionOptimizer(inner, OptimizerConfig(bf16=True))
    state = optimizer.state[model[0].bias]
    assert torch.equal(state["exp_avg"], moment.float())
    assert (state["exp_avg"].dtype, state["step"].item()) == (torch.float32, 1.0)
    give(model, 1)
    assert optimizer.step().update_successful


def test_names_come_from_the_optimizer_or_its_groups(mlp) -> None:
    """Torch's optimizers know names when they were given them."""
    named = FP32Optimizer(torch.optim.SGD(mlp().named_parameters()), OptimizerConfig())
    assert list(named.names.values()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    bare = FP32Optimizer(torch.optim.SGD(mlp().parameters()), OptimizerConfig())
    assert list(bare.names.values()) == [f"group0.param{index}" for index in range(4)]


def test_groups_of_the_optimizer_are_public(mlp) -> None:
    """Their settings stay, and hold when they are changed here."""
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 1.0}, {"params": model[2].parameters(), "lr": 0.0}]
    optimizer = FP32Optimizer(torch.optim.SGD(groups, lr=9.0), OptimizerConfig(clip_grad=0.0))
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.param_groups[1]["lr"] = 1.0
    before = [param.detach().clone() for param in model.parameters()]
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    moved = [not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)]
    assert moved == [False, False, True, True]


def test_attributes_of_parameters_decide_how_they_are_counted(mlp, give) -> None:
    """`shared` and `grad_norm_group` hold for optimizers made by hand too."""
    model = mlp()
    model[0].weight.shared = True
    model[2].weight.grad_norm_group = "head"
    optimizer = FP32Optimizer(torch.optim.SGD(model.parameters()), OptimizerConfig(clip_grad=1e9))
    give(model)
    optimizer.step()
    main = torch.stack([model[0].bias.grad.norm(), model[2].bias.grad.norm()]).norm().item()
    expected = {None: main, "head": model[2].weight.grad.norm().item()}
    assert optimizer.grad_norms == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("wrapper", "settings", "message"),
    [
        (
            FP32Optimizer,
            {"bf16": True},
            "bf16=True: FP32Optimizer keeps no main parameters; use MixedPrecisionOptimizer",
        ),
        (FP32Optimizer, {"loss_scale": 2.0}, "loss_scale=2.0: needs fp16=True or bf16=True"),
        (MixedPrecisionOptimizer, {}, "MixedPrecisionOptimizer needs fp16=True or bf16=True"),
        (
            MixedPrecisionOptimizer,
            {"bf16": True, "use_distributed_optimizer": True},
            "sharding='distributed': MixedPrecisionOptimizer steps an optimizer's parameters whole on every rank",
        ),
        (
            FP32Optimizer,
            {"overlap_param_gather": True},
            "overlap_param_gather=True: FP32Optimizer steps an optimizer's parameters whole on every rank",
        ),
        (
            MixedPrecisionOptimizer,
            {"bf16": True, "use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"},
            "exp_avg_dtype='bfloat16': SGD has no state exp_avg (momentum_buffer)",
        ),
    ],
)
def test_settings_that_would_be_ignored_are_refused(mlp, wrapper, settings, message) -> None:
    """An optimizer made by hand honours a setting, or says that it cannot."""
    inner = torch.optim.SGD(mlp(torch.bfloat16).parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ConfigurationError) as caught:
        wrapper(inner, OptimizerConfig(**settings))
    assert str(caught.value).startswith(message)


def test_a_loss_scale_of_the_configuration_holds(mlp, give) -> None:
    """Gradients are divided by it; another scaler beside it is refused."""
    model = mlp(torch.bfloat16)
    config = OptimizerConfig(bf16=True, loss_scale=8.0, clip_grad=0.0)
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), config)
    give(model)
    expected = [param.detach().float() - param.grad.float() / 8.0 for param in model.parameters()]
    optimizer.step()
    assert optimizer.get_loss_scale().item() == 8.0
    assert all(torch.equal(*pair) for pair in zip(expected, optimizer.get_main_params(), strict=True))
    with pytest.raises(ConfigurationError) as caught:
        MixedPrecisionOptimizer(torch.optim.SGD(model.parameters()), config, ConstantGradScaler(4.0))
    assert str(caught.value) == (
        "loss_scale=8.0 and a ConstantGradScaler that may scale otherwise: keep one of the two"
    )


def test_precision_aware_states_are_kept_by_hand_too(mlp, give) -> None:
    """Bit for bit what `build_optimizer` makes of the same settings; batches only where they change nothing."""
    settings = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp16"}
    config = OptimizerConfig(bf16=True, clip_grad=1.0, **settings)
    model = mlp(torch.bfloat16)
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(model.parameters(), foreach=False), config)
    give(model)
    assert optimizer.step().update_successful
    part = optimizer.parts[0]
    stored = part.inner.state[part.stepped[0]]
    assert (stored["exp_avg"].dtype, stored["exp_avg_sq"].dtype) == (torch.bfloat16, torch.float16)
    assert part.precision.batch_elements is not None

    class Coupled(torch.optim.AdamW):
        pass

    coupled = MixedPrecisionOptimizer(Coupled(mlp(torch.bfloat16).parameters()), config)
    assert coupled.parts[0].precision.batch_elements is None


def test_the_configuration_is_written_down(mlp, tmp_path) -> None:
    """By optimizers made by hand too."""
    config = OptimizerConfig(config_logger_dir=str(tmp_path / "log"))
    FP32Optimizer(torch.optim.SGD(mlp().parameters()), config)
    assert (tmp_path / "log" / "optimizer_config.json").exists()


def test_fp16_needs_a_scaler(mlp) -> None:
    """Gradients would underflow."""
    config = OptimizerConfig(fp16=True)
    with pytest.raises(ConfigurationError) as caught:
        Float16OptimizerWithFloat16Params(torch.optim.SGD(mlp(torch.float16).parameters()), config)
    assert str(caught.value) == (
        "fp16 gradients underflow without a loss scale: give a ConstantGradScaler or a DynamicGradScaler"
    )


def test_fp16_follows_its_scaler(mlp, give) -> None:
    """Overflows skip and lower the scale; the run goes on."""
    model = mlp(torch.float16)
    scaler = DynamicGradScaler(4.0, 1.0, hysteresis=1, growth_interval=2)
    optimizer = Float16OptimizerWithFloat16Params(
        torch.optim.SGD(model.parameters(), lr=0.1), OptimizerConfig(fp16=True), scaler
    )
    scales = []
    for step in range(4):
        give(model, step)
        if step == 0:
            model[0].bias.grad[0] = float("nan")
        assert optimizer.step().update_successful == (step > 0)
        scales.append(optimizer.get_loss_scale().item())
    assert scales == [2.0, 2.0, 4.0, 4.0]


def test_wrapping_twice_is_refused(mlp) -> None:
    """Only a plain torch optimizer can be wrapped."""
    once = FP32Optimizer(torch.optim.SGD(mlp().parameters()), OptimizerConfig())
    for wrong in (once, object()):
        with pytest.raises(ConfigurationError) as caught:
            FP32Optimizer(wrong, OptimizerConfig())
        assert (
            str(caught.value)
            == f"FP32Optimizer wraps a plain torch.optim.Optimizer, got {type(wrong).__name__}"
        )


def test_experts_and_dense_parameters_need_two_optimizers(mlp) -> None:
    """Their norms are added up over different groups."""
    model = mlp()
    model[0].weight.allreduce = False
    with pytest.raises(ConfigurationError, match="give each kind an optimizer of its own and chain them"):
        FP32Optimizer(torch.optim.SGD(model.parameters()), OptimizerConfig())


@pytest.mark.parametrize(
    "fails", ["making states", "states in another form", "experts beside dense parameters"]
)
def test_an_optimizer_that_cannot_be_wrapped_stays_as_it_was(mlp, give, fails) -> None:
    """Its groups hold the model's parameters, and its state is theirs: it can be stepped, or wrapped again."""
    model = mlp(torch.bfloat16)
    inner, settings, init = torch.optim.AdamW(model.parameters()), {}, None
    give(model)
    inner.step()
    if fails == "making states":

        def init(optimizer, config=None):
            raise RuntimeError("no state")

    elif fails == "states in another form":
        settings = {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.bfloat16}
        for state in inner.state.values():
            del state["exp_avg"]
    else:
        model[0].weight.allreduce = False
    before = {param: dict(state) for param, state in inner.state.items()}
    with pytest.raises((ConfigurationError, PluginError, RuntimeError)):
        MixedPrecisionOptimizer(inner, OptimizerConfig(bf16=True, **settings), None, init)
    assert [id(p) for group in inner.param_groups for p in group["params"]] == [*map(id, model.parameters())]
    assert {param: dict(state) for param, state in inner.state.items()}.keys() == before.keys()
    assert all(
        inner.state[param][key] is value for param, state in before.items() for key, value in state.items()
    )


def test_closures_in_a_signature_are_refused() -> None:
    """An optimizer that demands a closure cannot be a stage."""

    class Probing(torch.optim.SGD):
        def step(self, closure):
            return closure()

    with pytest.raises(PluginError, match=r"Probing\.step needs a closure"):
        FP32Optimizer(Probing([nn.Parameter(torch.ones(1))]), OptimizerConfig())


def test_keys_that_steps_note_need_what_joins_them() -> None:
    """A class that names its keys alone is refused when it is wrapped, not in the first checkpoint of several ranks."""

    class Noting(torch.optim.SGD):
        noted_by_steps = frozenset({"plan"})

    with pytest.raises(
        PluginError, match=r"Noting\.noted_by_steps must map each key of a group to a function"
    ):
        FP32Optimizer(Noting([nn.Parameter(torch.ones(1))]), OptimizerConfig())


def test_a_scheduler_of_the_wrapped_optimizer_is_refused_where_it_writes() -> None:
    """What it writes would change nothing; the wrapper's own groups are where to write."""
    weight = nn.Parameter(torch.zeros(2))
    inner = torch.optim.SGD([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 0.5**step)
    optimizer = FP32Optimizer(inner, OptimizerConfig(lr=1.0, clip_grad=0.0))
    weight.grad = torch.ones(2)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.step()
    assert weight.tolist() == [-1.25, -1.25]
    scheduler.step()
    with pytest.raises(
        UnsupportedOperationError, match=r"^lr=0.5 was written into a group of the wrapped SGD"
    ):
        optimizer.step()
    assert weight.tolist() == [-1.25, -1.25]
    inner.param_groups[0]["lr"] = 0.25
    optimizer.step()
    assert weight.tolist() == [-1.5, -1.5]
