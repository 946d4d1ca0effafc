"""Groups and schedules at a load: one rule, in whatever order optimizer, scheduler and checkpoint are loaded."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from torch import nn

from megaopt_core import OptimizerParamScheduler, build_optimizer
from megaopt_core.errors import ScheduleError

pytestmark = [pytest.mark.any_python, pytest.mark.filterwarnings("ignore:settings of the scheduler")]

RULES = {
    "checkpoint": {},
    "override": {"override_opt_param_scheduler": True},
    "agree": {"use_checkpoint_opt_param_scheduler": False},
}


class Run:
    """A model, its optimizer and, once it is made, its scheduler, configured with a peak."""

    def __init__(self, peak: float, rule: str, folder: Path, saved: Any = None) -> None:
        self.peak, self.rule, self.folder, self.saved = peak, rule, folder, saved
        torch.manual_seed(0)
        self.model = nn.Linear(4, 4)
        self.optimizer = build_optimizer(self.model, "adam", lr=peak, min_lr=peak / 10, weight_decay=0.1)
        self._scheduler: OptimizerParamScheduler | None = None

    @property
    def scheduler(self) -> OptimizerParamScheduler:
        """The scheduler; it is made when it is asked for first."""
        if self._scheduler is None:
            peak, rule = self.peak, RULES[self.rule]
            self._scheduler = OptimizerParamScheduler(
                self.optimizer, 0.0, peak, peak / 10, 2, 10, "linear", 0.1, 0.1, 10, "constant", **rule
            )
        return self._scheduler

    def step(self) -> None:
        """Take a step."""
        for param in self.model.parameters():
            param.grad = torch.ones_like(param)
        self.optimizer.step()
        self.scheduler.step(increment=1)

    def load_optimizer(self) -> None:
        """Load its state dict."""
        self.optimizer.load_state_dict(copy.deepcopy(self.saved[0]))

    def load_scheduler(self) -> None:
        """Load its state dict."""
        self.scheduler.load_state_dict(self.saved[1])

    def load_both(self) -> None:
        """Load the checkpoint, with the scheduler."""
        load_checkpoint(self.folder, self.model, self.optimizer, self.scheduler)

    def load_without(self) -> None:
        """Load the checkpoint, without the scheduler."""
        load_checkpoint(self.folder, self.model, self.optimizer)

    def load(self, order: str) -> None:
        """Load in an order."""
        for load in ORDERS[order]:
            load(self)


type Load = Callable[[Run], None]
ORDERS: dict[str, tuple[Load, ...]] = {
    "optimizer, scheduler": (Run.load_optimizer, Run.load_scheduler),
    "scheduler, optimizer": (Run.load_scheduler, Run.load_optimizer),
    "checkpoint": (Run.load_both,),
    "checkpoint, scheduler": (Run.load_without, Run.load_scheduler),
    "scheduler, checkpoint": (Run.load_scheduler, Run.load_without),
    "scheduler": (Run.load_scheduler,),
    "twice": (Run.load_both, Run.load_optimizer, Run.load_both, Run.load_scheduler),
}


@pytest.fixture
def resumed(tmp_path: Path) -> Callable[..., Run]:
    """Return what makes a run that may load one of another peak, after four steps."""
    first = Run(1e-2, "checkpoint", tmp_path / "last")
    for _ in range(4):
        first.step()
    save_checkpoint(tmp_path / "last", first.model, first.optimizer, first.scheduler)
    saved = copy.deepcopy((first.optimizer.state_dict(), first.scheduler.state_dict()))

    def make(peak: float, rule: str, *, made_first: bool) -> Run:
        run = Run(peak, rule, tmp_path / "last", saved)
        if made_first:
            _ = run.scheduler
        return run

    return make


@pytest.mark.parametrize("made_first", [True, False], ids=["made before", "made when needed"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rule", ["checkpoint", "override"])
def test_whose_bounds_hold(resumed, rule, order, made_first):
    """The checkpoint's, or those configured now: for scheduler and groups alike, at the step that was saved."""
    run = resumed(2e-2, rule, made_first=made_first)
    run.load(order)
    peak = 1e-2 if rule == "checkpoint" else 2e-2
    slope = 0.9 * peak / 8
    for count in (2, 3):
        for group in run.optimizer.param_groups:
            assert (group["max_lr"], group["min_lr"]) == (peak, peak / 10)
            assert group["lr"] == pytest.approx(peak - count * slope)
        run.step()
    assert run.scheduler.num_steps == 6


@pytest.mark.parametrize("order", ORDERS)
def test_bounds_that_must_agree(resumed, order):
    """An error names the setting and both values; where they are the same, the load succeeds."""
    run = resumed(2e-2, "agree", made_first=True)
    with pytest.raises(ScheduleError, match=r"max_lr is 0.02 in this scheduler and 0.01 in the checkpoint"):
        run.load(order)
    assert {(group["max_lr"], group["lr"]) for group in run.optimizer.param_groups} == {(2e-2, 0.0)}
    run = resumed(1e-2, "agree", made_first=True)
    run.load(order)
    assert {group["max_lr"] for group in run.optimizer.param_groups} == {1e-2}


def test_a_failed_load_leaves_groups_as_they_were(resumed):
    """Bounds among them."""
    run = resumed(2e-2, "checkpoint", made_first=True)
    run.saved[1]["num_steps"] = -1
    with pytest.raises(ScheduleError):
        run.load_scheduler()
    assert {(group["max_lr"], group["min_lr"], group["lr"]) for group in run.optimizer.param_groups} == {
        (2e-2, 2e-3, 0.0)
    }
