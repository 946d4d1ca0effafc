"""One-hot codes that are taken step by step: the weight that they are multiplied with stays a table."""

from types import ModuleType

import pytest
import torch

from megaopt_core.params import Doubt, Role, RoleDecision
from megaopt_core.routing import infer_roles

MADE = "self.t, self.w = nn.Parameter(torch.zeros(9, 8)), nn.Parameter(torch.zeros(8, 8))\nself.h = nn.Linear(8, 9)"
STEPS = {  # how a loop over time comes by the codes of a step
    "an index": "for n in range(3):\n    s = torch.tanh(c[:, n] @ self.t + s @ self.w)",
    "an index of all axes": "for n in range(3):\n    s = torch.tanh(c[:, n, :] @ self.t + s @ self.w)",
    "a loop": "for x in c.transpose(0, 1):\n    s = torch.tanh(x @ self.t + s @ self.w)",
    "unbound": "for x in c.unbind(1):\n    s = torch.tanh(F.linear(x, self.t.T) + s @ self.w)",
}


def roles_of(models: ModuleType, forward: str) -> dict[str, RoleDecision]:
    """Return the decisions for a model whose `c` are codes and whose `s` is a state."""
    start = "c, s = F.one_hot(ids, 9).float(), torch.zeros(2, 8)\n"
    with torch.device("meta"):
        return infer_roles(models.model_with_forward(MADE, "ids", f"{start}{forward}\nreturn self.h(s)")())


@pytest.mark.parametrize("case", STEPS)
def test_the_codes_of_a_step_are_codes(generated_models: ModuleType, case: str) -> None:
    """A recurrence takes them one by one; what multiplies its state is a matrix."""
    found = roles_of(generated_models, STEPS[case])
    assert found["t"].role is Role.EMBEDDING, found["t"].reason
    assert (found["w"].role, found["w"].doubt) == (Role.MATRIX, Doubt.NONE), found["w"].reason


MADE_OF = {  # how codes are made by hand
    "a comparison": "c = (ids[..., None] == torch.arange(9)).float()",
    "a method": "c = ids.unsqueeze(-1).eq(torch.arange(9)).float()",
    "scattered": "c = torch.zeros(2, 3, 9).scatter(2, ids[..., None], 1.0)",
    "scattered in place": "c = torch.zeros(2, 3, 9)\nc.scatter_(2, ids[..., None], 1)",
    "rows of the identity": "c = torch.eye(9)[ids]",
    "rows of the identity, moved": "c = torch.eye(9, device='cpu').to(torch.float32)[ids]",
}


@pytest.mark.parametrize("case", MADE_OF)
def test_codes_may_be_made_by_hand(generated_models: ModuleType, case: str) -> None:
    """By comparing what is given with all classes, or by writing a one where each is."""
    found = roles_of(generated_models, f"{MADE_OF[case]}\ns = torch.tanh(torch.relu(c @ self.t) @ self.w)")
    assert found["t"].role is Role.EMBEDDING, found["t"].reason
    assert (found["w"].role, found["w"].doubt) == (Role.MATRIX, Doubt.NONE), found["w"].reason


@pytest.mark.parametrize(
    "made",
    [
        "c = torch.zeros(2, 3, 9).scatter(2, ids[..., None], s.sum())",
        "c = torch.zeros(2, 9).scatter(1, ids, 1.0)",
        "c = (ids[..., None] == ids).float()",
        "c = torch.eye(9)[1] + ids",
    ],
    ids=["other values", "several ones", "a comparison of what is given", "one row of the identity"],
)
def test_not_all_that_is_written_or_compared_is_a_code(generated_models: ModuleType, made: str) -> None:
    """Other values and sets of ones are features, and what is compared with itself has no classes."""
    found = roles_of(generated_models, f"{made}\ns = torch.tanh(torch.relu(c @ self.t) @ self.w)")
    assert found["t"].role is not Role.EMBEDDING, found["t"].reason


