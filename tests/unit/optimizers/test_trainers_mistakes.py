"""Mistakes that users of trainers make: the error says how the trainer wants it."""

import pytest
import torch
from torch import nn

from megaopt_core import build_optimizer
from megaopt_core.errors import ConfigurationError, OwnershipError


@pytest.mark.parametrize("settings", [{}, {"optimizer": "t_adam", "lr": 0.1}])
def test_a_factory_of_the_trainer_is_called_without_a_model(settings) -> None:
    """`optimizer_cls_and_kwargs=(build_optimizer, {...})` makes the Trainer call `build_optimizer()`."""
    with pytest.raises(ConfigurationError) as caught:
        build_optimizer(**settings)
    assert str(caught.value) == (
        "build_optimizer() was called without a model. The Trainer of Hugging Face calls a factory without arguments, "
        "and its result with the model: optimizer_cls_and_kwargs=(lambda: build_optimizer, {...})"
    )


@pytest.mark.parametrize("what", ["step", "load"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda model: setattr(model[0].weight, "data", torch.ones(9, 5)),
            "'0.weight' has shape (9, 5) now, but had (7, 5) when its optimizer was built, and its states have "
            "that shape: resize the model (resize_token_embeddings()) before you build its optimizer, or build "
            "it again",
        ),
        (
            nn.Module.double,
            " is float64 now, but was float32 when its optimizer was "
            "built: convert the model (.to(dtype), .half(), .bfloat16()) before you build its optimizer",
        ),
    ],
    ids=["resized", "converted"],
)
def test_a_model_that_has_changed_is_named_before_a_state_dict_is_read(
    mlp, build, give, what, change, said
) -> None:
    """A trainer loads an optimizer's own state dict when it prepares it; no checkpoint is to blame."""
    model = mlp()
    optimizer = build(model)
    state = optimizer.state_dict()
    change(model)
    with pytest.raises(OwnershipError) as caught:
        optimizer.step() if what == "step" else optimizer.load_state_dict(state)
    assert str(caught.value).endswith(said)
