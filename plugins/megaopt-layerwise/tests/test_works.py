"""The work of a parameter: what its spec says, and how it can be divided."""

import attrs
import pytest
import torch
from megaopt_layerwise.planner import work_of

from megaopt_core.params import MATRIX, Granularity, MatrixView, ParamSpec

pytestmark = pytest.mark.any_python


def spec(shape: tuple[int, ...], view: MatrixView = MATRIX, *, takes_peers: bool = False) -> ParamSpec:
    """Return a matrix of cost 7."""
    return ParamSpec(
        "w",
        shape,
        torch.bfloat16,
        torch.float32,
        "any",
        0,
        Granularity.TENSOR,
        7.0,
        view=view,
        takes_peers=takes_peers,
    )


def test_numbers_are_those_of_the_spec():
    """What is not said of a world is left as it is."""
    work = work_of(spec((8, 32)), bucket=3, ranks=[1, 4], state_bytes_per_element=6.0)
    assert attrs.astuple(work) == ("w", 7.0, 256, 1536.0, 3, (1, 4), 1, 1, 0.0, 0.0, None)


def test_a_batch_is_divided_along_its_leading_dimensions():
    """Every expert of every group is a matrix; a matrix without a view is one."""
    assert work_of(spec((6, 8, 32), MatrixView(batch_dims=1))).matrices == 6
    assert work_of(spec((2, 6, 8, 32), MatrixView(batch_dims=2), takes_peers=True)).matrices == 12
    assert work_of(spec((2, 6, 8, 32), MatrixView(batch_dims=2), takes_peers=True)).most_peers == 1
    assert work_of(spec((8, 32), None, takes_peers=True)).matrices == 1
    assert work_of(spec((8, 32), None, takes_peers=True)).most_peers == 1


# One round: 4 m^2 n operations are divided, 2 m^3 are not; m^2 numbers of four bytes are added up.
WIDE = 2 * 8 / (4 * 32 + 2 * 8), 5 * 4 * 8**2
SPLIT_REPEATED = 2 * 8**3 + 2 * (2 * 4**3)
SPLIT = SPLIT_REPEATED / (4 * 8**2 * 32 + 2 * (4 * 4**2 * 32) + SPLIT_REPEATED), 5 * 4 * (8**2 + 2 * 4**2)


@pytest.mark.parametrize(
    ("shape", "view", "peers", "repeated", "exchanged"),
    [
        ((8, 8), MATRIX, 8, 1 / 3, 5 * 4 * 8**2),
        ((32, 8), MATRIX, 32, *WIDE),
        ((8, 32), MATRIX, 8, *WIDE),
        ((16, 32), MatrixView(split_sizes=(8, 4, 4)), 16, *SPLIT),
    ],
)
def test_peers_divide_what_a_gram_matrix_does_not_need(shape, view, peers, repeated, exchanged):
    """Only where the optimizer takes them."""
    work = work_of(spec(shape, view, takes_peers=True))
    assert work.most_peers == peers
    assert work.repeated == pytest.approx(repeated)
    assert work.exchanged == exchanged
    assert work_of(spec(shape, view)).most_peers == 1
