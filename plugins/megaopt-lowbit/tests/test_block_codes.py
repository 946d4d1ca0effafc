"""States in 8 bits, against the code written out in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megaopt_lowbit.blocks import BlockCode, decode_blocks

from megaopt_core.precision import BLOCK, BLOCKS, StoredSlice

pytestmark = pytest.mark.any_python

SIGNS = [False, True]


def magnitude(code: int, bits: int) -> float:
    """The number that a code stands for, read from its bits: zeros, a one, and a fraction."""
    if code == 0:
        return 0.0
    text = format(code, f"0{bits}b")
    zeros = text.index("1")
    fraction = text[zeros + 1 :]
    share = (int(fraction, 2) + 1) / 2 ** len(fraction) if fraction else 1.0
    return 10.0**-zeros * (0.1 + 0.9 * share)


def value_of(code: int, positive: bool) -> float:
    """A byte's number: eight bits of magnitude, or a sign and seven."""
    if positive:
        return magnitude(code, 8)
    return math.copysign(magnitude(code % 128, 7), -1 if code >= 128 else 1)


def nearest(value: float, largest: float, positive: bool) -> float:
    """The nearest number of a block whose largest magnitude is given."""
    scale = largest or 1.0
    return scale * min(
        (value_of(code, positive) for code in range(256)), key=lambda x: abs(x - value / scale)
    )


def numbers(count: int, positive: bool) -> torch.Tensor:
    """Numbers of many sizes."""
    chance = torch.Generator().manual_seed(3)
    sizes = 10.0 ** (-9 * torch.rand(count, generator=chance))
    return sizes if positive else sizes * torch.randn(count, generator=chance)


@pytest.mark.parametrize("positive", SIGNS)
def test_every_code_stands_for_its_number(positive) -> None:
    """All 256, rising with their magnitude; the largest is 1."""
    codes = torch.arange(256, dtype=torch.uint8)
    decoded = BlockCode(positive).decode(codes, torch.ones(1)).double()
    expected = torch.tensor([value_of(code, positive) for code in range(256)], dtype=torch.float64)
    assert torch.allclose(decoded, expected, rtol=6e-8, atol=0.0)
    magnitudes = [magnitude(code, 7) for code in range(128)]
    assert magnitudes == sorted(magnitudes)
    assert (decoded.max().item(), len(set(expected.abs().tolist()))) == (1.0, 256 if positive else 128)


@pytest.mark.parametrize("positive", SIGNS)
def test_values_become_the_nearest_number_of_their_block(positive) -> None:
    """Three blocks, the last one short; a positive value that would become 0 is the smallest number in its stead."""
    values = numbers(2 * BLOCK + 37, positive)
    stored, scale = BlockCode(positive).encode(values)
    decoded = BlockCode(positive).decode(stored, scale).double()
    for index, value in enumerate(values.double().tolist()):
        block = values[index // BLOCK * BLOCK :][:BLOCK].abs().double().max().item()
        expected = nearest(value, block, positive)
        if positive and expected == 0.0:
            expected = block * magnitude(1, 8)
        assert math.isclose(decoded[index].item(), expected, rel_tol=3e-7), index


@pytest.mark.parametrize("positive", SIGNS)
@given(values=st.lists(st.floats(-(2.0**126), 2.0**126, width=32), min_size=1, max_size=20))
def test_encoding_what_was_decoded_changes_nothing(positive, values) -> None:
    """A state dict holds decoded values: loading them gives the same values again."""
    code = BlockCode(positive)
    value = torch.tensor(values)
    once = code.decode(*code.encode(value.abs() if positive else value))
    assert torch.equal(code.decode(*code.encode(once)), once)


def test_an_element_takes_little_more_than_a_byte() -> None:
    """4 bytes of scale for 256 elements."""
    stored, scale = BlockCode().encode(torch.randn(10_000))
    size = stored.numel() * stored.element_size() + scale.numel() * scale.element_size()
    assert size / 10_000 <= 1.02


@pytest.mark.parametrize("value", [torch.zeros(3), torch.zeros(0), torch.zeros(())])
def test_zeros_and_what_is_empty_come_back(value) -> None:
    """Of any shape."""
    stored, scale = BlockCode().encode(value)
    assert torch.equal(BlockCode().decode(stored, scale), value)
    assert stored.shape == value.shape


def test_what_is_not_finite_is_not_hidden() -> None:
    """Its block decodes to nothing that could be taken for a value; other blocks are as they were."""
    value = torch.ones(2 * BLOCK)
    value[3] = math.nan
    decoded = BlockCode().decode(*BlockCode().encode(value))
    assert not decoded[:BLOCK].isfinite().any()
    assert torch.equal(decoded[BLOCK:], value[BLOCK:])


def test_random_rounding_is_right_on_average() -> None:
    """Over many gradients the mean comes as near as chance lets it; to nearest it would stay off."""
    value = torch.full((4 * BLOCK,), 0.302)
    value[::BLOCK] = 1.0
    chance = torch.Generator().manual_seed(0)
    rounded = BlockCode(stochastic=True)
    rounds = [
        rounded.decode(*rounded.encode(value, torch.randn(value.shape, generator=chance))) for _ in range(50)
    ]
    others = torch.stack(rounds)[:, 1:BLOCK]
    low, high = others.min().item(), others.max().item()
    assert low < 0.302 < high
    error = abs(others.double().mean().item() - 0.302)
    assert error < 4 * (high - low) / 2 / math.sqrt(others.numel())
    to_nearest = BlockCode().decode(*BlockCode().encode(value))[1].item()
    assert abs(to_nearest - 0.302) > 2 * error
    entropy = torch.randn(value.shape, generator=chance)
    assert torch.equal(rounded.encode(value, entropy)[0], rounded.encode(value, entropy)[0])


@pytest.mark.parametrize("start", [0, 5, BLOCK, 300])
@pytest.mark.parametrize("first", [0, 7, 260])
def test_any_range_of_what_was_saved_decodes_to_its_values(start, first) -> None:
    """A checkpoint keeps the blocks that a range touches, and another layout reads from the middle of it."""
    values = numbers(1000, positive=False)
    code = BlockCode()
    stored, scale = code.encode(values)
    kept = code.saved(scale, start, 900)
    part = StoredSlice(0, stored[start + first : 900], BLOCKS, kept, first, 900 - start, decode_blocks)
    assert torch.equal(decode_blocks(part), code.decode(stored, scale)[start + first : 900])


def test_slices_are_taken_over_where_blocks_meet_blocks() -> None:
    """Two halves of a piece, cut inside a block, give back its scales; shifted, or of two scales, they do not."""
    values = numbers(3 * BLOCK, positive=False)
    code = BlockCode()
    stored, scale = code.encode(values)

    def part(start, stop, to, kept=None):
        kept = code.saved(scale if kept is None else kept, start, stop)
        return StoredSlice(to, stored[start:stop], BLOCKS, kept, 0, stop - start, decode_blocks)

    like = torch.empty(3 * BLOCK)
    assert torch.equal(code.common_scale([part(0, 300, 0), part(300, 768, 300)], like), scale)
    assert torch.equal(code.common_scale([part(BLOCK, 768, 0)], torch.empty(2 * BLOCK)), scale[1:])
    assert code.common_scale([part(0, 300, 0), part(300, 700, 301)], like) is None
    assert code.common_scale([part(0, 300, 0), part(300, 768, 300, scale * 2)], like) is None
    assert BlockCode(positive=True).common_scale([part(0, 300, 0)], like) is None
