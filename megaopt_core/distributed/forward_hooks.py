"""Waiting for gathered parameters where the forward pass needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import define, field
from torch import nn

from megaopt_core.distributed.bucket import Bucket

__all__ = ["ForwardWaits"]


@define(eq=False)
class ForwardWaits:
    """Before a module runs, waits for the buckets of the parameters that it uses.

    A module uses its own parameters, and those of modules below it that nobody calls (attention reads the weight of its
    output projection, a head that of an embedding). Which are called is learned in the first forward pass, before which
    everything is waited for.

    Args:
        module: the model.
        bucket_of: parameter to its bucket.
        wait_for_all: return when all buckets are gathered.
        align: wait for everything before the first module of every forward pass runs.
    """

    module: nn.Module
    bucket_of: Mapping[torch.nn.Parameter, Bucket]
    wait_for_all: Callable[[], None]
    align: bool = False
    _called: set[nn.Module] = field(factory=set, init=False)
    _needs: dict[nn.Module, list[Bucket]] | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        for submodule in self.module.modules():
            submodule.register_forward_pre_hook(self._before)
        self.module.register_forward_hook(self._after_first)

    def _before(self, module: nn.Module, _: Any) -> None:
        if self._needs is None:
            self._called.add(module)
            self.wait_for_all()
        elif self.align and module is self.module:
            self.wait_for_all()
        else:
            for bucket in self._needs.get(module, ()):
                bucket.finish_param_sync()

    def _after_first(self, *_: Any) -> None:
        if self._needs is None:
            self._needs = {}
            self._assign(self.module, self.module)

    def _assign(self, module: nn.Module, caller: nn.Module) -> None:
        """Give the parameters of a module to itself and, when nothing calls it, to the nearest one above that runs."""
        runs = module if module in self._called else caller
        buckets = [
            self.bucket_of[param] for param in module.parameters(recurse=False) if param in self.bucket_of
        ]
        needs = self._needs if self._needs is not None else {}
        for user in dict.fromkeys((module, runs)):
            known = needs.setdefault(user, [])
            known.extend(bucket for bucket in buckets if bucket not in known)
        for child in module.children():
            self._assign(child, runs)
