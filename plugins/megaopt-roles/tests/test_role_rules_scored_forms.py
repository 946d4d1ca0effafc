"""Heads of more than two axes: bilinear forms and kernels used by hand, and several matrices."""

from types import ModuleType

import pytest
import torch

from megaopt_core.params import Doubt, Role, RoleDecision
from megaopt_core.routing import infer_roles

MADE = "self.a, self.b = nn.Linear(12, 9), nn.Linear(12, 9)\nself.w = nn.Parameter(torch.zeros({}))\n"
HEADS = {  # what is returned of two projections: the shape of the weight, its product
    "a form": ("5, 9, 9", "torch.einsum('bxi,oij,byj->boxy', a, self.w, b)"),
    "one form": ("1, 9, 9", "torch.einsum('bxi,oij,byj->boxy', a, self.w, b).squeeze(1)"),
    "a form of two rows": ("5, 9, 9", "torch.einsum('bi,cij,bj->bc', a[:, 0], self.w, b[:, 0])"),
    "a form by a function": ("5, 9, 9", "F.bilinear(a, b, self.w)"),
    "a kernel": ("5, 9, 3", "F.conv1d((a * b).mT, self.w, padding=1)"),
    "matrices": ("3, 9, 5", "torch.einsum('bxi,nio->bnxo', a + b, self.w)"),
    "features for each of some layers": ("9, 3, 5", "torch.einsum('bxi,ino->bnxo', a + b, self.w)"),
}
HIDDEN = {  # as above, with a layer that takes what is made
    "a form": ("5, 9, 9", "self.h(torch.einsum('bi,cij,bj->bc', a[:, 0], self.w, b[:, 0]))"),
    "a kernel": ("5, 9, 3", "self.h(F.conv1d((a * b).mT, self.w, padding=1).relu().mT)"),
}
APART = {  # a weight of which more is used than a product
    "distances": ("5, 9, 1", "F.conv1d((a * b).mT, self.w) - self.w.square().sum((1, 2))[:, None]"),
    "distances that a layer takes": (
        "5, 9, 1",
        "self.h((2 * F.conv1d((a * b).mT, self.w) - self.w.square().sum((1, 2))[:, None]).amax(-1))",
    ),
    "distances of patches": (
        "5, 9, 2",
        "self.h(torch.log(F.conv1d((a - b).mT.square(), torch.ones_like(self.w))"
        " - 2 * F.conv1d((a - b).mT, self.w) + (self.w**2).sum((1, 2)).view(-1, 1)).amin(-1))",
    ),
}


def found_in(models: ModuleType, shape: str, product: str) -> RoleDecision:
    """Return the decision for the weight of a model, once it has run."""
    made = MADE.format(shape) + "self.h = nn.Linear(5, 3)"
    model = models.model(
        made, f"def forward(self, x):\n    a, b = self.a(x).relu(), self.b(x).relu()\n    return {product}"
    )()
    model(torch.randn(2, 4, 12))
    return infer_roles(model)["w"]


@pytest.mark.parametrize("case", HEADS)
def test_a_form_that_is_returned_is_a_head(generated_models: ModuleType, case: str) -> None:
    """It is a head for certain."""
    found = found_in(generated_models, *HEADS[case])
    assert (found.role, found.doubt) == (Role.OUTPUT, Doubt.NONE), found.reason


@pytest.mark.parametrize("case", HIDDEN)
def test_a_form_that_a_layer_takes_is_hidden(generated_models: ModuleType, case: str) -> None:
    """It is a matrix for certain."""
    found = found_in(generated_models, *HIDDEN[case])
    assert (found.role, found.doubt) == (Role.MATRIX, Doubt.NONE), found.reason


@pytest.mark.parametrize("case", APART)
def test_what_is_more_than_one_product_stays_in_doubt(generated_models: ModuleType, case: str) -> None:
    """It may be a head, several, or none."""
    found = found_in(generated_models, *APART[case])
    assert found.doubt is Doubt.ROLE, found.reason
