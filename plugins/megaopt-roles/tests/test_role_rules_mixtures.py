"""Stacks of matrices that coefficients mix, as the bases of relations in a graph, and factors that look alike."""

from types import ModuleType

import pytest

from megaopt_core.params import Doubt, MatrixView, Role, RoleDecision
from megaopt_core.routing import infer_roles

MADE = (
    "self.c, self.m = nn.Parameter(torch.zeros(7, 3)), nn.Parameter(torch.zeros(3, 8, 6))\n"
    "self.a, self.h = nn.Linear(5, 8), nn.Linear(6, 4)"
)
LOOP = "y = 0\nfor r in range({}):\n    y = y + x @ w[r]"
MIXED = {  # how all matrices are made
    "einsum": "w = torch.einsum('rb,bio->rio', self.c, self.m)",
    "turned around": "w = torch.einsum('bio, rb -> rio', self.m, self.c)",
    "without a result": "w = torch.einsum('ab,bcd', self.c, self.m)",
    "flat": "w = torch.matmul(self.c, self.m.view(3, -1)).view(7, 8, 6)",
    "flattened": "w = (self.c @ self.m.flatten(1)).reshape(-1, 8, 6)",
    "linear": "w = F.linear(self.c, self.m.reshape(3, 48).t()).view(7, 8, 6)",
    "tensordot": "w = torch.tensordot(self.c, self.m, dims=1)",
    "entry by entry": "w = (self.c[:, :, None, None] * self.m).sum(1)",
}
ONE_BY_ONE = {  # one matrix a round
    "einsum": "y = 0\nfor r in range(7):\n    y = y + x @ torch.einsum('b,bio->io', self.c[r], self.m)",
    "a batch": "y = torch.einsum('nd,rdo->no', x, torch.einsum('rb,bio->rio', self.c, self.m))",
    "side by side": "y = torch.einsum('nd,rdo->nro', x, torch.einsum('rb,bio->rio', self.c, self.m)).sum(1)",
    "for neighbours": "w = torch.einsum('rb,bio->rio', self.c, self.m)\n"
    "y = torch.einsum('rmn,rno->mo', torch.ones(7, 2, 2), torch.einsum('ni,rio->rno', x, w))",
    "in one row": "w = (self.c @ self.m.flatten(1)).view(7, 8, 6)\n"
    "y = (x @ w.permute(1, 0, 2).reshape(8, 42)).unflatten(-1, (7, 6)).sum(1)",
    "all at once": "y = (x.unsqueeze(0) @ torch.einsum('rb,bio->rio', self.c, self.m)).sum(0)",
}
FEATURES = {  # the axis that is made is one of features
    "einsum": "y = torch.einsum('nr,rio->no', self.e(x), torch.einsum('rb,bio->rio', self.c, self.m))",
    "flat": "y = self.e(x) @ (self.c @ self.m.view(3, -1))\ny = y.view(-1, 8, 6).sum(1)",
}


def roles_of(models: ModuleType, body: str, more: str = "") -> dict[str, RoleDecision]:
    """Return the decisions for a model that mixes."""
    forward = f"x = self.a(given)\n{body}\nreturn self.h(F.relu(y))"
    return infer_roles(models.model_with_forward(MADE + more, "given", forward)())


CASES = {
    **{
        name: f"{made}\n{LOOP.format('w.size(0)' if name == 'einsum' else '7')}"
        for name, made in MIXED.items()
    },
    **{f"one by one: {name}": body for name, body in ONE_BY_ONE.items()},
}


@pytest.mark.parametrize("case", CASES)
def test_what_coefficients_mix_is_a_stack(generated_models: ModuleType, case: str) -> None:
    """The bases are matrices, the coefficients are none, and both are certain."""
    found = roles_of(generated_models, CASES[case])
    bases = found["m"]
    assert (bases.role, bases.doubt) == (Role.MATRIX, Doubt.NONE), bases.reason
    assert bases.view == MatrixView(batch_dims=1, transposed=True)
    assert (found["c"].role, found["c"].doubt) == (Role.ELEMENTWISE, Doubt.NONE), found["c"].reason


@pytest.mark.parametrize("case", FEATURES)
def test_what_makes_features_is_a_factor(generated_models: ModuleType, case: str) -> None:
    """A factor along an axis of features is no set of coefficients, or it is not known which."""
    found = roles_of(generated_models, FEATURES[case], "\nself.e = nn.Linear(8, 7)")["c"]
    assert found.role is Role.MATRIX or found.uncertain, found.reason
