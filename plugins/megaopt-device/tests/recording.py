"""Captures on a CPU as CUDA does: what is launched is written down and not executed, and repeated with its numbers."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["RecordingCapture"]


def _as_now(value: Any) -> Any:
    """Return what has the memory that a tensor has now, whatever memory it is given later, as a kernel does."""
    return tree_map_only(torch.Tensor, torch.Tensor.detach, value)


class _Recorder(TorchDispatchMode):
    """Writes operations down with their arguments as they are; what they change is put back afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.before, self.made = [], {}, set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing\nthe host would wait")
        given = _as_now((args, kwargs))
        for storage in (
            value.untyped_storage() for value in tree_leaves(given) if isinstance(value, torch.Tensor)
        ):
            if storage.data_ptr() not in self.made and storage.data_ptr() not in self.before:
                self.before[storage.data_ptr()] = storage, storage.clone()
        out = func(*args, **kwargs)
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in self.before:
                self.made.add(value.untyped_storage().data_ptr())
        self.operations.append((func, *given, _as_now(out)))
        return out

    def put_back(self) -> None:
        for storage, saved in self.before.values():
            storage.copy_(saved)


class RecordingCapture:
    """Counts what it is asked for; a replay repeats operations on the same tensors with the same numbers."""

    def __init__(self) -> None:
        self.is_capturing = False
        self.warm_ups, self.captures, self.replays, self.releases = 0, 0, 0, 0

    def warm_up(self, action: Callable[[], object]) -> None:
        self.warm_ups += 1
        action()

    def capture(self, action: Callable[[], object]) -> Callable[[], None]:
        recorder = _Recorder()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.is_capturing = True
            try:
                with recorder:
                    action()
            finally:
                self.is_capturing = False
                recorder.put_back()
        self.captures += 1

        @torch.no_grad()
        def replay():
            self.replays += 1
            for func, args, kwargs, out in recorder.operations:
                new = func(*args, **kwargs)
                for kept, value in zip(tree_leaves(out), tree_leaves(new), strict=True):
                    if isinstance(kept, torch.Tensor) and kept.data_ptr() != value.data_ptr():
                        kept.copy_(value)

        return replay

    def release(self) -> None:
        self.releases += 1
