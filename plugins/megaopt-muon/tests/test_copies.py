"""Copies of the bare classes: by `copy.deepcopy`, and by pickle."""

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megaopt_muon.adaptive import TensorParallelAdaptiveMuon
from megaopt_muon.muon import TensorParallelMuon

from megaopt_core.errors import UnsupportedOperationError
from megaopt_core.params import MatrixView, ParamInfo, Role

pytestmark = pytest.mark.any_python

SETTINGS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (TensorParallelMuon, {"nesterov": False, "scale_mode": "unit_rms_norm", "split_qkv": True}),
    (TensorParallelMuon, {"use_decoupled_weight_decay": False, "num_ns_steps": 3, "split_qkv": True}),
    (TensorParallelMuon, {"cautious_weight_decay": True, "split": "none"}),
    *((TensorParallelAdaptiveMuon, {"moment2_method": name}) for name in ("adamuon", "normuon", "namo")),
    (TensorParallelAdaptiveMuon, {"beta2": 0.5, "eps": 0.1, "extra_scale_factor": 3.0, "ns_method": "gram"}),
]


def made(kind: Callable[..., Any], settings: dict[str, Any]) -> Any:
    """Return an optimizer of a fused weight and a large matrix that has made a step."""
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((24, 8), (256, 512))]
    view = MatrixView(split_sizes=(8, 8, 8), fused="qkv")  # type: ignore[arg-type]
    params[0].param_info = ParamInfo("qkv", Role.MATRIX, view)  # type: ignore[attr-defined]
    optimizer = kind(params, lr=0.1, weight_decay=0.3, **settings)
    step([optimizer])
    return optimizer


def step(optimizers: list[Any]) -> None:
    """Step with gradients that are the same for all."""
    seed = int(torch.randint(1 << 30, ()))
    for optimizer in optimizers:
        generator = torch.Generator().manual_seed(seed)
        for param in params_of(optimizer):
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()


def params_of(optimizer: Any) -> list[torch.Tensor]:
    """Return what an optimizer steps."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def unpickled(optimizer: Any) -> Any:
    """Return what a pickle of an optimizer holds."""
    return pickle.loads(pickle.dumps(optimizer))  # noqa: S301 - written here


@pytest.mark.parametrize("copier", [copy.deepcopy, unpickled])
@pytest.mark.parametrize(("kind", "settings"), SETTINGS)
def test_a_copy_steps_as_the_original(
    copier: Callable[[Any], Any], kind: Callable[..., Any], settings: dict[str, Any]
) -> None:
    """Its settings, the plan, and what its parameters are go with it; nothing else is shared."""
    optimizer = made(kind, settings)
    copied = copier(optimizer)
    again = copier(copied)
    for _ in range(2):
        step([optimizer, copied, again])
    for params in zip(params_of(optimizer), params_of(copied), params_of(again), strict=True):
        assert torch.equal(params[0], params[1])
        assert torch.equal(params[0], params[2])
        assert params[0] is not params[1]
    assert copied.newton_schulz.workspace is copied.local_step.workspace
    assert copied.newton_schulz.workspace is not optimizer.newton_schulz.workspace
    copied.load_state_dict(optimizer.state_dict())
    step([copied])
    weight = torch.randn(3, 4)
    assert torch.equal(copied.scaled_orthogonalize_fn(weight), again.scaled_orthogonalize_fn(weight))


def test_a_copy_with_a_model_is_of_that_model() -> None:
    """Copied together, the optimizer steps the copied parameters."""
    optimizer = made(TensorParallelMuon, {})
    params, copied = copy.deepcopy((params_of(optimizer), optimizer))
    assert all(mine is its for mine, its in zip(params, params_of(copied), strict=True))


def test_process_groups_are_shared_by_copies_and_not_pickled() -> None:
    """They are the process's; the error says what to save."""
    groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1, rank=lambda: 0))
    optimizer = TensorParallelMuon([torch.nn.Parameter(torch.ones(4, 8))], pg_collection=groups)
    copied = copy.deepcopy(optimizer)
    assert copied.pg_collection is groups
    assert copied.planner.dense_group is groups.tp
    with pytest.raises(
        UnsupportedOperationError, match=r"process groups cannot be pickled; save its state_dict"
    ):
        pickle.dumps(optimizer)
