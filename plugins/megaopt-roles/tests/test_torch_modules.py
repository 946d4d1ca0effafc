"""torch's own modules: what their type says of a parameter, and what follows where one has several places."""

import pytest
from megaopt_roles.reading import read_roles
from torch import nn

from megaopt_core.params import Role


@pytest.mark.parametrize(
    ("module", "name", "role", "reason"),
    [
        (nn.Embedding(8, 4), "weight", Role.EMBEDDING, "table of Embedding"),
        (nn.LayerNorm(4), "weight", Role.ELEMENTWISE, "one dimension"),
        (nn.LSTM(4, 4), "weight_hh_l0", Role.MATRIX, "weight of LSTM, 4 gates"),
        (nn.MultiheadAttention(4, 2), "in_proj_weight", Role.MATRIX, "q, k and v of MultiheadAttention"),
        (
            nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
            "parametrizations.weight.original0",
            Role.ELEMENTWISE,
            "the gain of a parametrized weight",
        ),
    ],
)
def test_what_the_module_type_settles_is_certain(
    module: nn.Module, name: str, role: Role, reason: str
) -> None:
    """A forward would show no more."""
    decision = read_roles(module)[name]
    assert (decision.role, decision.reason, decision.uncertain) == (role, reason, False)


def test_a_table_that_is_tied_to_the_head_is_an_embedding() -> None:
    """Tying tells what the head is."""
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    decision = read_roles(model)["0.weight"]
    assert (decision.role, decision.uncertain) == (Role.EMBEDDING, False)
    assert decision.reason == "table of Embedding, tied to the output head"
