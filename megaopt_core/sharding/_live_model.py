"""The live tensors that strategies work on: a model's parameters by name, and the pieces of them that a rank steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import define, field, frozen

from megaopt_core.errors import GradientError
from megaopt_core.params._parts import is_dtensor, local_tensor
from megaopt_core.params._shards import Box, RankCoordinates, Shard, whole
from megaopt_core.params._specs import ParamInfo
from megaopt_core.sharding._elements import elements_of, store_elements
from megaopt_core.sharding._layout import PieceSpec

__all__ = ["LiveModel", "Piece", "gradient_misfit", "gradient_of", "has_gradient", "local_gradient"]


def gradient_of(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Return the gradient that a step uses: `main_grad` where a buffer provides one, else `grad`.

    Args:
        param: the model parameter.

    Raises:
        GradientError: `main_grad` has another shape than the parameter.
    """
    if not param.requires_grad and param.is_leaf:  # frozen again: what is left from before is no gradient
        return None
    main_grad: torch.Tensor | None = getattr(param, "main_grad", None)
    if main_grad is None:
        return param.grad
    if main_grad.shape != param.shape and (misfit := gradient_misfit(param)):
        raise GradientError(misfit)
    return main_grad


def gradient_misfit(param: torch.nn.Parameter) -> str | None:
    """Return that `main_grad` has another shape than what this rank has of its parameter; None where it has not.

    Args:
        param: the model parameter.
    """
    main_grad: torch.Tensor | None = getattr(param, "main_grad", None)
    if main_grad is None:
        return None
    shape = tuple(param.shape if is_dtensor(main_grad) else local_tensor(param).shape)
    given = tuple(main_grad.shape)
    return None if given == shape else f"main_grad of shape {given} for a parameter of shape {shape}"


def has_gradient(param: torch.nn.Parameter) -> bool:
    """Return whether a step would find a gradient, whatever its shape.

    Args:
        param: the model parameter.
    """
    if param.grad is None and getattr(param, "main_grad", None) is None:
        return False
    return param.requires_grad or not param.is_leaf


def local_gradient(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Return the gradient of what this rank holds of a parameter; a collective where a DTensor's is not yet reduced.

    Args:
        param: the model parameter.
    """
    grad = gradient_of(param)
    if grad is None or not is_dtensor(grad):
        return grad
    # Only gradients of DTensors are DTensors.
    if grad.placements != param.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(placements=param.placements)  # type: ignore[attr-defined]
    return local_tensor(grad)


@define(eq=False)
class Piece:
    """One live tensor that this rank steps.

    Args:
        spec: the piece as pure data.
        param: the tensor, in the model's dtype: the parameter itself, or memory that holds its members' elements.
        model_params: the model parameters of `spec.members`, in that order.
        grad: the gradient that `collect_grads` found, of `param`'s shape; None when there is none this step.
    """

    spec: PieceSpec
    param: torch.Tensor
    model_params: tuple[torch.nn.Parameter, ...]
    grad: torch.Tensor | None = None


@frozen(eq=False)
class LiveModel:
    """The model as strategies see it.

    Args:
        chunks: the (possibly wrapped) model chunks.
        params: canonical name to parameter, every trainable one of this rank.
        boxes: canonical name to the part of the logical tensor that this rank's parameter is; absent names are whole.
        rank: this rank's coordinates.
        infos: canonical name to what an inner optimizer is told of the parameter, for an exchange of updates.
    """

    chunks: Sequence[torch.nn.Module]
    params: Mapping[str, torch.nn.Parameter]
    boxes: Mapping[str, Box] = field(factory=dict)
    rank: RankCoordinates = field(factory=dict)
    infos: Mapping[str, ParamInfo] = field(factory=dict)
    _shared: dict[int, tuple[object, Any]] = field(factory=dict, init=False)

    def shared[T](self, key: object, make: Callable[[], T]) -> T:
        """Return what a strategy keeps once for all optimizers of this model, made at the first call.

        Args:
            key: an object that tells it from others, such as the layout; compared by identity.
            make: makes it.
        """
        if id(key) not in self._shared:
            self._shared[id(key)] = key, make()
        value: T = self._shared[id(key)][1]
        return value

    def box(self, name: str) -> Box:
        """Return which part of a logical tensor this rank's parameter is.

        Args:
            name: canonical name.
        """
        return self.boxes.get(name, whole(self.params[name].shape))

    def values(self, shard: Shard) -> torch.Tensor:
        """Return the model's values of a shard, flat; a view of the parameter where strides allow, else a copy.

        Args:
            shard: elements that this rank's parameter has.

        Raises:
            ShardingError: the parameter has not all of them.
        """
        return elements_of(local_tensor(self.params[shard.name]), self.box(shard.name), shard)

    def grad(self, shard: Shard) -> torch.Tensor | None:
        """Return the gradient of a shard, flat and dense; None when its parameter has none.

        A collective over its mesh where the gradient of a DTensor is not placed as the parameter is: then all ranks of
        the mesh ask, in one order.

        Args:
            shard: elements that this rank's parameter has.

        Raises:
            ShardingError: the parameter has not all of them.
        """
        grad = self.local_grad(shard.name)
        if grad is not None and grad.is_sparse:
            grad = grad.to_dense()
        return None if grad is None else elements_of(grad, self.box(shard.name), shard)

    def local_grad(self, name: str) -> torch.Tensor | None:
        """Return the gradient of what this rank holds of a parameter, in its shape; None when it has none.

        A collective where :meth:`grad` is.

        Args:
            name: canonical name.
        """
        return local_gradient(self.params[name])

    def store(self, shard: Shard, values: torch.Tensor) -> None:
        """Write a shard's elements into the model.

        Args:
            shard: elements that this rank's parameter has.
            values: their new values, in the shard's order.

        Raises:
            ShardingError: the parameter has not all of them.
        """
        with torch.no_grad():
            store_elements(local_tensor(self.params[shard.name]), self.box(shard.name), shard, values)

    def new_piece(self, spec: PieceSpec) -> Piece:
        """Return a live piece with memory of its own, which holds the model's present values.

        Args:
            spec: the piece as pure data.

        Raises:
            ShardingError: this rank's parameters have not all of its elements.
        """
        params = tuple(self.params[shard.name] for _, shard in spec.members)
        like = local_tensor(params[0])
        memory = torch.zeros(spec.shape, dtype=like.dtype, device=like.device)
        piece = Piece(spec, torch.nn.Parameter(memory), params)
        self.fill(piece)
        return piece

    def fill(self, piece: Piece) -> None:
        """Bring the model's present values into a piece; nothing to do where it shares the model's memory.

        Args:
            piece: a live piece.

        Raises:
            ShardingError: this rank's parameters have not all of its elements.
        """
        if len(piece.model_params) == 1 and piece.param is piece.model_params[0]:
            return
        with torch.no_grad():
            flat = piece.param.detach().view(-1)
            for offset, shard in piece.spec.members:
                target, values = flat[offset : offset + shard.numel], self.values(shard)
                if shard.numel and target.data_ptr() != values.data_ptr():
                    target.copy_(values)
