"""The policy of mixed precision: fp32 main copies of the model's parameters are stepped."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megaopt_core.precision._policy import PrecisionPolicy
from megaopt_core.precision._storage import LOW_PRECISION, ParamStorage, SeparateMain

__all__ = ["MainParams"]


class MainParams(PrecisionPolicy):
    """An fp32 main copy of every fp16 or bf16 piece is stepped; fp32 pieces are stepped in place."""

    is_mixed = True
    honours_noop = True

    def _storage(self, param: torch.Tensor) -> ParamStorage:
        if param.dtype not in LOW_PRECISION:
            return ParamStorage(param)
        storage = SeparateMain(param, torch.float32)
        storage.main = torch.nn.Parameter(storage.main)
        return storage

    def _tensor(self, storage: ParamStorage) -> torch.Tensor:
        return storage.main if isinstance(storage, SeparateMain) else storage.param

    def write_back(self, indices: Sequence[int]) -> None:
        """Round main copies into the model's parameters.

        Args:
            indices: positions of the pieces that were stepped.
        """
        stored = [self._storages[index] for index in indices]
        copied = [storage for storage in stored if isinstance(storage, SeparateMain)]
        if copied:
            torch._foreach_copy_([each.param for each in copied], [each.main for each in copied])
