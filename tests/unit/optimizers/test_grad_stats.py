"""Sums of squares and zero counts over gradients."""

import math
from collections.abc import Iterable

import pytest
import torch

from megaopt_core.errors import GradientError
from megaopt_core.optimizers._gradients.statistics import count_zeros, scale_gradients, sum_of_squares
from megaopt_core.optimizers._step.sums import found_inf_in

pytestmark = pytest.mark.any_python

CPU = torch.device("cpu")


def _exact(grads: Iterable[torch.Tensor]) -> float:
    real = (torch.view_as_real(grad) if grad.is_complex() else grad for grad in grads)
    return sum(grad.double().square().sum().item() for grad in real)


def _awkward() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    return [
        randn(1),
        randn(),
        randn(0, 3),
        randn(1024),
        randn(1025),
        randn(70, 70),
        randn(8, 9, 10, 11).to(memory_format=torch.channels_last),
        randn(100, 200)[:, ::2],
        randn(100, 90).t(),
        randn(5000).to(torch.bfloat16),
        randn(7).to(torch.float16),
        randn(20, 300).double(),
        torch.complex(randn(40), randn(40)),
    ]


def test_sums_agree_with_float64_for_every_kind_of_tensor() -> None:
    """Sizes, strides, dtypes and complex numbers make no difference."""
    for grads in ([grad] for grad in _awkward()):
        assert sum_of_squares(grads, CPU).item() == pytest.approx(_exact(grads), rel=1e-6)
    assert sum_of_squares(_awkward(), CPU).item() == pytest.approx(_exact(_awkward()), rel=1e-6)


@pytest.mark.parametrize("exact_range", [False, True])
def test_what_overflows_in_fp32_is_squared_in_float64(exact_range: bool) -> None:
    """Gradients above 1.8e19 have a finite norm; those that are not finite have none."""
    grads = [torch.full((5,), 1e25), torch.full((9000,), 1e30)]
    squares = sum_of_squares(iter(grads), CPU, exact_range=exact_range)
    assert squares.item() == pytest.approx(_exact(grads), rel=1e-6)
    assert math.isinf(sum_of_squares([*grads, torch.tensor([math.inf])], CPU, exact_range=exact_range).item())


def test_a_long_tensor_keeps_its_digits() -> None:
    """Twenty million elements, where one fp32 reduction is off by more than 1e-4."""
    grad = torch.full((20_000_000,), 1e-3)
    assert sum_of_squares([grad], CPU).item() == pytest.approx(_exact([grad[:1]]) * grad.numel(), rel=1e-6)


def test_nothing_has_no_norm_and_no_zeros() -> None:
    """An empty list sums to zero."""
    assert sum_of_squares([], CPU).item() == count_zeros([], CPU).item() == 0.0


def test_zeros_are_counted_in_every_kind_of_tensor() -> None:
    """Both parts of a complex zero are zero; negative zero is zero."""
    grads = [torch.tensor([0.0, -0.0, 1.0]), torch.tensor([0j, 1j]), torch.zeros(3, 2).t(), torch.tensor(0.0)]
    assert count_zeros(grads, CPU).item() == 2 + 1 + 6 + 1


def test_scaling_multiplies_in_place() -> None:
    """Also tensors whose elements are not in order; an empty list is fine."""
    grads = [torch.ones(2, 3).t(), torch.ones(())]
    scale_gradients(grads, 0.5)
    scale_gradients([], 0.5)
    assert [grad.sum().item() for grad in grads] == [3.0, 0.5]


@pytest.mark.parametrize("function", [sum_of_squares, count_zeros])
def test_sparse_gradients_are_refused(function) -> None:
    """The error says which settings avoid the question."""
    with pytest.raises(GradientError) as caught:
        function([torch.eye(3).to_sparse()], CPU)
    assert str(caught.value) == (
        "a sparse gradient of shape (3, 3) cannot be measured: build the embedding with sparse=False, or train it in "
        "fp32 with clip_grad=0.0 and log_num_zeros_in_grad=False"
    )


@pytest.mark.parametrize("bad", [None, complex(1.0, float("inf")), complex(float("nan"), 0.0)])
def test_complex_gradients_are_unscaled_and_checked(bad) -> None:
    """Both parts of each, in place, where they lie, also of a tensor that is shown conjugated."""
    shown = torch.randn(5, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)).conj()
    if bad is not None:
        shown[3] = bad
    plain, expected = torch.ones(2, dtype=torch.complex64), torch.view_as_real(shown.resolve_conj()) * 0.5
    flag = found_inf_in([plain, shown], 0.5, CPU)
    assert torch.equal(torch.view_as_real(shown.resolve_conj()).nan_to_num(), expected.nan_to_num())
    assert plain.tolist() == [0.5, 0.5]
    assert bool(flag.item()) is (bad is not None)


@pytest.mark.parametrize("numel", [0, 1, 10, 1000, 5000])
def test_what_underflows_in_fp32_is_squared_in_float64_where_the_range_is_exact(numel: int) -> None:
    """Also where every square is below the least number of fp32, and where there is nothing but zeros."""
    grads = [torch.full((numel,), 1e-25), torch.zeros(3000)]
    squares = sum_of_squares(grads, CPU, exact_range=True)
    assert squares.item() == pytest.approx(numel * 1e-50, rel=1e-6)
