"""The precision-aware policy: everything is stepped in fp32, a batch at a time, and stored in less."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch
from attrs import define, evolve, field

from megaopt_core import CodedState, Granularity, PrecisionPolicy, StoredSlice
from megaopt_core.execution import in_turns
from megaopt_core.precision import LOW_PRECISION, ParamStorage, SeparateMain, Stored, decode_slices, scale_key
from megaopt_lowbit.asked import require_possible, require_state, state_dtypes
from megaopt_lowbit.blocks import BlockCode
from megaopt_lowbit.remainders import Remainder
from megaopt_lowbit.scaled import ScaledCode

if TYPE_CHECKING:
    from megaopt_core import OptimizerConfig, OptimizerEntry
    from megaopt_core.sharding import Piece

__all__ = ["BATCH_ELEMENTS", "ParamRemainders"]

type StateCode = ScaledCode | BlockCode
"""How one state is stored between steps."""

BATCH_ELEMENTS = 2**24
"""Elements that are in fp32 at a time: with Adam, 16 bytes of temporary memory each."""

_WHOLE = 4
"""So many times as many of whole tensors on an accelerator: matrices that are iterated together fill it."""


@define(slots=False)
class ParamRemainders(PrecisionPolicy):
    """fp32 arithmetic on parameters, gradients and states that are stored in fewer bits.

    Complex and float64 parameters are stepped and kept, with their states, in the dtype that they have.

    Between steps a bf16 parameter is kept as itself and the 16 bits that an fp32 main parameter has more; states are
    kept in `state_dtypes`. A step decodes at most `batch_elements` elements at a time, steps them in fp32 and encodes
    them again, so it needs no kernel of its own.

    Args:
        state_dtypes: state key to storage dtype; absent keys stay in fp32.
        main_params_dtype: dtype of main copies, where there are any.
        main_grads_dtype: gradients are rounded to it before they are used.
        store_param_remainders: keep remainders for bf16 parameters in place of main copies; needs
            `main_params_dtype=torch.float32`.
        is_mixed: non-finite gradients skip the step.
        batch_elements: elements that are in fp32 at a time; None: all, for optimizers that step a group as one.
        by_shape: on an accelerator tensors of equal sides go together, and four times as many elements at a time.
        positive_states: state keys that are divided by: a positive value is never stored as 0.
        stochastic_rounding: round states of 8 bits up or down at random.
    """

    state_dtypes: Mapping[str, torch.dtype] = field(factory=dict)
    main_params_dtype: torch.dtype = torch.float32
    main_grads_dtype: torch.dtype = torch.float32
    store_param_remainders: bool = True
    is_mixed: bool = True
    batch_elements: int | None = BATCH_ELEMENTS
    by_shape: bool = False
    positive_states: frozenset[str] = frozenset({"exp_avg_sq"})
    stochastic_rounding: bool = False
    _codes: Mapping[str, StateCode] = field(init=False)
    _grads: list[torch.Tensor | None] = field(factory=list, init=False)
    _other_shapes: set[tuple[int, str]] = field(factory=set, init=False)
    """States that have no element for each of the piece's, and are kept as they are."""

    @classmethod
    def require_possible(cls, config: OptimizerConfig, entries: Mapping[str, OptimizerEntry]) -> None:
        """Raise unless every dtype that is asked for is kept by an optimizer in use.

        Args:
            config: the run's configuration.
            entries: registered name to entry, of every optimizer in use.

        Raises:
            UnsupportedSettingError: a setting asks for what cannot be done, or would be ignored.
        """
        require_possible(config, entries)

    @classmethod
    def of(cls, config: OptimizerConfig, entry: OptimizerEntry, name: str) -> Self:
        """Return a new policy for one inner optimizer.

        Args:
            config: the run's configuration.
            entry: the optimizer's entry, which says in which dtypes its states can be kept.
            name: the optimizer's registered name, for errors.

        Raises:
            UnsupportedSettingError: a state dtype is asked for that the optimizer cannot hold.
        """
        granularity = entry.configured(config).granularity
        return cls(
            state_dtypes=state_dtypes(config, entry, name),
            positive_states=entry.positive_states,
            main_params_dtype=config.main_params_dtype,
            main_grads_dtype=config.main_grads_dtype,
            store_param_remainders=config.store_param_remainders,
            is_mixed=config.fp16 or config.bf16,
            stochastic_rounding=config.stochastic_state_rounding,
            batch_elements=None if granularity is Granularity.GROUP else BATCH_ELEMENTS,
            by_shape=granularity is Granularity.TENSOR,
        )

    def require_state(
        self, config: OptimizerConfig, inner: torch.optim.Optimizer, entry: OptimizerEntry
    ) -> None:
        """Raise unless an optimizer has every state that is to be kept in less than fp32.

        Args:
            config: the run's configuration.
            inner: the optimizer, its state made; one that has none yet passes.
            entry: says which settings govern which states.

        Raises:
            UnsupportedSettingError: a state dtype would be ignored.
        """
        require_state(config, inner, entry)

    @_codes.default
    def _codes_by_dtype(self) -> Mapping[str, StateCode]:
        return {
            key: BlockCode(key in self.positive_states, self.stochastic_rounding)
            if dtype == torch.uint8
            else ScaledCode(dtype, key in self.positive_states)
            for key, dtype in self.state_dtypes.items()
        }

    def extend(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Return one tensor a piece, which has memory during a step only: fp32, or wider where the parameter is.

        Args:
            pieces: pieces that this rank steps from now on.
        """
        added = super().extend(pieces)
        self._grads = [None] * len(self._pieces)
        return added

    def _tensor(self, storage: ParamStorage) -> torch.Tensor:
        return torch.nn.Parameter(_placeholder(storage.param))

    def _storage(self, param: torch.Tensor) -> ParamStorage:
        wants_fp32 = self.main_params_dtype == torch.float32
        if param.dtype == torch.bfloat16 and self.store_param_remainders and wants_fp32:
            return Remainder(param)
        if param.dtype in LOW_PRECISION and param.dtype != self.main_params_dtype:
            return SeparateMain(param, self.main_params_dtype)
        return ParamStorage(param)

    def load_grads(self) -> None:
        """Round collected gradients to `main_grads_dtype`, except those of complex and float64 parameters."""
        self._grads = [
            None
            if piece.grad is None
            else piece.grad.to(self.main_grads_dtype if tensor.dtype == torch.float32 else tensor.dtype)
            for piece, tensor in zip(self._pieces, self._stepped, strict=True)
        ]

    def grad(self, index: int) -> torch.Tensor | None:
        """Return the gradient that a piece is stepped with, in `main_grads_dtype`.

        Args:
            index: position of the piece.
        """
        return self._grads[index]

    def batches(self, inner: torch.optim.Optimizer, *, store_all: bool = False) -> Generator[None]:
        """Give memory to a batch of tensors, hand over while `inner` holds them alone, then store them again.

        Args:
            inner: the optimizer; what its groups hold is stepped.
            store_all: keep what the tensors hold afterwards even where they have no gradient.
        """
        held = {id(tensor) for group in inner.param_groups for tensor in group["params"]}
        batches = self._batches([index for index, tensor in enumerate(self._stepped) if id(tensor) in held])
        tensors = [[self._stepped[index] for index in batch] for batch in batches]
        with closing(in_turns(inner, tensors)) as turns:
            for batch, _ in zip(batches, turns, strict=True):
                with self.lent(batch, inner, store_all=store_all):
                    yield

    @contextmanager
    def lent(
        self, indices: Sequence[int], inner: torch.optim.Optimizer, *, store_all: bool = False
    ) -> Iterator[None]:
        """Give the tensors of some pieces their fp32 memory inside the block, then store them again.

        Args:
            indices: positions of the pieces.
            inner: the optimizer, for the pieces' state.
            store_all: keep what the tensors hold afterwards even where they have no gradient.
        """
        opened: list[int] = []
        try:
            with torch.no_grad():
                for index in indices:
                    self._open(index, inner)
                    opened.append(index)
            yield
        finally:  # also after a step that raised, which may be tried again
            with torch.no_grad():
                for index in opened:
                    self._close(index, inner, store_all)

    def _batches(self, indices: Sequence[int]) -> list[list[int]]:
        """Return pieces that fit into memory together; one empty batch when there are none."""
        batches: list[list[int]] = [[]]
        elements, most = 0, self.batch_elements
        if self.by_shape and most and all(self._stepped[index].device.type != "cpu" for index in indices):
            indices = sorted(indices, key=lambda index: sorted(self._stepped[index].shape))
            most *= _WHOLE
        for index in indices:
            numel = self._stepped[index].numel()
            if batches[-1] and most is not None and elements + numel > most:
                batches.append([])
                elements = 0
            batches[-1].append(index)
            elements += numel
        return batches

    def _open(self, index: int, inner: torch.optim.Optimizer) -> None:
        tensor, grad, state = self._stepped[index], self._grads[index], inner.state[self._stepped[index]]
        data = self._storages[index].load()
        if grad is not None:
            grad = (grad if grad.is_sparse else _in_order_of(data, grad)).to(tensor.dtype)
        decoded = {
            key: _in_order_of(data, self._codes[key].decode(state[key], state.get(scale_key(key))))
            for key in self._codes_of(tensor)
            if isinstance(state.get(key), torch.Tensor) and state[key].shape == data.shape
        }
        # There is memory for all of it: nothing is half open.
        tensor.data, tensor.grad = data, grad
        state.update(decoded)
        for key in decoded:
            state.pop(scale_key(key), None)

    def _close(self, index: int, inner: torch.optim.Optimizer, store_all: bool) -> None:
        tensor = self._stepped[index]
        if store_all or tensor.grad is not None:
            self._storages[index].store(tensor.data)
        grad, tensor.grad = tensor.grad, None
        tensor.data = _placeholder(self._pieces[index].param)
        state = inner.state[tensor]
        for key in self._codes_of(tensor):
            if isinstance(state.get(key), torch.Tensor):
                if state[key].shape == tensor.shape:
                    self._encode(state, key, state[key], grad)
                else:
                    self._other_shapes.add((index, key))

    def _codes_of(self, stepped: torch.Tensor) -> Iterable[str]:
        """Return the state keys that are stored in another dtype than they are computed in."""
        return self.state_dtypes if stepped.dtype == torch.float32 else ()

    def _encode(
        self,
        state: MutableMapping[str, Any],
        key: str,
        value: torch.Tensor,
        grad: torch.Tensor | None = None,
    ) -> None:
        # A gradient is what two steps have least in common, and all replicas have: rounding makes its choice of it.
        grad = grad.to_dense() if grad is not None and grad.is_sparse else grad
        stored, scale = self._codes[key].encode(value, grad)
        state[key] = stored
        if scale is not None:
            state[scale_key(key)] = scale

    def discard_grads(self) -> None:
        """Drop gradients."""
        self._grads = [None] * len(self._pieces)

    def read_state(self, index: int, key: str, state: Mapping[str, Any]) -> Any:
        """Return one state value: fp32 where it is stored with a scale, else as it is stored.

        Args:
            index: position of the piece.
            key: its key.
            state: the inner optimizer's state of the piece.
        """
        scale = state.get(scale_key(key)) if key in self.state_dtypes else None
        return state[key] if scale is None else self._codes[key].decode(state[key], scale)

    def write_state(self, index: int, key: str, state: MutableMapping[str, Any], value: Any) -> None:
        """Store one state value in its storage dtype.

        Args:
            index: position of the piece.
            key: its key.
            state: the inner optimizer's state of the piece.
            value: the new value.
        """
        present, has_scale = state.get(key), scale_key(key) in state
        if has_scale and isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
            with torch.no_grad():
                self._encode(state, key, value.to(present.device, torch.float32).reshape(present.shape))
        else:
            super().write_state(index, key, state, value)

    def stored(self, index: int) -> Stored:
        """Return how a piece, its main value and its states are stored; states of other shapes are known after a step.

        Args:
            index: position of the piece.
        """
        coded = [
            key for key in self._codes_of(self._stepped[index]) if (index, key) not in self._other_shapes
        ]
        return evolve(super().stored(index), states={key: self._codes[key].stored(key) for key in coded})

    def is_code(self, key: str) -> bool:
        """Return whether a key is the scale of another.

        Args:
            key: the key.
        """
        return any(key == scale_key(stored) for stored in self.state_dtypes)

    def is_coded(self, index: int, key: str) -> bool:
        """Return whether a state has a scale: fp16 and fp8 ones.

        Args:
            index: position of the piece.
            key: the state's key.
        """
        stored = self.stored(index).states.get(key)
        return stored is not None and stored.code is not None

    def kept_as_they_are(self) -> Collection[tuple[int, str]]:
        """Return states that have no element for each of the piece's, such as those of several matrices in one."""
        return sorted(
            (index, key) for index, key in self._other_shapes if self.state_dtypes[key] != torch.float32
        )

    def coded_state(self, index: int, key: str, state: Mapping[str, Any]) -> CodedState | None:
        """Return the stored elements and their scale, of a state that has one.

        Args:
            index: position of the piece.
            key: a key of `state`.
            state: the inner optimizer's state of the piece.
        """
        scale = state.get(scale_key(key))
        if scale is None:
            return None
        stored, code = state[key].detach(), self._codes[key]
        return CodedState(
            code.name,
            stored.dtype,
            stored.device,
            lambda start, stop: stored.reshape(-1)[start:stop],
            lambda start, stop: code.saved(scale, start, stop),
        )

    def restore_state(
        self, index: int, key: str, state: MutableMapping[str, Any], slices: Sequence[StoredSlice]
    ) -> None:
        """Take stored elements over as they are where their scales fit here, else encode anew.

        Args:
            index: position of the piece.
            key: the state's key.
            state: the inner optimizer's state of the piece.
            slices: what was saved.
        """
        stepped = self._stepped[index]
        if key not in self._codes_of(stepped):
            super().restore_state(index, key, state, slices)
            return
        present = state.get(key)
        # What is there may be on the CPU for a time, and what takes its place stays there with it.
        like = stepped
        if isinstance(present, torch.Tensor) and present.shape == stepped.shape:
            like = present
        scale = self._codes[key].common_scale(slices, like)
        if scale is None:
            self._encode(state, key, decode_slices(slices, like))
            return
        stored = torch.zeros(stepped.shape, dtype=self.state_dtypes[key], device=like.device)
        for part in slices:
            stored.view(-1)[part.start : part.stop] = part.elements
        state[key] = stored
        state[scale_key(key)] = scale


def _in_order_of(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return values as they lie in a tensor's memory: fused kernels look at memory alone."""
    return values if values.stride() == tensor.stride() else torch.empty_like(tensor).copy_(values)


def _placeholder(param: torch.Tensor) -> torch.Tensor:
    dtype = torch.float32 if param.dtype in LOW_PRECISION else param.dtype
    return torch.empty((), dtype=dtype, device=param.device).expand(param.shape)
