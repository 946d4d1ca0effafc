"""Ownership over several axes: copies, peers and alignment."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from attrs import frozen
from megaopt_testing import require_partition

from megaopt_core.errors import OwnershipError
from megaopt_core.params import AxisPlacement, Granularity, ParamSpec, RankCoordinates
from megaopt_core.sharding import Peers, PieceSpec, World


def spec_of(name: str = "w", shape: tuple[int, ...] = (16, 4), **more: Any) -> ParamSpec:
    """Return a parameter as pure data."""
    dtype = torch.float32
    return ParamSpec(name, shape, dtype, dtype, "adam", 0, Granularity.ELEMENT, 1.0, **more)


@frozen
class Layout:
    """Pieces by a function of the rank."""

    of: object

    def pieces(self, rank: RankCoordinates) -> list[PieceSpec]:
        """Return what the function says."""
        return self.of(rank)


def check(specs: Sequence[ParamSpec], of: Callable[[RankCoordinates], list[PieceSpec]], **axes: int) -> None:
    """Raise unless the pieces are a partition."""
    require_partition("mine", Layout(of), specs, World(axes))


CUT = AxisPlacement("tp", 2, dim=0)


def halves(spec: ParamSpec) -> Callable[[RankCoordinates], list[PieceSpec]]:
    """Cut a rank's part in two along `dp`."""

    def of(rank):
        part = spec.shard(rank)
        middle = part.numel // 2
        first = rank.get("dp", 0) == 0
        return [PieceSpec.of(spec.shard(rank, *((0, middle) if first else (middle, part.numel))), 0)]

    return of


def test_copies_along_axes_of_the_model_are_as_they_should_be():
    """A parameter that tensor parallelism does not cut is stepped on each of its ranks."""
    whole, cut = spec_of("whole"), spec_of("cut", placements=(CUT,))
    check([whole, cut], lambda rank: [*halves(whole)(rank), *halves(cut)(rank)], dp=2, tp=2)


def test_one_rank_may_own_all_parts_of_what_is_cut():
    """Tensor- and data-parallel ranks share one owner; nobody else owns any of it."""
    spec = spec_of(placements=(CUT,))
    everything = [PieceSpec.of(spec.part(((0, 0), (16, 4))), 0)]
    check([spec], lambda rank: everything if (rank.get("tp", 0), rank["dp"]) == (1, 0) else [], dp=2, tp=2)
    with pytest.raises(OwnershipError, match="more than one rank owns"):
        check([spec], lambda rank: everything if rank["dp"] == 0 else [], dp=2, tp=2)


def test_a_part_that_another_rank_has_is_missing():
    """Each of the two tensor-parallel ranks has half: one owner of its half alone leaves the other."""
    spec = spec_of(placements=(CUT,))
    with pytest.raises(OwnershipError, match="no rank owns 32 of the 64 elements"):
        check([spec], lambda rank: halves(spec)(rank) if rank.get("tp", 0) == 0 else [], dp=2, tp=2)


def replicas(
    spec: ParamSpec, size: int, *, places: Sequence[int] | None = None
) -> Callable[[RankCoordinates], list[PieceSpec]]:
    """Let blocks of ranks along `dp` step the same rows."""

    def of(rank):
        dp = rank.get("dp", 0)
        block, index = divmod(dp, size)
        rows = 16 // (4 // size)
        peers = Peers("dp", size, index if places is None else places[dp])
        return [PieceSpec.of(spec.part(((block * rows, 0), (rows, 4))), 0, peers=peers)]

    return of


def test_replicas_of_one_block_own_together():
    """Two blocks of two ranks; a rank that says that it stands elsewhere is found."""
    spec = spec_of()
    check([spec], replicas(spec, 2), dp=4)
    with pytest.raises(OwnershipError, match=r"blocks of 2 along 'dp'.* at place 1 of a block on rank 0"):
        check([spec], replicas(spec, 2, places=[1, 0, 0, 1]), dp=4)


def test_two_owners_without_peers_are_two():
    """Nobody has said that they are replicas."""
    spec = spec_of()
    with pytest.raises(OwnershipError, match=r"more than one rank owns elements \[0, 64\)"):
        check([spec], lambda rank: [PieceSpec.of(spec.shard({}), 0)] if rank["dp"] < 2 else [], dp=4)


@pytest.mark.parametrize("takes_peers", [False, True])
def test_parts_are_for_optimizers_that_take_them(takes_peers):
    """Each peer has its own rows, and counts them."""
    spec = spec_of(takes_peers=takes_peers)

    def of(rank):
        dp = rank["dp"]
        return [PieceSpec.of(spec.part(((8 * dp, 0), (8, 4))), 0, peers=Peers("dp", 2, dp, dim=0))]

    if takes_peers:
        check([spec], of, dp=2)
    else:
        with pytest.raises(
            OwnershipError, match=r"'adam', which takes no parts \(it has no supports_peers\)"
        ):
            check([spec], of, dp=2)


@pytest.mark.parametrize(("alignment", "fits"), [(8, True), (16, True), (24, False), (64, False)])
@pytest.mark.parametrize("rows", [False, True])
def test_more_than_the_usual_alignment_is_a_condition(alignment, fits, rows):
    """Of ranges and of boxes; 8 elements are a wish."""
    spec = spec_of(alignment=alignment)

    def of(rank):
        dp = rank["dp"]
        box = spec.part(((8 * dp, 0), (8, 4))) if rows else spec.shard({}, 32 * dp, 32 * dp + 32)
        return [PieceSpec.of(box, 0)]

    if fits:
        check([spec], of, dp=2)
    else:
        with pytest.raises(OwnershipError, match=f"may be cut only at multiples of {alignment} elements"):
            check([spec], of, dp=2)


def test_a_shape_that_is_not_the_parameters_is_refused():
    """The shard would be of another tensor."""
    other = spec_of(shape=(16, 5))
    with pytest.raises(OwnershipError, match=r"which has the shape \(16, 4\), not \(16, 5\)"):
        check([spec_of()], lambda rank: [PieceSpec.of(other.shard({}), 0)])
