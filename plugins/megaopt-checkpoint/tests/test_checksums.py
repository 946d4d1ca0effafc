"""Sums that threads compute leaf by leaf are those of the whole, and what they are is written down."""

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from megaopt_checkpoint import checksums
from megaopt_checkpoint.checksums import BoxSum, sum_of, sums, threads
from megaopt_checkpoint.folder import HeldFolder

pytestmark = pytest.mark.any_python


def by_definition(data: bytes, leaf: int) -> str:
    """Return a sum from what docs/checkpoints.md says it is."""
    leaves = [data[start : start + leaf] for start in range(0, len(data), leaf)]
    return xxhash.xxh3_64_hexdigest(b"".join(xxhash.xxh3_64_digest(some) for some in leaves))


def test_a_sum_that_is_known():
    """Of XXH3's own reference: the empty text, seed 0."""
    assert sum_of(memoryview(b"")) == "2d06800538d394c2"


@given(
    lengths=st.lists(st.integers(0, 40), max_size=12),
    gaps=st.lists(st.booleans(), min_size=12, max_size=12),
    block=st.integers(1, 20),
    task=st.integers(1, 50),
    leaf=st.integers(1, 30),
)
def test_every_range_has_the_sum_of_its_bytes(tmp_path_factory, lengths, gaps, block, task, leaf):
    """Long ranges in leaves, short neighbours together, ranges apart from each other, empty ones."""
    folder = tmp_path_factory.mktemp("checksums")
    ranges, position = [], 0
    for length, gap in zip(lengths, gaps, strict=False):
        position += 7 * gap
        ranges.append((position, length))
        position += length
    data = bytes(number * 37 % 251 for number in range(position))
    (folder / "data.bin").write_bytes(data)
    with pytest.MonkeyPatch.context() as patch, HeldFolder(folder) as held, threads() as pool:
        patch.setattr(checksums, "_BLOCK", block)
        patch.setattr(checksums, "_TASK", task)
        patch.setattr(checksums, "_LEAF", leaf)
        found = sums(held.open("data.bin"), ranges, pool)
        pieces = [data[start : start + length] for start, length in ranges]
        assert found == [by_definition(piece, leaf) for piece in pieces]
        for piece in pieces:
            box = BoxSum()
            for start in range(0, len(piece), block):
                box.update(memoryview(piece)[start : start + block])
            assert box.text() == by_definition(piece, leaf)


def test_a_range_that_the_file_ends_in_has_none(tmp_path):
    """Others keep theirs."""
    (tmp_path / "data.bin").write_bytes(b"12345678")
    with HeldFolder(tmp_path) as held, threads() as pool:
        found = sums(held.open("data.bin"), [(0, 4), (4, 8)], pool)
    assert found == [sum_of(memoryview(b"1234")), None]
