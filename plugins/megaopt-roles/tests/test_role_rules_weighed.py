"""Products with a matrix that look like something else: none is certain to be element-wise."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import pytest
import torch

from megaopt_core.params import Doubt, Role, RoleDecision
from megaopt_core.routing import infer_roles

HIDDEN = {  # products of `x`, of 6 features, with `self.w`, of shape [8, 6]
    "sum of products": "(x.unsqueeze(-2) * self.w).sum(-1)",
    "sum over an axis that an index made": "(x[..., None, :] * self.w).sum(dim=-1)",
    "mean of products": "(self.w * x[:, :, None]).mean(-1) * 6",
    "sum of transposed products": "(x.unsqueeze(-1) * self.w.T).sum(-2)",
    "sum behind an activation": "torch.tanh(x.unsqueeze(-2) * self.w).sum(-1)",
    "rows in another order": "F.linear(x, self.w.index_select(0, self.order))",
    "rows that an index orders": "F.linear(x, self.w[self.order])",
    "padded": "F.linear(x, F.pad(self.w, (0, 0, 0, 0)))",
    "drawn around it": "F.linear(x, torch.distributions.Normal(self.w, 0.1).rsample())",
    "drawn around it, with its own spread": "F.linear(x, torch.distributions.Normal(self.w, self.w.exp()).rsample())",
}
MOVED = {  # products of `x` with a weight `[6, 8]` to which a layer adds something for each sample
    "batched": "torch.bmm(x, self.w + self.delta(c).view(-1, 6, 8))",
    "by hand": "x @ (self.delta(c).unflatten(-1, (6, 8)) + self.w)",
    "linear": "F.linear(x, (self.w + 0.1 * self.delta(c).view(6, 8)).T)",
    "less": "x @ (self.w - self.delta(c).view(-1, 6, 8))",
}
CODED = {  # layers that take codes
    "a convolution of one": (
        "nn.Conv1d(9, 6, 1)",
        "self.table(F.one_hot(ids, 9).float().transpose(1, 2)).mT",
        False,
    ),
    "permuted": ("nn.Conv1d(9, 6, 1)", "self.table(F.one_hot(ids, 9).float().permute(0, 2, 1)).mT", False),
    "several positions": (
        "nn.Conv1d(9, 6, 3)",
        "self.table(F.one_hot(ids, 9).float().transpose(1, 2)).mT",
        True,
    ),
    "padded": ("nn.Conv1d(9, 6, 2)", "self.table(F.pad(F.one_hot(ids, 9).float().mT, (1, 0))).mT", True),
}
GAINS = {  # of vectors that scale features
    "a vector for each head": "(x.unflatten(-1, (2, 3)) * self.heads).sum(-1)",
    "a gain": "x * self.gain",
    "a gain, and a sum over positions": "(x * self.gain).sum(1)",
}


def roles_of(models: ModuleType, made: str, forward: str, arguments: str = "x") -> Mapping[str, RoleDecision]:
    """Return the decisions for a model, by what makes it and the body of its forward."""
    with torch.device("meta"):
        return infer_roles(models.model_with_forward(made, arguments, forward)())


@pytest.mark.parametrize("case", HIDDEN)
def test_hidden_products(generated_models: ModuleType, case: str) -> None:
    """What is multiplied with a weight and summed was a product with it; so is a product with what it becomes."""
    made = (
        "self.a, self.head = nn.Linear(5, 6), nn.Linear(8, 7)\nself.w = nn.Parameter(torch.zeros(8, 6))\n"
        "self.register_buffer('order', torch.arange(8))"
    )
    forward = f"x = self.a(x).relu()\nreturn self.head(F.relu({HIDDEN[case]}))"
    found = roles_of(generated_models, made, forward)["w"]
    assert found.role is Role.MATRIX or found.doubt is Doubt.ROLE, found.reason


@pytest.mark.parametrize("case", GAINS)
def test_gains_stay_gains(generated_models: ModuleType, case: str) -> None:
    """A vector that scales features contracts none with another."""
    made = (
        "self.a, self.head = nn.Linear(5, 6), nn.Linear(6, 7)\n"
        "self.gain, self.heads = nn.Parameter(torch.zeros(4, 6)), nn.Parameter(torch.zeros(2, 3))"
    )
    forward = f"x = self.a(x).relu()\nreturn self.head({GAINS[case]})"
    found = roles_of(generated_models, made, forward)
    used = found["heads" if "head" in case else "gain"]
    assert (used.role, used.doubt) == (Role.ELEMENTWISE, Doubt.NONE), used.reason


@pytest.mark.parametrize("case", MOVED)
def test_weights_that_move_for_each_sample(generated_models: ModuleType, case: str) -> None:
    """What a layer adds something to, and a product then takes, may be a matrix."""
    made = (
        "self.a, self.delta, self.head = nn.Linear(5, 6), nn.Linear(3, 48), nn.Linear(8, 7)\n"
        "self.w = nn.Parameter(torch.zeros(6, 8))"
    )
    forward = f"x = self.a(x).relu()\nreturn self.head(F.relu({MOVED[case]}))"
    found = roles_of(generated_models, made, forward, "x, c")["w"]
    assert found.doubt is Doubt.ROLE, found.reason


@pytest.mark.parametrize("case", CODED)
def test_convolutions_of_codes(generated_models: ModuleType, case: str) -> None:
    """A convolution of one position over one-hot codes is a table, of several one in doubt."""
    layer, taken, doubtful = CODED[case]
    made = f"self.table, self.b, self.head = {layer}, nn.Linear(6, 8), nn.Linear(8, 7)"
    forward = f"return self.head(self.b({taken}).relu())"
    found = roles_of(generated_models, made, forward, "ids")["table.weight"]
    assert (found.role, found.uncertain) == (Role.EMBEDDING, doubtful), found.reason


@pytest.mark.parametrize(
    ("shared", "doubtful"),
    [("self.share(x)", False), ("self.share(x).sigmoid()", False), ("self.other(x)", True)],
)
def test_sums_of_shares(generated_models: ModuleType, shared: str, doubtful: bool) -> None:
    """A sum of what one number for each position scales compares no features; a sum of products does."""
    made = "self.a, self.value, self.share, self.other = (nn.Linear(6, n) for n in (6, 3, 1, 3))"
    forward = f"x = self.a(x).relu()\nreturn ({shared} * self.value(x)).sum({-1 if doubtful else 1})"
    found = roles_of(generated_models, made, forward)["value.weight"]
    assert (found.role, found.uncertain) == (Role.OUTPUT, doubtful), found.reason


def test_fused_heads_of_four_axes(generated_models: ModuleType) -> None:
    """Queries, keys and values as `[3, in, heads, size]`: three matrices, in doubt of layout alone."""
    made = (
        "self.e, self.w = nn.Embedding(9, 6), nn.Parameter(torch.zeros(3, 6, 2, 4))\n"
        "self.o, self.head = nn.Linear(8, 6), nn.Linear(6, 9)"
    )
    forward = (
        "x = self.e(x)\nq, k, v = torch.einsum('btd,cdhk->cbhtk', x, self.w)\n"
        "y = (q @ k.mT).softmax(-1) @ v\nreturn self.head(self.o(y.transpose(1, 2).flatten(2)))"
    )
    found = roles_of(generated_models, made, forward)["w"]
    assert (found.role, found.doubt) == (Role.MATRIX, Doubt.LAYOUT), found.reason
    assert found.view is not None
    assert [piece.shape for piece in found.view.windows((3, 6, 2, 4))] == [(3, 8, 6)]


@pytest.mark.parametrize(
    ("layer", "taken", "weight"),
    [
        ("nn.GRU(9, 8)", "self.table(F.one_hot(ids, 9).float())[0]", "weight_ih_l0"),
        (
            "nn.LSTM(9, 4, bidirectional=True)",
            "self.table(F.one_hot(ids, 9).float())[0]",
            "weight_ih_l0_reverse",
        ),
        ("nn.RNNCell(9, 8)", "self.table(F.one_hot(ids[0], 9).float())", "weight_ih"),
    ],
)
def test_recurrent_layers_of_codes(generated_models: ModuleType, layer: str, taken: str, weight: str) -> None:
    """What one-hot codes meet first is a table, in doubt; what the state meets is a matrix."""
    made = f"self.table, self.head = {layer}, nn.Linear(8, 7)"
    found = roles_of(generated_models, made, f"return self.head({taken})", "ids")
    table, state = found[f"table.{weight}"], found[f"table.{weight.replace('ih', 'hh')}"]
    assert (table.role, table.doubt) == (Role.EMBEDDING, Doubt.ROLE), table.reason
    assert (state.role, state.doubt) == (Role.MATRIX, Doubt.NONE), state.reason
