"""Tables that are marked as embeddings or outputs, with a batch that shows which of the two they are."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from megaopt_core.params import Role
from megaopt_core.routing import infer_roles

LOOKUPS = {
    "an index": lambda table, ids: table[ids],
    "a function": lambda table, ids: F.embedding(ids, table),
    "one-hot codes": lambda table, ids: F.one_hot(ids, 9).float() @ table,
    "rows that are selected": lambda table, ids: table.index_select(0, ids.flatten()).view(*ids.shape, 8),
}


class Model(nn.Module):
    """A bare table, a bare hidden matrix and a bare head."""

    def __init__(self, lookup: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.lookup = lookup
        self.table, self.head = (nn.Parameter(torch.zeros(9, 8)) for _ in range(2))
        self.hidden = nn.Parameter(torch.zeros(8, 8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return scores of every id."""
        x = self.lookup(self.table, ids)
        return (x + (x @ self.hidden).relu()) @ self.head.T


@pytest.mark.parametrize("lookup", LOOKUPS)
def test_a_marked_table_that_is_indexed_is_an_embedding(lookup):
    """The mark says one of the two for both; the batch shows that one of them is looked up in."""
    model = Model(LOOKUPS[lookup])
    model.table.is_embedding_or_output_parameter = model.head.is_embedding_or_output_parameter = True
    found = infer_roles(model, example=torch.zeros(2, 3, dtype=torch.long))
    assert (found["table"].role, found["head"].role) == (Role.EMBEDDING, Role.OUTPUT)
    assert not found["table"].uncertain
