"""Gates of recurrent cells that are written by hand, in models that return their states."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

WIDTH = 20


class Recurrent(nn.Module):
    """A step of a recurrent cell: it returns logits and the state."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(50, 3 * WIDTH), nn.Linear(WIDTH, 50)
        self.gates, self.new = (
            nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)),
            nn.Parameter(torch.randn(WIDTH, WIDTH)),
        )

    def forward(self, ids: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and the state."""
        h = self.step(self.table(ids), h)
        return self.last(h), h

    def step(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """Return the state."""
        return h


class PartByPart(Recurrent):
    """Takes the gates apart, and adds to each."""

    def step(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """Return the state."""
        first, second, third = x.chunk(3, 1)
        r, z = h.mm(self.gates).chunk(2, 1)
        r, z = torch.sigmoid(first + r), torch.sigmoid(second + z)
        return (1.0 - z) * h + z * torch.tanh(torch.mm(h * r, self.new) + third)


class AtOnce(Recurrent):
    """Bounds both gates before it takes them apart."""

    def step(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """Return the state."""
        r, z = torch.sigmoid(x[:, WIDTH:] + h @ self.gates).split(WIDTH, 1)
        return torch.as_tensor((1 - z) * h + z * torch.tanh(x[:, :WIDTH] + (r * h) @ self.new))


class Linear(Recurrent):
    """A gated linear unit makes the state."""

    def step(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """Return the state."""
        return functional.glu((h + x[:, :WIDTH]) @ self.gates, 1) @ self.new + functional.glu(
            h @ self.gates, -1
        )


@pytest.mark.parametrize(
    "model", [PartByPart(), AtOnce(), Linear()], ids=["part by part", "at once", "linear"]
)
def test_gates_of_a_state_that_is_returned_are_a_matrix(model: Recurrent) -> None:
    """Of each gate its own, without a doubt."""
    logits, state = model(torch.tensor([3, 4]), torch.randn(2, WIDTH))
    assert (logits.shape, state.shape) == ((2, 50), (2, WIDTH))
    decision = infer_roles(model)["gates"]
    assert (decision.role, decision.doubt) == (Role.MATRIX, Doubt.NONE)
    assert decision.view is not None
    assert decision.view.split_sizes == (WIDTH, WIDTH)


class Boxes(nn.Module):
    """Returns boxes, scaled by what is fixed, and scores of what lies there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.boxes = nn.Linear(9, 32), nn.Linear(32, 4)
        self.look, self.scores = nn.Linear(4, 32), nn.Linear(32, 5)
        self.register_buffer("size", torch.tensor(7.0))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and boxes."""
        center, size = self.boxes(self.first(x).relu()).split(2, -1)
        boxes = torch.cat([center.sigmoid() * self.size, size.sigmoid() * self.size], -1)
        return self.scores(self.look(boxes).relu()), boxes


def test_bounded_parts_that_are_returned_are_no_gates() -> None:
    """Nothing that depends on the input is multiplied with them."""
    decision = infer_roles(Boxes())["boxes.weight"]
    assert decision.role is Role.OUTPUT
