"""Sums that threads compute leaf by leaf are those of the whole, and what they are is written down."""

import zlib

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from megaopt_checkpoint import algorithms, checksums
from megaopt_checkpoint.algorithms import ALGORITHMS, BoxSum, combined
from megaopt_checkpoint.checksums import sum_of, sums, threads
from megaopt_checkpoint.folder import HeldFolder

pytestmark = pytest.mark.any_python


@given(st.binary(), st.binary())
def test_two_checksums_combine_to_that_of_both_texts(first, second):
    """As zlib's own `crc32_combine`, which Python does not offer."""
    assert combined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def by_definition(data: bytes, algorithm: str, leaf: int) -> str:
    """Return a sum from what docs/checkpoints.md says it is."""
    if algorithm == "crc32":
        return f"{zlib.crc32(data):08x}"
    leaves = [data[start : start + leaf] for start in range(0, len(data), leaf)]
    return xxhash.xxh3_64_hexdigest(b"".join(xxhash.xxh3_64_digest(some) for some in leaves))


def test_sums_that_are_known():
    """Of XXH3's own reference (the empty text, seed 0) and of CRC-32's check value."""
    assert sum_of(memoryview(b""), "xxh3-64") == "2d06800538d394c2"
    assert sum_of(memoryview(b""), "crc32") == "00000000"
    assert sum_of(memoryview(b"123456789"), "crc32") == "cbf43926"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=12),
    gaps=st.lists(st.booleans(), min_size=12, max_size=12),
    block=st.integers(1, 20),
    task=st.integers(1, 50),
    leaf=st.integers(1, 30),
)
def test_every_range_has_the_sum_of_its_bytes(tmp_path_factory, algorithm, lengths, gaps, block, task, leaf):
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
        for module in (checksums, algorithms):
            patch.setattr(module, "LEAF", leaf)
        found = sums(held.open("data.bin"), ranges, pool, algorithm)
        pieces = [data[start : start + length] for start, length in ranges]
        assert found == [by_definition(piece, algorithm, leaf) for piece in pieces]
        for piece in pieces:
            box = BoxSum(algorithm)
            for start in range(0, len(piece), block):
                box.update(memoryview(piece)[start : start + block])
            assert box.text() == by_definition(piece, algorithm, leaf)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_range_that_the_file_ends_in_has_none(tmp_path, algorithm):
    """Others keep theirs."""
    (tmp_path / "data.bin").write_bytes(b"12345678")
    with HeldFolder(tmp_path) as held, threads() as pool:
        found = sums(held.open("data.bin"), [(0, 4), (4, 8)], pool, algorithm)
    assert found == [sum_of(memoryview(b"1234"), algorithm), None]
