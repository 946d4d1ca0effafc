"""Outputs that the model returns and a judge takes, and codes that a decoder takes beside zeros or noise."""

from types import ModuleType

import pytest

from megaopt_core.params import Doubt, Role, RoleDecision
from megaopt_core.routing import infer_roles

POLICY = (
    "self.body = nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 28), nn.ReLU())\n"
    "self.mu, self.spread = nn.Linear(28, 3), nn.Linear(28, 3)\n"
    "self.q = nn.Sequential(nn.Linear(12, 30), nn.ReLU(), nn.Linear(30, 1))"
)
DRAW = (
    "def policy(self, s):\n    h = self.body(s)\n    d = torch.distributions.Normal(self.mu(h), self.spread(h).exp())\n"
    "    u = d.rsample()\n    return u.tanh(), d.log_prob(u).sum(-1)\n"
    "def forward(self, s, a):\n    b, p = self.policy(s)\n"
)
JUDGED = {  # what the model returns
    "losses": "q, v = (self.q(torch.cat([s, c], -1)) for c in (a, b))\n"
    "return q.square().mean(), (p - v[:, 0]).mean()",
    "the action": "q = self.q(torch.cat([s, a], -1))\nreturn b, q, self.q(torch.cat([s, b], -1))",
    "a dictionary": "value = lambda c: self.q(torch.cat((s, c), 1))\n"
    "return dict(q=value(a), p=value(b) - p, action=b)",
}
CODED = (
    "self.enc, self.mu = nn.Linear(24, 32), nn.Linear(32, 6)\n"
    "self.dec = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 24))"
)
DECODED = {  # what the decoder takes beside the code
    "zeros": "self.dec(z.new_zeros(len(x), 6))",
    "zeros like it": "self.dec(torch.zeros_like(z))",
    "noise": "self.dec(torch.randn_like(z))",
    "noise of its shape": "self.dec(torch.randn(len(x), 6))",
}


def found_in(models: ModuleType, made: str, before: str, text: str) -> dict[str, RoleDecision]:
    """Return the decisions for a model."""
    return infer_roles(models.model(made, before + "".join(f"    {line}\n" for line in text.split("\n")))())


@pytest.mark.parametrize("case", JUDGED)
def test_what_is_judged_and_returned_is_a_head(generated_models: ModuleType, case: str) -> None:
    """Both layers of the policy are heads for certain."""
    found = found_in(generated_models, POLICY, DRAW, JUDGED[case])
    for name in ("mu.weight", "spread.weight"):
        assert (found[name].role, found[name].doubt) == (Role.OUTPUT, Doubt.NONE), found[name].reason


@pytest.mark.parametrize("case", DECODED)
def test_what_is_decoded_is_no_certain_head(generated_models: ModuleType, case: str) -> None:
    """The layer of the code is in doubt where the decoder takes nothing else that is given."""
    text = f"z = self.mu(self.enc(x).relu())\nreturn self.dec(z), {DECODED[case]}, z"
    found = found_in(generated_models, CODED, "def forward(self, x):\n", text)["mu.weight"]
    assert found.role is Role.MATRIX or found.doubt is Doubt.ROLE, found.reason
