"""torchtitan's schedulers drive ours."""

from dataclasses import replace

import pytest
import titan_harness as harness
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

pytestmark = pytest.mark.distributed

STEPS, HEAD_LR = 8, 1e-4

DECAYS = ("linear", "sqrt", "cosine")


def _theirs() -> OptimizersContainer.Config:
    """Return torchtitan's AdamW, whose output layer has a learning rate of its own."""
    whole = harness.titans()
    (group,) = whole.param_groups
    head = ParamGroupConfig(
        pattern="^lm_head",
        optimizer_name=group.optimizer_name,
        optimizer_kwargs={**group.optimizer_kwargs, "lr": HEAD_LR},
    )
    return replace(whole, param_groups=[head, group])


def _runs(rank: int, size: int) -> list[list[harness.Run]]:
    """Return the runs of torchtitan's AdamW, our Adam and our Muon under each schedule."""
    own = {"lm_head.*": {"max_lr": HEAD_LR}}
    chosen = [_theirs(), replace(harness.adam(), overrides=own), replace(harness.muon(), overrides=own)]
    return [
        [
            harness.Run.of(harness.trainer(each, steps=STEPS, decay=decay, spmd_backend="partial_dtensor"))
            for each in chosen
        ]
        for decay in DECAYS
    ]


def test_every_group_follows_the_schedule(launch) -> None:
    """A group with a learning rate of its own too; Adam's losses and weights are those of torchtitan's AdamW."""
    runs = launch(_runs, 2)[0]
    for theirs, adam, muon in runs:
        assert all(len(set(rates)) == 2 for rates in theirs.rates)
        for ours in (adam, muon):
            assert [set(rates) for rates in ours.rates] == [set(rates) for rates in theirs.rates]
        assert adam.losses == pytest.approx(theirs.losses, rel=1e-6)
        assert harness.far(adam.weights, theirs.weights) < 1e-6
    assert len({str(theirs.rates) for theirs, _, _ in runs}) == len(DECAYS)
