"""Which buckets each module of a model reads while it runs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from attrs import frozen
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megaopt_distributed.buffers.bucket import Bucket

__all__ = ["BucketMemory", "BucketReads"]


@frozen
class BucketMemory:
    """Finds the bucket in whose memory a tensor lies: a parameter, a twin of it, or a view.

    Args:
        starts: address of each bucket, ascending.
        spans: the end of each, and the bucket.
    """

    starts: tuple[int, ...]
    spans: tuple[tuple[int, Bucket], ...]

    @classmethod
    def of(cls, buckets: Iterable[Bucket]) -> BucketMemory:
        """Return the memory of buckets that hold parameters.

        Args:
            buckets: those without parameters are left out.
        """
        found = []
        for bucket in buckets:
            data = bucket.param_data
            if data is not None and data.numel():
                found.append((data.data_ptr(), data.data_ptr() + data.nbytes, bucket))
        found.sort(key=lambda item: item[0])
        return cls(tuple(start for start, _, _ in found), tuple((end, bucket) for _, end, bucket in found))

    def holding(self, tensors: Iterable[Any]) -> list[Bucket]:
        """Return the buckets that hold tensors, each once.

        Args:
            tensors: tensors; whatever else there is, and what has no memory, is passed over.
        """
        found = []
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
                continue
            try:
                address = tensor.data_ptr()
            except RuntimeError:  # a subclass without memory of its own
                continue
            index = bisect_right(self.starts, address) - 1
            if index >= 0 and address < self.spans[index][0]:
                found.append(self.spans[index][1])
        return list(dict.fromkeys(found))


class BucketReads(TorchDispatchMode):
    """Notes, for every operation that reads a parameter in a bucket, the innermost module that runs.

    Args:
        memory: where the buckets are.
        modules: the modules that may run.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: what is compiled is compiled in the first pass already, and seen as one."""
        return True

    def __init__(self, memory: BucketMemory, modules: Sequence[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = memory
        self.modules = modules
        self.called: set[nn.Module] = set()
        self.reads: dict[nn.Module, dict[Bucket, None]] = {}
        self._running: list[nn.Module] = []
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        for module in self.modules:
            self._handles.append(module.register_forward_pre_hook(self._begins, prepend=True))
            self._handles.append(module.register_forward_hook(self._ends, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _begins(self, module: nn.Module, _: Any) -> None:
        self.called.add(module)
        self._running.append(module)

    def _ends(self, *_: Any) -> None:
        self._running.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note what an operation reads, and run it."""
        kwargs = kwargs or {}
        if self._running:
            read = self.memory.holding(tree_iter((args, kwargs)))
            self.reads.setdefault(self._running[-1], {}).update(dict.fromkeys(read))
        return func(*args, **kwargs)
