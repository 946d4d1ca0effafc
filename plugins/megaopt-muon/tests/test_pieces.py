"""Windows into stored parameters agree with the core's matrix views."""

import pytest
import torch
from megaopt_muon.pieces import pieces_of

from megaopt_core.errors import ViewError
from megaopt_core.params import MatrixView

CASES = [
    (MatrixView(), (6, 8)),
    (MatrixView(), (6, 2, 2, 2)),
    (MatrixView(transposed=True), (6, 8)),
    (MatrixView(split_sizes=(2, 3, 1)), (6, 8)),
    (MatrixView(split_sizes=(2, 1, 1)), (12, 8)),
    (MatrixView(split_sizes=(1, 1)), (6, 8)),
    (MatrixView(split_sizes=(2, 2), split_dim=1), (6, 8)),
    (MatrixView(split_sizes=(2, 1, 1), transposed=True), (8, 12)),
    (MatrixView(split_sizes=(2, 2), split_dim=1, transposed=True), (8, 6)),
    (MatrixView(batch_dims=1), (3, 6, 8)),
    (MatrixView(batch_dims=1, transposed=True, split_sizes=(2, 2)), (3, 6, 8)),
    (MatrixView(batch_dims=2, split_sizes=(1, 2)), (2, 3, 6, 8)),
]


@pytest.mark.parametrize(("view", "shape"), CASES, ids=[f"{view} {shape}" for view, shape in CASES])
def test_pieces_read_and_write_what_the_view_says(view, shape):
    """Reading gives the view's matrices; writing them into windows gives the merged tensor."""
    stored = torch.randn(shape)
    pieces = pieces_of(view, shape)
    matrices = view.matrices(stored)
    assert [piece.shape for piece in pieces] == [tuple(matrix.shape) for matrix in matrices]
    rebuilt = torch.empty(shape)
    for piece, matrix in zip(pieces, matrices, strict=True):
        assert torch.equal(piece.read(stored), matrix)
        assert piece.window(rebuilt).data_ptr() >= rebuilt.data_ptr()
        piece.window(rebuilt).copy_(piece.fold(matrix.contiguous()))
    assert torch.equal(rebuilt, stored)


def test_a_split_of_flattened_dimensions_is_refused():
    """Columns that are flattened from several dimensions cannot be split."""
    with pytest.raises(ViewError, match="flattened"):
        pieces_of(MatrixView(split_sizes=(4, 4), split_dim=1), (6, 2, 4))


def test_windows_of_a_tensor_that_is_not_contiguous():
    """A parameter in channels_last memory is updated in place."""
    stored = torch.zeros(4, 2, 3, 3).to(memory_format=torch.channels_last)
    (piece,) = pieces_of(MatrixView(), (4, 2, 3, 3))
    piece.window(stored).add_(piece.fold(torch.ones(4, 18)))
    assert stored.sum() == 72
