"""Stacks of matrices behind which no layer stands: heads side by side are outputs, experts of a last layer are not."""

from types import ModuleType

import pytest
import torch

from megaopt_core.params import Doubt, Role, RoleDecision
from megaopt_core.routing import infer_roles

MADE = (
    "self.tok, self.up, self.down = nn.Embedding(50, 12), nn.Linear(12, 20), nn.Linear(20, 12)\n"
    "self.gate, self.one = nn.Linear(12, 3), nn.Linear(12, 1)\n"
    "self.w, self.v = nn.Parameter(torch.zeros(3, 12, 7)), nn.Parameter(torch.zeros(3, 7, 12))\n"
    "self.s, self.t = nn.Parameter(torch.zeros(3, 7, 1)), nn.Parameter(torch.zeros(3, 7, 1))\n"
    "self.b, self.u = nn.Parameter(torch.zeros(3, 1, 7)), nn.Parameter(torch.zeros(3, 12, 1))\n"
)
BEGIN = "h = self.tok(ids)\nh = h + self.down(self.up(h).relu())\n"
HEADS = {  # the stack, and what is returned
    "an einsum": ("w", "return torch.einsum('btd,kdv->bktv', h, self.w)"),
    "an einsum of each with its own": ("v", "return torch.einsum('bkd,kvd->bkv', h, self.v)"),
    "a batch": ("w", "return torch.bmm(h.transpose(0, 1), self.w)"),
    "a batch with a bias": ("w", "return torch.baddbmm(self.b, h.transpose(0, 1), self.w)"),
    "a broadcast product": ("w", "return h[:, None] @ self.w + self.b"),
    "one after the other": ("v", "return torch.stack([F.linear(h, self.v[k]) for k in range(3)], 1)"),
    "a list": ("w", "return [h @ w for w in self.w]"),
    "a dictionary": ("w", "return {str(k): h @ self.w[k] for k in range(3)}"),
    "a map": ("w", "return torch.vmap(torch.matmul, in_dims=(None, 0))(h, self.w)"),
    "members that are averaged": ("w", "return (h[:, None] @ self.w).softmax(-1).mean(1)"),
    "the least of critics": ("u", "return torch.bmm(h.transpose(0, 1), self.u).min(0).values"),
    "an error of critics": (
        "u",
        "y = (h[:, None] @ self.u).squeeze(-1)\nreturn F.mse_loss(y, ids[:, None].float().expand_as(y))",
    ),
    "a loss of all members": (
        "u",
        "y = (h[:, None] @ self.u).squeeze(-1) - ids[:, None]\nreturn y.square().mean()",
    ),
    "a loss of classes": (
        "w",
        "y = torch.einsum('bkd,kdv->bkv', h, self.w)\nreturn F.cross_entropy(y.mT, ids)",
    ),
}
EXPERTS = {  # what goes on with the stream `h`; `v` makes what is added to it
    "mixed at once": "g = self.gate(h).softmax(-1)\ny = torch.einsum('btd,edf->btef', h, self.w).relu()\n"
    "return h + torch.einsum('btef,efd,bte->btd', y, self.v, g)",
    "mixed afterwards": "g = self.gate(h).softmax(-1)\ny = torch.einsum('btd,edf->btef', h, self.w).relu()\n"
    "y = torch.einsum('btef,efd->bted', y, self.v)\nreturn h + (y * g.unsqueeze(-1)).sum(-2)",
    "mixed by an einsum": "g = self.gate(h).sigmoid()\ny = (h[:, None] @ self.w).relu() @ self.v\n"
    "return h + torch.einsum('betd,bte->btd', y, g)",
    "one after the other": "g, y = self.gate(h).softmax(-1), 0\nfor e in range(3):\n"
    "    y = y + g[..., e : e + 1] * ((h @ self.w[e]).relu() @ self.v[e])\nreturn h + y",
    "the best": "g, i = self.gate(h).softmax(-1).max(-1)\n"
    "y = (h.unsqueeze(-2) @ self.w[i]).relu() @ self.v[i]\nreturn h + y.squeeze(-2) * g[..., None]",
    "without a gate": "return h + ((h[:, None] @ self.w).relu() @ self.v).mean(1)",
    "a list": "return h + sum((h @ w).relu() @ v for w, v in zip(self.w, self.v))",
    "without a stream": "g = self.gate(h).softmax(-1)\ny = torch.einsum('btef,efd->bted', "
    "torch.einsum('btd,edf->btef', h, self.w).relu(), self.v)\nreturn (y * g.unsqueeze(-1)).sum(-2)",
}


def decided(models: ModuleType, rest: str, name: str) -> RoleDecision:
    """Return what a weight is of a model that goes on so, once it has run."""
    model = models.model_with_forward(MADE, "ids", BEGIN + rest)()
    model(torch.zeros(2, 3, dtype=torch.long))
    return infer_roles(model)[name]


@pytest.mark.parametrize("case", HEADS)
def test_a_stack_that_is_returned_is_a_head(generated_models: ModuleType, case: str) -> None:
    """It is one for certain, whatever is made of its members afterwards."""
    name, rest = HEADS[case]
    found = decided(generated_models, rest, name)
    assert (found.role, found.doubt) == (Role.OUTPUT, Doubt.NONE), found.reason


@pytest.mark.parametrize("case", EXPERTS)
def test_experts_of_a_last_layer_are_no_heads(generated_models: ModuleType, case: str) -> None:
    """They are matrices, or in doubt; those that feed them are matrices for certain."""
    found = decided(generated_models, EXPERTS[case], "v")
    assert found.role is Role.MATRIX or found.doubt is Doubt.ROLE, found.reason
    first = decided(generated_models, EXPERTS[case], "w")
    assert (first.role, first.doubt) == (Role.MATRIX, Doubt.NONE), first.reason


def test_a_stack_of_which_only_scores_are_made_is_in_doubt(generated_models: ModuleType) -> None:
    """A softmax of these weighs what the stack makes, which is returned: the last layer of a graph network, say."""
    rest = (
        "y = h[:, None] @ self.w\ne = F.leaky_relu(y @ self.s + (y @ self.t).mT, 0.2).softmax(-1)\n"
        "return torch.log_softmax((e @ y).mean(1), -1)"
    )
    assert decided(generated_models, rest, "w").doubt is Doubt.ROLE
