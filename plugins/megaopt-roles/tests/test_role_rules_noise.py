"""Weights with noise: layers of Bayes, and those that explore. What noise is added to is the weight."""

from types import ModuleType

import pytest
import torch

from megaopt_core.params import Doubt, Role, RoleDecision
from megaopt_core.routing import infer_roles

MADE = (
    "self.mean, self.rho = nn.Parameter(torch.zeros(16, 8)), nn.Parameter(torch.zeros(16, 8))\n"
    "self.register_buffer('eps', torch.zeros(16, 8)); self.register_buffer('rows', torch.zeros(16))\n"
    "self.register_buffer('columns', torch.zeros(8)); self.head = nn.Linear(16, 5)"
)
FILL = "    self.eps.normal_(); self.rows.copy_(torch.randn(16)); self.columns.data.copy_(torch.randn(8))\n"
METHODS = (
    f"def fill(self):\n{FILL}"
    "def f(self, n):\n    x = torch.randn(n)\n    return x.sign().mul_(x.abs().sqrt_())\n"
    "def forward(self, x):\n    sigma, loss = F.softplus(self.rho), 0\n"
)
DRAWN = {  # the weight that is drawn
    "like it": "w = self.mean + sigma * torch.randn_like(self.mean)",
    "of its shape": "w = self.mean + torch.exp(0.5 * self.rho) * torch.randn(self.mean.shape, device=x.device)",
    "turned around": "w = sigma * torch.empty_like(sigma).normal_() + self.mean",
    "in one step": "w = torch.addcmul(self.mean, sigma, torch.randn_like(sigma))",
    "new": "w = self.mean + sigma * self.mean.data.new(self.mean.size()).normal_(0, 1)",
    "a distribution": "w = torch.distributions.Normal(self.mean, sigma).rsample()",
    "a distribution by name": "q = torch.distributions.Normal(loc=self.mean, scale=sigma)\n"
    "w = torch.distributions.Independent(q, 1).rsample()",
    "a buffer": "w = self.mean + self.rho * self.eps if self.training else self.mean",
    "factors": "w = self.mean + self.rho * (self.rows.unsqueeze(1) * self.columns)",
    "factors that are drawn": "w = self.mean + self.rho * torch.outer(self.f(16), self.f(8))",
    "a difference": "w = self.mean - sigma * torch.rand_like(sigma).sub(0.5).mul(2)",
}
ASKED = {  # what else is done with it
    "the divergence of two": "q = torch.distributions.Normal(self.mean, sigma)\nw = q.rsample()\n"
    "p = torch.distributions.Normal(torch.zeros_like(self.mean), torch.ones_like(sigma))\n"
    "loss = torch.distributions.kl_divergence(q, p).sum()",
    "how likely it is": "w = self.mean + sigma * torch.randn_like(sigma)\n"
    "q, p = torch.distributions.Normal(self.mean, sigma), torch.distributions.Normal(0, 1)\n"
    "loss = (q.log_prob(w) - p.log_prob(w)).sum()",
    "the divergence by hand": "w = self.mean + sigma * torch.randn_like(sigma)\n"
    "loss = 0.5 * (sigma.pow(2) + self.mean.pow(2) - 1 - 2 * sigma.log()).sum()",
    "a penalty": "w = self.mean + sigma * torch.randn_like(sigma)\nloss = (self.mean ** 2).sum() + self.rho.mean()",
}
OTHERWISE = {  # no noise, or nothing that it is added to
    "a mask": "w = self.mean + self.rho * self.head.weight.new_ones(16, 8)",
    "two by chance": "a = torch.rand(1)\nw = a * self.mean + (1 - a) * self.rho",
    "two that are scaled": "w = self.mean * torch.randn_like(sigma) + self.rho * torch.randn_like(sigma)",
}


def roles_of(models: ModuleType, body: str, returned: str) -> dict[str, RoleDecision]:
    """Return the decisions for a model that draws `w` and may add a `loss`."""
    text = METHODS + "".join(f"    {line}\n" for line in [*body.split("\n"), f"return {returned}"])
    model = models.model(MADE, text)()
    model(torch.randn(3, 8))
    return infer_roles(model)


@pytest.mark.parametrize("case", {**DRAWN, **ASKED})
def test_what_noise_is_added_to_is_the_weight(generated_models: ModuleType, case: str) -> None:
    """It is a matrix, what scales the noise is element-wise, and both are certain."""
    found = roles_of(
        generated_models, {**DRAWN, **ASKED}[case], "self.head(F.linear(x, w).relu()).mean() + loss"
    )
    assert (found["mean"].role, found["mean"].doubt) == (Role.MATRIX, Doubt.NONE), found["mean"].reason
    assert (found["rho"].role, found["rho"].doubt) == (Role.ELEMENTWISE, Doubt.NONE), found["rho"].reason
    assert found["head.weight"].role is Role.OUTPUT


