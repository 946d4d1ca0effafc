"""Low-rank factors written by hand: those of an embedding or a head are part of it, those of a hidden layer are not."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from megaopt_core.params import Role
from megaopt_core.routing import infer_roles

VOCABULARY, WIDTH, RANK = 40, 12, 3


class AdaptedTable(nn.Module):
    """Rows of a frozen table, and rows of a narrow one that a matrix widens."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.rows = nn.Parameter(torch.zeros(VOCABULARY, RANK))
        self.widen = nn.Parameter(torch.zeros(RANK, WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.frozen(ids) + self.rows[ids] @ self.widen


class AdaptedLayer(nn.Module):
    """A frozen layer beside two factors that are layers or bare parameters."""

    def __init__(self, outputs: int, *, layers: bool) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, outputs, bias=False).requires_grad_(False)
        self.one, self.other = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, outputs, bias=False)
        if not layers:
            self.one, self.other = self.one.weight, self.other.weight
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.layers:
            return self.frozen(x) + self.other(self.one(x))
        return self.frozen(x) + F.linear(F.linear(x, self.one), self.other)


class Model(nn.Module):
    """Factors of a table, of a hidden layer and of a head; a projection of a narrow table is no factor."""

    def __init__(self, *, layers: bool) -> None:
        super().__init__()
        self.table, self.hidden = AdaptedTable(), AdaptedLayer(WIDTH, layers=layers)
        self.narrow, self.project = nn.Embedding(VOCABULARY, RANK), nn.Linear(RANK, WIDTH, bias=False)
        self.head = AdaptedLayer(VOCABULARY, layers=layers)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids) + self.project(self.narrow(ids))
        return self.head(x + self.hidden(x).tanh())


@pytest.mark.parametrize("layers", [False, True])
def test_factors_of_a_table_or_a_head_are_no_matrices(layers):
    """A forward shows products that others take, yet what both factors make is a part of the table, or of the head."""
    found = infer_roles(Model(layers=layers), example=torch.zeros(2, 5, dtype=torch.long))
    end = ".weight" if layers else ""
    expected = {
        "table.rows": Role.ELEMENTWISE,
        "table.widen": Role.ELEMENTWISE,
        f"head.one{end}": Role.ELEMENTWISE,
        f"head.other{end}": Role.ELEMENTWISE,
        f"hidden.one{end}": Role.MATRIX,
        f"hidden.other{end}": Role.MATRIX,
        "project.weight": Role.MATRIX,
        "narrow.weight": Role.EMBEDDING,
        "head.frozen.weight": Role.OUTPUT,
    }
    assert {name: found[name].role for name in expected} == expected
    assert not any(found[name].uncertain for name in expected)


@pytest.mark.parametrize("layers", [False, True])
def test_without_a_batch_they_are_no_matrices_either(layers):
    """The head is known by its rows; what stands beside it is none of Muon's."""
    found = infer_roles(Model(layers=layers))
    matrices = {name for name, said in found.items() if said.role is Role.MATRIX}
    assert not any(name.startswith(("table", "head")) for name in matrices)


def test_a_projection_beside_two_tables_and_blocks_is_no_factor():
    """Their shapes fit by chance: a wide table for all blocks, a narrow one, and what widens the stream for them."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow, self.wide = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, 3 * WIDTH)
            self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3 * WIDTH, WIDTH)) for _ in range(2))

    model = nn.Sequential(Wide(), nn.Linear(WIDTH, VOCABULARY))
    assert infer_roles(model)["0.project.weight"].role is Role.MATRIX
