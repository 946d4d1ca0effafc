"""How large a part of a weight is says nothing of how it is used."""

from types import ModuleType

import pytest
import torch

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

MADE = "self.w, self.h = nn.Parameter(torch.zeros(8, 8)), nn.Linear(8, 5)"
EXTENTS = [
    "self.w[0].numel()",
    "self.w[0].shape[0]",
    "self.w[:, 0].size(0)",
    "self.w[1].nelement()",
    "self.w[0].ndim",
]


@pytest.mark.parametrize("extent", EXTENTS)
def test_the_extent_of_a_row(generated_models: ModuleType, extent: str) -> None:
    """A layer of somebody's own divides by it, say."""
    forward = f"return self.h(torch.relu(x @ (self.w / {extent} ** 0.5)))"
    with torch.device("meta"):
        found = infer_roles(generated_models.model_with_forward(MADE, "x", forward)())["w"]
    assert (found.role, found.doubt) == (Role.MATRIX, Doubt.NONE), found.reason


def test_a_row_that_is_used_besides(generated_models: ModuleType) -> None:
    """What is done to it counts, wherever its extent is asked for."""
    forward = "y = self.w[0] * self.w[0].numel()\nreturn self.h(torch.relu(x @ self.w) + y)"
    with torch.device("meta"):
        found = infer_roles(generated_models.model_with_forward(MADE, "x", forward)())["w"]
    assert found.doubt is Doubt.ROLE, found.reason
