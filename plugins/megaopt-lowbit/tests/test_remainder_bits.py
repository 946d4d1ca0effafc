"""Splitting fp32 into bf16 and 16 more bits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megaopt_lowbit.remainders import join_remainder, split_remainder

pytestmark = pytest.mark.any_python

SPECIAL = [
    0x00000000,  # 0
    0x80000000,  # -0
    0x00000001,  # smallest subnormal
    0x007FFFFF,  # largest subnormal
    0x00800000,  # smallest normal
    0x7F7FFFFF,  # largest number: its bf16 rounds to infinity
    0xFF7FFFFF,
    0x7F800000,  # infinity
    0xFF800000,
    0x7FC00000,  # NaN
    0x7FFFFFFF,  # NaN whose rounding leaves the format
    0xFFFFFFFF,
    0x7F800001,  # NaN with a payload in the remainder only
    0x3F808000,  # a tie
    0x3F807FFF,
    0x3F818000,
]


def _floats(bits: list[int]) -> torch.Tensor:
    signed = [value - 2**32 if value >= 2**31 else value for value in bits]
    return torch.tensor(signed, dtype=torch.int32).view(torch.float32)


def _round_trip(bits: list[int]) -> list[int]:
    joined = join_remainder(*split_remainder(_floats(bits)))
    return [value % 2**32 for value in joined.view(torch.int32).tolist()]


def _with_one_nan(bits: list[int]) -> list[int]:
    return [0x7FC00000 if value & 0x7FFFFFFF > 0x7F800000 else value for value in bits]


def test_special_values_come_back_bit_for_bit() -> None:
    """Zeros, subnormals, infinities and ties survive the round trip; a NaN stays one."""
    assert _round_trip(SPECIAL) == _with_one_nan(SPECIAL)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_every_bit_pattern_comes_back(bits: list[int]) -> None:
    """Splitting and joining is the identity on 32-bit patterns of numbers, and on the NaN that torch writes."""
    assert _round_trip(bits) == _with_one_nan(bits)


@given(st.integers(0x7F800001, 0x7FFFFFFF), st.booleans())
def test_the_model_sees_a_nan_where_the_main_value_is_one(bits: int, is_negative: bool) -> None:
    """Rounding a NaN's bits could give infinity or -0."""
    model, _ = split_remainder(_floats([bits | is_negative << 31, 0x7FFFFFFF, 0x7FFF8000]))
    assert model.isnan().all()


@given(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100))
def test_the_bf16_half_is_a_nearest_value(value: float) -> None:
    """What the model sees is as near to the main value as torch's own rounding."""
    main = torch.tensor([value])
    model, _ = split_remainder(main)
    ours = (model.double() - main.double()).abs()
    theirs = (main.to(torch.bfloat16).double() - main.double()).abs()
    assert torch.equal(ours, theirs)


def test_shapes_and_strides_are_kept() -> None:
    """A transposed tensor is split element by element."""
    main = torch.randn(3, 5).t()
    model, remainder = split_remainder(main)
    assert model.shape == remainder.shape == (5, 3)
    assert torch.equal(join_remainder(model, remainder), main)


@given(st.lists(st.tuples(st.integers(0, 2**16 - 1), st.integers(-(2**15), 2**15 - 1)), min_size=1))
def test_no_remainder_makes_nan_of_a_number(pairs: list[tuple[int, int]]) -> None:
    """Of another value's remainder too: what was written keeps its bits where no split makes such a pair."""
    high = torch.tensor([bits - 2**16 if bits >= 2**15 else bits for bits, _ in pairs], dtype=torch.int16)
    model = high.view(torch.bfloat16)
    joined = join_remainder(model, torch.tensor([rest for _, rest in pairs], dtype=torch.int16))
    assert torch.equal(joined.isnan(), model.isnan())
    assert torch.equal(split_remainder(joined)[0].nan_to_num(nan=0.5), model.nan_to_num(nan=0.5))


def test_zeros_and_infinities_keep_the_remainders_that_a_split_makes() -> None:
    """Every value that rounds to them comes back; a remainder of the other sign is none of theirs."""
    rest = torch.arange(-(2**15), 2**15).to(torch.int16)
    for text, own in (("0.0", rest >= 0), ("-0.0", rest >= 0), ("inf", rest <= 0), ("-inf", rest <= 0)):
        model = torch.full(rest.shape, float(text), dtype=torch.bfloat16)
        joined = join_remainder(model, rest)
        again, kept = split_remainder(joined)
        assert torch.equal(again.view(torch.int16), model.view(torch.int16))
        assert torch.equal(kept, torch.where(own, rest, 0))
