"""Kernels that each sample mixes by shares of its own, and the biases that are mixed with them."""

from types import ModuleType

import pytest
import torch

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

MADE = (
    "self.gate, self.h = nn.Linear(6, 4), nn.Linear(10, 3)\n"
    "self.w, self.b = nn.Parameter(torch.zeros(4, 10, 6, 3)), nn.Parameter(torch.zeros(4, 10))"
)
MIXED = {  # the kernels of all samples
    "einsum": "torch.einsum('bk,koit->boit', a, self.w)",
    "flat": "(a @ self.w.flatten(1)).view(-1, 10, 6, 3)",
    "tensordot": "torch.tensordot(a, self.w, dims=1)",
}


@pytest.mark.parametrize("case", MIXED)
def test_what_a_softmax_mixes_is_a_stack(generated_models: ModuleType, case: str) -> None:
    """The kernels are a stack of matrices of a doubtful layout, the biases are element-wise for certain."""
    text = (
        "def forward(self, x):\n    n = len(x)\n    a = self.gate(x.mean(-1)).softmax(-1)\n"
        f"    w = {MIXED[case]}\n"
        "    y = F.conv1d(x.reshape(1, n * 6, -1), w.reshape(n * 10, 6, 3), (a @ self.b).flatten(), groups=n)\n"
        "    return self.h(y.view(n, 10, -1).relu().mean(-1))\n"
    )
    model = generated_models.model(MADE, text)()
    model(torch.randn(2, 6, 12))
    found = infer_roles(model)
    kernels, biases = found["w"], found["b"]
    assert (kernels.role, kernels.doubt) == (Role.MATRIX, Doubt.LAYOUT), kernels.reason
    assert kernels.view is not None
    assert kernels.view.batch_dims == 1
    assert (biases.role, biases.doubt) == (Role.ELEMENTWISE, Doubt.NONE), biases.reason
