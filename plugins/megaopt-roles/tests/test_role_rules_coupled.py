"""Coupling layers of flows: a network makes shifts and scales of one half, which change the other half."""

import pytest

from megaopt_core.params import Doubt
from megaopt_core.routing import infer_roles

LAST = """
class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.scale = nn.Conv2d(24, 8, 3, padding=1), nn.Parameter(torch.zeros(1, 8, 1, 1))

    def forward(self, x):
        return {made}

class Coupling(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(4, 24, 3, padding=1), nn.ReLU(), Last())

    def forward(self, x):
        a, b = x.chunk(2, 1)
        scale, shift = self.net(a).chunk(2, 1)
        return torch.cat([a, (b + shift) * torch.sigmoid(scale + 2)], 1)
"""


@pytest.mark.parametrize("made", ["self.conv(x)", "self.conv(x) * torch.exp(self.scale * 3)"])
def test_shifts_and_scales_of_one_half(generated_models, made):
    """What met in one half is not put together again beside the other, and a gain of channels hides no rows."""
    model = generated_models.model(
        "self.a, self.h = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 3, 1)\n"
        "self.flows = nn.ModuleList(Coupling() for _ in range(2))",
        "def forward(self, x):\n    x = self.a(x)\n    for flow in self.flows:\n        x = flow(x)\n"
        "    return self.h(x)",
        LAST.replace("{made}", made),
    )
    found = infer_roles(model())["flows.0.net.2.conv.weight"]
    assert found.doubt is Doubt.NONE, found.reason
    assert found.view is not None
    assert found.view.split_sizes == (4, 4)
