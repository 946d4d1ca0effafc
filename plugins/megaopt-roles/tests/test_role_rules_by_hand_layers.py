"""Layers by hand around which steps are shifted, or whose channels are cut: padding along time, kernels of gates."""

from types import ModuleType

import pytest
import torch

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

SHIFTS = {
    "one step back": "F.pad(x, (0, 0, 1, -1))",
    "by keyword": "F.pad(input=x, pad=(0, 0, 1, -1))",
    "a list": "F.pad(x, [0, 0, 1, 0])[:, :-1]",
    "of functional": "nn.functional.pad(x, pad=(0, 0, 1, -1), value=0.0)",
}


@pytest.mark.parametrize("case", SHIFTS)
def test_shifts_along_time(generated_models: ModuleType, case: str) -> None:
    """Steps that are shifted say nothing of the weight that made them: its rows are features."""
    made = (
        "self.e, self.h = nn.Embedding(50, 16), nn.Linear(16, 50)\n"
        "self.w, self.o = nn.Parameter(torch.randn(16, 24)), nn.Parameter(torch.randn(24, 16))"
    )
    methods = (
        "def forward(self, ids):\n    x = self.e(ids)\n    for _ in range(2):\n"
        f"        x = x + (({SHIFTS[case]} + x) @ self.w).relu() @ self.o\n    return self.h(x)"
    )
    model = generated_models.model(made, methods)()
    model(torch.zeros(2, 8, dtype=torch.long))
    found = infer_roles(model)
    for name in "wo":
        assert (found[name].role, found[name].doubt) == (Role.MATRIX, Doubt.NONE), found[name].reason


CUTS = {  # the two halves of the channels that a kernel makes
    "chunk": "a, b = F.conv1d(x, self.k, padding=1).chunk(2, 1)",
    "glu by hand": "y = F.conv1d(x, self.k, padding=1)\na, b = y[:, :18], y[:, 18:]",
    "split": "a, b = torch.conv1d(x, self.k, None, 1, 1).split(18, dim=1)",
    "a function": "a, b = torch.chunk(F.conv1d(x, weight=self.k, padding='same'), 2, dim=1)",
}


@pytest.mark.parametrize("case", CUTS)
def test_kernels_of_gates(generated_models: ModuleType, case: str) -> None:
    """A kernel that is used by hand is cut where the channels that it makes are, as that of a layer is."""
    made = (
        "self.s, self.h = nn.Conv1d(5, 12, 1), nn.Conv1d(18, 9, 1)\n"
        "self.k = nn.Parameter(torch.randn(36, 12, 3))"
    )
    methods = (
        "def forward(self, x):\n    x = self.s(x)\n    "
        + CUTS[case].replace("\n", "\n    ")
        + "\n    return self.h(torch.tanh(a) * torch.sigmoid(b))"
    )
    model = generated_models.model(made, methods)()
    model(torch.zeros(2, 5, 8))
    found = infer_roles(model)
    assert (found["k"].role, found["k"].doubt) == (Role.MATRIX, Doubt.NONE)
    assert found["k"].view is not None
    assert found["k"].view.split_sizes == (18, 18)
