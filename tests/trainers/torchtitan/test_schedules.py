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


def _runs(rank: int, size: int, name: str) -> list[tuple[harness.Run, harness.Run]]:
    """Return torchtitan's run and ours under each schedule."""
    ours = replace(getattr(harness, name)(), overrides={"lm_head.*": {"max_lr": HEAD_LR}})
    return [
        tuple(
            harness.Run.of(harness.trainer(each, steps=STEPS, decay=decay, spmd_backend="partial_dtensor"))
            for each in (_theirs(), ours)
        )
        for decay in DECAYS
    ]


@pytest.mark.parametrize("name", ["adam", "muon"])
def test_every_group_follows_the_schedule(launch, name) -> None:
    """A group with a learning rate of its own too; Adam's losses and weights are those of torchtitan's AdamW."""
    runs = launch(_runs, 2, name)[0]
    for theirs, ours in runs:
        assert [set(rates) for rates in ours.rates] == [set(rates) for rates in theirs.rates]
        if name == "adam":
            assert ours.losses == pytest.approx(theirs.losses, rel=1e-6)
            assert harness.far(ours.weights, theirs.weights) < 1e-6
    assert len({str(ours.rates) for _, ours in runs}) == len(DECAYS)
    assert all(max(map(max, ours.rates)) == 8e-4 and len(set(ours.rates[0])) == 2 for _, ours in runs)
