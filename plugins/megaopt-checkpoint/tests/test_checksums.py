"""Checksums that threads compute of pieces are those of the whole."""

import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megaopt_checkpoint import checksums
from megaopt_checkpoint.checksums import combined, crc32s, threads
from megaopt_checkpoint.folder import HeldFolder

pytestmark = pytest.mark.any_python


@given(st.binary(), st.binary())
def test_two_checksums_combine_to_that_of_both_texts(first, second):
    """As zlib's own `crc32_combine`, which Python does not offer."""
    assert combined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=12),
    gaps=st.lists(st.booleans(), min_size=12, max_size=12),
    block=st.integers(1, 20),
    task=st.integers(1, 50),
)
def test_every_range_has_the_checksum_of_its_bytes(tmp_path_factory, lengths, gaps, block, task):
    """Long ranges in pieces, short neighbours together, ranges apart from each other, empty ones."""
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
        found = crc32s(held.open("data.bin"), ranges, pool)
    assert found == [zlib.crc32(data[start : start + length]) for start, length in ranges]


def test_a_range_that_the_file_ends_in_has_none(tmp_path):
    """Others keep theirs."""
    (tmp_path / "data.bin").write_bytes(b"12345678")
    with HeldFolder(tmp_path) as held, threads() as pool:
        assert crc32s(held.open("data.bin"), [(0, 4), (4, 8)], pool) == [zlib.crc32(b"1234"), None]
