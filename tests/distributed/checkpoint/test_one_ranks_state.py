"""One rank's state dict is never taken for the whole; what a rank can do with its own goes on."""

import copy
import io
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from megaopt_core import ProcessGroupCollection, build_optimizer
from megaopt_core.errors import StateDictError, UnsupportedOperationError
from megaopt_core.optimizers import MegatronOptimizer

pytest.importorskip("megaopt_adam")
files = pytest.importorskip("megaopt_checkpoint")
pytest.importorskip("megaopt_distributed")
pytest.importorskip("megaopt_layerwise")
pytestmark = [pytest.mark.any_python, pytest.mark.distributed]


class Halves(nn.Module):
    """Two weights of one size, so that each of two ranks keeps the state of one, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 64, bias=False)
        self.second = nn.Linear(64, 16, bias=False)
        self.empty = nn.Parameter(torch.zeros(0, 3))


def stepped(sharding: str, name: str, steps: int = 2, **settings: Any) -> tuple[Halves, MegatronOptimizer]:
    """Return a model and its optimizer after some steps."""
    model = Halves()
    optimizer = build_optimizer(model, name, lr=1e-2, clip_grad=0.0, sharding=sharding, **settings)
    go_on(model, optimizer, range(steps))
    return model, optimizer


def go_on(model: nn.Module, optimizer: MegatronOptimizer, steps: range) -> None:
    """Step on gradients that depend on the step alone."""
    for step in steps:
        chance = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=chance)
        optimizer.step()


def error_of(act: Any) -> str:
    """Return the kind and the words of an error."""
    try:
        act()
    except (StateDictError, UnsupportedOperationError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def keep_and_lose(rank: int, size: int) -> dict[str, Any]:
    """Pickle one rank's state in several ways, copy it in memory, and load it where all of it is needed."""
    found: dict[str, Any] = {}
    whole = StateDictOptions(full_state_dict=True)
    for sharding in ("distributed", "layer_wise"):
        model, optimizer = stepped(sharding, "adam")
        state = optimizer.state_dict()
        weights = {"first.weight": model.first.weight, "second.weight": model.second.weight}
        found[sharding, "lost"] = [name for name, param in weights.items() if not optimizer.state[param]]
        gathered = get_optimizer_state_dict(model, optimizer, options=whole)
        found[sharding, "file"] = error_of(partial(torch.save, state, io.BytesIO()))
        found[sharding, "full"] = error_of(partial(torch.save, gathered, io.BytesIO()))
        before = copy.deepcopy(
            {name: dict(optimizer.state[param]) for param, name in optimizer.names.items()}
        )
        optimizer.load_state_dict(copy.deepcopy(state))
        for flat in (False, True):
            options = StateDictOptions(flatten_optimizer_state_dict=flat)
            own = get_optimizer_state_dict(model, optimizer, options=options)
            set_optimizer_state_dict(model, optimizer, own, options=options)
        found[sharding, "same"] = all(
            torch.equal(value, optimizer.state[param][key])
            for param, name in optimizer.names.items()
            for key, value in before[name].items()
        )
        alone = build_optimizer(Halves(), "adam", lr=1e-2, pg_collection=ProcessGroupCollection())
        plain = {**state, "state": {index: dict(values) for index, values in state["state"].items()}}
        found[sharding, "alone"] = [error_of(partial(alone.load_state_dict, each)) for each in (state, plain)]
    _, without = stepped("distributed", "sgd", sgd_momentum=0.0)
    found["stateless"] = error_of(lambda: torch.save(without.state_dict(), io.BytesIO()))
    return found


def test_one_ranks_state_is_never_taken_for_the_whole(launch):
    """Neither in a file nor in a load; in memory, and by torch's functions, it goes where it came from."""
    for rank, found in enumerate(launch(keep_and_lose, 2)):
        assert found["stateless"] == "none"
        for sharding in ("distributed", "layer_wise"):
            (lost,) = found[sharding, "lost"]  # every rank keeps one weight's state
            assert found[sharding, "file"] == (
                "UnsupportedOperationError: a state dict of one rank cannot be pickled: other ranks keep the state of "
                "some of its parameters. Use save_checkpoint() and load_checkpoint(), or torch.distributed.checkpoint, "
                "also with torch's get_optimizer_state_dict(): each shard is saved once, and loads on any number of "
                "ranks"
            )
            assert found[sharding, "full"].startswith(
                "UnsupportedOperationError: a slice of a sharded tensor"
            ), rank
            assert found[sharding, "same"]
            for words in found[sharding, "alone"]:
                assert words.startswith(f"StateDictError: the state dict lacks the state of {lost!r}")


def reshard(rank: int, size: int, folder: str) -> list[bool]:
    """Save under one strategy and load under another, by our functions and by torch's, and step on."""
    same = []
    for there, here in (
        ("distributed", "replicated"),
        ("layer_wise", "replicated"),
        ("replicated", "distributed"),
    ):
        for way in ("files", "dcp", "torch"):
            model, optimizer = stepped(there, "adam")
            other, resumed = stepped(here, "adam", steps=0)
            path = f"{folder}/{there}-{here}-{way}"
            if way == "files":
                files.save_checkpoint(path, model, optimizer)
                files.load_checkpoint(path, other, resumed)
            elif way == "dcp":
                dcp.save({"optim": optimizer.checkpoint_state()}, checkpoint_id=path)
                dcp.load({"optim": resumed.checkpoint_state()}, checkpoint_id=path)
            else:
                dcp.save({"optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=path)
                state = {"optim": get_optimizer_state_dict(other, resumed)}
                dcp.load(state, checkpoint_id=path)
                set_optimizer_state_dict(other, resumed, state["optim"])
            other.load_state_dict(model.state_dict())
            go_on(model, optimizer, range(2, 4))
            go_on(other, resumed, range(2, 4))
            same.append(all(map(torch.equal, model.parameters(), other.parameters())))
    return same


def test_whole_and_empty_parameters_go_to_any_sharding(launch, tmp_path):
    """A parameter without elements has a state in every checkpoint, whatever the strategy."""
    for same in launch(reshard, 2, str(tmp_path)):
        assert all(same), same


@pytest.mark.parametrize("left_out", [True, False])
def test_a_state_that_was_left_out_is_missed_by_a_fresh_optimizer(left_out) -> None:
    """An empty state beside others is refused; a parameter without an entry has never been stepped."""
    groups = ProcessGroupCollection()
    _, first = stepped("replicated", "adam", pg_collection=groups)
    _, second = stepped("replicated", "adam", steps=0, pg_collection=groups)
    state = first.state_dict()
    index = state["param_groups"][0]["param_names"].index("first.weight")
    del state["state"][index]
    if left_out:
        state["state"][index] = {}
        with pytest.raises(StateDictError, match=r"lacks the state of 'first.weight'"):
            second.load_state_dict(state)
    second.load_state_dict(state, strict=not left_out)
