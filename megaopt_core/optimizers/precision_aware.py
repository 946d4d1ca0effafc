"""The precision-aware policy: everything is stepped in fp32, a batch at a time, and stored in less."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from attrs import define, field

from megaopt_core.optimizers.precision import LOW_PRECISION
from megaopt_core.optimizers.storage import InPlace, ParamStorage, Remainder, SeparateMain, decode_state, encode_state
from megaopt_core.sharding.base import Piece

__all__ = ["BATCH_ELEMENTS", "ParamRemainders"]

BATCH_ELEMENTS = 2**24
"""Elements that are in fp32 at a time: with Adam, 16 bytes of temporary memory each."""


@define
class ParamRemainders:
    """fp32 arithmetic on parameters, gradients and states that are stored in fewer bits.

    Between steps a bf16 parameter is kept as itself and the 16 bits that an fp32 main parameter has more; states are kept
    in `state_dtypes`. A step decodes at most :data:`BATCH_ELEMENTS` elements at a time, steps them in fp32 and encodes
    them again, so it needs no kernel of its own.

    Args:
        state_dtypes: state key to storage dtype; absent keys stay in fp32.
        main_params_dtype: dtype of main copies, where there are any.
        main_grads_dtype: gradients are rounded to it before they are used.
        store_param_remainders: keep remainders for bf16 parameters in place of main copies; needs
            `main_params_dtype=torch.float32`.
    """

    state_dtypes: Mapping[str, torch.dtype] = field(factory=dict)
    main_params_dtype: torch.dtype = torch.float32
    main_grads_dtype: torch.dtype = torch.float32
    store_param_remainders: bool = True
    is_mixed: bool = field(default=True, init=False)
    _pieces: Sequence[Piece] = field(factory=list, init=False)
    _storages: list[ParamStorage] = field(factory=list, init=False)
    _stepped: list[torch.nn.Parameter] = field(factory=list, init=False)
    _grads: list[torch.Tensor | None] = field(factory=list, init=False)

    def attach(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Return one fp32 tensor a piece, which has memory during a step only.

        Args:
            pieces: this rank's pieces of one inner optimizer.
        """
        self._pieces = pieces
        self._storages = [self._storage(piece.param) for piece in pieces]
        self._stepped = [torch.nn.Parameter(_placeholder(piece.param)) for piece in pieces]
        self._grads = [None] * len(pieces)
        return list(self._stepped)

    def _storage(self, param: torch.Tensor) -> ParamStorage:
        if param.dtype == torch.bfloat16 and self.store_param_remainders and self.main_params_dtype == torch.float32:
            return Remainder(param)
        if param.dtype in LOW_PRECISION and param.dtype != self.main_params_dtype:
            return SeparateMain(param, self.main_params_dtype)
        return InPlace(param)

    def load_grads(self) -> None:
        """Round collected gradients to `main_grads_dtype`."""
        self._grads = [None if piece.grad is None else piece.grad.to(self.main_grads_dtype) for piece in self._pieces]

    def grad(self, index: int) -> torch.Tensor | None:
        """Return the gradient that a piece is stepped with, in `main_grads_dtype`.

        Args:
            index: position of the piece.
        """
        return self._grads[index]

    def batches(self, inner: torch.optim.Optimizer) -> Iterator[None]:
        """Give memory to a batch of tensors, hand over while `inner` holds them alone, then store them again.

        Args:
            inner: the optimizer that holds the stepped tensors.
        """
        members = [list(group["params"]) for group in inner.param_groups]
        index_of = {id(tensor): index for index, tensor in enumerate(self._stepped)}
        try:
            for batch in self._batches():
                chosen = set(batch)
                for group, all_of_it in zip(inner.param_groups, members, strict=True):
                    group["params"] = [tensor for tensor in all_of_it if index_of[id(tensor)] in chosen]
                with torch.no_grad():
                    for index in batch:
                        self._open(index, inner)
                yield
                with torch.no_grad():
                    for index in batch:
                        self._close(index, inner)
        finally:
            for group, all_of_it in zip(inner.param_groups, members, strict=True):
                group["params"] = all_of_it

    def _batches(self) -> Iterator[list[int]]:
        batch: list[int] = []
        elements = 0
        for index, tensor in enumerate(self._stepped):
            if batch and elements + tensor.numel() > BATCH_ELEMENTS:
                yield batch
                batch, elements = [], 0
            batch.append(index)
            elements += tensor.numel()
        yield batch

    def _open(self, index: int, inner: torch.optim.Optimizer) -> None:
        tensor = self._stepped[index]
        tensor.data = self._storages[index].load()
        grad = self._grads[index]
        tensor.grad = None if grad is None else grad.to(tensor.dtype)
        state = inner.state[tensor]
        for key in self.state_dtypes:
            if key in state:
                state[key] = decode_state(state[key], state.pop(f"{key}_scale", None))

    def _close(self, index: int, inner: torch.optim.Optimizer) -> None:
        tensor = self._stepped[index]
        if tensor.grad is not None:
            self._storages[index].store(tensor.data)
        tensor.grad = None
        tensor.data = _placeholder(self._pieces[index].param)
        state = inner.state[tensor]
        for key, dtype in self.state_dtypes.items():
            if key in state:
                state[key], scale = encode_state(state[key], dtype)
                if scale is not None:
                    state[f"{key}_scale"] = scale

    def write_back(self) -> None:
        """Drop gradients; values were stored batch by batch."""
        self.discard_grads()

    def discard_grads(self) -> None:
        """Drop gradients."""
        self._grads = [None] * len(self._pieces)

    def reload_model_params(self) -> None:
        """Start again from the model's present values."""
        with torch.no_grad():
            for storage in self._storages:
                storage.take_model()

    def watched(self) -> list[list[torch.Tensor]]:
        """Return for each piece the tensors in which a change shows."""
        return [storage.watched() for storage in self._storages]

    def extra_state(self, index: int) -> dict[str, torch.Tensor]:
        """Return the fp32 main value of a piece, where the model's parameter does not hold it.

        Args:
            index: position of the piece.
        """
        return self._storages[index].extra()

    def set_extra_state(self, index: int, key: str, value: torch.Tensor) -> None:
        """Take over a value that :meth:`extra_state` returned.

        Args:
            index: position of the piece.
            key: its key.
            value: its value.
        """
        if key == "main_param":
            with torch.no_grad():
                self._storages[index].set_extra(key, value)


def _placeholder(param: torch.Tensor) -> torch.Tensor:
    return torch.empty(1, dtype=torch.float32, device=param.device).expand(param.shape)


