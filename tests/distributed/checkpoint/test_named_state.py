"""A small format of checkpoints of one's own: written against `optimizer.named_state()`, by public names alone."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megaopt_core import MegatronOptimizer, build_optimizer
from megaopt_core.errors import PluginNotInstalledError, StateDictError
from megaopt_core.params import Shard
from megaopt_core.registry import reset_registry

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]


def positions(shard: Shard) -> torch.Tensor:
    """Return where the elements of a shard lie in its flattened parameter."""
    whole = torch.arange(math.prod(shard.shape)).view(shard.shape)
    offsets, sizes = shard.box
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole.reshape(-1)[shard.start : shard.stop]


def settings_of(optimizer: MegatronOptimizer) -> dict[str, float]:
    """Return the learning rate of each parameter by name."""
    return {
        optimizer.names[param]: group["lr"] for group in optimizer.param_groups for param in group["params"]
    }


def save(optimizer: MegatronOptimizer, folder: str, rank: int) -> None:
    """Write what this rank keeps into a file of its own."""
    with optimizer.step_lock.saving():
        parts = [part for part in optimizer.named_state().slices() if not part.is_fresh]
        held = [(part.name, part.key, part.shard, part.is_elementwise, part.read().clone()) for part in parts]
    files = [
        (name, key, math.prod(shard.shape), positions(shard) if is_elementwise else None, value)
        for name, key, shard, is_elementwise, value in held
    ]
    torch.save((files, settings_of(optimizer)), Path(folder) / f"{rank}.pt")


def load(optimizer: MegatronOptimizer, folder: str) -> None:
    """Put each state together from the files of all ranks, and write what is kept here."""
    tensors, numbers = {}, {}
    for file in sorted(Path(folder).glob("*.pt")):
        slices, settings = torch.load(file)
        for name, key, numel, where, value in slices:
            if where is None:
                numbers[name, key] = value
            else:
                tensors.setdefault((name, key), torch.full((numel,), torch.nan))[where] = value
    found, state = [], optimizer.named_state()
    for part in state.slices():
        stored = tensors if part.is_elementwise else numbers
        value = stored[part.name, part.key]
        found.append((part, value[positions(part.shard)] if part.is_elementwise else value))
    state.write(found)
    for group in optimizer.param_groups:
        (saved,) = {settings[optimizer.names[param]] for param in group["params"]}
        group["lr"] = saved


def run(
    rank: int, size: int, folder: str, settings: dict[str, Any], steps: range, source: str | None = None
) -> list[torch.Tensor]:
    """Train with the same gradients everywhere, from a checkpoint if there is one, and save."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).to(torch.bfloat16)
    optimizer = build_optimizer(model, "adam", lr=1e-2, clip_grad=0.0, bf16=True, **settings)
    for group in optimizer.param_groups:
        group["lr"] *= 1 if source else 0.5  # a run that is resumed learns of it from the files alone
    if source is not None:
        model.load_state_dict(torch.load(f"{source}/model"))
        load(optimizer, source)
    for step in steps:
        torch.manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape).to(param.dtype)
        optimizer.step()
    save(optimizer, folder, rank)
    if rank == 0:
        torch.save(model.state_dict(), f"{folder}/model")
    if dist.is_initialized():
        dist.barrier()
    return [param.detach().float() for param in model.parameters()]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((2, {"sharding": "distributed"}), (1, {})),
        ((1, {}), (2, {"sharding": "distributed"})),
        ((2, {"sharding": "distributed", "use_precision_aware_optimizer": True}), (1, {})),
    ],
)
def test_a_format_of_ones_own_resumes_on_other_ranks(launch, tmp_path, first, second):
    """Bit for bit, from two ranks that share state to one and back; main values come from remainders, too."""
    pytest.importorskip("megaopt_distributed")
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    launch(run, first[0], str(tmp_path / "a"), first[1], range(2))
    resumed = launch(run, second[0], str(tmp_path / "b"), second[1], range(2, 4), str(tmp_path / "a"))
    unbroken = launch(run, 1, str(tmp_path / "c"), {}, range(4))
    assert all(map(torch.equal, resumed[0], unbroken[0]))


def test_what_does_not_fit_changes_nothing():
    """The error names the state."""
    pytest.importorskip("megaopt_adam")
    model = torch.nn.Linear(3, 2)
    optimizer = build_optimizer(model, "adam", lr=1e-2)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state, before = optimizer.named_state(), optimizer.state[model.weight]["exp_avg"].clone()
    parts = {(part.name, part.key): part for part in state.slices()}
    good, bad = parts["weight", "exp_avg"], parts["bias", "exp_avg"]
    with pytest.raises(StateDictError, match=r"'exp_avg' of 'bias' takes 2 elements here, got 3 elements"):
        state.write([(good, torch.zeros(6)), (bad, torch.zeros(3))])
    with pytest.raises(StateDictError, match=r"'step' of 'weight' is .* and cannot become 'many'"):
        state.write([(good, torch.zeros(6)), (parts["weight", "step"], "many")])
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], before)


def without_the_library(rank: int, size: int) -> list[str]:
    """Return what a rank hears that shares states, and has no plugin that shows them."""
    os.environ["MEGAOPT_DISABLE_PLUGINS"] = "checkpoint"
    reset_registry()
    model = torch.nn.Linear(5, 7)
    optimizer = build_optimizer(model, "adam", lr=1e-2, sharding="distributed")
    heard = []
    for ask in (optimizer.state_dict, lambda: optimizer.load_state_dict({"state": {}, "param_groups": []})):
        with pytest.raises(PluginNotInstalledError) as raised:
            ask()
        heard.append(str(raised.value))
    return heard


def test_without_the_library_all_ranks_are_told_what_to_install(launch):
    """Before any of them waits for another; the optimizer steps all the same."""
    pytest.importorskip("megaopt_distributed")
    for heard in launch(without_the_library, 2):
        for words in heard:
            assert words.startswith("a state dict that 'distributed' shares out over ranks comes with ")
            assert "megaopt-checkpoint" in words
