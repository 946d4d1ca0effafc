"""Policies before a critic whose weights are used by hand: stacked, in an einsum, by `F.linear`."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

STATE, ACTION, WIDTH = 9, 3, 32


def network(inputs: int, outputs: int, *end: nn.Module) -> nn.Sequential:
    """Return two hidden layers and a last one."""
    hidden = [nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, outputs), *end)


class ByHand(nn.Module):
    """A critic whose weights are used by hand, in one of several ways, and its policy."""

    def __init__(self, how: str, *, own_policy: bool = False) -> None:
        super().__init__()
        self.how, stack = how, () if how in ("linear", "turned") else (3,)
        sizes = [(STATE + ACTION, WIDTH), (WIDTH, WIDTH), (WIDTH, 1)]
        weights = [(torch.randn(*stack, *(pair[::-1] if how == "linear" else pair))) for pair in sizes]
        self.critic = nn.ParameterList([nn.Parameter(weight) for weight in weights])
        self.actor = network(STATE, ACTION, nn.Tanh())
        if own_policy:
            del self.actor[4]
            self.action = nn.Parameter(torch.randn(WIDTH, ACTION))

    def policy(self, s: torch.Tensor) -> torch.Tensor:
        """Return an action."""
        h = self.actor(s)
        return torch.tanh(h @ self.action) if hasattr(self, "action") else torch.as_tensor(h)

    def layer(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Return a product."""
        if self.how == "linear":
            return functional.linear(x, w)
        if self.how == "turned":
            return x @ w
        return torch.einsum("nbi,nio->nbo", x, w) if self.how == "einsum" else torch.bmm(x, w)

    def q(self, s: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """Return values."""
        x = torch.cat([s, a], -1)
        if self.how in ("einsum", "bmm"):
            x = x.unsqueeze(0).expand(3, -1, -1)
        for i, weight in enumerate(self.critic):
            x = self.layer(x, weight)
            x = x.relu() if i < 2 else x
        return x

    def forward(self, s: torch.Tensor, a: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        """Return the losses of both."""
        return torch.as_tensor(functional.mse_loss(self.q(s, a), r) - self.q(s, self.policy(s)).mean())


@pytest.mark.parametrize("own_policy", [False, True], ids=["layers", "own policy"])
@pytest.mark.parametrize("how", ["linear", "turned", "einsum", "bmm"])
def test_a_judge_may_use_its_weights_by_hand(how: str, own_policy: bool) -> None:
    """What such a one takes in place of an action is a head; its own layers are matrices."""
    found = infer_roles(ByHand(how, own_policy=own_policy))
    head = found["action" if own_policy else "actor.4.weight"]
    assert (head.role, head.doubt) == (Role.OUTPUT, Doubt.NONE)
    for name in ("actor.0.weight", "actor.2.weight", "critic.0", "critic.1"):
        assert (found[name].role, found[name].doubt) == (Role.MATRIX, Doubt.NONE), name
