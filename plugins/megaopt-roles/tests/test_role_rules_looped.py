"""Loops over parts of what a projection made: of positions, of features, and of either."""

from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

WIDTH = 16


class Cut(nn.Module):
    """A layer whose output is taken apart, in one of several ways."""

    parts = 1

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cut = nn.Linear(4, WIDTH), nn.Linear(WIDTH, self.parts * WIDTH)
        self.out, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 7)

    def taken(self, y: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Return what becomes of the parts."""
        return y

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        y = self.taken(self.cut(self.first(x).relu()), given)
        return torch.as_tensor(self.last(self.out(y).relu()))


class Comprehended(Cut):
    """Multiplies each part with a matrix that is given."""

    def taken(self, y: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Return all parts again."""
        return torch.cat([functional.gelu(part @ given) for part in y.split(2, 1)], 1)


class Listed(Cut):
    """The same in a loop."""

    def taken(self, y: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Return all parts again."""
        found = []
        for part in y.chunk(4, dim=1):
            found.append(torch.tanh(torch.matmul(part, given)))  # noqa: PERF401 - a loop is what is meant
        return torch.cat(found, 1)


@pytest.mark.parametrize("model", [Comprehended(), Listed()], ids=["comprehended", "listed"])
def test_parts_that_may_be_positions_or_features_are_in_doubt(model: Cut) -> None:
    """Nothing but the given matrix tells how many features a part has."""
    assert model(torch.randn(2, 8, 4), torch.randn(WIDTH, WIDTH)).shape == (2, 8, 7)
    decision = infer_roles(model)["cut.weight"]
    assert (decision.role, decision.doubt) == (Role.MATRIX, Doubt.LAYOUT)
    assert decision.view is not None
    assert not decision.view.split_sizes


class Named(Cut):
    """Two halves of the positions, by name."""

    def taken(self, y: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Return as many positions as the first half has."""
        first, second = y.split(2, 1)
        return torch.as_tensor(functional.gelu(first @ given) + second)


class Fed(Cut):
    """A layer takes all features of each part."""

    def taken(self, y: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Return all parts again."""
        return torch.cat([self.out(part) for part in y.split(2, 1)], 1)


@pytest.mark.parametrize("model", [Named(), Fed()], ids=["named", "fed"])
def test_positions_that_are_told_split_nothing(model: Cut) -> None:
    """By their number, or by a layer."""
    assert model(torch.randn(2, 4, 4), torch.randn(WIDTH, WIDTH)).shape[-1] == 7
    decision = infer_roles(model)["cut.weight"]
    assert (decision.role, decision.doubt) == (Role.MATRIX, Doubt.NONE)
    assert decision.view is not None
    assert not decision.view.split_sizes


class Gated(Cut):
    """A gate, and what it lets through, of flat activations."""

    parts = 2

    def taken(self, y: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Return what comes through."""
        gate, value = (part * given for part in y.chunk(2, 1))
        return gate.sigmoid() * value


class Attending(Cut):
    """Query, key and value of nodes."""

    parts = 3

    def taken(self, y: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Return the mean of values."""
        q, k, v = (part.view(-1, 4, WIDTH // 4) for part in y.chunk(3, 1))
        return torch.as_tensor(((q @ k.transpose(-1, -2)).softmax(-1) @ v).flatten(1))


@pytest.mark.parametrize("model", [Gated(), Attending()], ids=["gated", "attending"])
def test_features_that_are_told_split_a_projection(model: Cut) -> None:
    """By a layer that takes as many, or by their heads."""
    assert model(torch.randn(5, 4), torch.randn(5, WIDTH)).shape == (5, 7)
    decision = infer_roles(model)["cut.weight"]
    assert (decision.role, decision.doubt) == (Role.MATRIX, Doubt.NONE)
    assert decision.view is not None
    assert decision.view.split_sizes == (WIDTH,) * model.parts


class Scanned(Cut):
    """Positions decay a state one after the other, as in a state space that is written out."""

    start = 0

    def __init__(self) -> None:
        super().__init__()
        self.rates = nn.Parameter(torch.zeros(WIDTH, 3))

    def taken(self, y: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Return what the states sum to."""
        decay = torch.exp(y.unsqueeze(-1) * self.rates)
        state, states = torch.ones_like(decay[:, 0]), []
        for position in range(self.start, y.size(1)):
            state = decay[:, position] * state + given
            states.append(state.sum(-1))
        return torch.stack(states, 1)


class ScannedFromTheSecond(Scanned):
    """The first position is where the state begins."""

    start = 1


@pytest.mark.parametrize("model", [Scanned(), ScannedFromTheSecond()], ids=["all", "from the second"])
def test_single_rows_are_no_parts(model: Scanned) -> None:
    """A scan over positions would cut the features of a batch without positions into single rows."""
    assert model(torch.randn(2, 8, 4), torch.randn(WIDTH, 3)).shape == (2, 8 - model.start, 7)
    decision = infer_roles(model)["cut.weight"]
    assert (decision.role, decision.uncertain) == (Role.MATRIX, False)
    assert decision.view is not None
    assert not decision.view.split_sizes


class Windows(Cut):
    """Attends within windows of positions, of which each multiplies itself."""

    def taken(self, y: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Return all windows again."""
        found, state = [], torch.zeros(1)
        for start in range(0, y.size(1), 4):
            part = y[:, start : start + 4]
            found.append((part @ part.mT).tril() @ part + given)
            state = state + part.mT @ part
        return torch.cat(found, 1) + state.sum()


class WindowsOfTwo(Cut):
    """The same with windows of what two layers make, side by side."""

    def taken(self, y: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Return all windows again."""
        found, state = [], torch.zeros(1)
        for query, key in zip(self.out(y).split(4, 1), y.split(4, dim=1), strict=True):
            found.append((query @ key.mT).tril() @ key + given)
            state = state + key.mT @ query
        return torch.cat(found, 1) + state.sum()


class Groups(Cut):
    """Features in groups, by an index of the last axis."""

    parts = 2

    def taken(self, y: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Return the sum of what the groups make."""
        found = given.new_zeros(WIDTH)
        for start in range(0, 2 * WIDTH, WIDTH):
            part = y[..., start : start + WIDTH]
            found = found + (part @ part.mT).softmax(-1) @ part
        return found


@pytest.mark.parametrize(
    ("model", "doubt", "sizes"),
    [
        (Windows(), Doubt.LAYOUT, ()),
        (WindowsOfTwo(), Doubt.LAYOUT, ()),
        (Groups(), Doubt.NONE, (WIDTH, WIDTH)),
    ],
    ids=["windows", "windows of two", "groups"],
)
def test_an_index_in_a_loop_may_take_positions(model: Cut, doubt: Doubt, sizes: tuple[int, ...]) -> None:
    """Windows of the second axis hold positions or features; those of the last one are parts."""
    assert model(torch.randn(2, 8, 4), torch.randn(WIDTH)).shape == (2, 8, 7)
    decision = infer_roles(model)["cut.weight"]
    assert (decision.role, decision.doubt) == (Role.MATRIX, doubt), decision.reason
    assert decision.view is not None
    assert decision.view.split_sizes == sizes


class Merged(nn.Module):
    """Takes every other token, some of them by an index, and puts them together again."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.cut, self.head, self.name = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 7), name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores of what is left."""
        y = self.cut(x)
        even, odd = y[:, ::2], y[:, 1::2]
        order = even.argsort(1)[:, 1:]
        kept = even.gather(1, order) if self.name == "gather" else torch.take_along_dim(even, order, 1)
        scores: torch.Tensor = self.head(torch.cat([kept, odd], 1).mean(1))
        return scores


@pytest.mark.parametrize("name", ["gather", "take_along_dim"])
def test_tokens_picked_from_a_part_belong_to_it(name: str) -> None:
    """The parts come together again, as they do without the index: no layer is split by that."""
    model = Merged(name)
    assert model(torch.randn(2, 8, 4)).shape == (2, 7)
    decision = infer_roles(model)["cut.weight"]
    assert (decision.role, decision.doubt) == (Role.MATRIX, Doubt.NONE), decision.reason
    assert decision.view is not None
    assert not decision.view.split_sizes


class Averaged(nn.Module):
    """Takes the mean of two neighbours, as a sum that is divided."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.inner, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores of pairs."""
        y = self.cut(x)
        scores: torch.Tensor = self.head(torch.relu(self.inner(0.5 * (y[:, ::2] + y[:, 1::2]))))
        return scores


def test_a_sum_that_a_number_scales_is_still_a_sum() -> None:
    """The next layer takes as many features as each part of it has: the parts are positions."""
    model = Averaged()
    assert model(torch.randn(2, 8, 4)).shape == (2, 4, 7)
    decision = infer_roles(model)["cut.weight"]
    assert (decision.role, decision.doubt) == (Role.MATRIX, Doubt.NONE), decision.reason
    assert decision.view is not None
    assert not decision.view.split_sizes


@pytest.mark.parametrize("cut", ["h.unbind(0)", "h.unbind()", "h", "torch.unbind(h, 0)"])
def test_a_loop_over_parts_that_have_names(generated_models: ModuleType, cut: str) -> None:
    """Queries, keys and values that a loop shapes alike are three, whatever else may have three positions."""
    made = "self.e, self.qkv, self.o, self.h = nn.Embedding(9, 8), nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 9)"
    forward = (
        "x = self.e(ids)\nb, n, _ = x.shape\nh = self.qkv(x).reshape(b, n, 3, 2, -1).permute(2, 0, 3, 1, 4)\n"
        f"q, k, v = {cut}\nq, k, v = (part.transpose(1, 2).flatten(2) for part in (q, k, v))\n"
        "return self.h(self.o((q @ k.mT).softmax(-1) @ v))"
    )
    with torch.device("meta"):
        found = infer_roles(generated_models.model_with_forward(made, "ids", forward)())["qkv.weight"]
    assert found.view is not None
    assert (found.doubt, found.view.split_sizes) == (Doubt.NONE, (8, 8, 8)), found.reason


@pytest.mark.parametrize(
    "cut",
    [
        "torch.split(h, split_size_or_sections=[8, 8, 8], dim=-1)",
        "torch.split(tensor=h, split_size_or_sections=8, dim=2)",
        "h.split(split_size=8, dim=-1)",
        "torch.chunk(input=h, chunks=3, dim=-1)",
        "torch.tensor_split(h, indices_or_sections=3, dim=-1)",
        "torch.unbind(input=h.unflatten(-1, (3, 8)), dim=-2)",
    ],
)
def test_cuts_whose_arguments_are_named(generated_models: ModuleType, cut: str) -> None:
    """A function of torch and its method call some of them otherwise."""
    made = "self.e, self.qkv, self.o, self.h = nn.Embedding(9, 8), nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 9)"
    forward = f"h = self.qkv(self.e(ids))\nq, k, v = {cut}\nreturn self.h(self.o((q @ k.mT).softmax(-1) @ v))"
    with torch.device("meta"):
        found = infer_roles(generated_models.model_with_forward(made, "ids", forward)())["qkv.weight"]
    assert found.view is not None
    assert (found.doubt, found.view.split_sizes) == (Doubt.NONE, (8, 8, 8)), found.reason
