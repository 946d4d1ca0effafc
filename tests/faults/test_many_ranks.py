"""A manifest as large as that of the largest runs is none too large: what is checked grows with it."""

import struct
from pathlib import Path

import pytest
import torch
from megaopt_checkpoint import load_checkpoint, verify_checkpoint
from megaopt_checkpoint.checksums import sum_of
from megaopt_checkpoint.manifest import write_manifest
from megaopt_checkpoint.stored import Manifest, StoredChunk, StoredTensor

pytestmark = pytest.mark.any_python
RANKS = 1_024


def write(folder: Path, parameters: int) -> None:
    """Write a checkpoint of parameters of two elements, each from two of 1,024 ranks."""
    data = [bytearray() for _ in range(RANKS)]
    tensors = {}
    for index in range(parameters):
        chunks = []
        for half in range(2):
            rank = (2 * index + half) % RANKS
            raw = struct.pack("<f", 2.0 * index + half)
            file, checksum = f"rank-{rank:05d}.bin", sum_of(memoryview(raw))
            chunks.append(StoredChunk((half,), (1,), file, len(data[rank]), 4, checksum))
            data[rank] += raw
        tensors[f"model.p{index}"] = StoredTensor("float32", (2,), tuple(chunks))
    for rank, of_rank in enumerate(data):
        (folder / f"rank-{rank:05d}.bin").write_bytes(of_rank)
    manifest = Manifest(
        world_size=RANKS,
        files={f"rank-{rank:05d}.bin": len(of_rank) for rank, of_rank in enumerate(data)},
        tensors=tensors,
        model={"tensors": {f"p{index}": f"model.p{index}" for index in range(parameters)}},
    )
    write_manifest(folder, manifest)


@pytest.mark.parametrize("parameters", [7_000, pytest.param(70_000, marks=pytest.mark.long)])
def test_thousands_of_parameters_from_a_thousand_ranks(tmp_path, parameters: int) -> None:
    """They are verified, and a model of some of them gets their values."""
    folder = tmp_path / "many"
    folder.mkdir()
    write(folder, parameters)
    assert len(verify_checkpoint(folder).tensors) == parameters
    model = torch.nn.Module()
    for index in (0, 1, 511, 512, parameters - 1):
        model.register_parameter(f"p{index}", torch.nn.Parameter(torch.zeros(2)))
    report = load_checkpoint(folder, model, None, strict=False)
    assert len(report.unexpected) == parameters - 5
    assert model.p512.tolist() == [1024.0, 1025.0]
    last = model.get_parameter(f"p{parameters - 1}")
    assert last.tolist() == [2.0 * parameters - 2, 2.0 * parameters - 1]
