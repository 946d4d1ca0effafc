"""In every mesh of four ranks, one rank's fault stops all ranks, changes nothing, and the next step works."""

import math
import warnings
from typing import Any

import pytest
import torch
from megaopt_testing.plugins import temporary_plugin
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megaopt_core import build_optimizer, hookimpl
from megaopt_core.errors import MegaoptError
from megaopt_core.optimizers._gradients import statistics
from megaopt_core.plugin_api import StepObserver

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]

MESHES = {
    "dp 4": ((4,), ("dp",)),
    "tp 4": ((4,), ("tp",)),
    "dp 2, tp 2": ((2, 2), ("dp", "tp")),
    "pp 2, dp 2": ((2, 2), ("pp", "dp")),
    "pp 2, tp 2": ((2, 2), ("pp", "tp")),
}
SETTINGS = {
    "plain": {"clip_grad": 0.0},
    "clipped": {"clip_grad": 1.0},
    "bf16": {"clip_grad": 0.0, "bf16": True},
    "shared out": {"clip_grad": 1.0, "sharding": "distributed"},
}


class Objecting(StepObserver):
    """Raises where it is told to."""

    objects = False

    def before_step(self) -> None:
        """Object."""
        if self.objects:
            raise RuntimeError("this rank objects")


class Plugin:
    """Brings one to every optimizer."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_step_observers(self, optimizer: Any) -> list[StepObserver]:
        """A new one."""
        return [Objecting()]


def observer_of(optimizer: Any) -> Objecting:
    """Return the one of an optimizer."""
    return next(each for _, each in optimizer.observers.members if isinstance(each, Objecting))


def writes_another_rate(optimizer: Any, model: nn.Module) -> Any:
    """Write a setting that replicas do not share."""
    optimizer.param_groups[0]["lr"] = 0.3
    return lambda: optimizer.param_groups[0].update(lr=0.1)


def breaks_a_setting(optimizer: Any, model: nn.Module) -> Any:
    """Write a setting that cannot be."""
    optimizer.param_groups[0]["lr"] = "fast"
    return lambda: optimizer.param_groups[0].update(lr=0.1)


def objects(optimizer: Any, model: nn.Module) -> Any:
    """Let an observer raise."""
    observer_of(optimizer).objects = True
    return lambda: setattr(observer_of(optimizer), "objects", False)


def freezes(optimizer: Any, model: nn.Module) -> Any:
    """Freeze a parameter; its gradient goes, too."""
    model.bias.requires_grad_(False)
    model.bias.grad = None
    return lambda: model.bias.requires_grad_(True)


def converts(optimizer: Any, model: nn.Module) -> Any:
    """Exchange a gradient for a sparse one, which cannot be measured or collected."""
    model.weight.grad = torch.eye(4).to(model.weight.dtype).to_sparse()
    return lambda: None


def overflows(optimizer: Any, model: nn.Module) -> Any:
    """Leave a gradient that is not finite."""
    model.weight.grad[0, 0] = math.inf
    return lambda: None


FAULTS = (writes_another_rate, breaks_a_setting, objects, freezes, converts, overflows)


def give_gradients(model: nn.Module) -> None:
    """The same on all ranks."""
    for param in model.parameters():
        if param.requires_grad:
            param.grad = torch.full_like(param, 0.5)


def stepped(optimizer: Any) -> str:
    """Step; return what came of it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return "stepped" if optimizer.step().update_successful else "skipped"
    except (MegaoptError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def faulty_on_a_device(*given: Any) -> list[Any]:
    """The same, where a CPU is taken for a device that the host waits for."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(statistics, "_READ_FREELY", frozenset())
        return faulty(*given)


def faulty(rank: int, size: int, mesh: str, which: str, faults: tuple[str, ...]) -> list[Any]:
    """For each fault on rank 0, what the step says, whether a value has moved, and what the next two say."""
    shape, names = MESHES[mesh]
    found = []
    with temporary_plugin(Plugin(), "objecting"):
        for fault in (each for each in FAULTS if each.__name__ in faults):
            torch.manual_seed(0)
            model = nn.Linear(4, 4).to(torch.bfloat16 if "bf16" in SETTINGS[which] else torch.float32)
            if "tp" in names:
                model.weight.tensor_model_parallel, model.weight.partition_dim = True, 0
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer = build_optimizer(
                    model,
                    "adam",
                    lr=0.1,
                    pg_collection=init_device_mesh("cpu", shape, mesh_dim_names=names),
                    fqn=(lambda _, name: f"{rank // 2}.{name}") if "pp" in names else None,
                    **SETTINGS[which],
                )
            give_gradients(model)
            ready = stepped(optimizer)
            before = [param.detach().clone() for param in model.parameters()]
            optimizer.zero_grad()
            give_gradients(model)
            undo = fault(optimizer, model) if rank == 0 else lambda: None
            said = stepped(optimizer)
            stays = all(map(torch.equal, before, model.parameters()))
            undo()
            optimizer.zero_grad()
            give_gradients(model)
            after = stepped(optimizer)
            optimizer.zero_grad()
            give_gradients(model)
            found.append((ready, said, stays, after, stepped(optimizer)))
    return found


SAID = {
    "writes_another_rate": "lr: 0.3 on rank 0; 0.1 on rank",
    "breaks_a_setting": "lr='fast'",
    "objects": "this rank objects",
    "freezes": "'bias'",
    "converts": "sparse gradient",
}


@pytest.mark.parametrize("which", SETTINGS)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_fault_of_one_rank_stops_all(launch, mesh: str, which: str) -> None:
    """With the message of the rank that refused, or with the values that differ; found-inf skips on all."""
    faults = [each.__name__ for each in FAULTS]
    if "dp" not in mesh:  # nobody has the same parameters
        faults = [name for name in faults if name not in ("writes_another_rate", "freezes")]
    if which in ("plain", "shared out"):  # a sparse gradient is stepped, or fails apart from what is measured
        faults.remove("converts")
    results = launch(faulty, 4, mesh, which, tuple(faults))
    for fault, of_ranks in zip(faults, zip(*results, strict=True), strict=True):
        for ready, said, stays, after, last in of_ranks:
            assert ready == last == "stepped"
            if fault == "overflows":
                assert said == ("skipped" if which == "bf16" else "stepped")
                continue
            assert SAID[fault].replace("'bias'", "bias") in said, (fault, of_ranks)
            assert stays, (fault, of_ranks)
            assert after == "stepped", (fault, of_ranks)


@pytest.mark.parametrize("which", SETTINGS)
@pytest.mark.parametrize("mesh", ["dp 4", "dp 2, tp 2", "pp 2, dp 2"])
def test_on_a_device_all_raise_when_the_next_step_begins(launch, mesh: str, which: str) -> None:
    """The step itself changes nothing on any rank, and no rank leaves another one waiting."""
    faults = [each.__name__ for each in FAULTS if each is not converts]
    results = launch(faulty_on_a_device, 4, mesh, which, tuple(faults))
    for fault, of_ranks in zip(faults, zip(*results, strict=True), strict=True):
        for ready, said, stays, after, last in of_ranks:
            assert ready == last == "stepped", (fault, of_ranks)
            if fault == "overflows":
                assert said == ("skipped" if which == "bf16" else "stepped")
                continue
            assert (said, stays) == ("skipped", True), (fault, of_ranks)
            assert SAID[fault].replace("'bias'", "bias") in after, (fault, of_ranks)
