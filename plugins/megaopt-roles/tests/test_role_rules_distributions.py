"""Sums of projections of which a softmax is returned: distributions, as a dueling network makes them, and weights."""

from types import ModuleType

import pytest

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

MADE = (
    "self.body = nn.Sequential(nn.Linear(9, 20), nn.ReLU())\n"
    "self.value, self.gain = nn.Linear(20, 7), nn.Linear(20, 3 * 7)\n"
    "self.register_buffer('support', torch.linspace(-1, 1, 7))"
)
SUM = "h = self.body(x); v = self.value(h).view(-1, 1, 7); a = self.gain(h).view(-1, 3, 7)\nz = v + a - a.mean(1, True)"
RETURNED = {
    "a softmax": "torch.softmax(z, -1)",
    "its logarithm as well": "z.softmax(-1), F.log_softmax(z, -1)",
    "an expectation": "(z.softmax(2) * self.support).sum(2)",
    "an expectation as a product": "F.softmax(z, dim=2) @ self.support",
    "within bounds": "z.softmax(-1).clamp(min=1e-3)",
}
WEIGHING = {
    "what is given": "(z.softmax(-1) * x[:, None, :7]).sum(-1)",
    "another layer's output": "(z.softmax(1) * self.body(x)[:, None, :7]).sum(1)",
    "one with the other": "(v * a).sum(-1).softmax(-1)",
}


def roles_of(models: ModuleType, returned: str) -> list[tuple[Role, Doubt]]:
    """Return the decisions for the last layers of a model that returns this."""
    lines = [*SUM.split("\n"), f"return {returned}"]
    found = infer_roles(
        models.model(MADE, "def forward(self, x):\n" + "".join(f"    {one}\n" for one in lines))()
    )
    return [(found[name].role, found[name].doubt) for name in ("value.weight", "gain.weight")]


@pytest.mark.parametrize("case", RETURNED)
def test_a_distribution_that_is_returned(generated_models: ModuleType, case: str) -> None:
    """What it is made of is the output, for certain."""
    assert roles_of(generated_models, RETURNED[case]) == [(Role.OUTPUT, Doubt.NONE)] * 2


@pytest.mark.parametrize("case", WEIGHING)
def test_a_softmax_that_weighs(generated_models: ModuleType, case: str) -> None:
    """It may choose among what is given or made: no certain output."""
    assert all(doubt is Doubt.ROLE for _, doubt in roles_of(generated_models, WEIGHING[case]))
