"""States in 8 bits, under the optimizers that keep them so: what they round, what they take, how they resume."""

import importlib.util
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from megaopt_lowbit.blocks import BlockCode
from torch import nn

from megaopt_core import build_optimizer
from megaopt_core.errors import UnusedSettingWarning
from megaopt_core.optimizers import MegatronOptimizer

pytestmark = pytest.mark.any_python

AWARE = {"use_precision_aware_optimizer": True}
SETTINGS = {
    "adam": {"exp_avg_dtype": "uint8", "exp_avg_sq_dtype": "8bit"},
    "sgd": {"sgd_momentum_dtype": torch.uint8},
    "lion": {"exp_avg_dtype": "uint8"},
    "soap": {"exp_avg_dtype": "uint8", "exp_avg_sq_dtype": "uint8"},
    "muon": {"muon_momentum_dtype": "uint8", "exp_avg_dtype": "uint8", "exp_avg_sq_dtype": "uint8"},
    "adaptive_muon": {"muon_momentum_dtype": "uint8", "exp_avg_dtype": "uint8", "exp_avg_sq_dtype": "uint8"},
}
PLUGIN = {"sgd": "adam", "adaptive_muon": "muon"}
INSTALLED = [name for name in SETTINGS if importlib.util.find_spec(f"megaopt_{PLUGIN.get(name, name)}")]
KEYS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def make(
    name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, width: int = 48, **settings: Any
) -> tuple[nn.Sequential, MegatronOptimizer]:
    """Return a model with matrices and vectors, and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(width, 40), nn.LayerNorm(40), nn.Linear(40, width)).to(dtype)
    settings = {"lr": 0.01, "weight_decay": 0.1, "bf16": dtype is torch.bfloat16, **settings}
    return model, build_optimizer(model, name, **settings)


def train(model: nn.Module, optimizer: MegatronOptimizer, steps: Iterable[int]) -> None:
    """Give gradients that depend on the step alone."""
    for step in steps:
        chance = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=chance).to(param.dtype)
        optimizer.step()


def everything(model: nn.Module, optimizer: MegatronOptimizer) -> dict[str, Any]:
    """Return all values by name, states as the code holds them."""
    found = dict(model.state_dict())
    for part in optimizer.parts:
        for piece, tensor in zip(part.pieces, part.stepped, strict=True):
            name = piece.spec.members[0][1].name
            found |= {f"{name}/{key}": value for key, value in part.inner.state[tensor].items()}
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in found.items()
    }


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether all is equal, bit for bit."""
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        for name, value in one.items()
    )


@pytest.mark.parametrize("name", INSTALLED)
def test_a_value_takes_at_most_1_1_bytes(name) -> None:
    """Every state that has an element for each of the parameter's, with its scales."""
    model, optimizer = make(name, **AWARE, **SETTINGS[name])
    train(model, optimizer, range(2))
    held = everything(model, optimizer)
    for param in ("0.weight", "2.weight"):
        for key in KEYS:
            if f"{param}/{key}" in held:
                tensors = [held[f"{param}/{key}"], held[f"{param}/{key}_scale"]]
                size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
                assert tensors[0].dtype is torch.uint8
                assert size / model.get_parameter(param).numel() <= 1.1


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", INSTALLED)
def test_a_run_resumes_with_the_same_bits(name, dtype, stochastic, tmp_path) -> None:
    """From files, and from a state dict, which holds decoded values; random rounding goes on as it would have."""
    settings = {"dtype": dtype, "stochastic_state_rounding": stochastic, **AWARE, **SETTINGS[name]}
    model, optimizer = make(name, **settings)
    train(model, optimizer, range(3))
    files = pytest.importorskip("megaopt_checkpoint")
    files.save_checkpoint(tmp_path / "saved", model, optimizer)
    loaded_model, loaded = make(name, seed=1, **settings)
    files.load_checkpoint(tmp_path / "saved", loaded_model, loaded)
    copied_model, copied = make(name, seed=2, **settings)
    copied_model.load_state_dict(model.state_dict())
    copied.load_state_dict(optimizer.state_dict())
    assert same(everything(model, optimizer), everything(loaded_model, loaded))
    for each in ((model, optimizer), (loaded_model, loaded), (copied_model, copied)):
        train(*each, range(3, 6))
    assert same(everything(model, optimizer), everything(loaded_model, loaded))
    assert same(everything(model, optimizer), everything(copied_model, copied))


