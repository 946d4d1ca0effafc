"""Gradients: of weights, which learned step sizes move, and of a score with respect to what a model is given."""

from types import ModuleType

import pytest
import torch

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

MOVED = (
    "self.w, self.rate = nn.Parameter(torch.zeros(16, 8)), nn.Parameter(torch.zeros(16, 8))\n"
    "self.head = nn.Linear(16, 5)"
)
LOSS = "def loss(self, w, x):\n    return F.linear(x, w).relu().square().mean()\n"
STEPS = {  # the weight that is used: one that its gradient has moved
    "a difference": "g, = torch.autograd.grad(self.loss(self.w, x), self.w, create_graph=True)\n"
    "w = self.w - self.rate.exp() * g",
    "an item of the gradients": "g = torch.autograd.grad(self.loss(self.w, x), [self.w])[0]\n"
    "w = self.w - F.softplus(self.rate) * g",
    "one by one": "fast, rates = [self.w], [self.rate]\n"
    "for _ in range(2):\n"
    "    made = torch.autograd.grad(self.loss(fast[0], x), fast, create_graph=True)\n"
    "    fast = [p - r * g.detach() for p, r, g in zip(fast, rates, made)]\n"
    "w, = fast",
    "by name": "fast = {'w': self.w}\n"
    "made = torch.autograd.grad(self.loss(fast['w'], x), fast.values())\n"
    "fast = {k: v.sub(getattr(self, 'rate') * g) for (k, v), g in zip(fast.items(), made)}\n"
    "w = fast['w']",
    "a function": "w = self.w - self.rate * torch.func.grad(self.loss)(self.w, x)",
    "a function of names": "g = torch.func.grad(lambda p, x: self.loss(p['w'], x))({'w': self.w}, x)\n"
    "w = torch.addcmul(self.w, self.rate, g['w'].clamp(-1, 1), value=-1)",
    "with its value": "g, value = torch.func.grad_and_value(self.loss)(self.w, x)\nw = self.w - g * self.rate",
    "clipped": "g, = torch.autograd.grad(self.loss(self.w, x), (self.w,))\n"
    "w = self.w - self.rate * (g / g.norm().clamp_min(1))",
}
SCORED = (
    "self.a, self.b, self.c = nn.Linear(6, 20), nn.Linear(20, 28), nn.Linear(28, 1, bias=False)\n"
    "self.d = nn.Linear(6, 6)"
)
SCORE = "def score(self, x):\n    return self.c(self.b(self.a(x).tanh()).tanh()).sum()\n"
RETURNED = {  # a gradient with respect to what is given
    "first of one": "x = x.requires_grad_()\ng, = torch.autograd.grad(self.score(x), x, create_graph=True)\nreturn g",
    "negated": "x.requires_grad_(True)\nreturn -torch.autograd.grad(self.score(x), [x], create_graph=True)[0]",
    "a function": "return torch.func.grad(self.score)(x)",
    "of each": "return torch.func.vmap(torch.func.grad(self.score))(x[None])",
    "turned": "return torch.func.jacrev(self.score)(x) @ torch.ones(6, 6)",
    "multiplied": "g, = torch.autograd.grad(self.score(x.requires_grad_()), x)\nreturn (self.d(x) * g).sum()",
    "steps along it": "for _ in range(3):\n    x = x - 0.1 * torch.func.grad(self.score)(x)\nreturn x",
}


def lines(text: str) -> str:
    """Return the lines of a forward."""
    return "def forward(self, x):\n" + "".join(f"    {line}\n" for line in text.split("\n"))


@pytest.mark.parametrize("case", STEPS)
def test_what_scales_a_gradient_is_no_matrix(generated_models: ModuleType, case: str) -> None:
    """The weight that is moved stays a matrix, its step sizes are element-wise, and both are certain."""
    body = f"{STEPS[case]}\nreturn self.head(F.linear(x, w).relu())"
    model = generated_models.model(MOVED, LOSS + lines(body))()
    model(torch.randn(3, 8))
    found = infer_roles(model)
    assert (found["w"].role, found["w"].doubt) == (Role.MATRIX, Doubt.NONE), found["w"].reason
    assert (found["rate"].role, found["rate"].doubt) == (Role.ELEMENTWISE, Doubt.NONE), found["rate"].reason


@pytest.mark.parametrize("case", RETURNED)
def test_a_score_whose_gradient_is_returned_is_a_head(generated_models: ModuleType, case: str) -> None:
    """The last projection is certainly a head, those before it are certainly matrices."""
    model = generated_models.model(SCORED, SCORE + lines(RETURNED[case]))()
    model(torch.randn(6))
    found = infer_roles(model)
    head = found["c.weight"]
    assert (head.role, head.doubt) == (Role.OUTPUT, Doubt.NONE), head.reason
    for name in ("a.weight", "b.weight"):
        assert (found[name].role, found[name].doubt) == (Role.MATRIX, Doubt.NONE), found[name].reason
