"""A manifest as large as that of the largest runs is none too large: what is checked grows with it."""

import struct
from pathlib import Path

import pytest
import torch
from megaopt_checkpoint import load_checkpoint, verify_checkpoint
from megaopt_checkpoint.checksums import sum_of
from megaopt_checkpoint.manifest import write_manifest

from megaopt_core.state import CHECKSUMS, Manifest, StoredChunk, StoredTensor

pytestmark = pytest.mark.any_python
PARAMETERS, RANKS = 70_000, 1_024


def write(folder: Path) -> None:
    """Write a checkpoint of 70,000 parameters of two elements, each from two of 1,024 ranks."""
    data = [bytearray() for _ in range(RANKS)]
    tensors = {}
    for index in range(PARAMETERS):
        chunks = []
        for half in range(2):
            rank = (2 * index + half) % RANKS
            raw = struct.pack("<f", 2.0 * index + half)
            file, checksum = f"rank-{rank:05d}.bin", sum_of(memoryview(raw), CHECKSUMS)
            chunks.append(StoredChunk((half,), (1,), file, len(data[rank]), 4, checksum))
            data[rank] += raw
        tensors[f"model.p{index}"] = StoredTensor("float32", (2,), tuple(chunks))
    for rank, of_rank in enumerate(data):
        (folder / f"rank-{rank:05d}.bin").write_bytes(of_rank)
    manifest = Manifest(
        world_size=RANKS,
        files={f"rank-{rank:05d}.bin": len(of_rank) for rank, of_rank in enumerate(data)},
        tensors=tensors,
        model={"tensors": {f"p{index}": f"model.p{index}" for index in range(PARAMETERS)}},
    )
    write_manifest(folder, manifest)


def test_seventy_thousand_parameters_from_a_thousand_ranks(tmp_path) -> None:
    """They are verified, and a model of some of them gets their values."""
    folder = tmp_path / "many"
    folder.mkdir()
    write(folder)
    assert len(verify_checkpoint(folder).tensors) == PARAMETERS
    model = torch.nn.Module()
    for index in (0, 1, 511, 512, 69_999):
        model.register_parameter(f"p{index}", torch.nn.Parameter(torch.zeros(2)))
    report = load_checkpoint(folder, model, None, strict=False)
    assert len(report.unexpected) == PARAMETERS - 5
    assert model.p512.tolist() == [1024.0, 1025.0]
    assert model.p69999.tolist() == [139998.0, 139999.0]
