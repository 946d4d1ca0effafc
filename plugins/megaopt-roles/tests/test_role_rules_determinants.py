"""Matrices of normalizing flows, whose determinant goes into the loss: that is a number, no part of the matrix."""

from types import ModuleType

import pytest
import torch

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

VOLUMES = {  # the logarithm of the volume that the product with a matrix takes
    "slogdet": "torch.slogdet(self.w)[1]",
    "in double precision": "torch.slogdet(self.w.double())[1].float()",
    "by name": "torch.linalg.slogdet(self.w).logabsdet",
    "of the determinant": "torch.linalg.det(self.w).abs().log()",
    "a method": "self.w.slogdet()[1] * x.shape[1]",
    "of singular values": "torch.linalg.svdvals(self.w).log().sum()",
}
PRODUCTS = {
    "a convolution": "F.conv2d(x, self.w[:, :, None, None])",
    "a product": "(x.flatten(2).mT @ self.w.T).mT.unflatten(2, x.shape[2:])",
}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("volume", VOLUMES)
def test_a_matrix_and_its_volume(generated_models: ModuleType, volume: str, product: str) -> None:
    """It is a hidden matrix, and certainly so."""
    made = "self.w = nn.Parameter(torch.eye(6))\nself.net, self.last = nn.Conv2d(6, 20, 3), nn.Linear(20, 4)"
    methods = (
        f"def step(self, x):\n    return {PRODUCTS[product]}, {VOLUMES[volume]}\n"
        "def forward(self, x):\n    x, volume = self.step(x)\n"
        "    return self.last(self.net(x).relu().mean((2, 3))), volume"
    )
    model = generated_models.model(made, methods)()
    model(torch.randn(2, 6, 5, 5))
    found = infer_roles(model)["w"]
    assert (found.role, found.doubt) == (Role.MATRIX, Doubt.NONE), found.reason
