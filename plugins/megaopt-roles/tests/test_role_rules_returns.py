"""What a model returns in several ways, or scores by a loss: its last projections are its heads."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from megaopt_core.params import Role, RoleDecision
from megaopt_core.params._roles import Doubt
from megaopt_core.routing import infer_roles

BRANCHES = {  # returns of two branches: dictionaries of different keys
    "probabilities, and a loss in training": (
        "p = self.o(self.a(x).relu()).sigmoid()\n"
        "if y is not None:\n    return {'prob': p, 'loss': F.binary_cross_entropy(p, y)}\nreturn {'prob': p}"
    ),
    "a loss alone": (
        "p = self.o(self.a(x).relu()).sigmoid()\n"
        "if y is not None:\n    return {'loss': F.binary_cross_entropy(p, y)}\nreturn {'prob': p}"
    ),
    "two uses of one net": (
        "if self.training:\n    return {'loss': F.mse_loss(self.o(self.a(x + y).relu()), y)}\n"
        "return {'action': self.o(self.a(x).relu())}"
    ),
    "one dictionary, put together in branches": (
        "p = self.o(self.a(x).relu())\nif y is None:\n    out = {'prob': p}\n"
        "else:\n    out = {'loss': F.mse_loss(p, y)}\nreturn out"
    ),
}


def roles_of(models: ModuleType, made: str, forward: str) -> dict[str, RoleDecision]:
    """Return the decisions for a model."""
    with torch.device("meta"):
        return infer_roles(models.model_with_forward(made, "x, y=None", forward)())


@pytest.mark.parametrize("case", BRANCHES)
def test_dictionaries_of_different_keys(generated_models, case):
    """What either branch returns is returned."""
    found = roles_of(generated_models, "self.a, self.o = nn.Linear(8, 9), nn.Linear(9, 1)", BRANCHES[case])
    head = found["o.weight"]
    assert (head.role, head.doubt) == (Role.OUTPUT, Doubt.NONE), head.reason
    assert (found["a.weight"].role, found["a.weight"].doubt) == (Role.MATRIX, Doubt.NONE)


BODY = "self.up, self.down, self.norm = nn.Linear(8, 32), nn.Linear(32, 8), nn.LayerNorm(8)\nself.o = nn.Linear(8, 8)\n"
FEATURES = "h = self.norm(x + self.down(self.up(x).relu()))\n"
HIDDEN_WIDTH = {  # heads as wide as the model: how more is made, what is returned, whether the head is certain
    "a score": ("", "return self.o(h)", Doubt.ROLE),
    "classes": ("", "return F.cross_entropy(self.o(h), y)", Doubt.NONE),
    "classes, by log-probabilities": ("", "return F.nll_loss(self.o(h).log_softmax(-1), y)", Doubt.NONE),
    "classes, by a module": (
        "self.loss = nn.CrossEntropyLoss()",
        "return self.loss(self.o(h), y)",
        Doubt.NONE,
    ),
    "a regression": ("", "return F.mse_loss(self.o(h), y)", Doubt.NONE),
    "a regression by hand": ("", "return ((self.o(h) - y) ** 2).mean()", Doubt.NONE),
    "an error of size": ("", "return torch.abs(y - self.o(h)).sum()", Doubt.NONE),
    "an error times itself": ("", "d = self.o(h).sub(y)\nreturn (d * d).mean()", Doubt.NONE),
    "a power of an error": ("", "return (self.o(h) - y).pow(2).mean()", Doubt.NONE),
    "what two layers make": (
        "self.k = nn.Linear(8, 8)",
        "return ((self.o(h) - self.k(y)) ** 2).mean()",
        Doubt.ROLE,
    ),
    "a contrast": (
        "self.k = nn.Linear(8, 8)",
        "return F.cross_entropy(self.o(h) @ self.k(y).T, torch.arange(4))",
        Doubt.ROLE,
    ),
    "beside boxes": (
        "self.box = nn.Linear(8, 4)",
        "return {'classes': self.o(h), 'boxes': self.box(h)}",
        Doubt.NONE,
    ),
    "beside boxes of a deeper head": (
        "self.box = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))",
        "return self.o(h), self.box(h)",
        Doubt.NONE,
    ),
    "beside a head of something else": (
        "self.box = nn.Linear(8, 4)",
        "return self.o(h), self.box(y)",
        Doubt.ROLE,
    ),
}


@pytest.mark.parametrize("case", HIDDEN_WIDTH)
def test_a_head_as_wide_as_the_model(generated_models, case):
    """A loss, or a head beside it, tells that it is one; its width alone leaves that open."""
    made, result, doubt = HIDDEN_WIDTH[case]
    found = roles_of(generated_models, BODY + made, FEATURES + result)
    head = found["o.weight"]
    assert head.doubt is doubt, head.reason
    assert doubt is Doubt.ROLE or head.role is Role.OUTPUT
    for name in ("up.weight", "down.weight"):
        assert (found[name].role, found[name].doubt) == (Role.MATRIX, Doubt.NONE), found[name].reason


class Denoiser(nn.Module):
    """Layers of one width, of whose output a loss is made by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.o = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        noise = torch.randn_like(x)
        return (self.o(self.b(self.a(x + noise).relu()).relu()) - noise).square().mean()