@pytest.mark.parametrize("case", DRAWN)
def test_the_mean_of_a_last_layer_is_a_head(generated_models: ModuleType, case: str) -> None:
    """Where nothing follows, the weight that noise is added to is an output."""
    found = roles_of(generated_models, DRAWN[case], "F.linear(x, w)")
    assert found["mean"].role is Role.OUTPUT, found["mean"].reason
    assert (found["rho"].role, found["rho"].doubt) == (Role.ELEMENTWISE, Doubt.NONE), found["rho"].reason


@pytest.mark.parametrize("case", DRAWN)
@pytest.mark.parametrize("returned", ["self.head(F.linear(x, w).relu())", "F.linear(x, w)"])
def test_an_example_takes_no_scale_for_a_weight(
    generated_models: ModuleType, case: str, returned: str
) -> None:
    """Its memory shows two parameters that make what a product contracts; which of them the source tells."""
    text = METHODS + "".join(f"    {line}\n" for line in [*DRAWN[case].split("\n"), f"return {returned}"])
    model = generated_models.model(MADE, text)()
    read, shown = infer_roles(model), infer_roles(model, example=torch.ones(3, 8))
    assert {name: (shown[name].role, shown[name].doubt) for name in ("mean", "rho")} == {
        name: (read[name].role, read[name].doubt) for name in ("mean", "rho")
    }


@pytest.mark.parametrize("case", OTHERWISE)
def test_other_sums_make_no_certain_scale(generated_models: ModuleType, case: str) -> None:
    """A weight that a mask multiplies, or chance, may be one."""
    found = roles_of(generated_models, OTHERWISE[case], "self.head(F.linear(x, w).relu())")["rho"]
    assert found.role is Role.MATRIX or found.uncertain


@pytest.mark.parametrize(
    "fill",
    [
        "for part in (self.rows, self.columns):\n        part.copy_(torch.randn_like(part))",
        "for part in [self.rows, self.columns]:\n        part.data.normal_()",
        "for name in ('rows', 'columns'):\n        getattr(self, name).normal_()",
        "for part, n in ((self.rows, 16), (self.columns, 8)):\n        part.copy_(torch.randn(n))",
    ],
)
def test_buffers_that_a_loop_fills(generated_models: ModuleType, fill: str) -> None:
    """One after the other, they hold noise as well."""
    methods = (
        f"def fill(self):\n    {fill}\n"
        "def forward(self, x):\n    w = self.mean + self.rho * torch.outer(self.rows, self.columns)\n"
        "    return self.head(F.linear(x, w).relu())"
    )
    found = infer_roles(generated_models.model(MADE, methods)())
    assert (found["mean"].role, found["mean"].doubt) == (Role.MATRIX, Doubt.NONE), found["mean"].reason
    assert (found["rho"].role, found["rho"].doubt) == (Role.ELEMENTWISE, Doubt.NONE), found["rho"].reason


@pytest.mark.parametrize(
    "buffers",
    [
        "self.register_buffer('rows', torch.randn(16)); self.register_buffer('columns', torch.randn(8))",
        "for name, n in (('rows', 16), ('columns', 8)):\n    self.register_buffer(name, torch.randn(n))",
        "self.register_buffer('rows', torch.empty(16).normal_())\n"
        "self.register_buffer('columns', torch.empty(8).normal_(), persistent=False)",
        "self.rows, self.columns = torch.randn(16), torch.randn(8)",
    ],
)
def test_buffers_that_are_drawn_once(generated_models: ModuleType, buffers: str) -> None:
    """Where no method of the layer draws them anew, somebody outside does."""
    made = f"{MADE.splitlines()[0]}\nself.head = nn.Linear(16, 5)\n{buffers}"
    methods = (
        "def forward(self, x):\n    w = self.mean + self.rho * torch.outer(self.rows, self.columns)\n"
        "    return self.head(F.linear(x, w).relu())"
    )
    found = infer_roles(generated_models.model(made, methods)())
    assert (found["mean"].role, found["mean"].doubt) == (Role.MATRIX, Doubt.NONE), found["mean"].reason
    assert (found["rho"].role, found["rho"].doubt) == (Role.ELEMENTWISE, Doubt.NONE), found["rho"].reason


def test_a_random_mask_is_no_noise(generated_models: ModuleType) -> None:
    """A weight under one is not certain to scale anything."""
    made = f"{MADE}\nself.register_buffer('mask', (torch.rand(16, 8) > 0.5).float())"
    methods = (
        "def forward(self, x):\n    return self.head(F.linear(x, self.mean + self.rho * self.mask).relu())"
    )
    found = infer_roles(generated_models.model(made, methods)())["rho"]
    assert found.role is Role.MATRIX or found.uncertain
