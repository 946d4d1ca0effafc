"""Softmaxes that weigh what other layers predict: shares of it, or predictions themselves, which is in doubt."""

from types import ModuleType

import pytest

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

MADE = (
    "self.enc, self.parts, self.gate = nn.LSTM(9, 20, batch_first=True), nn.Linear(20, 5), nn.Linear(20, 5)\n"
    "self.act = nn.Softmax(-1)"
)
BEGIN = ["h = self.enc(x)[0]", "p = self.parts(h)"]
SUMMED = {  # what is returned where the products are added up
    "by hand": "return (self.gate(h).softmax(-1) * p).sum(-1)",
    "beside the parts": "w = self.act(self.gate(h))\nreturn {'score': (p * w).sum(-1), 'parts': p}",
    "a mean": "return torch.softmax(self.gate(h), -1).mul(p).mean(dim=-1), p",
    "moved in between": "w = self.gate(h).softmax(-1)\nreturn (w * p).mT.sum(1)",
    "an einsum": "return torch.einsum('btk,btk->bt', self.gate(h).softmax(-1), p)",
    "a loss of it": "w = self.gate(h).softmax(-1)\nreturn F.mse_loss((w * p).sum(-1), y)",
}
KEPT = {  # where it is a prediction, whatever else it multiplies
    "scaled": "return self.gate(h).softmax(-1) * p[..., :1].exp()",
    "the mean of something fixed": "w = self.gate(h).softmax(-1)\nreturn p, (w * torch.arange(5)).sum(-1)",
    "an entropy": "w = self.gate(h).softmax(-1)\nreturn p, w, -(w * w.log()).sum(-1)",
    "returned by itself": "w = self.gate(h)\nreturn w, (w.softmax(-1) * p).sum(-1)",
    "in a loss of classes": "w = self.gate(h)\n"
    "return F.cross_entropy(w.flatten(0, 1), y.flatten()) + (w.softmax(-1) * p).sum(-1).mean()",
}


def head(models: ModuleType, rest: str, name: str = "gate.weight") -> tuple[Role, Doubt]:
    """Return what a layer of a model is, and in what doubt, which goes on so."""
    lines = "".join(f"    {line}\n" for line in [*BEGIN, *rest.split("\n")])
    found = infer_roles(models.model(MADE, f"def forward(self, x, y):\n{lines}")())[name]
    return found.role, found.doubt


@pytest.mark.parametrize("case", SUMMED)
def test_shares_of_predictions_are_in_doubt(generated_models: ModuleType, case: str) -> None:
    """What they weigh is an output; of what weighs it the source does not say whether it is a prediction, too."""
    assert head(generated_models, SUMMED[case])[1] is Doubt.ROLE
    assert head(generated_models, SUMMED[case], "parts.weight") == (Role.OUTPUT, Doubt.NONE)


@pytest.mark.parametrize("case", KEPT)
def test_predictions_stay_certain(generated_models: ModuleType, case: str) -> None:
    """A softmax that is scaled, whose mean is taken of fixed values, or that stands by itself, is a prediction."""
    assert head(generated_models, KEPT[case]) == (Role.OUTPUT, Doubt.NONE)
