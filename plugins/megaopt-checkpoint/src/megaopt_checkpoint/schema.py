"""What may stand in a manifest: a document of a stranger until every field of it is what the format says."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import fields, frozen

from megaopt_checkpoint.values.encoding import decode, dtype_named
from megaopt_core.errors import CheckpointCorruptError, CheckpointError, ViewError
from megaopt_core.params import MatrixView, Role

__all__ = ["Schema", "matrix_view"]

_MOST_DIMS = 64
_LARGEST = 2**63

_DTYPE = re.compile(
    r"bool|bfloat16|u?int(8|16|32|64)|complex(32|64|128)|float(16|32|64)|float[0-9]+_[0-9a-z]+"  # not quantized
)
_VIEW = frozenset(attribute.name for attribute in fields(MatrixView))
_DIGITS = re.compile("[0-9a-f]*")
_FILE = re.compile(r"rank-[0-9]{5,9}\.bin")


def matrix_view(view: Mapping[str, Any]) -> MatrixView:
    """Return the view that a manifest describes.

    Args:
        view: its fields, and the shape of what is viewed.
    """
    return MatrixView(**{key: value for key, value in view.items() if key != "shape"})


@frozen
class Schema:
    """Checks of a document's values; each returns the value, or raises one error that names file, place and value.

    Args:
        path: of the manifest.
    """

    path: Path

    def fault(self, where: str, value: Any, expected: str) -> CheckpointCorruptError:
        """Return the error that names a value.

        Args:
            where: the place in the document.
            value: what stands there.
            expected: what should.
        """
        return CheckpointCorruptError(
            f"{self.path} is no valid manifest: {where} is {reprlib.repr(value)}, which is not {expected}",
            path=str(self.path),
        )

    def mapping(self, value: Any, where: str) -> dict[str, Any]:
        """Return an object; its keys are text, as JSON has it.

        Args:
            value: the value.
            where: its place.
        """
        if isinstance(value, dict):
            return value
        raise self.fault(where, value, "an object")

    def fields(self, value: Any, where: str, required: set[str], optional: frozenset[str]) -> dict[str, Any]:
        """Return an object of certain keys.

        Args:
            value: the value.
            where: its place.
            required: keys that it has.
            optional: keys that it may have.
        """
        found = self.mapping(value, where).keys()
        if found >= required and found - required <= optional:
            return self.mapping(value, where)
        raise self.fault(where, sorted(found), f"an object of the fields {sorted(required | optional)}")

    def sequence(self, value: Any, where: str, length: int | None = None) -> list[Any]:
        """Return a list.

        Args:
            value: the value.
            where: its place.
            length: its length; None: any.
        """
        if isinstance(value, list) and length in {None, len(value)}:
            return value
        raise self.fault(where, value, "a list" if length is None else f"a list of {length}")

    def text(self, value: Any, where: str) -> str:
        """Return text.

        Args:
            value: the value.
            where: its place.
        """
        if isinstance(value, str):
            return value
        raise self.fault(where, value, "text")

    def texts(self, value: Any, where: str) -> dict[str, str]:
        """Return an object of texts.

        Args:
            value: the value.
            where: its place.
        """
        for key, item in self.mapping(value, where).items():
            self.text(item, f"{where}.{key}")
        return self.mapping(value, where)

    def count(self, value: Any, where: str, least: int = 0, below: int = _LARGEST) -> int:
        """Return a whole number.

        Args:
            value: the value.
            where: its place.
            least: its lower bound.
            below: a power of two that it is less than.
        """
        if type(value) is int and least <= value < below:
            return value
        raise self.fault(where, value, f"a whole number from {least} to 2**{below.bit_length() - 1} - 1")

    def digits(self, value: Any, where: str, count: int) -> str:
        """Return hexadecimal digits.

        Args:
            value: the value.
            where: its place.
            count: how many.
        """
        if isinstance(value, str) and len(value) == count and _DIGITS.fullmatch(value):
            return value
        raise self.fault(where, value, f"{count} digits from 0 to f")

    def sizes(self, value: Any, where: str, dims: int | None = None) -> tuple[int, ...]:
        """Return a shape, or offsets.

        Args:
            value: the value.
            where: its place.
            dims: how many numbers; None: any number that a tensor has.
        """
        if isinstance(value, list) and len(value) <= _MOST_DIMS and dims in {None, len(value)}:
            for size in value:
                if type(size) is not int or not 0 <= size < _LARGEST:
                    break
            else:
                return tuple(value)
        most = f"at most {_MOST_DIMS}" if dims is None else dims
        raise self.fault(where, value, f"a list of {most} numbers")

    def box(
        self, offsets: Any, sizes: Any, where: str, shape: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return a box inside a shape.

        Args:
            offsets: where it begins.
            sizes: its extents.
            where: its place in the document.
            shape: the shape.
        """
        box = self.sizes(offsets, where, len(shape)), self.sizes(sizes, where, len(shape))
        if box[1] == shape and not any(box[0]):
            return box
        if all(offset + size <= extent for offset, size, extent in zip(*box, shape, strict=True)):
            return box
        raise self.fault(where, [*map(list, box)], f"a box inside the shape {shape}")

    def dtype(self, value: Any, where: str) -> torch.dtype:
        """Return a dtype that a tensor can be made of here.

        Args:
            value: the value.
            where: its place.

        Raises:
            CheckpointError: this torch has no such dtype.
        """
        if not isinstance(value, str) or not _DTYPE.fullmatch(value):
            raise self.fault(where, value, "a dtype of plain elements")
        try:
            return dtype_named(value)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {where}: {error}", path=str(self.path)) from error

    def file(self, value: Any, where: str) -> str:
        """Return the name of a rank's file: without a folder, so that nothing outside is named.

        Args:
            value: the value.
            where: its place.
        """
        if isinstance(value, str) and _FILE.fullmatch(value):
            return value
        raise self.fault(where, value, "the name of a rank's file, such as rank-00000.bin")

    def role(self, described: Mapping[str, Any], where: str) -> None:
        """Check what a parameter was: its role, and how it was seen as matrices; without a routing neither is kept.

        Args:
            described: the parameter's record.
            where: its place.
        """
        role, view = described.get("role"), described.get("view")
        if role is not None and role not in list(Role):
            raise self.fault(f"{where}.role", role, f"one of {[str(role) for role in Role]}")
        if view is None:
            return
        if role != Role.MATRIX:
            raise self.fault(f"{where}.view", view, "absent from what is no matrix")
        self.fields(view, f"{where}.view", {"shape"}, _VIEW)
        self.sizes(view["shape"], f"{where}.view.shape")
        for attribute in fields(MatrixView):
            if attribute.name in view:
                self._like(attribute.default, view[attribute.name], f"{where}.view.{attribute.name}")
        try:
            matrix_view(view).matrix_shapes(view["shape"])
        except (ValueError, ViewError) as error:
            raise self.fault(f"{where}.view", view, f"a view: {error}") from error

    def _like(self, default: Any, value: Any, where: str) -> None:
        """Check that a value is of the kind of a field's default."""
        if isinstance(default, bool):
            if not isinstance(value, bool):
                raise self.fault(where, value, "true or false")
        elif isinstance(default, int):
            self.count(value, where)
        elif isinstance(default, str):
            self.text(value, where)
        else:
            self.sizes(value, where)

    def encoded(self, value: Any, where: str, tensor: Callable[[str], torch.Tensor]) -> Any:
        """Check an encoded value, and return it decoded with tensors of one element.

        Args:
            value: the value.
            where: its place.
            tensor: what stands for a named tensor; refuses names that the value may not have.
        """
        try:
            return decode(value, tensor)
        except CheckpointError as error:
            raise type(error)(
                f"{self.path} is no valid manifest: {where}: {error}", path=str(self.path)
            ) from error

    def settings(self, value: Any, where: str, tensor: Callable[[str], torch.Tensor]) -> Mapping[Any, Any]:
        """Check encoded settings, and return them decoded.

        Args:
            value: the value.
            where: its place.
            tensor: as for :meth:`encoded`.
        """
        found = self.encoded(value, where, tensor)
        if isinstance(found, dict):
            return found
        raise self.fault(where, value, "an object of settings")
