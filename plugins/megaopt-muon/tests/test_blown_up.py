"""What an iteration may never return: memory of others, a number that blew up, or nothing of a large update."""

import itertools

import pytest
import torch
from megaopt_muon.choice.growth import largest_norm
from megaopt_muon.coefficients import get_supported_coefficient_types, resolve_coefficients
from megaopt_muon.newton_schulz.iteration import NewtonSchulz

pytestmark = pytest.mark.any_python

TYPES = [name for name in get_supported_coefficient_types() if name != "custom"]
TRIPLES = [
    triple for triple in itertools.product((0.0, 1.5), (0.0, -0.5), (0.0, 0.25)) if triple != (0.0,) * 3
]
SHAPES = [(24, 24), (16, 40), (40, 16), (3, 16, 24), (260, 300)]


def _exact(update: torch.Tensor, coefficients: tuple[tuple[float, float, float], ...]) -> torch.Tensor:
    x = update.double() / torch.linalg.vector_norm(update.double(), dim=(-2, -1), keepdim=True)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize("triple", [*TRIPLES, (0.0, 0.0, 0.0)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("precision", ["medium", "highest"])
@pytest.mark.usefixtures("in_bfloat16")
def test_steps_that_leave_products_out_are_right(
    shape: tuple[int, ...], triple: tuple[float, float, float], method: str, precision: str
) -> None:
    """A coefficient of zero is one: what lay in the memory of a product that is left out is not read."""
    update = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    ns = NewtonSchulz((triple, (1.0, 0.0, 0.0)), precision, method)
    for dtype, size in itertools.product((torch.bfloat16, torch.float32), {update.numel(), 16 * 16, 24 * 24}):
        torch.full((size,), torch.nan, dtype=dtype)  # memory that the next one of this size is given
    exact = _exact(update, ns.coefficients)
    error = (ns(update) - exact).norm()
    assert error <= (0.02 if precision == "medium" else 1e-5) * exact.norm()


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("steps", [3, 5, 6, 7, 8, 9])
@pytest.mark.usefixtures("in_bfloat16")
def test_no_singular_value_is_driven_far_away(name: str, steps: int) -> None:
    """Rounding in bfloat16 drives those of `cans` as far as 1e34; what is healthy keeps its bits."""
    coefficients = resolve_coefficients(name, steps)
    ns = NewtonSchulz(coefficients)
    generator = torch.Generator().manual_seed(steps)
    for rows, columns in [(1, 9), (8, 8), (16, 64), (64, 64), (64, 128), (128, 128)]:
        single = torch.randn(rows, 1, generator=generator) @ torch.randn(1, columns, generator=generator)
        updates = [torch.randn(rows, columns, generator=generator) for _ in range(6)]
        batch = torch.stack([*updates, single])
        results = ns(batch)
        norms = torch.linalg.vector_norm(results, dim=(-2, -1))
        assert norms.max() <= largest_norm(coefficients, rows, columns) * 1.01
        assert torch.equal(
            ns(torch.stack([*updates, updates[0]]))[:-1], results[:-1]
        )  # whatever is beside them
        assert ((results * _exact(batch, coefficients)).sum(dim=(-2, -1)) > 0).all()


@pytest.mark.parametrize("precision", ["medium", "highest"])
@pytest.mark.parametrize("shape", [(1, 3000), (8, 8), (300, 300), (3, 40, 50)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("in_bfloat16")
def test_a_norm_beyond_float32_is_divided_by(
    shape: tuple[int, ...], precision: str, dtype: torch.dtype
) -> None:
    """An update of finite numbers whose norm is none of float32 moves as much as any other: scale says nothing."""
    update = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    huge = (update * 2.0**127).clamp(-3e38, 3e38)
    small = huge * 2.0**-100
    assert huge.isfinite().all()
    ns = NewtonSchulz(resolve_coefficients("quintic", 5), precision)
    assert torch.linalg.vector_norm(huge.double(), dim=(-2, -1)).min() > torch.finfo(torch.float32).max
    result, expected = ns(huge), ns(small)
    assert result.norm() > 0.5
    assert (result - expected).norm() <= (0.05 if precision == "medium" else 1e-5) * expected.norm()


@pytest.mark.usefixtures("in_bfloat16")
def test_a_large_neighbour_changes_no_bit() -> None:
    """Only the matrix whose norm is too large is divided in two steps."""
    batch = torch.randn(3, 16, 24, generator=torch.Generator().manual_seed(0))
    ns = NewtonSchulz(resolve_coefficients("quintic", 5), "highest")
    alone = ns(batch)
    batch[1] *= 2.0**126
    batch[1, 0, 0] = 3e38
    assert torch.equal(ns(batch)[[0, 2]], alone[[0, 2]])
