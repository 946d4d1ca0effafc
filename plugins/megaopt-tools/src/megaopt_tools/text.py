"""The text that is trained on: its bytes, their split, and batches of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from attrs import frozen

from megaopt_tools.errors import TextError

__all__ = ["TRAIN_SHARE", "VOCABULARY", "Text", "batches", "builtin_text", "load_text", "windows"]

VOCABULARY = 256
"""A token is a byte."""

TRAIN_SHARE = 0.9
"""The first part of a text is trained on, the rest is held out."""

_BUILTIN = "pydoc_data.topics"


@frozen
class Text:
    """A text as bytes, with its split.

    Args:
        source: where it comes from: the path of a file, or the name of the built-in text.
        data: all of its bytes.

    Example:
        >>> text = Text("letters", b"abcdefghij")
        >>> bytes(text.train.tolist()), bytes(text.val.tolist())
        (b'abcdefghi', b'j')
    """

    source: str
    data: bytes

    @property
    def sha256(self) -> str:
        """SHA-256 of all bytes, in hexadecimal."""
        return hashlib.sha256(self.data).hexdigest()

    @property
    def train(self) -> torch.Tensor:
        """The first 90 % as tokens, uint8, shape `[bytes]`."""
        return _tokens(self.data[: self.train_bytes])

    @property
    def val(self) -> torch.Tensor:
        """The last 10 % as tokens, uint8, shape `[bytes]`."""
        return _tokens(self.data[self.train_bytes :])

    @property
    def train_bytes(self) -> int:
        """How many bytes are trained on."""
        return int(len(self.data) * TRAIN_SHARE)

    def require_context(self, context: int) -> None:
        """Check that there is enough to train on and something to predict in what is held out.

        Args:
            context: bytes that the model sees at once.

        Raises:
            TextError: the text is too short.
        """
        if not self.data:
            raise TextError(f"{self.source}: the text is empty", source=self.source)
        if self.train_bytes < context + 1 or len(self.data) - self.train_bytes < 2:
            raise TextError(
                f"{self.source}: {len(self.data)} bytes are too few for a context of {context}: 90 % of the text must "
                f"hold {context + 1} bytes, and the rest 2; give a longer text or a smaller --context",
                source=self.source,
            )


def _tokens(data: bytes) -> torch.Tensor:
    # A bytearray is a copy that may be written to; torch warns of memory that may not.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def builtin_text() -> Text:
    """Return the topics of Python's own help, in the order of their names: some 490 kB of English and code.

    The text comes with Python, hence differs a little from version to version; its SHA-256 tells which one it was.
    """
    from pydoc_data.topics import topics

    return Text(_BUILTIN, "\n".join(topics[name] for name in sorted(topics)).encode())


def load_text(path: Path | None) -> Text:
    """Return the text of a file.

    Args:
        path: the file, read as bytes; None: the built-in text.

    Raises:
        TextError: the file cannot be read.
    """
    if path is None:
        return builtin_text()
    try:
        return Text(str(path), path.read_bytes())
    except OSError as error:
        raise TextError(f"{path}: cannot be read: {error.strerror}", source=str(path)) from error


def batches(
    tokens: torch.Tensor, batch_size: int, context: int, seed: int, first: int = 0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches from random places, without end; the same seed yields the same ones.

    Args:
        tokens: whole numbers, shape `[bytes]`, longer than `context`.
        batch_size: windows in a batch.
        context: length of a window.
        seed: of the places.
        first: how many batches of the seed are left out, as those of a run that goes on.

    Yields:
        Inputs and targets, int64, each `[batch_size, context]`; a target is the byte that follows its input.
    """
    generator = torch.Generator().manual_seed(seed)
    places = len(tokens) - context
    reach = torch.arange(context + 1)
    for _ in range(first):
        torch.randint(places, (batch_size, 1), generator=generator)
    while True:
        starts = torch.randint(places, (batch_size, 1), generator=generator)
        window = tokens[starts + reach].long()
        yield window[:, :-1], window[:, 1:]


def windows(
    tokens: torch.Tensor, batch_size: int, context: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield a text from its beginning to its end, every byte but the first as a target exactly once.

    Args:
        tokens: whole numbers, shape `[bytes]`.
        batch_size: most windows in a batch.
        context: length of a window; the last one may be shorter.

    Yields:
        Inputs and targets, int64, each `[windows, length]`.

    Example:
        >>> for inputs, targets in windows(torch.arange(6), batch_size=8, context=2):
        ...     print(inputs.tolist(), targets.tolist())
        [[0, 1], [2, 3]] [[1, 2], [3, 4]]
        [[4]] [[5]]
    """
    whole = (len(tokens) - 1) // context
    inputs = tokens[: whole * context].view(whole, context)
    targets = tokens[1 : whole * context + 1].view(whole, context)
    for start in range(0, whole, batch_size):
        yield inputs[start : start + batch_size].long(), targets[start : start + batch_size].long()
    rest = tokens[whole * context :].long()
    if len(rest) > 1:
        yield rest[None, :-1], rest[None, 1:]
