"""How pieces are stored, as data: with it alone a reader finds the numbers that a policy finds by its code."""

from typing import Any

import pytest
import torch

from megaopt_core.precision import BLOCK, BLOCKS, REMAINDER, SCALED, Stored, StoredTensor

pytestmark = pytest.mark.any_python

AWARE = {"use_precision_aware_optimizer": True}
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
MAINS: list[Any] = [
    pytest.param(FP32, {}, None, id="fp32"),
    pytest.param(BF16, {"bf16": True}, StoredTensor(FP32), id="main"),
    pytest.param(FP16, {"fp16": True, "loss_scale": 1.0}, StoredTensor(FP32), id="main-fp16"),
    pytest.param(BF16, {"bf16": True, **AWARE}, StoredTensor(torch.int16, REMAINDER), id="remainders"),
    pytest.param(
        BF16, {"bf16": True, "main_params_dtype": "fp16", **AWARE}, StoredTensor(FP16), id="main-in-fp16"
    ),
    pytest.param(BF16, {"bf16": True, "main_params_dtype": "bf16", **AWARE}, None, id="bf16"),
]
STATES = {
    "bf16": (StoredTensor(BF16),) * 2,
    "fp16": tuple(
        StoredTensor(FP16, SCALED, f"{key}_scale", 0, key == "exp_avg_sq")
        for key in ("exp_avg", "exp_avg_sq")
    ),
    "fp8": tuple(
        StoredTensor(torch.float8_e4m3fn, SCALED, f"{key}_scale", 0, key == "exp_avg_sq")
        for key in ("exp_avg", "exp_avg_sq")
    ),
    "uint8": tuple(
        StoredTensor(torch.uint8, BLOCKS, f"{key}_scale", BLOCK, key == "exp_avg_sq")
        for key in ("exp_avg", "exp_avg_sq")
    ),
}


def _read(stored: StoredTensor, elements: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    """Return values by what the layout says, and by no function of a policy."""
    assert elements.dtype == stored.dtype
    values = torch.tensor(stored.values)[elements.long()] if stored.values else elements.float()
    if not stored.scale:
        return values
    size = stored.block or values.numel()
    return (
        values.flatten() * state[stored.scale].reshape(-1).repeat_interleave(size)[: values.numel()]
    ).view(values.shape)


def _stepped(build: Any, model: torch.nn.Module, give: Any, steps: int = 2, **settings: Any) -> Any:
    optimizer = build(model, **settings)
    for step in range(steps):
        give(model, step)
        optimizer.step()
    (part,) = optimizer.parts
    return part


@pytest.mark.parametrize(("dtype", "settings", "main"), MAINS)
def test_a_parameter_and_its_main_value_are_read_by_the_layout(
    mlp, give, build, dtype, settings, main
) -> None:
    """In place, as a main copy of either dtype, and as the bits that a bf16 parameter lacks."""
    part = _stepped(build, mlp(dtype), give, **settings)
    for index, piece in enumerate(part.pieces):
        stored, storage = part.precision.stored(index), part.precision._storages[index]
        assert stored == Stored(FP32, StoredTensor(piece.param.dtype), main, {})
        value = piece.param.detach().float()
        if stored.main is not None:
            kept = storage.remainder if stored.main.code == REMAINDER else storage.main
            value = _read(stored.main, kept.detach(), {})
            if stored.main.code == REMAINDER:
                high = piece.param.detach().view(torch.int16).to(torch.int32) << 16
                value = (high + kept).view(torch.float32)
        assert torch.equal(value, part.precision.value(index).detach().float())


@pytest.mark.parametrize("dtype", STATES)
def test_states_are_read_by_the_layout(build, give, dtype) -> None:
    """The numbers equal those that the policy decodes, over several blocks of which the last is not full."""
    torch.manual_seed(0)
    model = torch.nn.Linear(37, 29, dtype=BF16)
    narrow = {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}
    part = _stepped(build, model, give, bf16=True, **AWARE, **narrow)
    for index, tensor in enumerate(part.stepped):
        stored, state = part.precision.stored(index), part.inner.state[tensor]
        assert tuple(stored.states.values()) == STATES[dtype]
        assert list(stored.states) == ["exp_avg", "exp_avg_sq"]
        scales = {each.scale for each in stored.states.values() if each.scale}
        assert scales == {key for key in state if part.precision.is_code(key)}
        for key, layout in stored.states.items():
            read = _read(layout, state[key], state)
            assert read.abs().max() > 0
            assert torch.equal(read, part.precision.read_state(index, key, state).float())
            assert part.precision.is_coded(index, key) is (layout.code is not None)


def test_states_of_wide_parameters_are_stored_as_they_are_stepped(build) -> None:
    """The layout is known before the first step, and says in which dtype."""
    model = torch.nn.Linear(3, 2, dtype=torch.float64)
    part = build(model, **AWARE, exp_avg_dtype="uint8").parts[0]
    assert part.precision.stored(0) == Stored(torch.float64, StoredTensor(torch.float64), None, {})


@pytest.mark.parametrize("is_positive", [False, True])
def test_the_table_of_a_code_rises_to_one_with_and_without_a_sign(is_positive) -> None:
    """256 values; half of them negative where there is a sign."""
    values = StoredTensor(torch.uint8, BLOCKS, is_positive=is_positive).values
    magnitudes = values if is_positive else values[:128]
    assert len(values) == 256
    assert list(magnitudes) == sorted(magnitudes)
    assert (magnitudes[0], magnitudes[-1]) == (0.0, 1.0)
    assert is_positive or values[128:] == tuple(-value for value in magnitudes)
    assert StoredTensor(FP16, SCALED, "scale").values == ()
