"""A view that attributes declare describes the whole of a parameter, of which this rank may have a part."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megaopt_core import ProcessGroupCollection
from megaopt_core.errors import ViewError
from megaopt_core.routing._inventory import take_inventory

TWO = SimpleNamespace(size=lambda: 2, rank=lambda: 0)


def _model(sizes: tuple[int, ...], *, cut: bool = True) -> nn.Module:
    model = torch.nn.Module()
    model.hidden = torch.nn.Linear(4, 8, bias=False)
    weight = model.hidden.weight
    weight.is_qkv, weight.qkv_split_shapes = True, sizes
    if cut:
        weight.tensor_model_parallel, weight.partition_dim = True, 0
    return model


def test_a_split_that_the_shard_alone_could_not_have_is_taken():
    """One query group of 16 rows lies on two ranks, 8 rows on each."""
    (item,) = take_inventory([_model((8, 4, 4))], ProcessGroupCollection(tp=TWO)).trainable
    assert (item.part.shape, tuple(item.param.shape)) == ((16, 4), (8, 4))
    assert item.decision.view.matrix_shapes(item.part.shape) == ((8, 4), (4, 4), (4, 4))


@pytest.mark.parametrize("cut", [True, False])
def test_a_split_that_does_not_fit_the_whole_is_refused(cut):
    """The message names the parameter, who described it, and the shape that was looked at."""
    rows = 16 if cut else 8
    groups = ProcessGroupCollection(tp=TWO) if cut else ProcessGroupCollection()
    with pytest.raises(ViewError) as caught:
        take_inventory([_model((5, 4, 4), cut=cut)], groups)
    assert str(caught.value) == (
        "hidden.weight: attributes is_qkv and qkv_split_shapes: MatrixView(qkv: split rows (5, 4, 4)): the sizes add "
        f"up to 13, which does not divide the {rows} rows of a parameter of shape ({rows}, 4)"
    )
