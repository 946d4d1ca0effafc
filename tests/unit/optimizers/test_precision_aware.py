"""Precision-aware states: fp32 arithmetic, less memory."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megaopt_lowbit.policy import BATCH_ELEMENTS
from megaopt_testing.plugins import temporary_plugin
from torch import nn
from torch.optim.optimizer import ParamsT

from megaopt_core import OptimizerEntry, hookimpl
from megaopt_core.errors import UnsupportedSettingError
from megaopt_core.optimizers import MegatronOptimizer

pytestmark = pytest.mark.any_python

AWARE = {"bf16": True, "use_precision_aware_optimizer": True}


def _train(model: nn.Module, optimizer: MegatronOptimizer, give: Callable[..., None], steps: int = 6) -> None:
    for step in range(steps):
        give(model, step)
        optimizer.step()


def test_remainders_are_bit_equal_to_main_copies(mlp, build, give) -> None:
    """Half the memory of a main copy, the same main values to the bit."""
    aware, plain = mlp(torch.bfloat16), mlp(torch.bfloat16)
    first, second = build(aware, **AWARE), build(plain, bf16=True)
    for step in range(20):
        give(aware, step)
        give(plain, step)
        first.step()
        second.step()
        for mine, other in zip(aware.parameters(), plain.parameters(), strict=True):
            assert torch.equal(first.state[mine]["main_param"], second.state[other]["main_param"])


def test_batches_are_bit_equal_to_one_batch(mlp, build, give, monkeypatch) -> None:
    """How many elements are in fp32 at a time makes no difference, also where an optimizer counts in its groups."""
    models = [mlp(torch.bfloat16), mlp(torch.bfloat16)]
    results = []
    for model, elements in zip(models, (2**24, 10), strict=True):
        monkeypatch.setattr("megaopt_lowbit.policy.BATCH_ELEMENTS", elements)
        with temporary_plugin(_Counting(), "counting"):
            optimizer = build(model, "counting", **AWARE)
            _train(model, optimizer, give)
            results.append(optimizer.param_groups[0]["k"])
    assert results == [6, 6]
    assert all(torch.equal(*pair) for pair in zip(*(model.parameters() for model in models), strict=True))


class _CountsInItsGroup(torch.optim.Optimizer):
    """Adam-like in that its step size depends on a count that the group keeps."""

    def __init__(self, params: ParamsT, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] / group["k"])


class _Counting:
    megaopt_api = "1"

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        return {"counting": OptimizerEntry(_CountsInItsGroup)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_low_precision_states_follow_fp32_ones(mlp, build, give, dtype) -> None:
    """Moments in fewer bits move parameters where fp32 moments do, within the dtype's precision."""
    aware, plain = mlp(torch.bfloat16), mlp(torch.bfloat16)
    first = build(aware, **AWARE, exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
    second = build(plain, bf16=True)
    start = [param.detach().float().clone() for param in aware.parameters()]
    _train(aware, first, give)
    _train(plain, second, give)
    for old, mine, other in zip(start, aware.parameters(), plain.parameters(), strict=True):
        expected, got = second.state[other]["main_param"] - old, first.state[mine]["main_param"] - old
        assert (got - expected).norm() <= 4 * torch.finfo(dtype).eps * expected.norm()


def test_bf16_states_are_rounded_once_a_step(build, give) -> None:
    """A written-out Adam with bf16 moments has the same bits."""
    model = nn.Linear(6, 4, dtype=torch.bfloat16)
    optimizer = build(model, **AWARE, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    main = model.weight.detach().float().clone()
    m = v = torch.zeros_like(main)
    for step in range(1, 6):
        give(model, step)
        grad = model.weight.grad.float()
        m = m.float().lerp(grad, 0.1)
        v = (v.float() * 0.999).addcmul(grad, grad, value=1 - 0.999)
        denominator = (v.sqrt() / (1 - 0.999**step) ** 0.5).add(1e-8)
        main = main.addcdiv(m, denominator, value=-0.01 / (1 - 0.9**step))
        m, v = m.bfloat16(), v.bfloat16()
        optimizer.step()
        assert torch.equal(optimizer.state[model.weight]["exp_avg"], m)
        assert torch.equal(optimizer.state[model.weight]["exp_avg_sq"], v)
        assert torch.equal(optimizer.state[model.weight]["main_param"], main)


def test_states_are_made_without_moving_anything(mlp, build) -> None:
    """Before the first step all states are there, in their storage dtypes, and zero."""
    model = mlp(torch.bfloat16)
    optimizer = build(model, **AWARE, exp_avg_dtype="bf16")
    for param, other in zip(model.parameters(), mlp(torch.bfloat16).parameters(), strict=True):
        state = optimizer.state[param]
        assert torch.equal(param, other)
        assert state["exp_avg"].dtype == torch.bfloat16
        assert not state["exp_avg"].any()
        assert torch.equal(state["main_param"], param.float())


def test_scales_are_not_states(mlp, build, give) -> None:
    """State shows decoded moments; how they are stored is nobody's business."""
    model = mlp(torch.bfloat16)
    optimizer = build(model, **AWARE, exp_avg_sq_dtype="fp16")
    _train(model, optimizer, give)
    state = optimizer.state[model[0].weight]
    assert sorted(state) == ["exp_avg", "exp_avg_sq", "main_param", "step"]
    assert state["exp_avg_sq"].dtype == torch.float32
    assert 0 < state["exp_avg_sq"].max() < 1
    state["exp_avg_sq"] = torch.full((7, 5), 0.25)
    assert state["exp_avg_sq"].unique().tolist() == [0.25]


def test_fp32_training_can_keep_states_in_less(mlp, build, give) -> None:
    """Precision-aware states need no bf16 model; non-finite gradients are stepped, as in fp32."""
    model = mlp()
    optimizer = build(model, use_precision_aware_optimizer=True, exp_avg_dtype="bf16")
    give(model)
    model[0].bias.grad[0] = float("inf")
    assert optimizer.step().update_successful
    assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {**AWARE, "exp_avg_dtype": "bf16", "optimizer": "t_sgd"},
            "exp_avg_dtype='bfloat16': no optimizer in use can keep exp_avg in less than fp32 ('t_sgd')",
        ),
        (
            {**AWARE, "main_params_dtype": "fp8"},
            "main_params_dtype='float8_e4m3fn': must be one of 'float32', 'float16', 'bfloat16'",
        ),
        (
            {**AWARE, "main_grads_dtype": "fp8"},
            "main_grads_dtype='float8_e4m3fn': must be one of 'float32', 'float16', 'bfloat16'",
        ),
        (
            {"use_precision_aware_optimizer": True, "main_grads_dtype": "bf16"},
            "main_grads_dtype='bfloat16': must be 'float32' unless fp16=True or bf16=True",
        ),
        (
            {"fp16": True, "use_precision_aware_optimizer": True, "main_grads_dtype": "fp16"},
            "main_grads_dtype='float16': unscaled gradients underflow in fp16; use 'float32' or 'bfloat16'",
        ),
        ({"loss_scale": 2.0}, "loss_scale=2.0: needs fp16=True or bf16=True; fp32 losses are not scaled"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(mlp, build, settings, message) -> None:
    """The error names the field; nothing is accepted and ignored."""
    with pytest.raises(UnsupportedSettingError) as caught:
        build(mlp(torch.bfloat16), **settings)
    assert str(caught.value) == message
    assert caught.value.setting == message.split("=")[0]


def test_a_dtype_that_an_optimizer_does_not_declare_is_refused(mlp, build) -> None:
    """The error lists what it can hold."""

    class Narrow:
        megaopt_api = "1"

        @hookimpl
        def megaopt_optimizer_entries(self):
            dtypes = {"exp_avg": frozenset({torch.float32, torch.bfloat16})}
            return {"narrow": OptimizerEntry(torch.optim.AdamW, state_dtypes=dtypes)}

    with temporary_plugin(Narrow(), "narrow"), pytest.raises(UnsupportedSettingError) as caught:
        build(mlp(torch.bfloat16), "narrow", **AWARE, exp_avg_dtype="fp16")
    assert str(caught.value) == "exp_avg_dtype='float16': 'narrow' can keep exp_avg in 'bfloat16', 'float32'"


# Memory, against the table that users read.

TABLE = Path(__file__).parents[3] / "docs" / "precision.md"


def _rows() -> list[tuple[dict[str, object], float]]:
    found = re.findall(r"^\| `([^`]+)` \|.*\| ([\d.]+) \|$", TABLE.read_text(), re.MULTILINE)
    return [(eval(f"dict({settings})"), float(total)) for settings, total in found]  # noqa: S307 - our own page


def _bytes(model: nn.Module, optimizer: MegatronOptimizer) -> int:
    """Count every byte that parameters and optimizer keep between steps, shared memory once."""
    tensors = [*model.parameters(), *optimizer.get_main_params()]
    for part in optimizer.parts:
        for state in part.inner.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        for storage in getattr(part.precision, "_storages", ()):
            tensors += [value for value in vars_of(storage) if isinstance(value, torch.Tensor)]
    return sum(
        {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
        }.values()
    )


def vars_of(storage: object) -> list[object]:
    """Return the values of all slots."""
    return [getattr(storage, name) for name in type(storage).__slots__ if not name.startswith("__")]


@pytest.mark.parametrize(("settings", "expected"), _rows(), ids=str)
def test_memory_is_what_the_documentation_says(build, settings, expected) -> None:
    """Bytes a parameter between steps, gradients not counted, equal the table's number up to a few scalars."""
    dtype = (
        torch.float16 if settings.get("fp16") else torch.bfloat16 if settings.get("bf16") else torch.float32
    )
    model = nn.Linear(512, 512, bias=False, dtype=dtype)
    optimizer = build(model, **settings)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    optimizer.zero_grad()
    assert _bytes(model, optimizer) / model.weight.numel() == pytest.approx(expected, abs=0.001)


def test_the_documented_table_has_rows() -> None:
    """The test above reads something."""
    assert len(_rows()) >= 8


def test_a_step_has_a_batch_in_fp32_at_a_time(mlp, build, give, monkeypatch) -> None:
    """Between steps and in other batches' turns a tensor has no memory; the largest is a batch by itself."""
    assert BATCH_ELEMENTS == 2**24
    monkeypatch.setattr("megaopt_lowbit.policy.BATCH_ELEMENTS", 20)
    model, seen = mlp(torch.bfloat16), []
    part = build(model, bf16=True, use_precision_aware_optimizer=True).parts[0]
    whole = [tensor.numel() for tensor in part.stepped]
    part.inner.register_step_pre_hook(
        lambda *_: seen.append([tensor.untyped_storage().nbytes() // 4 for tensor in part.stepped])
    )
    give(model)
    part.collect_grads()
    part.step()
    assert (whole, len(seen)) == ([35, 7, 21, 3], 4)
    for turn, counts in enumerate(seen):
        assert counts == [numel if index == turn else 1 for index, numel in enumerate(whole)]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64])
def test_wider_parameters_keep_their_dtype(build, dtype) -> None:
    """Complex and float64 parameters beside bf16 ones are stepped as torch steps them, with their states."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.wide = nn.Parameter(torch.randn(3, 2, dtype=dtype))
            self.low = nn.Parameter(torch.randn(4, 2, dtype=torch.bfloat16))

    ours, theirs = Mixed(), Mixed()
    settings = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "main_grads_dtype": "bf16"}
    optimizer = build(ours, "t_adam", overrides={}, bf16=True, lr=0.1, clip_grad=0.0, **settings)
    plain = torch.optim.AdamW([theirs.wide], lr=0.1, foreach=False, weight_decay=0.01)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.01
    for step in range(3):
        torch.manual_seed(step)
        ours.wide.grad = torch.randn(3, 2, dtype=dtype)
        theirs.wide.grad = ours.wide.grad.clone()
        ours.low.grad = torch.randn(4, 2).bfloat16()
        optimizer.step()
        plain.step()
    assert torch.equal(ours.wide, theirs.wide)
    assert optimizer.state[ours.wide]["exp_avg"].dtype is dtype
    assert optimizer.state[ours.low]["exp_avg"].dtype is torch.bfloat16


@pytest.mark.parametrize("optimizer_name", ["t_adam", "t_fused", "t_momentum"])
def test_zeros_that_nobody_counted_stay_numbers(build, optimizer_name) -> None:
    """What is pruned by way of `.data`, in a tensor too large to be compared whole, has the remainders of before."""
    torch.manual_seed(0)
    model = nn.Linear(100, 100, bias=False).bfloat16()
    optimizer = build(model, optimizer_name, bf16=True, use_precision_aware_optimizer=True)
    for step in range(4):
        if step == 2:
            model.weight.data[7, 3:60] = 0.0
            model.weight.data[8, 3:60] = -0.0
        grad = torch.randn(100, 100, generator=torch.Generator().manual_seed(step))
        model.weight.grad = grad.bfloat16()
        assert optimizer.step().update_successful
    assert model.weight.isfinite().all()
    assert optimizer.state[model.weight]["main_param"].isfinite().all()


@pytest.mark.parametrize("aware", [False, True])
@pytest.mark.parametrize(
    ("dtype", "settings"),
    [(torch.bfloat16, {"bf16": True, "loss_scale": 4.0}), (torch.float16, {"fp16": True, "loss_scale": 4.0})],
)
def test_complex_parameters_are_stepped_with_a_loss_scale(build, dtype, settings, aware) -> None:
    """As without one, in the same bits; one part that is not finite skips the step."""

    def trained(**settings: Any) -> tuple[torch.Tensor, bool]:
        model = nn.Module()
        model.low = nn.Parameter(torch.ones(4, dtype=dtype))
        model.wide = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        optimizer = build(model, "t_adam", use_precision_aware_optimizer=aware, **settings)
        scale = optimizer.get_loss_scale().item()
        for step in range(3):
            model.low.grad = torch.full_like(model.low, scale)
            model.wide.grad = torch.full_like(model.wide, complex(1.0, step) * scale)
            assert optimizer.step().update_successful
        model.wide.grad = torch.full_like(model.wide, complex(1.0, float("nan")))
        return model.wide.detach(), optimizer.step().update_successful

    (scaled, went_on), (plain, _) = trained(**settings), trained(**{**settings, "loss_scale": 1.0})
    assert torch.equal(scaled, plain)
    assert not went_on


def test_one_infinity_leaves_the_other_elements_of_narrow_states_alone(build) -> None:
    """In full precision it is stepped with; the moments of all others go on as if it had not been."""

    def trained(bad: float | None, **settings: Any) -> torch.Tensor:
        model = nn.Linear(32, 32, bias=False)
        nn.init.ones_(model.weight)
        optimizer = build(model, "t_adam", lr=1e-3, use_precision_aware_optimizer=True, **settings)
        for step in range(6):
            grad = 1e-4 * torch.randn(32, 32, generator=torch.Generator().manual_seed(step))
            if step == 2 and bad is not None:
                grad[0, 0] = bad
            model.weight.grad = grad
            optimizer.step()
        return model.weight.detach()

    for dtype in ("fp16", "fp8"):
        settings = {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}
        plain = trained(None, **settings)
        for bad in (float("inf"), float("nan")):
            values = trained(bad, **settings)
            assert not values[0, 0].isfinite()
            values[0, 0] = plain[0, 0]
            assert torch.equal(values, plain)
