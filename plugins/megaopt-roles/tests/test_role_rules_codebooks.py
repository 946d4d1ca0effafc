"""Codebooks that a softmax chooses from, in one table or a stack of them, and stacks of experts that it mixes."""

from types import ModuleType

import pytest

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

STACK = "self.c = nn.Parameter(torch.zeros(4, 9, 4))"
TABLE = "self.c = nn.Parameter(torch.zeros(9, 16))"
HARD = "p = F.one_hot(p.argmax(-1), 9).float() - p.detach() + p\n"
CODES = {  # how codes are looked up by `p`, of shape [batch, 4, 9]
    "a stack by einsum": (STACK, "y = torch.einsum('bmk,mkd->bmd', p, self.c)"),
    "a stack by matmul": (STACK, "y = (p.transpose(0, 1) @ self.c).transpose(0, 1)"),
    "one of a stack": (STACK, "y = torch.stack([p[:, i] @ self.c[i] for i in range(4)], 1)"),
    "a stack, straight through": (STACK, HARD + "y = torch.einsum('bmk,mkd->bmd', p, self.c)"),
    "a table, straight through": (TABLE, HARD + "y = p @ self.c"),
}
MIXED = {  # a softmax over the first axis of a stack mixes its matrices
    "experts": "y = torch.bmm(x[:, None], torch.einsum('be,edf->bdf', g, self.c))[:, 0]",
    "experts of a sum": "y = sum(g[:, i, None] * (x @ self.c[i]) for i in range(4))",
}


@pytest.mark.parametrize("case", CODES)
def test_codes_that_a_softmax_chooses_are_no_hidden_matrix(generated_models: ModuleType, case: str) -> None:
    """A stack of codebooks is one as a single table is, also where the choice is hard and only its gradient soft."""
    made, forward = CODES[case]
    made = f"self.e, self.o = nn.Linear(6, 36), nn.Linear(16, 3)\n{made}"
    source = f"p = self.e(x).view(-1, 4, 9).softmax(-1)\n{forward}\nreturn self.o(y.reshape(-1, 16))"
    decision = infer_roles(generated_models.model_with_forward(made, "x", source)())["c"]
    assert (decision.role, decision.doubt) == (Role.ELEMENTWISE, Doubt.ROLE), decision.reason


@pytest.mark.parametrize("case", MIXED)
def test_experts_that_a_softmax_mixes_are_matrices(generated_models: ModuleType, case: str) -> None:
    """The softmax chooses among matrices there, not among their rows."""
    made = (
        "self.g, self.i, self.o = nn.Linear(6, 4), nn.Linear(6, 9), nn.Linear(4, 3)\n"
        "self.c = nn.Parameter(torch.zeros(4, 9, 4))"
    )
    source = f"g, x = self.g(x).softmax(-1), self.i(x)\n{MIXED[case]}\nreturn self.o(F.relu(y))"
    decision = infer_roles(generated_models.model_with_forward(made, "x", source)())["c"]
    assert (decision.role, decision.doubt) == (Role.MATRIX, Doubt.NONE), decision.reason


@pytest.mark.parametrize("shape", ["1, 4, 8", "2, 4, 8"], ids=["an axis of one", "the batch's"])
@pytest.mark.parametrize(
    "scores", ["self.q @ x.mT", "torch.bmm(self.q, x.mT) * 0.3", "torch.einsum('bqd,bkd->bqk', self.q, x)"]
)
def test_queries_in_a_stack_are_as_doubtful_as_in_a_table(
    generated_models: ModuleType, shape: str, scores: str
) -> None:
    """Their products with activations choose among these; leading axes change nothing about it."""
    made = f"self.i, self.o = nn.Linear(6, 8), nn.Linear(8, 3)\nself.q = nn.Parameter(torch.zeros({shape}))"
    source = f"x = self.i(x)\nreturn self.o(({scores}).softmax(-1) @ x)"
    decision = infer_roles(generated_models.model_with_forward(made, "x", source)())["q"]
    assert (decision.role, decision.doubt) == (Role.ELEMENTWISE, Doubt.ROLE), decision.reason
