"""A run that began with torch's AdamW goes on with ours."""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megaopt_trainers.midrun import take_over
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from megaopt_core import MegatronOptimizer, build_optimizer
from megaopt_core.errors import ConfigurationError

VECTORS = 7
MATRICES = ("2.weight", "3.weight")


def network() -> nn.Sequential:
    """Return a small model with an embedding, a norm, hidden layers and a head."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 16)
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Take steps on data that the step decides."""
    for step in steps:
        batch = torch.randint(0, 16, (4, 6), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def adamw(model: nn.Module, groups: str) -> torch.optim.AdamW:
    """Return torch's AdamW over groups as scripts make them."""
    params = list(model.parameters())
    split: Any = params
    if groups == "by dimension":
        split = [
            {"params": [param for param in params if param.dim() >= 2], "weight_decay": 0.1},
            {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
        ]
    elif groups == "backwards":
        split = params[::-1]
    return torch.optim.AdamW(split, lr=1e-2, weight_decay=0.1, fused=True)


def reloaded(model: nn.Module, groups: str, form: str, began: Any, folder: str) -> torch.optim.AdamW:
    """Return an AdamW for a new process's model, with the state that a checkpoint of one form has."""
    old = adamw(model, groups)
    if form == "torch.save":
        torch.save(began[1].state_dict(), f"{folder}/old.pt")
        old.load_state_dict(torch.load(f"{folder}/old.pt"))
    else:
        saved = get_optimizer_state_dict(*began)
        dcp.save({"optim": saved}, checkpoint_id=folder, no_dist=True)
        state = {"optim": get_optimizer_state_dict(model, old)}
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        set_optimizer_state_dict(model, old, state["optim"])
    return old


@pytest.fixture(params=["torch.save", "dcp"])
def began(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Return a function that trains three steps with AdamW, saves, goes on, and builds ours in its place."""

    def begin(groups: str, kind: str, **settings: Any) -> tuple[nn.Module, nn.Module, MegatronOptimizer, Any]:
        theirs = network()
        optimizer = adamw(theirs, groups)
        train(theirs, optimizer, range(3))
        ours = copy.deepcopy(theirs)
        old = reloaded(ours, groups, request.param, (theirs, optimizer), str(tmp_path))
        new = build_optimizer(ours, kind, clip_grad=0.0, **settings)
        told = take_over(new, old)
        train(theirs, optimizer, range(3, 6))
        return theirs, ours, new, told

    return begin


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("groups", ["one", "by dimension", "backwards"])
def test_adam_goes_on_bit_for_bit(began, groups) -> None:
    """Moments, counts and settings, whatever order the groups had; what was built with is replaced."""
    theirs, ours, optimizer, told = began(groups, "adam", lr=0.5, weight_decay=0.3)
    train(ours, optimizer, range(3, 6))
    assert all(map(torch.equal, theirs.parameters(), ours.parameters()))
    assert (len(told.kept), told.anew) == (VECTORS + len(MATRICES), ())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("groups", ["one", "by dimension"])
def test_muon_keeps_what_adam_steps_and_says_what_begins_anew(began, groups) -> None:
    """Matrices have the settings that Muon was built with, and no state of Adam's."""
    _, ours, optimizer, told = began(groups, "muon", lr=0.02, weight_decay=0.3)
    name_of = {param: name for name, param in ours.named_parameters()}
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state[param]
            if name_of[param] in MATRICES:
                assert (group["lr"], group["weight_decay"], set(state)) == (0.02, 0.3, {"momentum_buffer"})
                assert not state["momentum_buffer"].any()
            else:
                assert (group["lr"], int(state["step"])) == (1e-2, 3)
    assert set(told.anew) == set(MATRICES)
    assert str(told).splitlines()[1] == f"state of 2 parameters begins anew: {', '.join(told.anew)}"
    train(ours, optimizer, range(3, 6))


def test_the_optimizer_of_another_model_is_refused() -> None:
    """Nothing is matched by position."""
    model, other = network(), network()
    old = adamw(other, "one")
    train(other, old, range(1))
    with pytest.raises(ConfigurationError, match=r"9 of the 9 parameters .* are not stepped by the new one"):
        take_over(build_optimizer(model, "adam"), old)
