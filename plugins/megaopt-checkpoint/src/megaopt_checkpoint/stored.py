"""What a manifest says, as data: files, boxes of tensors, and what refers to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import define, field, frozen

from megaopt_core.errors import CheckpointVersionError

__all__ = ["CHECKSUMS", "FORMAT_VERSION", "Manifest", "StoredChunk", "StoredTensor", "require_format"]

FORMAT_VERSION = 4
"""The format that is written and read."""

CHECKSUMS = "xxh3-64"
"""The algorithm of checksums."""


def require_format(name: str, version: Any, writer: str | None) -> None:
    """Raise unless a document has the format that is read here.

    Args:
        name: what errors call the checkpoint.
        version: the format that its document names.
        writer: the version of megaopt-core that wrote it, where the document says so.

    Raises:
        CheckpointVersionError: it has another one.
    """
    if type(version) is not int or version != FORMAT_VERSION:
        raise CheckpointVersionError(
            f"{name} has format version {version!r}, written by megaopt-core {writer or 'of an unknown version'}; "
            f"megaopt reads format {FORMAT_VERSION} alone, and a newer format after pip install --upgrade megaopt-core",
            path=name,
        )


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
