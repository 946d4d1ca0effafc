"""Losses and other numbers that a model returns: they hold no features, and nothing is added to a stream in them."""

from types import ModuleType

import pytest
import torch

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

VAE = (
    "self.enc, self.mu, self.logvar = nn.Linear(30, 24), nn.Linear(24, 7), nn.Linear(24, 7)\n"
    "self.dec, self.norm, self.out = nn.Linear(7, 20), nn.LayerNorm(20), nn.Linear(20, 30)"
)
PENALTIES = {  # how far a code is from the prior, as one number
    "a mean": "(0.5 * (mu ** 2 + logvar.exp() - 1 - logvar)).mean()",
    "a sum, then a mean": "(0.5 * (mu ** 2 + logvar.exp() - 1 - logvar)).sum(-1).mean()",
    "a sum of all": "0.5 * torch.sum(mu.pow(2) + logvar.exp() - 1 - logvar) / len(x)",
    "a method": "self.penalty(mu, logvar)",
    "clamped before": "(mu ** 2 + logvar.exp() - 1 - logvar).sum(-1).clamp(min=0.1).mean()",
}


@pytest.mark.parametrize("case", PENALTIES)
def test_codes_that_a_loss_holds_to_a_prior(generated_models: ModuleType, case: str) -> None:
    """What a decoder takes, and a penalty is made of, is hidden: only the reconstruction is an output."""
    methods = (
        "def penalty(self, mu, logvar):\n    return -0.5 * (1 + logvar - mu.square() - logvar.exp()).mean()\n"
        "def forward(self, x):\n    h = self.enc(x).relu()\n    mu, logvar = self.mu(h), self.logvar(h)\n"
        "    z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()\n"
        f"    y = self.out(self.norm(self.dec(z)))\n    kl = {PENALTIES[case]}\n"
        "    return {'loss': F.mse_loss(y, x) + 0.1 * kl, 'kl': kl}"
    )
    model = generated_models.model(VAE, methods)()
    model(torch.zeros(2, 30))
    found = infer_roles(model)
    assert [(name, one.reason) for name, one in found.items() if one.doubt is not Doubt.NONE] == []
    assert {found[f"{name}.weight"].role for name in ("enc", "mu", "logvar", "dec")} == {Role.MATRIX}
    assert found["out.weight"].role is Role.OUTPUT


SCORES = {  # what keeps a projection an output that other layers take, too: its loss is held against what is given
    "classes": "F.cross_entropy(a, y)",
    "a likelihood": "-torch.distributions.Normal(a, 1.0).log_prob(x).mean()",
    "an error": "(a - x).pow(2).mean()",
}


@pytest.mark.parametrize("case", SCORES)
def test_outputs_that_other_layers_take(generated_models: ModuleType, case: str) -> None:
    """A projection whose output a loss holds against what is given is no hidden matrix for certain."""
    made = (
        "self.e, self.a, self.n = nn.Linear(30, 24), nn.Linear(24, 30), nn.LayerNorm(24)\n"
        "self.back, self.h = nn.Linear(30, 24), nn.Linear(24, 9)"
    )
    methods = (
        "def forward(self, x, y):\n    h = self.n(self.e(x))\n    a = self.a(h)\n"
        f"    last = self.h(self.n(self.back(a)))\n    return {SCORES[case]} + F.cross_entropy(last, y)"
    )
    found = infer_roles(generated_models.model(made, methods)())
    assert found["a.weight"].role is Role.OUTPUT or found["a.weight"].doubt is Doubt.ROLE
    assert (found["h.weight"].role, found["h.weight"].doubt) == (Role.OUTPUT, Doubt.NONE)


KEPT = {  # a number that scales or shifts features, which are no number then
    "a product": "x * x.mean()",
    "a quotient": "x / x.abs().sum()",
    "a difference": "x - torch.mean(x)",
}


@pytest.mark.parametrize("case", KEPT)
def test_numbers_beside_features(generated_models: ModuleType, case: str) -> None:
    """What is scaled by a number is none: a state that is returned, and goes on, stays in doubt."""
    made = "self.e, self.a, self.h = nn.Linear(30, 24), nn.Linear(24, 11), nn.Linear(11, 9)\nself.n = nn.LayerNorm(24)"
    methods = f"def forward(self, x):\n    x = self.a(self.n(self.e(x)))\n    x = {KEPT[case]}\n    return self.h(x), x"
    found = infer_roles(generated_models.model(made, methods)())
    assert found["a.weight"].doubt is Doubt.ROLE


RETURNS = {  # a model that returns its prediction, which another layer takes, or a loss
    "a branch": "if y is None:\n    return a\nreturn loss",
    "an expression": "return a if y is None else loss",
    "a variable": "out = loss\nif y is None:\n    out = a\nreturn out",
}


@pytest.mark.parametrize("case", RETURNS)
def test_a_prediction_or_a_loss(generated_models: ModuleType, case: str) -> None:
    """Where either is returned, the prediction is one: its projection is no hidden matrix for certain."""
    made = (
        "self.e, self.a, self.n = nn.Linear(30, 24), nn.Linear(24, 11), nn.LayerNorm(24)\n"
        "self.back, self.h = nn.Linear(11, 24), nn.Linear(24, 9)"
    )
    methods = (
        "def forward(self, x, y=None):\n    a = self.a(self.n(self.e(x)))\n"
        "    loss = (self.h(self.n(self.back(a))) * a.mean()).mean()\n    "
        + RETURNS[case].replace("\n", "\n    ")
    )
    found = infer_roles(generated_models.model(made, methods)())
    assert found["a.weight"].role is Role.OUTPUT or found["a.weight"].doubt is Doubt.ROLE
