"""Loops over layers whose last round hands something on that nothing takes, as residual blocks with skips do."""

from types import ModuleType

import pytest

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

BLOCK = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d, self.n = (nn.Linear(12, 12) for _ in range(5))
        self.keep, self.skip = nn.Linear(12, 12), nn.Linear(12, 20)
    def forward(self, x):
        y = self.d(self.c(self.b(self.a(x).relu()).relu()).relu()).relu() * self.n(x)
        return x + self.keep(y), self.skip(y)
"""
ENDS = "return self.out(s.relu())"
LOOPS = {  # what is made, what is done in a loop, and the weight of the last round
    "layers in lists": (
        "self.keep = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))\n"
        "self.skip = nn.ModuleList(nn.Linear(12, 20) for _ in range(3))",
        "for keep, skip in zip(self.keep, self.skip):\n    s = s + skip(x.tanh())\n    x = x + keep(x.tanh())",
        "keep.2.weight",
    ),
    "by position": (
        "self.keep = nn.ModuleList(nn.Conv1d(12, 12, 1) for _ in range(2))\n"
        "self.skip = nn.ModuleList(nn.Conv1d(12, 20, 1) for _ in range(2))",
        "x = x.mT\nfor i in range(2):\n    s = s + self.skip[i](x.relu()).mT\n    x = self.keep[i](x.relu())",
        "keep.1.weight",
    ),
    "matrices by hand": (
        "self.keep = nn.ParameterList(torch.randn(12, 12) for _ in range(3))\n"
        "self.skip = nn.ParameterList(torch.randn(12, 20) for _ in range(3))",
        "for keep, skip in zip(self.keep, self.skip):\n    s = s + x.relu() @ skip\n    x = x + x.tanh() @ keep",
        "keep.2",
    ),
    "blocks": (
        "self.blocks = nn.ModuleList(Block() for _ in range(3))",
        "for block in self.blocks:\n    x, one = block(x)\n    s = s + one",
        "blocks.2.keep.weight",
    ),
    "names": (
        "self.keep = nn.ModuleDict({f'at {i}': nn.Linear(12, 12) for i in range(3)})\n"
        "self.skip = nn.ModuleList(nn.Linear(12, 20) for _ in range(3))",
        "for (_, one), two in zip(self.keep.items(), self.skip):\n    s = s + two(x.relu())\n    x = x + one(x.tanh())",
        "keep.at 2.weight",
    ),
}
APART = (
    "self.keep = nn.ModuleList(nn.Linear(12, 12) for _ in range(2)); self.skip = nn.Linear(12, 20)",
    "s = self.skip(self.keep[0](x).relu())\nself.lost = self.keep[1](x)",
)


def decision(models: ModuleType, made: str, loop: str, name: str) -> tuple[Role, Doubt]:
    """Return what a weight is, and in what doubt."""
    lines = "".join(f"    {line}\n" for line in ["s = 0", *loop.split("\n"), ENDS])
    model = models.model(f"{made}\nself.out = nn.Linear(20, 5)", f"def forward(self, x):\n{lines}", BLOCK)
    found = infer_roles(model())[name]
    return found.role, found.doubt


@pytest.mark.parametrize("case", LOOPS)
def test_the_last_round_is_like_the_others(generated_models: ModuleType, case: str) -> None:
    """A matrix for certain, as what the other rounds hand on."""
    assert decision(generated_models, *LOOPS[case]) == (Role.MATRIX, Doubt.NONE)


def test_what_is_called_elsewhere_is_in_doubt(generated_models: ModuleType) -> None:
    """Layers of a list that different places call are not like each other."""
    assert decision(generated_models, *APART, "keep.1.weight")[1] is Doubt.ROLE
