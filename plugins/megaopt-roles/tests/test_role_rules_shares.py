"""Projections that weigh what others make: shares of a mixture, scores of attention. They are hidden."""

from types import ModuleType

import pytest

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

MADE = (
    "self.enc, self.one, self.other = nn.LSTM(9, 20, batch_first=True), nn.Linear(20, 13), nn.Linear(20, 13)\n"
    "self.gate, self.more = nn.Linear(20, 1), nn.Linear(20, 1)\n"
    "self.last = nn.Linear(20, 13)"
)
BEGIN = [
    "h, _ = self.enc(x)",
    "g = torch.sigmoid(self.gate(h))",
    "a, b = self.one(h).softmax(-1), self.other(h).softmax(-1)",
]
MIXED = {
    "a share and its rest": "return torch.log(g * a + (1 - g) * b + 1e-9)",
    "the rest first": "r = 1.0 - g\nreturn r * a + b * g",
    "a share of a sum": "g = torch.sigmoid(self.gate(h) + self.more(h[:, :1]))\nreturn g * a + (1 - g) * b",
    "lerp": "return torch.lerp(a, b, g)",
    "mul": "return torch.add(torch.mul(a, g), torch.mul(b, 1 - g))",
    "positions that are copied": "p = (g * a).scatter_add(2, ids, (1 - g) * b)\nreturn p.clamp_min(1e-9).log()",
    "a loss of it": "p = g * a + (1 - g) * b\nreturn -p.gather(-1, ids).log().mean()",
}
POOLED = {
    "weights beside the prediction": "w = self.gate(h).softmax(1)\nreturn self.last((w * h).sum(1)), w.squeeze(-1)",
    "by a product": "w = self.gate(h).squeeze(-1).softmax(dim=1)\ny = w[:, None].bmm(h)\nreturn self.last(y[:, 0]), w",
    "by an einsum": "w = torch.softmax(self.gate(h), 1)\nreturn self.last(torch.einsum('bti,btd->bd', w, h)), w",
    "all that follows": "w = self.gate(self.last(h).relu()[..., :1].expand(-1, -1, 20)).softmax(1)\n"
    "return (w * self.one(h)).sum(1)",
}
RETURNED = {
    "a share beside the mixture": "return g * a + (1 - g) * b, g",
    "a part of what is returned": "p, m = self.one(h).split([12, 1], -1)\nm = m.sigmoid()\n"
    "return m * p + (1 - m) * x.sum(-1, True)",
}


def decision(models: ModuleType, rest: str, name: str) -> tuple[Role, Doubt]:
    """Return what a layer of a model is, and in what doubt, which goes on so."""
    lines = "".join(f"    {line}\n" for line in [*BEGIN, *rest.split("\n")])
    found = infer_roles(models.model(MADE, f"def forward(self, x, ids):\n{lines}")())[name]
    return found.role, found.doubt


@pytest.mark.parametrize("case", {**MIXED, **POOLED})
def test_what_weighs_is_hidden(generated_models: ModuleType, case: str) -> None:
    """A matrix for certain; what it weighs is the output where nothing follows."""
    rest = {**MIXED, **POOLED}[case]
    assert decision(generated_models, rest, "gate.weight") == (Role.MATRIX, Doubt.NONE)
    head = "one.weight" if "self.last(" not in rest or case == "all that follows" else "last.weight"
    assert decision(generated_models, rest, head) == (Role.OUTPUT, Doubt.NONE)


def test_a_share_that_is_returned_by_itself_is_in_doubt(generated_models: ModuleType) -> None:
    """It may be a prediction: of what is in front, say."""
    assert decision(generated_models, RETURNED["a share beside the mixture"], "gate.weight")[1] is Doubt.ROLE


def test_a_part_that_weighs_says_nothing_of_the_others(generated_models: ModuleType) -> None:
    """What makes them all is an output for certain."""
    found = decision(generated_models, RETURNED["a part of what is returned"], "one.weight")
    assert found == (Role.OUTPUT, Doubt.NONE)