class Adding(Denoiser):
    """The last layer adds to a stream."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        h = self.a(x)
        h = h + self.o(self.b(h).relu())
        return (h - x).square().mean()


@pytest.mark.parametrize(("model", "role"), [(Denoiser(), Role.OUTPUT), (Adding(), Role.MATRIX)])
def test_what_a_loss_by_hand_takes_is_a_head(model: Denoiser, role: Role) -> None:
    """In a model of one width, too; a stream that several layers added to is none of its layers' prediction."""
    found = infer_roles(model)
    assert found["o.weight"].role is role
    assert [found[f"{name}.weight"].role for name in "ab"] == [Role.MATRIX] * 2


class OwnNorm(nn.Module):
    """A norm whose gain has a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what has a mean square of one, scaled."""
        return x * self.gamma / x.square().mean(-1, keepdim=True).sqrt()


class OtherWidthInside(nn.Module):
    """A table of one width, layers of another, and what they made, if it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.widen = nn.Linear(16, 24)
        self.norms = nn.ModuleList(OwnNorm() for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(24, 96) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(96, 24) for _ in range(2))
        self.head = nn.Linear(24, 50)

    def forward(self, ids: torch.Tensor, details: bool = False) -> Any:
        """Return the logits, and hidden states where details are asked for."""
        x = self.widen(self.embed(ids))
        hidden = [x]
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(torch.relu(up(norm(x))))
            hidden.append(x)
        logits = self.head(x)
        return (logits, hidden) if details else logits


def test_norms_of_ones_own_tell_hidden_widths() -> None:
    """States that a model returns on request are as wide as its norms, whatever these call their gain."""
    found = infer_roles(OtherWidthInside())
    assert {name for name, decision in found.items() if decision.uncertain} == set()
    assert found["widen.weight"].role is Role.MATRIX
    assert found["head.weight"].role is Role.OUTPUT


@pytest.mark.parametrize(
    ("shape", "result", "role"),
    [
        ((1, 8), "F.linear(h, self.w).squeeze(-1)", Role.OUTPUT),
        ((1, 8), "h @ self.w.T", Role.OUTPUT),
        ((8, 1), "(h @ self.w)[:, 0].sigmoid()", Role.OUTPUT),
        ((1, 8), "self.out(h * F.linear(h, self.w).sigmoid())", Role.ELEMENTWISE),
        ((1, 8), "self.out(h) + (h * self.w).sum(-1, keepdim=True)", Role.ELEMENTWISE),
    ],
    ids=["linear", "turned", "stored [in, out]", "a gate", "a gain"],
)
def test_a_score_that_is_made_by_hand(
    generated_models: ModuleType, shape: tuple[int, int], result: str, role: Role
) -> None:
    """One row of a parameter is a head where its product is what the model returns, as it is in a linear layer."""
    made = f"self.a, self.out, self.w = nn.Linear(6, 8), nn.Linear(8, 3), nn.Parameter(torch.zeros({shape}))"
    model = generated_models.model_with_forward(made, "ids", f"h = F.relu(self.a(ids))\nreturn {result}")
    decision = infer_roles(model())["w"]
    assert (decision.role, decision.uncertain) == (role, False), decision.reason


PREDICTOR = (
    "self.p, self.e, self.n = nn.Linear(6, 16), nn.Linear(16, 16), nn.LayerNorm(16)\n"
    "self.d, self.o, self.k = nn.Linear(16, 8), nn.Linear(8, 16), nn.Linear(8, 16)"
)
PREDICTED = {  # what is returned of a prediction, and of the features that it is held against
    "a loss": "return F.smooth_l1_loss(self.o(z), h)",
    "losses": "return F.smooth_l1_loss(self.o(z), h) + 0.1 * F.mse_loss(self.k(z), h)",
    "an error by hand": "return ((self.o(z) - h) ** 2).mean()",
    "an error of size": "return (self.o(z) - h).abs().sum()",
    "an angle": "return 1 - F.cosine_similarity(self.o(z), h).mean()",
}


@pytest.mark.parametrize("case", PREDICTED)
def test_predictions_of_hidden_features(generated_models, case):
    """What a loss holds against features of the model itself adds to no stream, as wide as these are."""
    forward = "h, z = self.n(self.e(self.p(y))), self.d(self.n(self.e(self.p(x))))\n"
    found = roles_of(generated_models, PREDICTOR, forward + PREDICTED[case])
    assert found["o.weight"].doubt is Doubt.ROLE, found["o.weight"].reason
    assert (found["e.weight"].role, found["e.weight"].doubt) == (Role.MATRIX, Doubt.NONE)
