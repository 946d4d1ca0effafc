"""Captures on a CPU as CUDA does: what is launched is written down and not executed, and repeated with its numbers."""

import warnings

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["RecordingCapture"]


class _Recorder(TorchDispatchMode):
    """Writes operations down with their arguments as they are; what they change is put back afterwards."""

    def __init__(self):
        super().__init__()
        self.operations, self.before, self.made = [], {}, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing\nthe host would wait")
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and id(value) not in self.made:
                self.before.setdefault(value.data_ptr(), (value, value.clone()))
        out = func(*args, **kwargs)
        self.made.update(id(value) for value in tree_leaves(out) if isinstance(value, torch.Tensor))
        self.operations.append((func, args, kwargs, out))
        return out

    def put_back(self):
        for value, saved in self.before.values():
            value.copy_(saved)


class RecordingCapture:
    """Counts what it is asked for; a replay repeats operations on the same tensors with the same numbers."""

    def __init__(self):
        self.warm_ups, self.captures, self.replays = 0, 0, 0

    def warm_up(self, action):
        self.warm_ups += 1
        action()

    def capture(self, action):
        recorder = _Recorder()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with recorder:
                    action()
            finally:
                recorder.put_back()
        self.captures += 1

        def replay():
            self.replays += 1
            for func, args, kwargs, out in recorder.operations:
                new = func(*args, **kwargs)
                for kept, value in zip(tree_leaves(out), tree_leaves(new), strict=True):
                    if isinstance(kept, torch.Tensor) and kept.data_ptr() != value.data_ptr():
                        kept.copy_(value)

        return replay
