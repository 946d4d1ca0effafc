"""Loops over parts of a sequence: what one part leaves for the next one is read, however long a part is."""

from types import ModuleType

import pytest
import torch

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

MADE = (
    "self.q, self.k, self.v = nn.Linear(12, 8), nn.Linear(12, 8), nn.Linear(12, 8)\n"
    "self.rate, self.o, self.size = nn.Linear(12, 2), nn.Linear(8, 5), 4"
)
PARTS = {  # the parts of the sequence
    "split": "x.split(self.size, 1)",
    "split by a function": "torch.split(x, self.size, dim=1)",
    "one": "x.chunk(1, dim=-2)",
    "more than there are": "x.split(64, dim=-2)",
}


@pytest.mark.parametrize("case", PARTS)
def test_what_a_part_leaves_is_read(generated_models: ModuleType, case: str) -> None:
    """The layers that write the state, which the next part reads, are matrices for certain."""
    text = (
        "def forward(self, x):\n    state, made = torch.zeros(len(x), 8, 8), []\n"
        f"    for part in {PARTS[case]}:\n"
        "        made.append(torch.bmm(self.q(part), state))\n"
        "        rate = self.rate(part).sigmoid().mean(1, keepdim=True)[..., :1]\n"
        "        state = state * rate + torch.bmm(self.k(part).mT, self.v(part))\n"
        "    return self.o(torch.cat(made, 1))\n"
    )
    model = generated_models.model(MADE, text)()
    model(torch.randn(2, 10, 12))
    found = infer_roles(model)
    for name in ("q.weight", "k.weight", "v.weight", "rate.weight"):
        assert (found[name].role, found[name].doubt) == (Role.MATRIX, Doubt.NONE), (name, found[name].reason)
    assert found["o.weight"].role is Role.OUTPUT


MET = {  # a table of each head, whose later rows meet queries
    "einsum": "torch.einsum('bhte,hre->bhtr', q, self.table[:, -size:])",
    "product": "q @ self.table[:, :size].mT",
    "named before": "(lambda rows: q @ rows.transpose(-1, -2))(self.table[:, -size:])",
    "narrow": "torch.einsum('bhte,hre->bhtr', q, self.table.narrow(1, 0, size))",
}


@pytest.mark.parametrize("case", MET)
def test_positions_of_each_head_are_in_doubt(generated_models: ModuleType, case: str) -> None:
    """Tables that a sequence's length cuts are no weights for certain, also where they lie in a stack."""
    text = (
        "def forward(self, x):\n    size, q = x.shape[1], self.q(x).unflatten(-1, (2, 4)).transpose(1, 2)\n"
        f"    met = ({MET[case]}).sum(1)\n    return self.o(met.softmax(-1) @ x)\n"
    )
    made = "self.q, self.o = nn.Linear(12, 8), nn.Linear(12, 5)\nself.table = nn.Parameter(torch.zeros(2, 16, 4))"
    model = generated_models.model(made, text)()
    model(torch.randn(2, 10, 12))
    found = infer_roles(model)
    assert (found["table"].role, found["table"].doubt) == (Role.ELEMENTWISE, Doubt.ROLE)
    assert (found["q.weight"].role, found["q.weight"].doubt) == (Role.MATRIX, Doubt.NONE)


def test_experts_of_which_some_are_taken_are_matrices(generated_models: ModuleType) -> None:
    """The first axis of a stack tells its matrices apart: how many are taken says nothing of each."""
    text = (
        "def forward(self, x):\n    some = self.experts[: x.shape[1]]\n"
        "    return self.o(torch.einsum('bti,tio->bto', x, some))\n"
    )
    made = "self.experts, self.o = nn.Parameter(torch.randn(16, 12, 8)), nn.Linear(8, 5)"
    model = generated_models.model(made, text)()
    model(torch.randn(2, 10, 12))
    found = infer_roles(model)["experts"]
    assert (found.role, found.doubt) == (Role.MATRIX, Doubt.NONE), found.reason
