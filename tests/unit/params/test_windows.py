"""Windows into stored tensors: each matrix of a view, read and written in place."""

import pytest
import torch

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
    (MatrixView(split_sizes=(3, 1), split_dim=1), (6, 2, 4)),
    (MatrixView(batch_dims=1, split_sizes=(3, 5), split_dim=1), (3, 6, 2, 4)),
    (MatrixView(split_sizes=(2, 1, 1), transposed=True), (8, 12)),
    (MatrixView(split_sizes=(2, 2), split_dim=1, transposed=True), (8, 6)),
    (MatrixView(batch_dims=1), (3, 6, 8)),
    (MatrixView(batch_dims=1, transposed=True, split_sizes=(2, 2)), (3, 6, 8)),
    (MatrixView(batch_dims=2, split_sizes=(1, 2)), (2, 3, 6, 8)),
    (MatrixView(transposed=True, first_dims=2), (2, 4, 6)),
    (MatrixView(first_dims=3), (2, 2, 3, 4, 5)),
    (MatrixView(batch_dims=1, transposed=True, first_dims=2, split_sizes=(2, 1)), (3, 2, 2, 6)),
    (MatrixView(first_dims=2, split_sizes=(2, 2)), (2, 4, 6)),
    (MatrixView(first_dims=2, split_sizes=(3, 1), split_dim=1), (2, 3, 2, 4)),
]


def _by_hand(view: MatrixView, stored: torch.Tensor) -> list[torch.Tensor]:
    """The matrices by plain indexing, as the docstring of `MatrixView` says it."""
    batch = stored.shape[: view.batch_dims]
    rows = stored.shape[view.batch_dims : view.batch_dims + view.first_dims].numel()
    matrix = stored.reshape(*batch, rows, -1)
    matrix = matrix.transpose(-1, -2) if view.transposed else matrix
    if not view.split_sizes:
        return [matrix]
    dim = matrix.dim() - 2 + view.split_dim
    owners = [piece for piece, size in enumerate(view.split_sizes) for _ in range(size)]
    owner = torch.tensor(owners * (matrix.shape[dim] // len(owners)))
    return [
        matrix.index_select(dim, (owner == piece).nonzero().flatten())
        for piece in range(len(view.split_sizes))
    ]


@pytest.mark.parametrize(("view", "shape"), CASES, ids=[f"{view} {shape}" for view, shape in CASES])
def test_windows_read_and_write_what_the_view_says(view, shape):
    """Reading gives the matrices that indexing gives; writing them into windows gives the tensor back."""
    stored = torch.randn(shape)
    windows, matrices = view.windows(shape), _by_hand(view, stored)
    assert [window.shape for window in windows] == [tuple(matrix.shape) for matrix in matrices]
    rebuilt = torch.empty(shape)
    for window, matrix in zip(windows, matrices, strict=True):
        assert torch.equal(window.read(stored), matrix)
        assert window.window(rebuilt).untyped_storage().data_ptr() == rebuilt.untyped_storage().data_ptr()
        window.window(rebuilt).copy_(window.fold(matrix.contiguous()))
    assert torch.equal(rebuilt, stored)


def test_flattened_columns_of_strided_memory_are_read_but_not_split_in_place():
    """There is no view of them to write into."""
    stored = torch.randn(4, 2, 3, 3).to(memory_format=torch.channels_last)
    window, _ = MatrixView(split_sizes=(9, 9), split_dim=1).windows((4, 2, 3, 3))
    assert torch.equal(window.read(stored), stored[:, 0].reshape(4, 9))
    with pytest.raises(ViewError, match="must be contiguous"):
        window.window(stored)


def test_first_dimensions_of_strided_memory_are_read_but_not_written_in_place():
    """Two dimensions that do not lie one after the other make none."""
    stored = torch.randn(4, 3, 2).transpose(0, 1)
    (window,) = MatrixView(first_dims=2).windows((3, 4, 2))
    assert torch.equal(window.read(stored), stored.reshape(12, 2))
    with pytest.raises(ViewError, match="must be contiguous"):
        window.window(stored)


def test_windows_of_a_tensor_that_is_not_contiguous():
    """A parameter in channels_last memory is updated in place."""
    stored = torch.zeros(4, 2, 3, 3).to(memory_format=torch.channels_last)
    (window,) = MatrixView().windows((4, 2, 3, 3))
    window.window(stored).add_(window.fold(torch.ones(4, 18)))
    assert stored.sum() == 72
