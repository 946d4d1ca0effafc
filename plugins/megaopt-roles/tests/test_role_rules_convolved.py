"""Kernels that are convolved with by hand, and what a forward takes apart of what they make."""

from types import ModuleType

import pytest
import torch

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


DEPTHWISE = {  # convolutions that take each channel by itself, between a projection and what takes it apart
    "by hand": "F.conv1d(u, self.filter, padding=2, groups=u.size(1))[..., :x.size(1)]",
    "with a bias": "F.silu(F.conv1d(u, self.filter, self.bias, 1, 2, 1, 36)[..., : x.shape[1]])",
    "weight of a layer": "F.conv1d(u, self.conv.weight, self.conv.bias, padding=2, groups=36)[..., : x.shape[1]]",
    "a layer": "self.conv(u)[..., : x.shape[1]]",
    "padded before": "F.conv1d(F.pad(u, (2, 0)), self.filter, groups=36)",
    "padded, a layer": "self.conv(F.pad(u, (2, 0, 0, 0)))[..., 2 : x.shape[1] + 2]",
}


@pytest.mark.parametrize("case", DEPTHWISE)
def test_channels_by_themselves_stay_what_they_are(generated_models: ModuleType, case: str) -> None:
    """The projection before is cut where the forward takes apart what comes out."""
    made = (
        "self.into, self.out = nn.Linear(9, 36), nn.Linear(12, 7)\n"
        "self.filter, self.bias = nn.Parameter(torch.randn(36, 1, 3)), nn.Parameter(torch.zeros(36))\n"
        "self.conv = nn.Conv1d(36, 36, 3, groups=36, padding=2)"
    )
    text = (
        f"def forward(self, x):\n    u = self.into(x).transpose(1, 2)\n    u = {DEPTHWISE[case]}\n"
        "    q, k, v = u.chunk(3, 1)\n    return self.out((q * k.sigmoid() * v).mT)"
    )
    model = generated_models.model(made, text)()
    model(torch.zeros(2, 5, 9))
    found = infer_roles(model)["into.weight"]
    assert (found.role, found.doubt) == (Role.MATRIX, Doubt.NONE), found.reason
    assert found.view is not None
    assert found.view.split_sizes == (12, 12, 12)


EXPERTS = {  # what gates and values of stacked experts are made by, stored [experts, in, 2 * hidden]
    "experts first": ("nd,edh->enh", "torch.bmm(g.sigmoid() * u, self.down).sum(0)"),
    "tokens first": ("nd,edh->neh", "torch.einsum('neh,ehd->nd', g.sigmoid() * u, self.down)"),
    "of their own": ("end,edh->enh", "torch.einsum('enh,ehd->nd', g.sigmoid() * u, self.down)"),
    "sequences": ("bsd,edh->besh", "torch.einsum('besh,ehd->bsd', g.sigmoid() * u, self.down)"),
}


@pytest.mark.parametrize("case", EXPERTS)
def test_stacks_in_an_einsum_are_taken_apart(generated_models: ModuleType, case: str) -> None:
    """The halves of what each expert makes are matrices of their own, wherever the letter of experts stands."""
    equation, back = EXPERTS[case]
    made = (
        "self.up, self.down = nn.Parameter(torch.randn(3, 9, 40)), nn.Parameter(torch.randn(3, 20, 9))\n"
        "self.head = nn.Linear(9, 5)"
    )
    given = {"end": "x.expand(3, *x.shape)", "bsd": "x[None]"}.get(equation[:3], "x")
    text = (
        f"def forward(self, x):\n    g, u = torch.einsum('{equation}', {given}, self.up).chunk(2, -1)\n"
        f"    return self.head({back})"
    )
    model = generated_models.model(made, text)()
    model(torch.zeros(4, 9))
    found = infer_roles(model)["up"]
    assert (found.role, found.doubt) == (Role.MATRIX, Doubt.NONE), found.reason
    assert found.view is not None
    assert (found.view.batch_dims, found.view.split_sizes) == (1, (20, 20))
