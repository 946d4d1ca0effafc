"""What a product is part of: of the output beside a head, or of scores that a softmax chooses by."""

from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles


class Splines(nn.Module):
    """A layer of a Kolmogorov-Arnold network: a plain product, and one with powers of the input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.base = nn.Parameter(torch.randn(outputs, inputs))
        self.spline = nn.Parameter(torch.randn(outputs, inputs, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both."""
        powers = torch.stack([x**i for i in range(5)], -1)
        spline = functional.linear(powers.view(x.size(0), -1), self.spline.view(self.outputs, -1))
        return functional.linear(functional.silu(x), self.base) + spline


class Beside(Splines):
    """Returns both, one beside the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one pair."""
        powers = torch.stack([x**i for i in range(5)], -1)
        spline = functional.linear(powers.view(x.size(0), -1), self.spline.view(self.outputs, -1))
        return torch.cat([functional.linear(functional.silu(x), self.base), spline], -1)


def test_what_is_added_to_a_head_is_one() -> None:
    """The layer before stays a hidden one."""
    model = nn.Sequential(Splines(6, 7), Splines(7, 4))
    assert model(torch.randn(2, 6)).shape == (2, 4)
    found = infer_roles(model)
    assert (found["0.spline"].role, found["0.spline"].doubt) == (Role.MATRIX, Doubt.NONE)
    for name in ("1.base", "1.spline"):
        assert (found[name].role, found[name].doubt) == (Role.OUTPUT, Doubt.NONE), found[name]


def test_what_lies_beside_a_head_is_in_doubt() -> None:
    """It may be another head, or none."""
    assert infer_roles(nn.Sequential(Splines(6, 7), Beside(7, 4)))["1.spline"].uncertain


class Shortened(nn.Module):
    """Attends to fewer keys and values than there are positions, as Linformer does."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(6, 6) for _ in range(3))
        self.keys, self.values = (nn.Parameter(torch.randn(8, 4)) for _ in range(2))
        self.out, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        k = torch.einsum("bnd,nk->bkd", self.key(x), self.keys)
        v = torch.einsum("bnd,nk->bkd", self.value(x), self.values)
        return self.head(x + self.out((self.query(x) @ k.mT).softmax(-1) @ v))


class Learned(Shortened):
    """Chooses among keys by learned queries."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        k = torch.einsum("bnd,nk->bkd", self.key(x), self.keys)
        return self.head(self.out(k.softmax(1).mT @ k))


@pytest.mark.parametrize("name", ["keys", "values"])
def test_what_makes_fewer_keys_of_keys_is_a_matrix(name: str) -> None:
    """Queries meet an activation, not its rows."""
    model = Shortened()
    assert model(torch.randn(2, 8, 6)).shape == (2, 8, 3)
    decision = infer_roles(model)[name]
    assert (decision.role, decision.doubt) == (Role.MATRIX, Doubt.NONE), decision


def test_what_a_softmax_is_taken_of_at_once_chooses() -> None:
    """Its rows met activations."""
    decision = infer_roles(Learned())["keys"]
    assert (decision.role, decision.doubt) == (Role.ELEMENTWISE, Doubt.ROLE), decision


def test_parts_begin_no_stream(generated_models):
    """A head as wide as a layer of which parts are taken, in a sum with one of these, adds to no stream of its."""
    made = "self.a, self.t = nn.Linear(24, 16), nn.Linear(16, 8)\nself.b, self.o = nn.Linear(24, 8), nn.Linear(8, 8)"
    forward = (
        "t = self.t(self.a(x).relu())\nx = x - t[:, :4] @ self.back\n"
        "return x, t[:, 4:] @ self.front + self.o(self.b(x).relu())"
    )
    buffers = (
        "\nself.register_buffer('back', torch.ones(4, 24))\nself.register_buffer('front', torch.ones(4, 8))"
    )
    model = generated_models.model_with_forward(made + buffers, "x", forward)
    found = infer_roles(model())
    assert found["o.weight"].doubt is Doubt.ROLE, found["o.weight"].reason
    assert (found["t.weight"].role, found["t.weight"].doubt) == (Role.MATRIX, Doubt.NONE)


POOLED = """
class Pooled(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.norm = nn.Linear(width, 16), nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
    def forward(self, x):
        x = self.first(x)
        return x + self.mlp(self.norm(x))
"""
COMPARED = {  # what is done with the outputs of two towers
    "matmul": "torch.matmul(a, b.t())",
    "scaled": "F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T * self.scale.exp() - 3",
    "einsum": "torch.einsum('id,jd->ij', a, b)",
    "sum of products": "(a * b).sum(-1)",
    "the other first": "b @ a.mT",
    "loss": "-F.logsigmoid(a @ b.t() * (2 * torch.eye(len(a)) - 1)).mean()",
    "cosine": "F.cosine_similarity(a, b)",
    "in batches": "torch.bmm(a[:, None], b[:, :, None]).flatten()",
}


@pytest.mark.parametrize("how", COMPARED)
def test_what_is_compared_is_not_added(generated_models: ModuleType, how: str) -> None:
    """A tower's last layer adds nothing to the stream of the other tower, however wide that is: it may be a head."""
    made = (
        "self.image, self.words, self.text = Pooled(9), nn.Embedding(40, 16), Pooled(16)\n"
        "self.last, self.scale = nn.Linear(16, 16), nn.Parameter(torch.tensor(2.0))"
    )
    methods = (
        "def forward(self, image, ids):\n    a, b = self.last(self.text(self.words(ids))), self.image(image)\n"
        f"    return {COMPARED[how]}"
    )
    model = generated_models.model(made, methods, POOLED)()
    model(torch.randn(3, 9), torch.arange(3))
    found = infer_roles(model)
    assert found["last.weight"].doubt is Doubt.ROLE, found["last.weight"].reason
    for name in ("text.mlp.0.weight", "text.first.weight", "image.mlp.0.weight"):
        assert (found[name].role, found[name].doubt) == (Role.MATRIX, Doubt.NONE), found[name].reason
