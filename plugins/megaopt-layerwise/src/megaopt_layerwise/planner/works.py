"""What an owner planner is given: the work of stepping one parameter, as numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import field, frozen

from megaopt_core.errors import ShardingError
from megaopt_core.params import ParamSpec

__all__ = ["Carried", "Work", "peer_dim", "work_of"]


def _ranks(value: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(value)


@frozen
class Work:
    """The work of stepping one parameter.

    Args:
        name: of the parameter; unique.
        cost: operations of one step of all of it.
        numel: its elements, which its owner sends to the others.
        state_bytes: bytes of optimizer state and main values, which lie with its owner.
        bucket: when its gradient is ready: buckets are reduced in the order of their numbers.
        ranks: those that can own it, in ascending order; None: all.
        matrices: equal independent matrices that it is a batch of; whole ones may go to different ranks.
        most_peers: the largest number of ranks that may step parts of it together.
        repeated: the fraction of `cost` that every peer does again, whatever its part.
        exchanged: bytes that peers add up in each step, such as Gram matrices.
        asked_peers: how many ranks somebody wants to step it together; None: the plan chooses.

    Raises:
        ShardingError: a number is out of range.

    Example:
        >>> Work("up", cost=4e9, numel=1_048_576, state_bytes=8_388_608, bucket=3).most_peers
        1
    """

    name: str
    cost: float
    numel: int
    state_bytes: float
    bucket: int = 0
    ranks: tuple[int, ...] | None = field(default=None, converter=_ranks)
    matrices: int = 1
    most_peers: int = 1
    repeated: float = 0.0
    exchanged: float = 0.0
    asked_peers: int | None = None

    def __attrs_post_init__(self) -> None:
        if min(self.cost, self.numel, self.state_bytes, self.repeated, self.exchanged) < 0:
            raise ShardingError(f"Work({self.name!r}): cost, elements and bytes are not negative")
        if self.matrices < 1 or self.most_peers < 1:
            raise ShardingError(
                f"Work({self.name!r}): matrices={self.matrices} and most_peers={self.most_peers} are at least 1"
            )
        if self.ranks is not None and (not self.ranks or list(self.ranks) != sorted(set(self.ranks))):
            raise ShardingError(
                f"Work({self.name!r}): ranks={self.ranks} must be ascending, with at least one"
            )


@frozen
class Carried:
    """What ranks step besides the works that are shared out, such as experts where dense matrices are.

    Args:
        costs: operations of a step on each rank.
        state_bytes: bytes of state on each rank.
    """

    costs: Sequence[float]
    state_bytes: Sequence[float]


def work_of(
    spec: ParamSpec,
    *,
    bucket: int = 0,
    ranks: Sequence[int] | None = None,
    state_bytes_per_element: float = 8.0,
    rounds: int = 5,
) -> Work:
    """Return the work of stepping a parameter, from its spec.

    Only leading dimensions that the view counts as a batch divide it into whole matrices. Peers (`takes_peers`) cut it
    along :func:`peer_dim`. They are taken to add up a square matrix of the other dimension in each of several rounds,
    in fp32, and to multiply it by itself: with `m` and `n` the smaller and the larger dimension a round has `4 m^2 n`
    operations that peers divide, and `2 m^3` that each does again.

    Args:
        spec: the parameter, as the whole logical tensor.
        bucket: when its gradient is ready.
        ranks: those that can own it; None: all.
        state_bytes_per_element: bytes of state and main values for each element.
        rounds: of the iteration that peers do together.

    Example:
        >>> import torch
        >>> from megaopt_core.params import MATRIX, Granularity
        >>> tensor = Granularity.TENSOR
        >>> work_of(ParamSpec("w", (8, 32), torch.float32, torch.float32, "any", 0, tensor, 5.0, view=MATRIX)).numel
        256
    """
    matrices, peers, repeated, exchanged = 1, 1, 0.0, 0.0
    if spec.view is not None:
        matrices = math.prod(spec.shape[: spec.view.batch_dims]) or 1
    dim = peer_dim(spec)
    if spec.view is not None and dim is not None:
        shapes = [shape[-2:] for shape in spec.view.matrix_shapes(spec.shape)]
        divided = sum(4.0 * min(shape) ** 2 * max(shape) for shape in shapes)
        again = sum(2.0 * min(shape) ** 3 for shape in shapes)
        # In memory peers lie row by row.
        peers = min(spec.shape[0], spec.shape[dim])
        repeated = again / (divided + again) if divided else 0.0
        exchanged = sum(4.0 * rounds * min(shape) ** 2 for shape in shapes)
    return Work(
        spec.name,
        spec.cost,
        spec.numel,
        state_bytes_per_element * spec.numel,
        bucket,
        ranks,
        matrices,
        max(peers, 1),
        repeated,
        exchanged,
        spec.peers,
    )


def peer_dim(spec: ParamSpec) -> int | None:
    """Return the stored dimension that peers cut, across which Gram matrices are the smaller ones; None: there is none.

    What splits into several matrices is not cut along the dimension that it splits along. A batch has no peers, since
    its matrices go to different ranks as they are.

    Args:
        spec: the parameter, as the whole logical tensor.

    Example:
        >>> import torch
        >>> from megaopt_core.params import Granularity, MatrixView
        >>> tensor = Granularity.TENSOR
        >>> spec = ParamSpec("qkv", (24, 32), torch.float32, torch.float32, "any", 0, tensor, 5.0, takes_peers=True,
        ...     view=MatrixView(split_sizes=(8, 8, 8)))
        >>> peer_dim(spec)
        1
    """
    view = spec.view
    if view is None or not spec.takes_peers or view.batch_dims:
        return None
    _, *lengths = view.logical_shape(spec.shape)
    cut = 0 if lengths[0] >= lengths[1] else 1
    if view.split_sizes or view.head_sizes or view.head_columns:
        cut = 1 - view.split_dim
    if any(shape[-2:][1 - cut] > lengths[cut] for shape in view.matrix_shapes(spec.shape)):
        return None
    return 0 if (cut == 0) != view.transposed else view.first_dims
