"""Builds say once what is in doubt, with names and a remedy, and raise where nothing would be stepped."""

import warnings

import pytest
import torch
from torch import nn

from megaopt_core import ParamKey, build_optimizer
from megaopt_core.errors import DoubtfulRolesWarning, RoutingError

pytestmark = pytest.mark.usefixtures("stand_in")


class Model(nn.Module):
    """A layer whose features nothing takes by convention, a bare weight, and a fused one."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(40, 8)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(8, 8)}) for _ in "ab"
        )
        self.bare = nn.Parameter(torch.zeros(8, 8))
        self.last = nn.Linear(8, 7)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            gate, value = block["up"](x).chunk(2, -1)
            x = x + block["down"](gate * value)
        return self.last(x @ self.bare)


IDS = torch.zeros(2, 3, dtype=torch.long)


def test_one_warning_names_what_is_in_doubt():
    """Roles and views, how many of how many, and what to do."""
    with pytest.warns(DoubtfulRolesWarning) as caught:
        build_optimizer(Model(), "whole", lr=0.1)
    (message,) = [str(warning.message) for warning in caught]
    assert message.startswith(
        "'whole': 2 of 7 weights go to plain, because they may or may not be hidden matrices: bare, "
        "last.weight (bare of Model: no convention says how it is used"
    )
    assert (
        "2 of 7 are stepped as one matrix each, though they may hold several: blocks.0.up.weight" in message
    )
    assert "Pass example=batch" in message


def test_a_batch_leaves_no_doubt():
    """The forward shows all of it."""
    model = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built = build_optimizer(model, "whole", lr=0.1, example=IDS)
    rows = {row.name: row for row in built.report().params}
    assert {name for name, row in rows.items() if row.optimizer == "whole"} == {
        *(f"blocks.{n}.{layer}.weight" for n in (0, 1) for layer in ("up", "down")),
        "bare",
    }
    assert rows["blocks.1.down.weight"].reason == "its output is added to the residual stream"


def test_a_forward_that_raises_keeps_its_reason():
    """It stands in the warning."""
    with pytest.warns(
        DoubtfulRolesWarning, match="its forward could not be run on the meta device: TypeError"
    ):
        build_optimizer(Model(), "whole", lr=0.1, example=(IDS, IDS))


def test_who_steps_everything_alike_is_not_bothered():
    """Doubts matter to an optimizer that takes some shapes alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_optimizer(Model(), "plain", lr=0.1)


@pytest.mark.parametrize(
    "model", [nn.LayerNorm(4), nn.Embedding(5, 4), nn.Linear(4, 4)], ids=["norm", "table", "doubt"]
)
def test_an_optimizer_that_would_step_nothing_raises(model):
    """Its run would be another optimizer's."""
    with pytest.raises(RoutingError, match="'whole' would step nothing on any rank: "):
        build_optimizer(model, "whole", lr=0.1)


def test_an_override_that_sends_the_matrices_away_is_no_doubt():
    """Then somebody has asked for it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    build_optimizer(model, "whole", lr=0.1, overrides={ParamKey(name="*.weight"): {"optimizer": "plain"}})


def test_one_forward_is_all_that_is_run():
    """Buffers, modes, gradients and generators are as before."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
            self.head = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = nn.functional.dropout(self.norm(self.inner(x)), 0.5)
            return self.head(x) if x.sum().item() < 1e9 else x  # needs numbers

    model = Counting().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built = build_optimizer(
            model, "whole", lr=0.1, example=torch.randn(5, 4, generator=torch.Generator())
        )
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [row.optimizer for row in built.report().params if row.name == "inner.weight"] == ["whole"]
    assert all(param.grad is None for param in model.parameters())
