"""Parts of a fused projection that are gates, and parts that are query, key and value: as many, and as large."""

from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional

from megaopt_core.params import Fused, Role
from megaopt_core.routing import infer_roles

WIDTH = 32


class Cell(nn.Module):
    """Projections of an input and of a state, and an output layer.

    Args:
        parts: how many parts each projection has.
    """

    parts = 3

    def __init__(self) -> None:
        super().__init__()
        self.ih, self.hh = nn.Linear(WIDTH, self.parts * WIDTH), nn.Linear(WIDTH, self.parts * WIDTH)
        self.sigmoid, self.out = nn.Sigmoid(), nn.Linear(WIDTH, 10)


class LongShortTerm(Cell):
    """Four gates of a sum."""

    parts = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Step through a sequence."""
        h = c = torch.zeros(x.shape[0], WIDTH)
        for step in x.unbind(1):
            i, f, g, o = (self.ih(step) + self.hh(h)).chunk(4, 1)
            c = torch.sigmoid(f) * c + i.sigmoid() * torch.tanh(g)
            h = functional.sigmoid(o) * c.tanh()
        return self.out(h)


class Gated(Cell):
    """Two gates and a candidate, of both projections."""

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """Step once."""
        (xr, xz, xn), (hr, hz, hn) = self.ih(x).chunk(3, -1), self.hh(h).chunk(3, -1)
        r, z = self.sigmoid(xr + hr), self.sigmoid(xz + hz)
        return self.out((1 - z) * torch.tanh(xn + r * hn) + z * h)


class Simple(Cell):
    """Two gates, and a part that no function bounds."""

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """Step once."""
        u, f, r = self.ih(x).split(WIDTH, -1)
        f, r = f.sigmoid(), torch.sigmoid(r)
        c = f * c + (1 - f) * u
        return self.out(r * c + (1 - r) * self.hh(x).chunk(3, -1)[0].sigmoid().repeat(1, 1))


class WithoutScores(Cell):
    """Attention without scores: a sigmoid of the queries weighs what it returns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend."""
        q, k, v = self.ih(x).chunk(3, -1)
        weights = torch.exp(k)
        return self.out(torch.sigmoid(q) * (weights * v).sum(1, keepdim=True) / weights.sum(1, keepdim=True))


class WithGate(Cell):
    """Attention whose output goes through a gate."""

    parts = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend."""
        q, gate, k, v = self.ih(x).chunk(4, -1)
        q, k, v = (part.view(2, 5, 4, 8).transpose(1, 2) for part in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 5, WIDTH)
        return self.out(mixed * self.sigmoid(gate))


@pytest.mark.parametrize(
    ("cell", "kind"),
    [
        (LongShortTerm, Fused.NOTHING),
        (Gated, Fused.NOTHING),
        (Simple, Fused.NOTHING),
        (WithoutScores, Fused.QKV),
        (WithGate, Fused.QKV),
    ],
)
def test_gates_are_no_queries_keys_and_values(cell: type[Cell], kind: Fused) -> None:
    """Each gate is a matrix of its own; `muon_split_qkv=False` joins queries, keys and values alone."""
    found = infer_roles(cell())["ih.weight"]
    assert found.role is Role.MATRIX
    assert found.view is not None
    assert (found.view.split_sizes, found.view.fused) == ((WIDTH,) * cell.parts, kind)


def test_twins_are_read_alike() -> None:
    """What one cell says holds for the second of its class, too."""
    found = infer_roles(nn.Sequential(LongShortTerm(), LongShortTerm()))
    kinds = {name: decision.view.fused for name, decision in found.items() if decision.view is not None}
    assert {kinds[f"{cell}.{name}.weight"] for cell in "01" for name in ("ih", "hh")} == {Fused.NOTHING}


@pytest.mark.parametrize(
    "joined", ["torch.stack(found, 1)", "torch.stack(found, dim=0)", "torch.stack(found)"]
)
def test_steps_of_a_scan_do_not_put_gates_together_again(generated_models: ModuleType, joined: str) -> None:
    """What is made of all gates at every step holds none of them, and lies beside the other steps."""
    made = "self.i, self.gates, self.o = nn.Linear(5, 8), nn.Linear(8, 24), nn.Linear(8, 3)"
    forward = (
        "z, f, o = self.gates(self.i(x)).chunk(3, -1)\nc, found = 0, []\n"
        "for t in range(x.size(1)):\n    g = f[:, t].sigmoid()\n    c = g * c + (1 - g) * z[:, t].tanh()\n"
        f"    found.append(o[:, t].sigmoid() * c)\nreturn self.o({joined})"
    )
    model = generated_models.model_with_forward(made, "x", forward)()
    assert model(torch.zeros(2, 4, 5)).shape[-1] == 3
    decision = infer_roles(model)["gates.weight"]
    assert (decision.role, decision.uncertain) == (Role.MATRIX, False), decision.reason
    assert decision.view is not None
    assert decision.view.split_sizes == (8, 8, 8)


def test_a_rotation_puts_halves_together_again(generated_models: ModuleType) -> None:
    """Halves that are turned lie beside each other in features: they are no parts."""
    made = "self.i, self.turned, self.o = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)"
    forward = (
        "a, b = self.turned(self.i(x)).chunk(2, -1)\n"
        "y = torch.stack((a * 0.6 - b * 0.8, b * 0.6 + a * 0.8), -1).flatten(-2)\nreturn self.o(y.relu())"
    )
    decision = infer_roles(generated_models.model_with_forward(made, "x", forward)())["turned.weight"]
    assert decision.view is not None
    assert (decision.uncertain, decision.view.split_sizes) == (False, ()), decision.reason
