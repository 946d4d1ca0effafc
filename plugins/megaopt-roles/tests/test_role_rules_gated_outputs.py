"""Gates of experts inside of a last layer: they weigh what is returned, and are hidden."""

from types import ModuleType

import pytest
import torch

from megaopt_core.params import Doubt, Role, RoleDecision
from megaopt_core.routing import infer_roles

MADE = (
    "self.first, self.base, self.gate = nn.Linear(9, 12), nn.Linear(12, 7), nn.Linear(12, 5)\n"
    "self.hand = nn.Parameter(torch.zeros(12, 5))\n"
    "self.a, self.b = nn.Parameter(torch.zeros(5, 4, 12)), nn.Parameter(torch.zeros(5, 7, 4))\n"
    "self.w = nn.Parameter(torch.zeros(5, 12, 7))\n"
    "self.experts = nn.ModuleList(nn.Linear(12, 7) for _ in range(5))\n"
)
BEGIN = "h = self.first(x).relu()\n"
PAIRS = "z = torch.einsum('bsi,nri->bsnr', h, self.a)\nz = torch.einsum('bsnr,nor->bsno', z, self.b)\n"
STACK = "z = torch.einsum('bsd,ndo->bsno', h, self.w)\n"
LIST = "z = torch.stack([expert(h) for expert in self.experts], -2)\n"
SHARES = {  # what the gate's scores, of five features, become
    "softmax": "{}.softmax(-1)",
    "sigmoid": "torch.sigmoid({})",
    "normalized": "F.normalize(torch.sigmoid({}), p=1, dim=-1)",
    "filled": "{0}.masked_fill({0} < 0, -1e9).softmax(-1)",
    "masked": "torch.where({0} >= {0}.topk(2, -1).values[..., -1:], {0}, -1e9).softmax(-1)",
}
SUMS = {  # how shares `p` weigh what the experts made, `z`, of shape [batch, positions, expert, features]
    "a sum of products": "(z * p.unsqueeze(-1)).sum(-2)",
    "with an index": "(p[..., None] * z).sum(dim=2)",
    "an einsum": "torch.einsum('bsn,bsno->bso', p, z)",
    "the other way": "torch.einsum('bsno,bsn->bso', z, p)",
    "a product": "(p.unsqueeze(-2) @ z).squeeze(-2)",
    "one after the other": "sum(p[..., i : i + 1] * z[..., i, :] for i in range(5))",
}
MIXED = {
    f"{made}, {share}, {mixed}": (rest, share, mixed)
    for made, rest in (("pairs", PAIRS), ("a stack", STACK), ("a list", LIST))
    for share in SHARES
    for mixed in SUMS
}


def decided(models: ModuleType, rest: str) -> dict[str, RoleDecision]:
    """Return the decisions for a model that goes on so, once it has run."""
    model = models.model_with_forward(MADE, "x", BEGIN + rest)()
    assert model(torch.randn(2, 5, 9))[0].shape[-1] == 7
    return dict(infer_roles(model))


@pytest.mark.parametrize("case", MIXED)
@pytest.mark.parametrize("base", ["self.base(h) + ", ""])
def test_a_gate_is_hidden(generated_models: ModuleType, case: str, base: str) -> None:
    """A layer, or a weight that is used by hand; what it weighs is the output."""
    rest, share, mixed = MIXED[case]
    for gate, name in (("self.gate(h)", "gate.weight"), ("(h @ self.hand)", "hand")):
        found = decided(
            generated_models, f"{rest}p = {SHARES[share].format(gate)}\nreturn {base}{SUMS[mixed]}"
        )
        assert (found[name].role, found[name].doubt) == (Role.MATRIX, Doubt.NONE), found[name].reason


PREDICTIONS = {  # what is returned, in which `gate` weighs nothing
    "one score of a prediction": "return self.gate(h).softmax(-1)[..., 1:2] * self.base(h)",
    "one after another": "p = self.gate(h).sigmoid()\nreturn torch.cat([p, p[..., :1] * self.base(h)], -1)[..., :7]",
    "compared": "q = (h @ self.hand).log_softmax(-1)\n"
    "return (self.gate(h).softmax(-1) * q).sum(-1, True).expand(2, 5, 7)",
    "compared with all": "q = (h @ self.hand).log_softmax(-1).flatten(0, 1)\n"
    "return torch.einsum('bsn,qn->bsq', self.gate(h).softmax(-1), q)[..., :7]",
}


@pytest.mark.parametrize("case", PREDICTIONS)
def test_what_weighs_nothing_is_no_certain_gate(generated_models: ModuleType, case: str) -> None:
    """It is a head, or in doubt."""
    found = decided(generated_models, PREDICTIONS[case])["gate.weight"]
    assert found.role is not Role.MATRIX or found.doubt is Doubt.ROLE, found.reason
