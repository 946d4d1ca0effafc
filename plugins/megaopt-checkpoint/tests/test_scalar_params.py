"""Parameters without dimensions: which of their states are elements and which are numbers is the entry's to say."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from megaopt_checkpoint import load_checkpoint, load_torch_state_dict, save_checkpoint
from megaopt_testing import temporary_plugin
from random_cuts import random_cuts
from torch import nn
from torch.optim.optimizer import ParamsT
from training import same, train, values

from megaopt_core import OptimizerEntry, build_optimizer, hookimpl
from megaopt_core.optimizers import MegatronOptimizer

pytestmark = pytest.mark.any_python

NARROW = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn})


class Kinds(torch.optim.Optimizer):
    """Keeps elements, and numbers as tensors without dimensions, of one element, and as Python numbers."""

    def __init__(self, params: ParamsT, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(
                        exp_avg=torch.zeros_like(param), distance=torch.zeros(()), rate=torch.ones(1), count=0
                    )
                state["count"] += 1
                state["distance"] += 0.25
                state["rate"] *= 0.5
                state["exp_avg"].lerp_(param.grad, 0.1)
                scale = group["lr"] * float(state["rate"]) * float(state["distance"]) / state["count"]
                param.sub_(state["exp_avg"] * scale)


class Plugin:
    megaopt_api = "1"

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        return {
            "kinds": OptimizerEntry(
                Kinds,
                config_to_kwargs=lambda config, chunks, pgs: {"lr": config.lr},
                scalar_states={"distance", "rate"},
                state_dtypes={"exp_avg": NARROW},
            ),
            "narrow_adam": OptimizerEntry(
                torch.optim.AdamW, state_dtypes={"exp_avg": NARROW, "exp_avg_sq": NARROW}
            ),
        }


@pytest.fixture(autouse=True)
def plugin() -> Iterator[None]:
    """Register both for every test here."""
    with temporary_plugin(Plugin(), "kinds"):
        yield


class Scalars(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.scalar = nn.Parameter(torch.randn(()))
        self.one = nn.Parameter(torch.randn(1))
        self.matrix = nn.Parameter(torch.randn(3, 5))


def make(seed: int = 0, optimizer: str = "kinds", **settings: Any) -> tuple[Scalars, MegatronOptimizer]:
    """Return a model and its optimizer."""
    model = Scalars(seed)
    settings = {"lr": 0.01, "clip_grad": 0.0, "overrides": {}, **settings}
    return model, build_optimizer(model, optimizer, **settings)


def state_of(model: nn.Module, optimizer: MegatronOptimizer) -> dict[str, torch.Tensor]:
    """Return every state of every parameter, elements in the parameter's shape."""
    found = {}
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items():
            held = torch.as_tensor(value)
            shape = param.shape if key in {"exp_avg", "exp_avg_sq"} else ()
            found[f"{name}.{key}"] = held.reshape(shape).clone()
    return found


FEWER = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "fp16"}


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        ("kinds", {}),
        ("kinds", FEWER),
        ("narrow_adam", {}),
        ("narrow_adam", FEWER),
        ("narrow_adam", {**FEWER, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16"}),
    ],
    ids=str,
)
def test_every_kind_of_state_resumes(tmp_path, optimizer, settings):
    """Elements with and without a scale, numbers of every kind; bit for bit."""
    model, whole = make(optimizer=optimizer, **settings)
    train(model, whole, range(3))
    save_checkpoint(tmp_path / "last", model, whole)
    other_model, other = make(1, optimizer=optimizer, **settings)
    load_checkpoint(tmp_path / "last", other_model, other)
    assert same(state_of(model, whole), state_of(other_model, other))
    train(model, whole, range(3, 6))
    train(other_model, other, range(3, 6))
    assert same(values(model), values(other_model))
    assert same(state_of(model, whole), state_of(other_model, other))


@pytest.mark.parametrize("optimizer", ["kinds", "narrow_adam"])
def test_between_a_tensor_by_itself_and_a_part_of_flat_memory(tmp_path, optimizer):
    """A number stays one where the parameter is an element among others."""
    with random_cuts(1, ranks=1, rank=0):
        model, whole = make(optimizer=optimizer)
        train(model, whole, range(3))
        save_checkpoint(tmp_path / "whole", model, whole)
        flat_model, flat = make(1, optimizer=optimizer, sharding="cut1")
        load_checkpoint(tmp_path / "whole", flat_model, flat)
        assert same(state_of(flat_model, flat), state_of(model, whole))
        save_checkpoint(tmp_path / "flat", flat_model, flat)
        again_model, again = make(2, optimizer=optimizer)
        load_checkpoint(tmp_path / "flat", again_model, again)
    assert same(state_of(again_model, again), state_of(model, whole))
    train(model, whole, range(3, 5))
    train(again_model, again, range(3, 5))
    assert same(values(model), values(again_model))


def test_numbers_of_a_plain_optimizer(tmp_path):
    """A torch state dict does not say which of them are elements; the entry does."""
    theirs = Scalars()
    plain = Kinds(theirs.parameters(), lr=0.01)
    train(theirs, plain, range(2))
    with random_cuts(1, ranks=1, rank=0):
        model, optimizer = make(1, sharding="cut1")
        load_torch_state_dict(optimizer, plain.state_dict(), model=model)
        found = state_of(model, optimizer)
    for name, param in theirs.named_parameters():
        for key, value in plain.state[param].items():
            assert found[f"{name}.{key}"].flatten().tolist() == torch.as_tensor(value).flatten().tolist()


def test_a_state_that_is_named_like_a_scale_is_a_state(tmp_path):
    """`exp_avg_scale` of an optimizer's own, beside its `exp_avg`, multiplies nothing."""

    class Scaled(Kinds):
        @torch.no_grad()
        def step(self, closure=None):
            super().step(closure)
            for state in self.state.values():
                state["exp_avg_scale"] = torch.tensor(3.0)

    class Offer:
        megaopt_api = "1"

        @hookimpl
        def megaopt_optimizer_entries(self):
            return {"scaled": OptimizerEntry(Scaled, scalar_states={"distance", "rate", "exp_avg_scale"})}

    with temporary_plugin(Offer(), "scaled"):
        model, optimizer = make(optimizer="scaled")
        train(model, optimizer, range(2))
        save_checkpoint(tmp_path / "last", model, optimizer)
        other_model, other = make(1, optimizer="scaled")
        load_checkpoint(tmp_path / "last", other_model, other)
        assert same(state_of(other_model, other), state_of(model, optimizer))
        assert float(other.state[other_model.scalar]["exp_avg_scale"]) == 3.0
