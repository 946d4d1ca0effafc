"""Precision policies: which tensor the inner optimizer steps, how it meets the model's, and how states are stored."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Self

import torch

from megaopt_core.errors import PluginError, PluginHookError
from megaopt_core.precision._state_codes import CodedState, Decoder, StoredSlice, decode_slices
from megaopt_core.precision._storage import ParamStorage
from megaopt_core.precision._stored import Stored, StoredTensor
from megaopt_core.registry._infos import PluginInfo
from megaopt_core.registry._registry import get_registry
from megaopt_core.sharding._live_model import Piece

if TYPE_CHECKING:
    from megaopt_core.config._optimizer_config import OptimizerConfig
    from megaopt_core.plugin_api._entries import OptimizerEntry

__all__ = ["MAIN_PARAM", "Fp32", "PrecisionPolicy"]

MAIN_PARAM = "main_param"
"""State key of the main parameter that a precision policy keeps."""


class PrecisionPolicy:
    """What stands between a piece of the model and the tensor that is stepped.

    This class steps each piece itself, all at once, and keeps states as they are; a policy derives from it and replaces
    what it does otherwise. It fills `_pieces` and `_stepped` in `attach`. Between steps a policy may keep a state in a
    code of its own: it stores it after each batch, and says in :meth:`is_coded` which states these are, in
    :meth:`is_code` which keys are part of the code, in :meth:`coded_state` what a checkpoint saves, in :meth:`decoder`
    how it is read and in :meth:`restore_state` when it is taken over as it is.
    """

    is_mixed: bool = False
    """True when non-finite gradients skip the step."""
    honours_noop: bool = False
    """Where the inner step changes no bit, neither do loading gradients, storing and writing back."""
    _pieces: Sequence[Piece]
    _stepped: Sequence[torch.Tensor]
    _storages: Sequence[ParamStorage]
    _watched: list[list[torch.Tensor]]
    _borrowers: list[tuple[torch.Tensor, torch.Tensor | None]]
    """Stepped tensors that were lent a gradient, and the gradient that each had before."""

    @classmethod
    def require_possible(cls, config: OptimizerConfig, entries: Mapping[str, OptimizerEntry]) -> None:
        """Raise unless the policy can do what a configuration asks of it: asked at the build, before :meth:`of`.

        Args:
            config: the run's configuration.
            entries: registered name to entry, of every optimizer in use.
        """

    @classmethod
    def of(cls, config: OptimizerConfig, entry: OptimizerEntry, name: str) -> Self:
        """Return a new policy for one inner optimizer: here one without arguments.

        Args:
            config: the run's configuration.
            entry: the optimizer's entry.
            name: the optimizer's registered name, for errors.
        """
        return cls()

    def require_state(
        self, config: OptimizerConfig, inner: torch.optim.Optimizer, entry: OptimizerEntry
    ) -> None:
        """Raise unless an optimizer of a class that no plugin describes has the state that the policy is to keep.

        Args:
            config: the run's configuration.
            inner: the optimizer, its state made; one that has none yet passes.
            entry: what is assumed of it.
        """

    def attach(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Return the tensor to step for every piece, in order.

        Args:
            pieces: this rank's pieces of one inner optimizer.
        """
        self._pieces, self._storages, self._stepped, self._borrowers = (), (), (), []
        return self.extend(pieces)

    def extend(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Return the tensors to step for pieces that come after those of :meth:`attach`.

        Args:
            pieces: pieces that this rank steps from now on.
        """
        storages = [self._storage(piece.param) for piece in pieces]
        added = list(map(self._tensor, storages))
        self._pieces = [*self._pieces, *pieces]
        self._storages, self._stepped = [*self._storages, *storages], [*self._stepped, *added]
        self._watched = [storage.watched() for storage in self._storages]
        return added

    def replace(self, index: int, old: torch.Tensor) -> torch.Tensor:
        """Return the tensor to step for a piece whose `param` is another tensor now.

        Args:
            index: position of the piece.
            old: what its `param` was, of the same shape and dtype.
        """
        storage = self._storages[index]
        storage.param = self._pieces[index].param
        self._watched[index] = storage.watched()
        if self._stepped[index] is old:
            self._stepped = [storage.param if tensor is old else tensor for tensor in self._stepped]
        return self._stepped[index]

    def _storage(self, param: torch.Tensor) -> ParamStorage:
        """Return what keeps a piece's value between steps: the piece alone."""
        return ParamStorage(param)

    def _tensor(self, storage: ParamStorage) -> torch.Tensor:
        """Return what is stepped: the piece itself."""
        return storage.param

    def load_grads(self) -> None:
        """Lend every stepped tensor the gradient that its piece collected, in its own dtype and order in memory.

        Torch's fused kernels go through parameter and gradient as they lie in memory, whatever their strides are.
        """
        other: list[torch.Tensor] = []
        like: list[torch.Tensor] = []
        for piece, tensor in zip(self._pieces, self._stepped, strict=True):
            grad = piece.grad
            own = grad if tensor is piece.param and grad is tensor.grad else None
            if grad is not None and grad.is_sparse:
                grad = grad.to(tensor.dtype)
            elif grad is not None and (grad.dtype != tensor.dtype or grad.stride() != tensor.stride()):
                other.append(grad)
                grad = torch.empty_like(tensor)
                like.append(grad)
            if grad is own and grad is tensor.grad:
                continue
            tensor.grad = grad
            self._borrowers.append((tensor, own))
        if other:
            torch._foreach_copy_(like, other)

    def discard_grads(self) -> None:
        """Drop this step's gradients, and whatever else only the step needs.

        Lent gradients are taken back, so that backward does not add to them.
        """
        for tensor, own in self._borrowers:
            tensor.grad = own
        self._borrowers.clear()

    def grad(self, index: int) -> torch.Tensor | None:
        """Return the gradient that a piece will be stepped with; it may be changed in place.

        Args:
            index: position of the piece.
        """
        return self._stepped[index].grad

    def batches(self, inner: torch.optim.Optimizer, *, store_all: bool = False) -> Generator[None]:
        """Hand over once for each batch of tensors that `inner` is to step: here once, for everything together.

        Args:
            inner: the optimizer; what its groups hold is stepped.
            store_all: keep what the tensors hold afterwards even where they have no gradient.
        """
        yield

    def lent(self, indices: Sequence[int], inner: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Give the stepped tensors of some pieces their memory inside the block, whatever the groups of `inner` hold.

        Blocks of different pieces may overlap in time. Here they always have their memory.

        Args:
            indices: positions of the pieces.
            inner: the optimizer, for the pieces' state.
        """
        return nullcontext()

    def write_back(self, indices: Sequence[int]) -> None:
        """Bring stepped values into the pieces; nothing to do where the piece is what was stepped.

        Args:
            indices: positions of the pieces that were stepped.
        """

    def reload_model_params(self) -> None:
        """Take the pieces' present values over into the stepped tensors, where more is kept of them."""
        self.take_over(range(len(self._storages)))

    def take_over(self, indices: Sequence[int]) -> None:
        """Take present values of some pieces over, element by element: what rounds to the model's value stays.

        Args:
            indices: positions of the pieces that somebody wrote to.
        """
        with torch.no_grad():
            for index in indices:
                self._storages[index].take_model()

    def value(self, index: int) -> torch.Tensor:
        """Return the value of a piece between steps, in fp32 or wider, to read.

        Args:
            index: position of the piece.
        """
        return self._storages[index].load()

    def set_value(self, index: int, value: torch.Tensor) -> None:
        """Keep another value of a piece, and round it into the piece.

        Args:
            index: position of the piece.
            value: of the piece's shape.
        """
        with torch.no_grad():
            self._storages[index].store(value)

    def watched(self) -> list[list[torch.Tensor]]:
        """Return for each piece the tensors in which a change shows."""
        return self._watched

    def stored(self, index: int) -> Stored:
        """Return how a piece, its main value and its states are stored between steps; no tensor is touched.

        Args:
            index: position of the piece.

        Example:
            >>> from types import SimpleNamespace
            >>> policy = Fp32()
            >>> _ = policy.attach([SimpleNamespace(param=torch.ones(2))])
            >>> policy.stored(0).param.dtype, policy.stored(0).main
            (torch.float32, None)
        """
        storage = self._storages[index]
        return Stored(
            self._stepped[index].dtype, StoredTensor(storage.param.dtype), storage.stored_main(), {}
        )

    def extra_keys(self, index: int) -> tuple[str, ...]:
        """Return the keys of :meth:`extra_state`, without computing its values.

        Args:
            index: position of the piece.
        """
        return (MAIN_PARAM,) if self._storages[index].has_main else ()

    def extra_state(self, index: int) -> dict[str, torch.Tensor]:
        """Return state of one piece that the policy owns: `main_param`, where it says more than the model's parameter.

        Args:
            index: position of the piece.
        """
        return {key: self._storages[index].load() for key in self.extra_keys(index)}

    def set_extra_state(self, index: int, key: str, value: torch.Tensor) -> None:
        """Take over a value that :meth:`extra_state` returned; keys that the policy does not keep are left alone.

        Args:
            index: position of the piece.
            key: its key.
            value: of any floating dtype, of the piece's shape.
        """
        if key in self.extra_keys(index):
            with torch.no_grad():
                self._storages[index].set_main(value)

    def read_state(self, index: int, key: str, state: Mapping[str, Any]) -> Any:
        """Return one state value as arithmetic sees it, decoded if it is stored in a code of its own: here as it is.

        Args:
            index: position of the piece.
            key: its key.
            state: the inner optimizer's state of the piece.
        """
        return state[key]

    def write_state(self, index: int, key: str, state: MutableMapping[str, Any], value: Any) -> None:
        """Store what :meth:`read_state` returned: a tensor in the one that is there, anything else in its place.

        Args:
            index: position of the piece.
            key: its key.
            state: the inner optimizer's state of the piece.
            value: the new value.
        """
        present = state.get(key)
        if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
            with torch.no_grad():
                present.copy_(value.reshape(present.shape))
        else:
            state[key] = value

    def is_code(self, key: str) -> bool:
        """Return whether a state key holds only how another is stored, such as a scale; it is never saved by itself.

        Args:
            key: the key.
        """
        return False

    def is_coded(self, index: int, key: str) -> bool:
        """Return whether a state is stored in a code between steps, once there is one.

        Args:
            index: position of the piece.
            key: the state's key.
        """
        return False

    def kept_as_they_are(self) -> Collection[tuple[int, str]]:
        """Return position and key of states that a narrower dtype was asked for, and that do not take it."""
        return ()

    def coded_state(self, index: int, key: str, state: Mapping[str, Any]) -> CodedState | None:
        """Return how a checkpoint saves a state that is stored in a code, slice by slice; None: as it is.

        Args:
            index: position of the piece.
            key: a key of `state` for which :meth:`is_coded` holds.
            state: the inner optimizer's state of the piece.
        """
        return None

    def decoder(self, code: str) -> Decoder | None:
        """Return what decodes a code of this policy or of another: here what a plugin offers; None: unknown here.

        Args:
            code: its name, as :meth:`coded_state` gives it.

        Raises:
            PluginError: what a plugin offers for it by `megaopt_state_codes` is no function, two offer it, or nobody
                does and a plugin that might have failed.
        """
        found: list[tuple[Decoder, PluginInfo]] = []
        failed: list[PluginHookError] = []
        for info, offered in get_registry().call_each("megaopt_state_codes", failed=failed):
            if not isinstance(offered, Mapping):
                words = f"returned {type(offered).__name__}; it must return {{name: decoder}}"
                failed.append(info.wrong_answer("megaopt_state_codes", words))
            elif code in offered:
                decode = offered[code]
                if not callable(decode):
                    raise PluginError(
                        f"{info}: megaopt_state_codes returned {code!r}: {type(decode).__name__}; it must be a function"
                    )
                found.append((decode, info))
        if len(found) > 1:
            raise PluginError(f"the state code {code!r} is given by {found[0][1]} and by {found[1][1]}")
        if failed and not found:
            raise failed[0]
        return found[0][0] if found else None

    def restore_state(
        self, index: int, key: str, state: MutableMapping[str, Any], slices: Sequence[StoredSlice]
    ) -> None:
        """Take over what was saved: exactly where it is stored alike here, else decoded and stored anew, as here.

        Args:
            index: position of the piece.
            key: the state's key; `state` may lack it.
            state: the inner optimizer's state of the piece.
            slices: what was saved, in the order of the piece's elements; elements in none of them become 0.
        """
        self.write_state(index, key, state, decode_slices(slices, self._stepped[index]))


class Fp32(PrecisionPolicy):
    """Parameters are stepped in place, in their own dtype."""

    honours_noop = True
