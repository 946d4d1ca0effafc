"""Batches by shape in float16: matrices of equal sides together, whichever way they lie, and whenever they come."""

from typing import Any

import pytest
import torch
from megaopt_muon.muon import TensorParallelMuon
from megaopt_muon.newton_schulz import iteration
from megaopt_muon.newton_schulz.half import iterate_half
from megaopt_muon.pieces import half_batches
from megaopt_muon.step import local_step, matrix_steps

pytestmark = pytest.mark.any_python


def stepped(shapes: list[tuple[int, ...]], **settings: Any) -> list[torch.Tensor]:
    """Return parameters after two steps with some gradients."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = TensorParallelMuon(params, 0.1, weight_decay=0.1, **settings)
    for _ in range(2):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
    return [param.detach() for param in params]


@pytest.fixture
def half_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Let a processor step as an accelerator does; the list receives the shape of each batch."""
    batches: list[tuple[int, ...]] = []

    def counted(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        batches.append(tuple(x.shape))
        return iterate_half(x, *args, **kwargs)

    monkeypatch.setattr(iteration.NewtonSchulz, "is_half", lambda self, device: self.precision == "medium")
    monkeypatch.setattr(half_batches, "iterate_half", counted)
    return batches


SHAPES = [(48, 16), (16, 48), (32, 32), (48, 16), (20, 30), (16, 48)]


def test_tall_and_wide_matrices_are_one_batch(half_on_a_cpu) -> None:
    """Two steps of three kinds of sides; each result is as close to that of float32 as float16 allows."""
    exact = stepped(SHAPES, fp32_matmul_prec="highest")
    assert half_on_a_cpu == []
    found = stepped(SHAPES, fp32_matmul_prec="medium")
    assert sorted(half_on_a_cpu) == sorted([(4, 16, 48), (32, 32), (20, 30)] * 2)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=0.1 * 2 * 2**-7)


@pytest.mark.parametrize("most", [1, 48 * 16, 3 * 48 * 16])
def test_batches_are_as_large_as_memory_allows(half_on_a_cpu, monkeypatch, most) -> None:
    """And a matrix becomes what it would in any other batch."""
    whole = stepped(SHAPES)
    half_on_a_cpu.clear()
    monkeypatch.setattr(half_batches, "MOST", most)
    cut = stepped(SHAPES)
    count = max(1, most // (48 * 16))
    sizes = [1 if len(shape) == 2 else shape[0] for shape in half_on_a_cpu if 48 in shape]
    assert sizes == [min(count, 4 - start) for start in range(0, 4, count)] * 2
    for one, other in zip(whole, cut, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-3)


def test_updates_of_a_few_parameters_are_wide_at_a_time(half_on_a_cpu, monkeypatch) -> None:
    """Their matrices wait in float16 for the rest of their batch; the result is the same to the bit."""
    whole = stepped(SHAPES)
    monkeypatch.setattr(local_step, "_CHUNK", 48 * 16)
    made = []

    def counted(self: Any, group: Any, params: Any) -> Any:
        made.append(len(params))
        return local_updates(self, group, params)

    local_updates = matrix_steps.MatrixSteps._local_updates
    monkeypatch.setattr(matrix_steps.MatrixSteps, "_local_updates", counted)
    few = stepped(SHAPES)
    assert max(made) == 1
    assert all(torch.equal(one, other) for one, other in zip(whole, few, strict=True))


def test_matrices_of_different_groups_and_dtypes_keep_their_settings(half_on_a_cpu) -> None:
    """A group has its own rate; what is stored in bfloat16 is in one batch with what is stored in float32."""
    torch.manual_seed(0)
    params = [
        torch.nn.Parameter(torch.randn(16, 48, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)
    ]
    before = [param.detach().clone() for param in params]
    optimizer = TensorParallelMuon(
        [{"params": params[:1]}, {"params": params[1:], "lr": 0.0}], 0.1, weight_decay=0.0
    )
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    assert not torch.equal(params[0], before[0])
    assert torch.equal(params[1], before[1])
    half_on_a_cpu.clear()
    both = TensorParallelMuon(params, 0.1)
    for param in params:
        param.grad = torch.randn_like(param)
    both.step()
    assert half_on_a_cpu == [(2, 16, 48)]
