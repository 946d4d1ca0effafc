"""Kernels that are convolved with by hand, and what a forward takes apart of what they make."""

from types import ModuleType

import pytest

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

CUT = {
    "gates of an image": (2, "i, f, o, g = F.conv2d(x, self.w, self.b, padding=1).chunk(4, 1)", 4),
    "gates of a sequence": (1, "i, f, o, g = torch.split(F.conv1d(input=x, weight=self.w), 6, dim=1)", 4),
    "by position": (
        2,
        "y = F.conv2d(x, self.w)\n    i, f, o, g = y[:, :6], y[:, 6:12], y[:, 12:18], y[:, 18:]",
        4,
    ),
    "a volume": (
        3,
        "i, f, o, g = torch.conv3d(x, self.w.tanh(), padding=1).unflatten(1, (4, 6)).unbind(1)",
        4,
    ),
    "two halves": (2, "i, f = F.conv2d(x, self.w).chunk(2, 1)\n    o, g = f, i", 2),
    "all of it": (2, "i = f = o = g = F.conv2d(x, self.w)", 0),
}


@pytest.mark.parametrize("case", CUT)
def test_what_a_kernel_makes_is_taken_apart(generated_models: ModuleType, case: str) -> None:
    """Each part is made by a matrix of its own."""
    axes, cut, count = CUT[case]
    made = (
        f"self.w, self.b = nn.Parameter(torch.randn(24, 5, *[3] * {axes})), nn.Parameter(torch.zeros(24))\n"
        "self.out = nn.Linear(12, 7)"
    )
    text = (
        f"def forward(self, x):\n    {cut}\n    c = f.sigmoid() * x.mean() + i.sigmoid() * g.tanh()\n"
        "    return self.out((o.sigmoid() * c.tanh()).flatten(2).mean(1))"
    )
    found = infer_roles(generated_models.model(made, text)())["w"]
    assert (found.role, found.doubt) == (Role.MATRIX, Doubt.NONE), found.reason
    assert found.view is not None
    assert len(found.view.split_sizes) == count
