"""Names that an expression binds: in a comprehension the function around it has them, too."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from megaopt_core.params import Role
from megaopt_core.routing import infer_roles


class Bound(nn.Module):
    """Layers whose output is bound to a name in an expression."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(17, 12), nn.Linear(12, 17)
        self.layers = nn.ModuleList([nn.Linear(12, 12) for _ in range(3)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        x = self.table(ids)
        hidden = [x := functional.gelu(layer(x)) for layer in self.layers]
        assert len(hidden) == len(self.layers)
        return torch.as_tensor(self.head(x))


class InNested(Bound):
    """Loops over two things at once."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        x = self.table(ids)
        _ = [[x := x + layer(x) for layer in (self.layers[at],)] for at in range(3)]
        return torch.as_tensor(self.head(x))


class InDictionary(Bound):
    """Keeps what is bound under a key."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        x = self.table(ids)
        _ = {at: (x := torch.relu(layer(x))) for at, layer in enumerate(self.layers)}
        return torch.as_tensor(self.head(x))


class InCondition(Bound):
    """Binds where it asks."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        x = self.table(ids)
        kept = [y for layer in self.layers if (y := layer(x)) is not None]
        return torch.as_tensor(self.head(functional.gelu(kept[0] * kept[1]) + y))


@pytest.mark.parametrize("kind", [Bound, InNested, InDictionary, InCondition])
def test_a_name_that_a_comprehension_binds_outlives_it(kind: type[Bound]) -> None:
    """What a layer behind it takes is the last that was bound."""
    model = kind()
    assert model(torch.zeros(2, 4, dtype=torch.long)).shape == (2, 4, 17)
    found = infer_roles(model)
    for at in range(3):
        decision = found[f"layers.{at}.weight"]
        assert (decision.role, decision.uncertain) == (Role.MATRIX, False), (at, decision)
    assert found["head.weight"].role is Role.OUTPUT
