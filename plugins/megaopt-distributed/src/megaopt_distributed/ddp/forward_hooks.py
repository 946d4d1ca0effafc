"""Waiting for gathered parameters where the forward pass needs them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from attrs import define, field
from torch import nn

from megaopt_core.errors import UnsupportedOperationError
from megaopt_distributed.buffers.bucket import Bucket
from megaopt_distributed.ddp.bucket_reads import BucketMemory, BucketReads

__all__ = ["ForwardWaits"]


@define(eq=False)
class ForwardWaits:
    """Before a module runs, waits for the buckets of the parameters that it reads.

    These are its own parameters, those that an operation read in the first pass while it was the innermost module
    that ran, and those of modules below it that were not called in that pass. There is a first pass for training and
    one for evaluation, with gradients and without; before each everything is waited for, as before calls that do not
    go through :meth:`run`.

    Modules hold it by a weak reference; copies of a module wait for nothing.

    Args:
        module: the model.
        buckets: all buckets, in the order in which they are waited for.
        align: wait for everything before every forward pass.
    """

    module: nn.Module
    buckets: Sequence[Bucket]
    align: bool = False
    _memory: BucketMemory = field(init=False)
    _running: list[nn.Module] = field(factory=list, init=False)
    _own: dict[nn.Module, list[Bucket]] = field(factory=dict, init=False)
    _needs: dict[nn.Module, dict[Bucket, None]] = field(factory=dict, init=False)
    _learned: set[tuple[bool, bool]] = field(factory=set, init=False)
    _by_module: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._memory = BucketMemory.of(self.buckets)
        before_forward, before_state_dict = _hooks(weakref.ref(self))
        inside_compiled = {
            below for module in self.module.modules() if _is_compiled(module) for below in _below(module)
        }
        for module in self.module.modules():
            self._own[module] = self._memory.holding(module.parameters(recurse=_is_compiled(module)))
            module.register_state_dict_pre_hook(before_state_dict)
            module.register_load_state_dict_pre_hook(before_state_dict)
            if module not in inside_compiled:
                # Before the hooks of others: one that computes a weight reads parameters.
                module.register_forward_pre_hook(before_forward, prepend=True)
                self._running.append(module)

    @property
    def is_gathering(self) -> bool:
        """True when a bucket is being gathered, or was and nobody has waited for it."""
        return any(bucket.is_gathering for bucket in self.buckets)

    def run(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model, every module as soon as its buckets are there.

        Args:
            *inputs: passed on.
            **kwargs: passed on.
        """
        kind = (self.module.training, torch.is_grad_enabled())
        if kind not in self._learned:
            self.wait(self.buckets)
            with BucketReads(self._memory, self._running) as seen:
                result = self.module(*inputs, **kwargs)
            self._learn(seen)
            self._learned.add(kind)
            return result
        if self.align:
            self.wait(self.buckets)
        self._by_module = True
        try:
            return self.module(*inputs, **kwargs)
        finally:
            self._by_module = False

    def wait(self, buckets: Iterable[Bucket]) -> None:
        """Return when buckets are gathered.

        Args:
            buckets: which.
        """
        for bucket in buckets:
            bucket.finish_param_sync()

    def before_forward(self, module: nn.Module) -> None:
        """Wait for what a module reads.

        Args:
            module: it is about to run.
        """
        self.wait(self._needs.get(module, ()) if self._by_module else self.buckets)

    def before_state_dict(self, module: nn.Module) -> None:
        """Wait for a module's own parameters, which are about to be read or overwritten.

        Args:
            module: the module.
        """
        self.wait(self._own.get(module, ()))

    def _learn(self, seen: BucketReads) -> None:
        for module, buckets in seen.reads.items():
            self._needs.setdefault(module, {}).update(buckets)
        # Parameters belong to their module and, when nothing calls it, to the nearest one above that runs.
        visits = [(self.module, self.module)]
        known = set(visits)
        while visits:
            module, caller = visits.pop()
            runs = module if module in seen.called else caller
            for user in (module, runs):
                self._needs.setdefault(user, {}).update(dict.fromkeys(self._own[module]))
            new = [(child, runs) for child in module.children() if (child, runs) not in known]
            known.update(new)
            visits += new


class _Hook:
    """Acts for the modules of one model; a copy of it, pickled or not, does nothing."""

    def __init__(
        self,
        act: Callable[[nn.Module], None] | None = None,
        waits: weakref.ref[ForwardWaits] | None = None,
    ) -> None:
        self._act, self._waits = act, waits

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if self._act is not None:
            self._act(module)

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        waits = None if self._waits is None else self._waits()
        if waits is not None and waits.is_gathering:
            raise UnsupportedOperationError(
                "the module cannot be copied or pickled while its parameters are being gathered: call "
                "finish_param_sync() of its DistributedDataParallel before"
            )
        return (_Hook, ())


def _hooks(waits: weakref.ref[ForwardWaits]) -> tuple[_Hook, _Hook]:
    """Return what acts before a module runs, and before its state dict is taken or loaded."""

    def before_forward(module: nn.Module) -> None:
        if (alive := waits()) is not None:
            alive.before_forward(module)

    def before_state_dict(module: nn.Module) -> None:
        if (alive := waits()) is not None:
            alive.before_state_dict(module)

    return _Hook(torch.compiler.disable(before_forward), waits), _Hook(before_state_dict, waits)


def _is_compiled(module: nn.Module) -> bool:
    """Return whether a module and all below it run as one graph, into which hooks would put breaks."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def _below(module: nn.Module) -> Iterator[nn.Module]:
    return (below for below in module.modules() if below is not module)
