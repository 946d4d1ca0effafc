"""Two streams whose queries, keys and values are laid end to end: what cuts them all cuts those of each stream."""

from types import ModuleType

import pytest
import torch

from megaopt_core.params import Doubt, Role, RoleDecision
from megaopt_core.routing import infer_roles

FUSED = (
    "self.a, self.b = nn.Linear(16, 48), nn.Linear(12, 48)\n"
    "self.streams = nn.ModuleDict({'a': self.a, 'b': self.b})\n"
)
ENDS = (
    "self.first, self.second, self.memory = nn.Linear(7, 16), nn.Linear(7, 12), nn.Parameter(torch.zeros(2, 48))\n"
    "self.out, self.head = nn.Linear(16, 16), nn.Linear(16, 5)\n"
)
TAKEN = {  # how queries, keys and values of both streams are laid end to end
    "permuted": "q, k, v = torch.cat([self.a(x), self.b(y)], 1).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)",
    "chunked": "q, k, v = map(heads, torch.cat((self.a(x), self.b(y)), dim=-2).chunk(3, -1))",
    "indexed": (
        "made = torch.cat([self.b(y), self.a(x)], 1)\n"
        "q, k, v = (heads(made[..., i * 16 : i * 16 + 16]) for i in range(3))"
    ),
    "three in one": (
        "made = torch.cat([torch.cat([self.a(x), self.a(x)], 1), self.b(y)], 1).view(4, -1, 3, 2, 8)\n"
        "q, k, v = made.permute(2, 0, 3, 1, 4).unbind(0)"
    ),
    "shaped before": (
        "made = [f(z).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4) for f, z in ((self.a, x), (self.b, y))]\n"
        "q, k, v = torch.cat(made, dim=3)"
    ),
    "by name": (
        "made = {name: layer({'a': x, 'b': y}[name]) for name, layer in self.streams.items()}\n"
        "q, k, v = map(heads, torch.cat([*made.values()], 1).split(16, -1))"
    ),
    "a choice of layers": (
        "made = [self.streams[name](z).chunk(3, -1) for name, z in given.items()]\n"
        "q, k, v = (heads(torch.cat([part[i] for part in made], 1)) for i in range(3))"
    ),
    "beside a memory": (
        "made = torch.cat([self.memory.expand(4, -1, -1), self.a(x), self.b(y)], 1)\n"
        "q, k, v = map(heads, made.chunk(3, -1))"
    ),
}


def _found(models: ModuleType, taken: str) -> dict[str, RoleDecision]:
    text = (
        "def forward(self, x, y, given=None):\n"
        "    heads = lambda z: z.unflatten(-1, (2, 8)).transpose(1, 2)\n"
        "    x, y = self.first(x), self.second(y)\n    " + taken.replace("\n", "\n    ") + "\n"
        "    z = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)\n"
        "    return self.head(x + self.out(z)[:, : x.shape[1]])\n"
    )
    model = models.model(FUSED + ENDS, text)()
    if "given.items" not in taken:
        assert model(torch.randn(4, 3, 7), torch.randn(4, 5, 7)).shape == (4, 3, 5)
    return dict(infer_roles(model))


@pytest.mark.parametrize("case", TAKEN)
def test_what_cuts_both_streams_cuts_the_weights_of_each(generated_models: ModuleType, case: str) -> None:
    """Each weight holds three matrices, for certain."""
    found = _found(generated_models, TAKEN[case])
    for name in ("a.weight", "b.weight"):
        decision = found[name]
        assert (decision.role, decision.doubt) == (Role.MATRIX, Doubt.NONE), (name, decision.reason)
        assert decision.view.split_sizes == (16, 16, 16), (name, decision.view)
