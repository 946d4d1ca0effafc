"""What is put in the place of an item is read back there, and nowhere else: heads of a list of features."""

from types import ModuleType

import pytest
import torch

from megaopt_core.params import Doubt, Role, RoleDecision
from megaopt_core.routing import infer_roles

MADE = """self.n, self.a, self.b = 2, nn.Linear(6, 8), nn.Linear(8, 8)
self.boxes = nn.ModuleList(nn.Linear(8, 5) for _ in range(2))
self.bins = nn.Linear(5, 1, bias=False).requires_grad_(False)"""
LOOPS = {
    "counted": "for i in range(self.n):\n    x[i] = self.boxes[i](x[i])\n",
    "as many as there are": "for i in range(len(x)):\n    x[i] = self.boxes[i](x[i])\n",
    "numbered": "for i, y in enumerate(x):\n    x[i] = self.boxes[i](y)\n",
    "by hand": "x[0] = self.boxes[0](x[0])\nx[1] = self.boxes[1](x[1])\n",
}
RETURNS = {
    "as they are": "return x",
    "of one row": "return torch.cat([y for y in x], 1)",
    "means of fixed values": "return self.bins(torch.cat([y for y in x], 1).softmax(-1))",
    "both": "return self.bins(torch.cat([y for y in x], 1).softmax(-1)), x",
}


def decisions(models: ModuleType, forward: str) -> dict[str, RoleDecision]:
    """Return the decisions for a model that is given a list of features."""
    with torch.device("meta"):
        return infer_roles(models.model_with_forward(MADE, "x", forward)())


@pytest.mark.parametrize("returned", RETURNS)
@pytest.mark.parametrize("loop", LOOPS)
def test_heads_of_a_list(generated_models: ModuleType, loop: str, returned: str) -> None:
    """Each takes its own item; a frozen mean over bins, as YOLO's, is no layer behind them."""
    found = decisions(generated_models, LOOPS[loop] + RETURNS[returned])
    for name in ("boxes.0.weight", "boxes.1.weight"):
        assert (found[name].role, found[name].doubt) == (Role.OUTPUT, Doubt.NONE), (name, found[name].reason)


@pytest.mark.parametrize(
    "loop",
    [
        "for i in range(1, len(x)):\n    x[i] = self.b(x[i - 1])",
        "x[0] = self.b(x[0])\nx[1] = self.b(x[0])",
        "for i in range(len(x)):\n    x[i] = self.b(x[i])\nfor j in range(1, len(x)):\n    x[1] = x[j] + self.a(x[j])",
        "for i in range(len(x)):\n    x[i] = self.b(x[i])\nx = [torch.relu(y) for y in x]",
    ],
    ids=["the item before", "by hand", "another loop", "all items"],
)
def test_what_is_read_back_is_handed_on(generated_models: ModuleType, loop: str) -> None:
    """A layer takes what it has put where another item is made of it."""
    found = decisions(generated_models, f"{loop}\nreturn self.boxes[0](torch.relu(x[1]))")["b.weight"]
    assert (found.role, found.doubt) == (Role.MATRIX, Doubt.NONE), found.reason


def test_a_trained_mean_is_a_layer(generated_models: ModuleType) -> None:
    """Where its values are learned, what takes the softmax is the head."""
    made = MADE.replace(".requires_grad_(False)", "")
    with torch.device("meta"):
        found = infer_roles(
            generated_models.model_with_forward(made, "x", "return self.bins(self.boxes[0](x).softmax(-1))")()
        )
    assert found["bins.weight"].role is Role.OUTPUT
    assert found["boxes.0.weight"].role is Role.MATRIX
