"""A logical tensor of which this process holds some boxes, in the terms of torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch

from megaopt_checkpoint.values.chunks import Chunk, chunks_of
from megaopt_core.errors import UnsupportedOperationError
from megaopt_core.params import Shard

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

__all__ = ["SlicedTensor", "joined", "sliced"]

type _Held = tuple[Chunk, Callable[[], torch.Tensor]]
"""A box, and what returns the flat elements of the shard that it was cut from."""


class SlicedTensor(torch.Tensor):
    """Stands for a whole logical tensor; holds this process's boxes of it and no memory of its own.

    It knows the protocol by which `torch.distributed.checkpoint` saves and loads sharded tensors, needs neither a
    process group nor a device mesh, and takes any number of boxes in any number of dimensions. No arithmetic is
    possible: boxes are reached through :meth:`local`.

    Args:
        shape: of the logical tensor.
        dtype: of its elements.
        device: where the boxes are.
        held: each box with what returns the flat elements of the shard that it was cut from, when they are needed; the
            box counts its elements in it. Writing into the result writes into what it is a view of.
    """

    _held: tuple[_Held, ...]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, held: Sequence[_Held]
    ) -> Self:
        """Make the wrapper; see the class."""
        made: Self = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)
        made._held = tuple(held)
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch annotates it without `cls` and `func`
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse: there is nothing to compute with; a trainer may detach it, copy it, or move it to a device."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        given = kwargs or {}
        if func is torch.ops.aten.clone.default or (
            func is torch.ops.aten._to_copy.default and given.get("dtype") in (None, args[0].dtype)
        ):
            return args[0].copied(given.get("device"))
        raise UnsupportedOperationError(
            f"{func} is not possible on a slice of a sharded tensor; save and load it with torch.distributed.checkpoint"
        )

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The boxes that this process holds."""
        return tuple(chunk for chunk, _ in self._held)

    def local(self, index: int) -> torch.Tensor:
        """Return the elements of one box, as a view where its memory allows it.

        Args:
            index: position among `chunks`.
        """
        chunk, elements = self._held[index]
        return elements()[chunk.start : chunk.stop].view(chunk.sizes)

    def box(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        """Return the elements of the box of these offsets and sizes.

        Args:
            offsets: where it begins.
            sizes: its extents.

        Raises:
            LookupError: this process holds no such box.
        """
        for index, chunk in enumerate(self.chunks):
            if (chunk.offsets, chunk.sizes) == (offsets, sizes):
                return self.local(index)
        raise LookupError(f"this rank holds no box of {list(sizes)} at {list(offsets)}, but {self!r}")

    def copied(self, device: torch.device | None = None) -> SlicedTensor:
        """Return the same boxes in memory of their own.

        Args:
            device: where; None: where they are.
        """
        device = device or self.device
        held: list[_Held] = []
        for index, chunk in enumerate(self.chunks):
            box = self.local(index).detach().to(device, copy=True)
            held.append((Chunk(chunk.offsets, chunk.sizes, 0, box.numel()), box.flatten))
        return SlicedTensor(self.shape, self.dtype, device, held)

    def read_once(self) -> SlicedTensor:
        """Return the same boxes, kept once read: what torch writes into them stays, also where they are computed."""
        held = [(chunk, cache(elements)) for chunk, elements in self._held]
        return SlicedTensor(self.shape, self.dtype, self.device, held)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: one rank's part, in a file of its own, would be taken for the whole."""
        raise UnsupportedOperationError(
            "a slice of a sharded tensor cannot be pickled or copied. Use save_checkpoint() and load_checkpoint(), or "
            "torch.distributed.checkpoint: each shard is saved once, and loads on any number of ranks"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # torch annotates no result
        boxes = ", ".join(f"{list(chunk.offsets)}+{list(chunk.sizes)}" for chunk in self.chunks)
        return f"SlicedTensor({list(self.shape)}, {self.dtype}, boxes: {boxes or 'none'})"

    __hash__ = torch.Tensor.__hash__

    # What torch.distributed.checkpoint calls.

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        """Return one item per box."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=box, properties=properties, size=self.size()),
            )
            for box in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the boxes."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
            for chunk in self.chunks
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the box that begins at the index's offset."""
        for position, chunk in enumerate(self.chunks):
            if torch.Size(chunk.offsets) == index.offset:
                return self.local(position)
        raise LookupError(f"{index.fqn}: no box begins at {index.offset}")


def sliced(
    shard: Shard, dtype: torch.dtype, device: torch.device, flat: Callable[[], torch.Tensor]
) -> SlicedTensor:
    """Return a shard as the part of its logical tensor that it is.

    Args:
        shard: which elements.
        dtype: of the elements.
        device: where they are.
        flat: returns the elements, flat.
    """
    return SlicedTensor(shard.shape, dtype, device, [(chunk, flat) for chunk in chunks_of(shard)])


def joined(present: torch.Tensor | None, more: SlicedTensor) -> SlicedTensor:
    """Return one tensor for two pieces of this rank that hold elements of one parameter.

    Args:
        present: the first; None: there is none yet.
        more: the second.
    """
    if not isinstance(present, SlicedTensor):
        return more
    return SlicedTensor(more.shape, more.dtype, more.device, (*present._held, *more._held))
