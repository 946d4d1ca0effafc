"""Networks that another network of the same model judges: what ends them is a head, though a layer takes its output."""

import copy
from types import ModuleType

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


class Agent(nn.Module):
    """A policy and its critic, with their copies that move behind."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = network(STATE, ACTION, nn.Tanh()), network(STATE + ACTION, 1)
        self.actor_target, self.critic_target = copy.deepcopy(self.actor), copy.deepcopy(self.critic)

    def forward(self, s: torch.Tensor, a: torch.Tensor, s2: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        """Return the losses of both."""
        with torch.no_grad():
            a2 = (self.actor_target(s2) + torch.randn_like(a)).clamp(-1, 1)
            target = r + 0.99 * self.critic_target(torch.cat([s2, a2], -1))
        q = self.critic(torch.cat([s, a], -1))
        action = self.actor(s)
        return (
            functional.mse_loss(q, target) - torch.as_tensor(self.critic(torch.cat([s, action], -1))).mean()
        )


class Pair(nn.Module):
    """Two hidden layers and a last one for two things."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Linear(12, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.one_b, self.two_b, self.last_b = (
            nn.Linear(12, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 1),
        )

    def forward(self, s: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two values."""
        x = torch.cat([s, a], 1)
        first = self.last(self.two(self.one(x).relu()).relu())
        return first, self.last_b(self.two_b(self.one_b(x).relu()).relu())


class Delayed(nn.Module):
    """A policy whose turn comes in every second call only."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic, self.calls = network(STATE, ACTION, nn.Tanh()), Pair(), 0

    def forward(self, s: torch.Tensor, a: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        """Return the losses of both, or of the critic."""
        self.calls += 1
        loss = sum(functional.mse_loss(q, r) for q in self.critic(s, a))
        if self.calls % 2 == 0:
            loss = loss - self.critic(s, self.actor(s))[0].mean()
        return torch.as_tensor(loss)


class Wrapped(nn.Module):
    """An agent inside."""

    def __init__(self) -> None:
        super().__init__()
        self.agent = Agent()

    def forward(self, s: torch.Tensor, a: torch.Tensor, s2: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        """Return its loss."""
        return torch.as_tensor(self.agent(s, a, s2, r))


class OnlyItsOwn(nn.Module):
    """A policy whose critic sees no other actions; a distribution makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean, self.spread = (
            network(STATE, WIDTH, nn.SiLU()),
            *(nn.Linear(WIDTH, 3) for _ in "ms"),
        )
        self.critic = network(STATE + ACTION, 1)

    def forward(self, s: torch.Tensor) -> torch.Tensor:
        """Return the value of an action."""
        h = self.body(s)
        action = torch.distributions.Normal(self.mean(h), self.spread(h).exp()).rsample()
        return torch.as_tensor(self.critic(torch.cat([s, action.tanh()], -1)).mean())


class Halved(nn.Module):
    """A policy of one layer for mean and spread, and a model of the world whose critic takes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.policy = network(STATE, WIDTH, nn.SiLU()), nn.Linear(WIDTH, 2 * ACTION)
        self.critic = network(STATE + ACTION, 1)

    def forward(self, s: torch.Tensor) -> torch.Tensor:
        """Return the value of an action."""
        mean, spread = self.policy(self.body(s)).chunk(2, -1)
        action = torch.tanh(mean + torch.randn_like(mean) * spread.clamp(-5, 2).exp())
        return torch.as_tensor(self.critic(torch.cat([s, action], -1)).mean())


class Adversarial(nn.Module):
    """A generator, and what tells its images from real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.judge = network(7, 20, nn.Tanh()), network(20, 1)

    def forward(self, real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return the loss of both."""
        return torch.as_tensor(self.judge(real).mean() - self.judge(self.generator(noise)).mean())


@pytest.mark.parametrize(
    ("model", "sure", "doubtful"),
    [
        (Agent(), ["actor.4"], ["actor_target.4"]),
        (Delayed(), ["actor.4"], []),
        (Wrapped(), ["agent.actor.4"], ["agent.actor_target.4"]),
        (OnlyItsOwn(), [], ["mean", "spread"]),
        (Halved(), [], ["policy"]),
        (Adversarial(), ["generator.4"], []),
    ],
    ids=["agent", "delayed", "wrapped", "only its own", "halved", "adversarial"],
)
def test_what_another_network_judges_is_a_head(
    model: nn.Module, sure: list[str], doubtful: list[str]
) -> None:
    """The layers before it, and those of the judge, are matrices."""
    found = infer_roles(model)
    heads = {name: found.pop(f"{name}.weight") for name in [*sure, *doubtful]}
    assert {name: head.role for name, head in heads.items()} == dict.fromkeys(heads, Role.OUTPUT)
    assert [name for name, head in heads.items() if head.uncertain] == doubtful
    rest = {decision for name, decision in found.items() if name.endswith("weight")}
    assert {decision.doubt for decision in rest} == {Doubt.NONE}
    assert {decision.role for decision in rest} == {Role.MATRIX, Role.OUTPUT}


@pytest.mark.parametrize(
    ("model", "given", "name"),
    [
        (Delayed(), (STATE, ACTION, 1), "actor.4"),
        (Agent(), (STATE, ACTION, STATE, 1), "actor.4"),
        (Adversarial(), (20, 7), "generator.4"),
    ],
    ids=["delayed", "agent", "adversarial"],
)
def test_an_example_does_not_contradict_it(model: nn.Module, given: tuple[int, ...], name: str) -> None:
    """That a layer takes the output of a judged network is no news: the source says so, too."""
    example = tuple(torch.ones(4, size) for size in given)
    assert infer_roles(model, example=example)[f"{name}.weight"].role is Role.OUTPUT


class Skipping(nn.Module):
    """Lays what it was given beside features again, hidden ones and activated ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = network(STATE, WIDTH), nn.Linear(WIDTH + STATE, WIDTH)
        self.narrow, self.last = nn.Linear(WIDTH, 20), nn.Linear(20 + STATE, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        h = self.second(torch.cat([self.first(x), x], -1)).relu()
        return torch.as_tensor(self.last(torch.cat([self.narrow(h).relu(), x], -1)))


class Timed(nn.Module):
    """Lays an embedding of time beside what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.net = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 24)), network(26, 2)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """Return a velocity."""
        return torch.as_tensor(self.net(torch.cat([x, self.time(t)], -1)))


class SkippingByHand(nn.Module):
    """Lays what it was given beside hidden features again, with weights that are used by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first_weight, self.back_weight, self.second_weight, self.last_weight = (
            nn.Parameter(torch.randn(*sizes))
            for sizes in ((STATE, 40), (40, STATE), (40 + STATE, 24), (24, 4))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        h = torch.relu(x @ self.first_weight)
        h = torch.relu((x + h @ self.back_weight) @ self.first_weight)
        return torch.relu(torch.cat([h, x], -1) @ self.second_weight) @ self.last_weight


class Repeated(nn.Module):
    """One layer that takes what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.back, self.last = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        h = self.cell(x).tanh()
        for _ in range(2):
            h = self.cell(x + self.back(h)).tanh()
        return torch.as_tensor(self.last(h))


@pytest.mark.parametrize(
    "model",
    [Skipping(), Timed(), Repeated(), SkippingByHand()],
    ids=["skipping", "timed", "repeated", "by hand"],
)
def test_what_lies_beside_an_input_otherwise_is_a_matrix(model: nn.Module) -> None:
    """All but the last one, without a doubt."""
    found = infer_roles(model)
    roles = [(found[name].role, found[name].doubt) for name in found if name.endswith("weight")]
    assert roles[:-1] == [(Role.MATRIX, Doubt.NONE)] * (len(roles) - 1)
    assert roles[-1] == (Role.OUTPUT, Doubt.NONE)


@pytest.mark.parametrize(
    "method",
    [
        "def logits(self, x):\n    return self.h(x)",
        "def decode(self, z):\n    return self.h(self.b(z).relu())",
    ],
)
def test_what_a_method_of_no_forward_is_given(generated_models: ModuleType, method: str) -> None:
    """Its argument is nothing that the model is given: the layer before stays hidden."""
    made = (
        "self.e, self.a, self.b, self.h = nn.Embedding(9, 8), nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 7)\n"
        "self.left_over = nn.Parameter(torch.ones(7))"
    )
    forward = "def forward(self, ids):\n    x = self.e(ids)\n    return self.h(x + self.b(self.a(x).relu()))"
    with torch.device("meta"):
        found = infer_roles(generated_models.model(made, f"{method}\n{forward}")())
    for name in ("a.weight", "b.weight"):
        assert (found[name].role, found[name].doubt) == (Role.MATRIX, Doubt.NONE), (name, found[name].reason)