def test_a_head_as_wide_as_the_codes_is_an_output(generated_models: ModuleType) -> None:
    """A layer that takes codes has a row for each class, as a table has, and so has what predicts them."""
    made = "self.t, self.g, self.h = nn.Linear(9, 8), nn.GRU(8, 8), nn.Linear(8, 9)"
    forward = "return self.h(self.g(self.t(torch.eye(9)[ids]))[0]).softmax(-1).log()"
    with torch.device("meta"):
        found = infer_roles(generated_models.model_with_forward(made, "ids", forward)())
    assert found["t.weight"].role is Role.EMBEDDING, found["t.weight"].reason
    assert (found["h.weight"].role, found["h.weight"].doubt) == (Role.OUTPUT, Doubt.NONE), found[
        "h.weight"
    ].reason


def test_one_column_of_codes_is_no_code(generated_models: ModuleType) -> None:
    """Whether something is the first class is a number for each position, and these are mixed."""
    found = roles_of(generated_models, "s = torch.tanh(c[..., 0] @ self.t @ self.w)")
    assert found["t"].role is not Role.EMBEDDING, found["t"].reason


LAYER = "self.e, self.a, self.h = nn.Linear(9, 8), nn.Linear(8, 8), nn.Linear(8, 9)"
CODED = {  # codes, and how a layer takes them
    "a number": "y = self.e(F.one_hot(ids, 9).float())",
    "another type": "y = self.e(F.one_hot(ids, 9).to(self.a.weight.dtype))",
    "by name": "y = self.e(input=F.one_hot(ids, num_classes=9).type(torch.float32))",
    "a step": "c = F.one_hot(ids, 9).float()\ny = self.e(c[:, 0]) + self.e(c[:, 1])",
    "a loop": "y = 0\nfor c in F.one_hot(ids, 9).float():\n    y = y + self.e(c)",
    "dropout": "y = self.e(F.dropout(F.one_hot(ids.clamp(0, 8), 9).float(), 0.1))",
    "a comparison": "y = self.e((ids[..., None] == torch.arange(9)).float())",
    "a written one": "y = self.e(torch.zeros(2, 3, 9).scatter(2, ids[..., None], 1.0))",
    "two of one": "y = self.e(F.one_hot(ids, 9).float()) * self.e(F.one_hot(ids + 1, 9).float())",
}
NOT_ALL_CODED = {
    "features beside them": "more = torch.sin(ids)[..., None].expand(2, 3, 5)\n"
    "y = self.e(torch.cat([F.one_hot(ids, 4).float(), more], -1))",
    "another call": "y = self.e(F.one_hot(ids, 9).float()) + self.e(torch.softmax(ids.float(), -1))",
    "a board": "y = self.e(F.one_hot(ids, 3).float().flatten(1))",
    "a thermometer": "y = self.e(F.one_hot(ids, 9).float().cumsum(-1))",
    "a choice": "c = F.one_hot(ids, 9).float() if self.training else ids.float()\ny = self.e(c)",
    "the weight in a product": "y = self.e(F.one_hot(ids, 9).float()) @ self.e.weight @ self.e.weight.T",
}


@pytest.mark.parametrize("case", CODED)
def test_a_layer_that_takes_codes_alone_is_a_table(generated_models: ModuleType, case: str) -> None:
    """It looks a row up for each: that is certain."""
    forward = f"{CODED[case]}\nreturn self.h(self.a(y).relu())"
    found = infer_roles(generated_models.model_with_forward(LAYER, "ids", forward)())
    assert (found["e.weight"].role, found["e.weight"].doubt) == (Role.EMBEDDING, Doubt.NONE), found[
        "e.weight"
    ]
    assert (found["a.weight"].role, found["a.weight"].doubt) == (Role.MATRIX, Doubt.NONE)


@pytest.mark.parametrize("case", NOT_ALL_CODED)
def test_a_layer_that_takes_more_than_codes_is_no_certain_table(
    generated_models: ModuleType, case: str
) -> None:
    """Features beside the codes, sums of them and other calls make it one of two."""
    forward = f"{NOT_ALL_CODED[case]}\nreturn self.h(self.a(y).relu())"
    found = infer_roles(generated_models.model_with_forward(LAYER, "ids", forward)())["e.weight"]
    assert found.role is not Role.EMBEDDING or found.uncertain
