"""Which parameters lie in layer-wise buffers, by mark, by role, or by shape alone."""

from types import SimpleNamespace

import megaopt_layerwise
import pytest
import torch
from megaopt_layerwise import is_managed_by_layer_wise_optimizer, tag_params_for_buffer_routing
from megaopt_layerwise.buffer_routing import bucket_is_managed_by_layer_wise_optimizer

from megaopt_core.sharding import BufferKey


class Tiny(torch.nn.Module):
    """An embedding, a hidden matrix with a bias and a norm, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 8)
        self.hidden = torch.nn.Linear(8, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.hidden(self.embed(tokens))))


def test_hidden_matrices_are_marked_and_nothing_else():
    """What is frozen has no buffer, so it has no mark."""
    model = Tiny()
    model.norm.bias.requires_grad_(False)
    tag_params_for_buffer_routing(model)
    marks = {
        name: getattr(param, "is_managed_by_layer_wise_optimizer", None)
        for name, param in model.named_parameters()
    }
    assert marks == {
        "embed.weight": False,
        "hidden.weight": True,
        "hidden.bias": False,
        "norm.weight": False,
        "norm.bias": None,
    }
    assert [is_managed_by_layer_wise_optimizer(param) for param in model.parameters()] == [
        False,
        True,
        False,
        False,
        False,
    ]


def test_attributes_say_what_a_parameter_is():
    """`use_muon` and `is_embedding_or_output_parameter`, in a model and alone."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    model[0].weight.use_muon = False
    model[2].weight.is_embedding_or_output_parameter = True
    assert [is_managed_by_layer_wise_optimizer(model[index].weight) for index in (0, 2)] == [False, False]
    tag_params_for_buffer_routing([model])
    assert not any(param.is_managed_by_layer_wise_optimizer for param in model.parameters())


def test_a_mark_wins_over_the_shape():
    """The mark was made with the model at hand."""
    param = torch.nn.Parameter(torch.empty(4, 4))
    assert is_managed_by_layer_wise_optimizer(param)
    param.is_managed_by_layer_wise_optimizer = False
    assert not is_managed_by_layer_wise_optimizer(param)


@pytest.mark.parametrize("default", [True, False])
def test_a_bucket_is_managed_as_its_first_parameter_is(default):
    """A bucket without marks belongs to whoever asks."""
    marked, unmarked = (torch.nn.Parameter(torch.empty(2, 2)) for _ in range(2))
    marked.is_managed_by_layer_wise_optimizer = not default
    buckets = {
        "marked": SimpleNamespace(params=[marked, unmarked]),
        "by name": SimpleNamespace(params={"w": marked}),
        "unmarked": SimpleNamespace(params=[unmarked]),
        "empty": SimpleNamespace(params=[]),
        "by key": SimpleNamespace(
            key=BufferKey(torch.float32, torch.float32, is_managed_by_layer_wise=not default)
        ),
    }
    answers = {
        name: bucket_is_managed_by_layer_wise_optimizer(bucket, default_for_untagged=default)
        for name, bucket in buckets.items()
    }
    assert answers == {
        "marked": not default,
        "by name": not default,
        "unmarked": default,
        "empty": default,
        "by key": not default,
    }


def test_public_names_resolve_on_first_use():
    """And others are an attribute error."""
    assert all(getattr(megaopt_layerwise, name) is not None for name in megaopt_layerwise.__all__)
    with pytest.raises(AttributeError, match="module 'megaopt_layerwise' has no attribute 'nonsense'"):
        megaopt_layerwise.nonsense  # noqa: B018 - reading is the test
