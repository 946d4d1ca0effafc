"""Weights that something fixed multiplies: those of the edges of a graph, and matrices under a mask."""

from types import ModuleType

import pytest

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

MADE = (
    "self.conv, self.up, self.out = nn.Conv2d(3, 18, 1), nn.Linear(6, 20), nn.Linear(6, 5)\n"
    "self.register_buffer('edges', torch.zeros(3, 11, 11)); self.register_buffer('mask', torch.ones(6, 20))\n"
    "self.gain, self.hidden = nn.Parameter(torch.ones(3, 11, 11)), nn.Parameter(torch.randn(6, 20))"
)
CONV = "y = self.conv(x).view(len(x), 3, 6, -1, 11)\n"
EDGES = {  # of which kind, and from where to where
    "an einsum over kinds": f"{CONV}y = torch.einsum('nkctv,kvw->nctw', y, self.edges * self.gain)",
    "kinds one by one": "y = sum(self.conv(x)[:, :6] @ (self.edges[k] * self.gain[k]) for k in range(3))",
    "matmul": "a = self.gain.mul(self.edges)\ny = torch.matmul(self.conv(x)[:, :6], a[0])",
    "at the left of nodes": "y = ((self.edges[0] * self.gain[0]) @ x.mean(2).mT.tile(1, 1, 2)).mT[..., None]",
    "an einsum of nodes": (
        "y = torch.einsum('kvw,nwc->ncv', self.gain * self.edges, x[:, :, 0].mT.tile(1, 1, 2))[..., None]"
    ),
}
MASKED = {
    "a linear layer": "F.linear(y, self.hidden * self.mask)",
    "at the right": "self.up(y) @ (self.mask * self.hidden).t()",
    "an einsum": "torch.einsum('ni,oi->no', y, self.hidden * self.mask)",
}


@pytest.mark.parametrize("case", EDGES)
def test_weights_of_fixed_edges_are_in_doubt(generated_models: ModuleType, case: str) -> None:
    """A product sums over nodes: they may be gains of what is fixed."""
    lines = [*EDGES[case].split("\n"), "return self.out(y.mean((2, 3)).relu())"]
    text = "def forward(self, x):\n" + "".join(f"    {line}\n" for line in lines)
    found = infer_roles(generated_models.model(MADE, text)())["gain"]
    assert (found.role, found.doubt) == (Role.ELEMENTWISE, Doubt.ROLE), found.reason


@pytest.mark.parametrize("case", MASKED)
def test_a_matrix_under_a_mask_is_a_matrix(generated_models: ModuleType, case: str) -> None:
    """Where a product sums over features, for certain."""
    text = (
        "def forward(self, x):\n    y = self.conv(x).mean((2, 3))[:, :20]\n    h = self.up(y[:, :6])\n"
        f"    y = {'y[:, :6]' if 'up' in MASKED[case] else 'h'}\n    return self.out({MASKED[case]}.relu())\n"
    )
    found = infer_roles(generated_models.model(MADE, text)())["hidden"]
    assert (found.role, found.doubt) == (Role.MATRIX, Doubt.NONE), found.reason
