"""Matrix views: taking a tensor apart and putting it together again."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megaopt_core.errors import ViewError
from megaopt_core.params import MATRIX, MatrixView

pytestmark = pytest.mark.any_python

small = st.integers(1, 4)


@st.composite
def views(draw: st.DrawFn) -> tuple[MatrixView, tuple[int, ...]]:
    """Return a view of any kind, and a shape that it fits."""
    batch = draw(st.lists(small, max_size=2))
    transposed, split_dim = draw(st.booleans()), draw(st.integers(0, 1))
    sizes = tuple(draw(st.lists(small, max_size=4)))
    groups = draw(small)
    extent = [draw(small), draw(small)]
    tail = draw(st.lists(small, max_size=2))
    if sizes:
        extent[split_dim] = groups * sum(sizes)
    stored = extent[::-1] if transposed else extent
    if tail and sizes and math.prod(tail) > 1:
        flattened = 0 if transposed else 1  # the logical dimension that the kernel is part of
        if flattened == split_dim:
            tail = [1] * len(tail)
    head = draw(st.lists(small, max_size=2))
    if sizes and transposed == (split_dim == 1):  # what is split must begin where its pattern does
        head = [1] * len(head)
    view = MatrixView(len(batch), transposed, split_dim, sizes, first_dims=1 + len(head))
    return view, (*batch, *head, *stored, *tail)


@given(views())
def test_round_trip(case):
    """Merging what a view takes apart gives the tensor back, element by element."""
    view, shape = case
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    matrices = view.matrices(tensor)
    assert torch.equal(view.merge(matrices, shape), tensor)


@given(views())
def test_shapes_agree(case):
    """The shapes that are promised without a tensor are those of the matrices."""
    view, shape = case
    matrices = view.matrices(torch.zeros(shape))
    assert view.matrix_shapes(shape) == tuple(tuple(matrix.shape) for matrix in matrices)
    assert sum(matrix.numel() for matrix in matrices) == math.prod(shape)


@given(views())
def test_meta_device(case):
    """Views work without memory."""
    view, shape = case
    matrices = view.matrices(torch.zeros(shape, device="meta"))
    assert tuple(view.merge(matrices, shape).shape) == shape


def test_blocks():
    """Sizes that add up to the rows cut blocks."""
    tensor = torch.arange(12).reshape(6, 2)
    first, second = MatrixView(split_sizes=(4, 2)).matrices(tensor)
    assert torch.equal(first, tensor[:4])
    assert torch.equal(second, tensor[4:])


def test_interleaved():
    """Sizes of one take every second row."""
    tensor = torch.arange(12).reshape(6, 2)
    gate, up = MatrixView(split_sizes=(1, 1)).matrices(tensor)
    assert torch.equal(gate, tensor[::2])
    assert torch.equal(up, tensor[1::2])


def test_groups():
    """Sizes repeat per group, and each piece of all groups is one matrix."""
    tensor = torch.arange(16).reshape(8, 2)
    q, k, v = MatrixView(split_sizes=(2, 1, 1)).matrices(tensor)
    assert torch.equal(q, tensor[[0, 1, 4, 5]])
    assert torch.equal(k, tensor[[2, 6]])
    assert torch.equal(v, tensor[[3, 7]])


def test_transposed_experts():
    """`[experts, in, out]` gives a batch of `[out, in]`."""
    tensor = torch.arange(24).reshape(2, 3, 4)
    (matrix,) = MatrixView(batch_dims=1, transposed=True).matrices(tensor)
    assert torch.equal(matrix, tensor.mT)


def test_transposed_kernel():
    """`[in, out, k]` of a transposed convolution gives `[out * k, in]`."""
    tensor = torch.arange(24).reshape(2, 3, 4)
    (matrix,) = MatrixView(transposed=True).matrices(tensor)
    assert torch.equal(matrix, tensor.reshape(2, 12).T)


def test_plain_is_the_tensor_itself():
    """A plain view of a matrix costs nothing."""
    tensor = torch.zeros(3, 2)
    assert MATRIX.matrices(tensor)[0] is tensor
    assert MATRIX.is_plain


def test_label_is_no_part_of_equality():
    """Two views that see the same matrices are equal, whatever they are called."""
    assert MatrixView(split_sizes=(1, 1), label="gate_up") == MatrixView(split_sizes=(1, 1))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MatrixView(batch_dims=-1), "MatrixView(batch_dims=-1): must not be negative"),
        (lambda: MatrixView(split_dim=2), "MatrixView(split_dim=2): must be 0 (rows) or 1 (columns)"),
        (
            lambda: MatrixView(split_sizes=(2, 0)),
            "MatrixView(split_sizes=(2, 0)): every size must be at least 1",
        ),
        (
            lambda: MATRIX.matrix_shapes((3,)),
            "MatrixView(plain): needs at least 2 dimensions, the parameter has shape (3,)",
        ),
        (
            lambda: MatrixView(split_sizes=(2, 2), label="gate_up").matrix_shapes((6, 3)),
            "MatrixView(gate_up: split rows (2, 2)): the sizes add up to 4, which does not divide the 6 rows of a "
            "parameter of shape (6, 3)",
        ),
        (
            lambda: MATRIX.merge([torch.zeros(2, 2)], (3, 2)),
            "MatrixView(plain): cannot merge matrices of shapes ((2, 2),) into (3, 2); expected ((3, 2),)",
        ),
    ],
)
def test_messages(build, message):
    """What does not fit says what was given and what would fit."""
    with pytest.raises(ViewError) as caught:
        build()
    assert str(caught.value) == message