@pytest.mark.parametrize("name", INSTALLED)
def test_a_run_goes_on_from_other_states(name, tmp_path) -> None:
    """From fp32 into 8 bits and back: what is loaded is what was shown."""
    files = pytest.importorskip("megaopt_checkpoint")
    for before, after in (({}, {**AWARE, **SETTINGS[name]}), ({**AWARE, **SETTINGS[name]}, {})):
        model, optimizer = make(name, **before)
        train(model, optimizer, range(3))
        folder = tmp_path / str(len(before))
        files.save_checkpoint(folder, model, optimizer)
        loaded_model, loaded = make(name, seed=1, **after)
        files.load_checkpoint(folder, loaded_model, loaded)
        for param, other in zip(model.parameters(), loaded_model.parameters(), strict=True):
            for key in KEYS:
                if key in optimizer.state[param]:
                    value = optimizer.state[param][key]
                    code = BlockCode(positive=key == "exp_avg_sq")
                    expected = (
                        code.decode(*code.encode(value))
                        if not before and key in _kept(name, loaded, other)
                        else value
                    )
                    assert torch.equal(loaded.state[other][key].reshape(-1), expected.reshape(-1)), key


def _kept(name: str, optimizer: MegatronOptimizer, param: torch.Tensor) -> list[str]:
    for part in optimizer.parts:
        for piece, tensor in zip(part.pieces, part.stepped, strict=True):
            if piece.model_params[0] is param:
                state = part.inner.state[tensor]
                return [key for key in KEYS if f"{key}_scale" in state]
    raise AssertionError(name)


@pytest.mark.skipif("soap" not in INSTALLED, reason="of soap")
def test_moments_of_several_matrices_stay_as_they_are(tmp_path) -> None:
    """A fused weight has moments a matrix, which are no elements of it: it is named, and they resume too."""
    files = pytest.importorskip("megaopt_checkpoint")

    def built(seed):
        torch.manual_seed(seed)
        model = nn.MultiheadAttention(32, 2)
        with pytest.warns(
            UnusedSettingWarning, match="exp_avg_dtype='uint8': does not reach exp_avg of in_proj"
        ):
            optimizer = build_optimizer(model, "soap", lr=0.01, **AWARE, **SETTINGS["soap"])
        assert "exp_avg_sq of in_proj_weight" in str(optimizer.report().unused_settings)
        assert "out_proj" not in str(optimizer.report().unused_settings)
        return model, optimizer

    model, optimizer = built(0)
    train(model, optimizer, range(3))
    held = everything(model, optimizer)
    assert held["out_proj.weight/exp_avg"].dtype is torch.uint8
    assert {held[f"in_proj_weight/exp_avg{end}"].dtype for end in ("", "_1", "_2")} == {torch.float32}
    files.save_checkpoint(tmp_path / "saved", model, optimizer)
    loaded_model, loaded = built(1)
    files.load_checkpoint(tmp_path / "saved", loaded_model, loaded)
    for each in ((model, optimizer), (loaded_model, loaded)):
        train(*each, range(3, 6))
    assert same(everything(model, optimizer), everything(loaded_model, loaded))


@pytest.mark.skipif("adam" not in INSTALLED, reason="steps with sgd")
def test_the_momentum_is_rounded_between_steps_and_nothing_else() -> None:
    """The formula of SGD written out, with the buffer stored after each step: bit for bit."""
    torch.manual_seed(0)
    model = nn.Linear(30, 20, bias=False)
    settings = {"weight_decay": 0.0, "clip_grad": 0.0, "overrides": {}, "sgd_momentum": 0.9}
    optimizer = build_optimizer(model, "sgd", lr=0.1, sgd_momentum_dtype="uint8", **AWARE, **settings)
    weight, code = model.weight.detach().clone(), BlockCode()
    buffer = torch.zeros_like(weight)
    for step in range(5):
        grad = torch.randn(20, 30, generator=torch.Generator().manual_seed(step))
        model.weight.grad = grad.clone()
        optimizer.step()
        buffer = buffer * 0.9 + grad
        weight = weight.add(buffer, alpha=-0.1)
        buffer = code.decode(*code.encode(buffer))
        assert torch.equal(model.weight, weight)


@pytest.mark.skipif("adam" not in INSTALLED, reason="steps with adam")
def test_rounding_without_bytes_is_named() -> None:
    """A setting that acts on nothing in use says so."""
    with pytest.warns(
        UnusedSettingWarning, match="stochastic_state_rounding=True: no state is kept in 8 bits"
    ):
        make("adam", stochastic_state_rounding=True)
