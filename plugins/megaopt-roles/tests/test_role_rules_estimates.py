"""What a network predicts a first time, without a gradient, and is given the second time: it stays a prediction."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from megaopt_core.params import Role
from megaopt_core.routing import infer_roles

WIDTH, HIDDEN = 6, 20


class Denoiser(nn.Module):
    """Predicts what was given to it with noise, from that and an estimate of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(31, WIDTH)
        self.take, self.inner, self.last = (
            nn.Linear(2 * WIDTH, HIDDEN),
            nn.Linear(HIDDEN, HIDDEN),
            nn.Linear(HIDDEN, WIDTH),
        )

    def net(self, x: torch.Tensor, estimate: torch.Tensor) -> torch.Tensor:
        """Return a prediction."""
        h = functional.silu(self.take(torch.cat([x, estimate], -1)))
        return torch.as_tensor(self.last(functional.silu(self.inner(h))))

    def estimate(self, x: torch.Tensor) -> torch.Tensor:
        """Return the first prediction."""
        with torch.no_grad():
            return self.net(x, torch.zeros_like(x))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        x = self.table(ids)
        predicted = self.net(x + torch.randn_like(x), self.estimate(x))
        return (predicted - x).square().mean()


class Assigned(Denoiser):
    """Estimates now and then."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        x = self.table(ids)
        estimate = torch.zeros_like(x)
        if torch.rand(()) > 0.5:
            with torch.inference_mode():
                estimate = self.net(x, estimate)
        return (self.net(x, estimate) - x).square().mean()


class Decorated(Denoiser):
    """A method without gradients."""

    @torch.no_grad()
    def estimate(self, x: torch.Tensor) -> torch.Tensor:
        """Return the first prediction."""
        return self.net(x, torch.zeros_like(x))


class Switched(Denoiser):
    """Switches gradients off."""

    def estimate(self, x: torch.Tensor) -> torch.Tensor:
        """Return the first prediction."""
        with torch.set_grad_enabled(mode=False):
            return self.net(x, torch.zeros_like(x))


class Detached(Denoiser):
    """Takes the gradient away afterwards."""

    def estimate(self, x: torch.Tensor) -> torch.Tensor:
        """Return the first prediction."""
        made = self.net(x, torch.zeros_like(x)) * 1
        made.detach_()
        return made


@pytest.mark.parametrize("kind", [Denoiser, Assigned, Decorated, Switched, Detached])
def test_an_estimate_that_is_given_makes_no_hidden_layer(kind: type[Denoiser]) -> None:
    """The last layer is no certain matrix; those before it are."""
    model = kind()
    assert model(torch.zeros(2, 4, dtype=torch.long)).shape == ()
    found = infer_roles(model)
    last = found.pop("last.weight")
    assert last.uncertain or last.role is Role.OUTPUT, last
    for name in ("take", "inner"):
        decision = found[f"{name}.weight"]
        assert (decision.role, decision.uncertain) == (Role.MATRIX, False), (name, decision)


class Taught(nn.Module):
    """Compares what it makes with what a network makes that stands in no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.top = nn.Linear(8, HIDDEN), nn.Linear(HIDDEN, 8)
        self.student, self.head = nn.Linear(8, HIDDEN), nn.Linear(HIDDEN, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        with torch.no_grad():
            given = self.top(self.teacher(x).relu())
        return torch.as_tensor(self.head(self.student(x + given).relu()))


def test_what_only_stands_where_no_gradient_flows_is_taken_still() -> None:
    """Nothing else says what its layers are."""
    found = infer_roles(Taught())
    for name in ("teacher", "top", "student"):
        decision = found[f"{name}.weight"]
        assert (decision.role, decision.uncertain) == (Role.MATRIX, False), (name, decision)
