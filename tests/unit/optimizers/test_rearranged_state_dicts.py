"""State dicts whose groups torch's functions have rearranged: states go by the names that are listed."""

from collections.abc import Callable, Collection

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp

from megaopt_core import ParamKey
from megaopt_core.errors import CheckpointMismatchError, StateDictError
from megaopt_core.optimizers import MegatronOptimizer


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, give: Callable[..., None]) -> None:
    for step in range(2):
        give(model, step)
        optimizer.step()


def _square(
    halved: Collection[str], build: Callable[..., MegatronOptimizer]
) -> tuple[nn.Module, MegatronOptimizer]:
    """Return matrices of one shape, and an optimizer that decays some of them by half."""
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(4)))
    return model, build(
        model, weight_decay=0.5, overrides={ParamKey(name=name): {"wd_mult": 0.5} for name in halved}
    )


@pytest.mark.parametrize(
    ("there", "here"),
    [(["0.weight"], ["1.weight"]), ([], ["0.weight"]), (["3.weight"], ["0.weight"])],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:parameters that were in several groups:UserWarning")
def test_torchs_helpers_carry_states_into_other_groups(build, give, there, here) -> None:
    """They list parameters as the groups are here, and leave beside them the names of those that were saved."""
    (source, first), (target, second) = _square(there, build), _square(here, build)
    _train(source, first, give)
    dcp.set_optimizer_state_dict(target, second, dcp.get_optimizer_state_dict(source, first))
    for mine, other in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(first.state[mine]["exp_avg"], second.state[other]["exp_avg"])


def test_torchs_helpers_leave_out_settings_of_merged_groups(build, give, snapshot) -> None:
    """Nobody knows then who stepped what: the error names the parameters, and nothing changes."""
    (source, first), (target, second) = _square(["0.weight"], build), _square([], build)
    _train(source, first, give)
    saved = dcp.get_optimizer_state_dict(source, first)
    before = snapshot(target, second)
    with pytest.raises(
        StateDictError, match=r"lacks the settings of 1\.weight, 2\.weight, 3\.weight: the groups"
    ):
        dcp.set_optimizer_state_dict(target, second, saved)
    assert snapshot(target, second) == before


@pytest.mark.parametrize("key", ["step", "exp_avg", "exp_avg_sq"])
def test_flat_states_that_are_missing_are_named(build, give, snapshot, key) -> None:
    """Torch puts an empty mapping in their place."""
    flat = dcp.StateDictOptions(flatten_optimizer_state_dict=True)
    (source, first), (target, second) = _square([], build), _square([], build)
    _train(source, first, give)
    saved = dcp.get_optimizer_state_dict(source, first, options=flat)
    del saved[f"state.1.weight.{key}"]
    before = snapshot(target, second)
    with pytest.raises(
        CheckpointMismatchError, match=f"lacks state that the optimizer keeps here: 1.weight: {key};"
    ):
        dcp.set_optimizer_state_dict(target, second, saved, options=flat)
    assert snapshot(target, second) == before
