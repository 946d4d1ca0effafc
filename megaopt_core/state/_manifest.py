"""What a manifest says, as data: files, boxes of tensors, and what refers to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import define, field, frozen

__all__ = ["CHECKSUMS", "FORMAT_VERSION", "Manifest", "StoredChunk", "StoredTensor"]

FORMAT_VERSION = 4
"""The newest format that is read, and the one that is written.

2 names the codes of states, 3 what parameters are, 4 how checksums are computed.
"""

CHECKSUMS = "xxh3-64"
"""How the checksums that are written are computed."""


@frozen
class StoredChunk:
    """One box of a tensor: where it lies in the logical tensor and where in the files.

    Args:
        offsets: of the box in the logical tensor.
        sizes: of the box.
        file: name of the file.
        position: first byte in the file.
        length: bytes.
        checksum: of the bytes, as hexadecimal digits.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    position: int
    length: int
    checksum: str


@frozen
class StoredTensor:
    """A logical tensor: raw little-endian elements in row-major order, box by box."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


@define
class Manifest:
    """What a checkpoint says about itself.

    Args:
        world_size: number of ranks that wrote it.
        files: file name to its size in bytes.
        tensors: key to stored tensor.
        model: `tensors` (name to key), `aliases` (tied name to name), `objects` (name to encoded value).
        optimizer: `parameters`, `groups`, `scaler`; None when no optimizer was saved.
        scheduler: the encoded state of the scheduler.
        extra: what the caller added, encoded.
        configuration: the optimizer's configuration.
        plugins: optimizer name to the distribution that provides it.
        written: versions and time.
        version: of the format.
        checksums: name of the algorithm of all checksums.
    """

    world_size: int = 1
    files: dict[str, int] = field(factory=dict)
    tensors: dict[str, StoredTensor] = field(factory=dict)
    model: dict[str, Any] = field(factory=dict)
    optimizer: dict[str, Any] | None = None
    scheduler: Any = None
    extra: Any = None
    configuration: dict[str, Any] | None = None
    plugins: dict[str, str] = field(factory=dict)
    written: dict[str, str] = field(factory=dict)
    version: int = FORMAT_VERSION
    checksums: str = CHECKSUMS

    @property
    def parameters(self) -> Mapping[str, Mapping[str, Any]]:
        """Parameter name to what is saved of its optimizer state."""
        return {} if self.optimizer is None else self.optimizer["parameters"]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.files.values())

    def chunks(self) -> Iterator[tuple[str, StoredChunk]]:
        """Yield `(key, chunk)` of every stored box."""
        for key, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                yield key, chunk
