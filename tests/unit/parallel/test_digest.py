"""The digest of values: equal bits give equal digests, wherever they lie; other bits or another order do not."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megaopt_core.parallel._digest import digest_of_each, digest_of_tensors

pytestmark = pytest.mark.any_python

SIZES = [2, 7, 2000, 30_000, 70_000, 600_003]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]


def values(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return random values."""
    return torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_digest_does_not_depend_on_the_memory(size, dtype):
    """A view at an odd offset, and one that is not contiguous, have the digest of a copy."""
    given = values(size, dtype)
    shifted = torch.empty(size + 1, dtype=dtype)[1:].copy_(given)
    strided = torch.empty(size, 2, dtype=dtype)[:, 0].copy_(given)
    assert digest_of_tensors([given]) == digest_of_tensors([shifted]) == digest_of_tensors([strided])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_values_have_another_digest(size, dtype):
    """Of one element, of all signs, of two signs, or in another order."""
    given = values(size, dtype)
    changed = {"negated": -given, "sign of the last": given.clone(), "zero": given.clone()}
    changed["sign of the last"][-1] *= -1
    changed["zero"][size // 2] = 0
    if size > 2:
        changed["two signs"] = given.clone()
        changed["two signs"][[0, -1]] *= -1
        changed["reversed"], changed["rolled"] = given.flip(0), given.roll(1)
    digests = [digest_of_tensors([tensor]) for tensor in (given, *changed.values())]
    assert len(set(digests)) == len(digests), list(changed)


def test_order_of_small_tensors_and_swapped_rows_count() -> None:
    """Tensors that are put together keep their places, and so do the experts of a stack."""
    one, other = values(5, torch.float32), values(6, torch.float32)
    assert digest_of_tensors([one, other]) != digest_of_tensors([other, one])
    stack = values(4 * 64 * 512, torch.float32).view(4, 64, 512)
    assert digest_of_tensors([stack]) != digest_of_tensors([stack[[1, 0, 2, 3]]])


def many(rows: int, columns: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return tensors of one shape with random values."""
    return list(values(count * rows * columns, dtype).view(count, rows, columns).unbind(0))


@pytest.mark.parametrize("shape", [(3, 5), (64, 64), (128, 128), (128, 129)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_of_many_alike_counts_at_its_place(shape, dtype) -> None:
    """Where one lies does not matter; an element, a sign, and which of them is which do."""
    given = many(*shape, 40, dtype)
    apart = [torch.empty(shape[1] * shape[0] + 1, dtype=dtype)[1:].view(shape).copy_(one) for one in given]
    turned = [one.t().contiguous().t() for one in given]
    assert digest_of_tensors(given) == digest_of_tensors(apart) == digest_of_tensors(turned)
    others = {}
    for at in (0, 17, 39):
        for what, change in {"zero": lambda one: one.fill_(0), "signs": lambda one: one.mul_(-1)}.items():
            others[what, at] = [one.clone() for one in given]
            change(others[what, at][at])
            others[f"the last's {what}", at] = [one.clone() for one in given]
            change(others[f"the last's {what}", at][at][-1, -1])
    others["two swapped"] = [given[1], given[0], *given[2:]]
    others["all moved on"] = [*given[1:], given[0]]
    others["rows of one swapped"] = [given[0].flip(0), *given[1:]]
    others["two of one sign"] = [-given[0], -given[1], *given[2:]]
    digests = [digest_of_tensors(some) for some in (given, *others.values())]
    assert len(set(digests)) == len(digests)


def test_shapes_between_each_other_keep_their_places() -> None:
    """Those of one shape are read together; the others, too, count where they stand among their own."""
    a, b, c = (values(size, torch.float32) for size in (5, 6, 7))
    assert digest_of_tensors([a, b, a.neg(), c]) != digest_of_tensors([a.neg(), b, a, c])
    assert digest_of_tensors([a, b, c]) != digest_of_tensors([a, c, b])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_by_itself_does_not_depend_on_the_memory(size, dtype) -> None:
    """Of one shape that lies at an odd offset, or has gaps; another of the list counts for nothing."""
    given = values(size, dtype)
    shifted = torch.empty(size + 1, dtype=dtype)[1:].copy_(given)
    strided = torch.empty(size, 2, dtype=dtype)[:, 0].copy_(given)
    first, *others, last = digest_of_each([given, shifted, strided, -given]).tolist()
    assert others == [first, first]
    assert last != first


@given(st.lists(st.sampled_from([-2, -1, 0, 1, 2]), min_size=1, max_size=40), st.integers(0, 3000))
def test_no_pattern_of_small_steps_cancels(steps: list[int], before: int) -> None:
    """Steps of a few units in the last place, of which sums stay what they were in many."""
    old = torch.linspace(1, 2, before + len(steps)).view(torch.int32)
    new = old.clone()
    new[before:] += torch.tensor(steps, dtype=torch.int32)
    differ = any(steps)
    each = digest_of_each([old.view(torch.float32), new.view(torch.float32)])
    assert bool(each[0] != each[1]) == differ
    assert (digest_of_tensors([old]) != digest_of_tensors([new])) == differ
