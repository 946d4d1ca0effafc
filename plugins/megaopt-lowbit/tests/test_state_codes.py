"""State tensors in fewer bits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megaopt_lowbit.scaled import ScaledCode

pytestmark = pytest.mark.any_python

NARROW = [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


def stored_and_read(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is left of values that were stored."""
    code = ScaledCode(dtype)
    return code.decode(*code.encode(value))


@pytest.mark.parametrize("dtype", NARROW)
@given(values=st.lists(st.floats(-(2.0**126), 2.0**126, width=32), min_size=1, max_size=20))
def test_encoding_what_was_decoded_changes_nothing(dtype, values) -> None:
    """A checkpoint holds decoded values: loading them gives the same values again."""
    once = stored_and_read(torch.tensor(values), dtype)
    assert torch.equal(stored_and_read(once, dtype), once)


@pytest.mark.parametrize("dtype", NARROW)
def test_the_scale_is_a_power_of_two_that_uses_the_range(dtype) -> None:
    """The largest element lands in the upper half of the dtype's range, and nothing overflows."""
    value = torch.tensor([1e-20, 3e-20])
    stored, scale = ScaledCode(dtype).encode(value)
    assert torch.frexp(scale)[0].item() == 0.5
    assert torch.finfo(dtype).max / 2 < stored.float().max() <= torch.finfo(dtype).max


@pytest.mark.parametrize("dtype", NARROW)
def test_relative_error_is_that_of_the_dtype(dtype) -> None:
    """Elements near the largest lose no more than half a unit in the last place."""
    value = torch.linspace(0.5, 1.0, 1001) * 1e-12
    decoded = stored_and_read(value, dtype)
    assert ((decoded - value).abs() / value).max() <= torch.finfo(dtype).eps / 2 * 1.001


@pytest.mark.parametrize("dtype", NARROW)
def test_second_moments_do_not_become_zero(dtype) -> None:
    """A positive value is never rounded to zero where it will be divided by; zero stays zero."""
    value = torch.tensor([1.0, 1e-30, 0.0])
    stored, _ = ScaledCode(dtype, positive=True).encode(value)
    assert (stored.float() > 0).tolist() == [True, True, False]


def test_bf16_needs_no_scale() -> None:
    """bf16 has the range of fp32."""
    stored, scale = ScaledCode(torch.bfloat16).encode(torch.tensor([1e-30, 1e30]))
    assert (stored.dtype, scale) == (torch.bfloat16, None)


@pytest.mark.parametrize("value", [torch.zeros(3), torch.zeros(0)])
def test_zeros_and_empty_tensors_have_scale_one(value) -> None:
    """Nothing to scale by: the scale is 1."""
    stored, scale = ScaledCode(torch.float16).encode(value)
    assert (stored.shape, scale.item()) == (value.shape, 1.0)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_has_no_part_in_the_scale(dtype, bad) -> None:
    """The other elements are stored as they are without it, and it shows as not finite, in this step and the next."""
    value = torch.linspace(-3e-9, 2e-9, 100)
    alone = stored_and_read(value, dtype)
    beside = torch.cat([value, torch.tensor([bad])])
    for _ in range(2):
        beside = stored_and_read(beside, dtype)
        assert torch.equal(beside[:-1], alone)
        assert not beside[-1].isfinite()


@pytest.mark.parametrize("dtype", NARROW)
def test_nothing_finite_has_scale_one(dtype) -> None:
    """There is nothing to scale by."""
    stored, scale = ScaledCode(dtype).encode(torch.full((3,), torch.nan))
    assert (stored.float().isnan().all().item(), scale.item()) == (True, 1.0)
