"""What is refused when a scheduler is built or stepped, word for word."""

import math
import re
from typing import Any

import pytest
import torch

from megaopt_core.errors import ScheduleError
from megaopt_core.schedules import OptimizerParamScheduler

SETTINGS = {
    "init_lr": 0.0,
    "max_lr": 1.0,
    "min_lr": 0.1,
    "lr_warmup_steps": 10,
    "lr_decay_steps": 110,
    "lr_decay_style": "linear",
    "start_wd": 0.0,
    "end_wd": 0.2,
    "wd_incr_steps": 100,
    "wd_incr_style": "linear",
}


def sgd(**group: Any) -> torch.optim.SGD:
    """A plain torch optimizer with one group, which has these further keys."""
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(2))], **group}], lr=9.0)


def scheduler_on(optimizer: torch.optim.Optimizer | None = None, **changes: Any) -> OptimizerParamScheduler:
    """A scheduler whose settings are the ones above but for the changes."""
    return OptimizerParamScheduler(sgd() if optimizer is None else optimizer, **(SETTINGS | changes))


def values(optimizer: torch.optim.Optimizer) -> list[tuple[float, float]]:
    """Learning rate and weight decay of every group."""
    return [(float(group["lr"]), group["weight_decay"]) for group in optimizer.param_groups]


WSD = {"lr_decay_style": "WSD", "lr_wsd_decay_style": "linear", "wsd_decay_steps": 50}
REFUSED = [
    ({"max_lr": -1.0}, "max_lr=-1.0: must be finite and not negative", "max_lr"),
    ({"init_lr": -0.5}, "init_lr=-0.5: must be finite and not negative", "init_lr"),
    ({"min_lr": math.nan}, "min_lr=nan: must be finite and not negative", "min_lr"),
    ({"max_lr": math.inf}, "max_lr=inf: must be finite and not negative", "max_lr"),
    ({"max_lr": "1e-3"}, "max_lr='1e-3': must be a number", "max_lr"),
    ({"max_lr": None}, "max_lr=None: must be a number", "max_lr"),
    ({"init_lr": True}, "init_lr=True: must be a number", "init_lr"),
    ({"init_lr": 2.0}, "init_lr=2.0: must not be above max_lr=1.0", "init_lr"),
    ({"min_lr": 1.5}, "min_lr=1.5: must not be above max_lr=1.0", "min_lr"),
    ({"lr_warmup_steps": -1}, "lr_warmup_steps=-1: must be finite and not negative", "lr_warmup_steps"),
    (
        {"lr_warmup_steps": 110},
        "lr_warmup_steps=110: must be below lr_decay_steps=110, which counts from step 0",
        "lr_warmup_steps",
    ),
    (
        {"lr_warmup_steps": 0, "lr_decay_steps": 0},
        "lr_warmup_steps=0: must be below lr_decay_steps=0, which counts from step 0",
        "lr_warmup_steps",
    ),
    ({"start_wd": -0.1}, "start_wd=-0.1: must be finite and not negative", "start_wd"),
    ({"end_wd": math.nan}, "end_wd=nan: must be finite and not negative", "end_wd"),
    ({"start_wd": 0.3}, "start_wd=0.3: must not be above end_wd=0.2", "wd_incr_style"),
    ({"wd_incr_steps": -3}, "wd_incr_steps=-3: must be finite and not negative", "wd_incr_steps"),
    (
        {"wd_incr_style": "constant"},
        "start_wd=0.0: style 'constant' needs it equal to end_wd=0.2",
        "wd_incr_style",
    ),
    (
        {"wd_incr_style": "WSD"},
        "wd_incr_style='WSD': this style serves lr_decay_style only; known are constant, cosine, linear",
        "wd_incr_style",
    ),
    (
        {"lr_decay_style": "cosin"},
        (
            "lr_decay_style='cosin': no plugin offers this style (did you mean 'cosine'?); "
            "known are constant, cosine, inverse-square-root, linear, WSD"
        ),
        "lr_decay_style",
    ),
    (
        {"wd_incr_style": "step-wise"},
        "wd_incr_style='step-wise': no plugin offers this style; known are constant, cosine, linear",
        "wd_incr_style",
    ),
    ({"lr_decay_style": None}, "lr_decay_style=None: must be the name of a style", "lr_decay_style"),
    (
        WSD | {"wsd_decay_steps": None},
        "wsd_decay_steps=None: style 'WSD' needs the length of its final decay",
        "lr_decay_style",
    ),
    (
        WSD | {"wsd_decay_steps": 101},
        "wsd_decay_steps=101: must be from 1 to lr_decay_steps - lr_warmup_steps = 100",
        "lr_decay_style",
    ),
    (
        WSD | {"wsd_decay_steps": 0},
        "wsd_decay_steps=0: must be from 1 to lr_decay_steps - lr_warmup_steps = 100",
        "lr_decay_style",
    ),
    (WSD | {"wsd_decay_steps": -5}, "wsd_decay_steps=-5: must be finite and not negative", "wsd_decay_steps"),
    (
        WSD | {"lr_wsd_decay_style": None},
        "lr_wsd_decay_style=None: style 'WSD' takes 'linear', 'cosine', 'exponential', 'minus_sqrt'",
        "lr_decay_style",
    ),
    (
        WSD | {"lr_wsd_decay_style": "square"},
        "lr_wsd_decay_style='square': style 'WSD' takes 'linear', 'cosine', 'exponential', 'minus_sqrt'",
        "lr_decay_style",
    ),
]


@pytest.mark.parametrize(
    ("changes", "message", "setting"), REFUSED, ids=[m.split(":")[0] for _, m, _ in REFUSED]
)
def test_bad_settings_are_refused_at_construction(changes, message, setting) -> None:
    """The message names the setting, what was given and what is allowed; no group was touched."""
    optimizer = sgd()
    with pytest.raises(ScheduleError) as error:
        scheduler_on(optimizer, **changes)
    assert (str(error.value), error.value.setting) == (message, setting)
    assert values(optimizer) == [(9.0, 0)]


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"max_lr": 0.05}, "param group 1: min_lr=0.1: must not be above max_lr=0.05"),
        ({"max_lr": -1.0}, "param group 1: max_lr=-1.0: must be finite and not negative"),
        ({"wd_mult": math.nan}, "param group 1: wd_mult=nan: must be finite and not negative"),
        ({"start_wd": 0.5}, "param group 1: start_wd=0.5: must not be above end_wd=0.2"),
    ],
)
def test_bad_values_of_a_group_are_refused_at_construction(group, message) -> None:
    """The message says which group."""
    optimizer = sgd()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], **group})
    with pytest.raises(ScheduleError, match=f"^{re.escape(message)}$"):
        scheduler_on(optimizer)


@pytest.mark.filterwarnings("ignore::megaopt_core.errors.UnusedSettingWarning")
def test_a_group_may_warm_up_from_above_its_maximum() -> None:
    """`init_lr` is the scheduler's alone: a group with a smaller maximum comes down to it."""
    optimizer = sgd(max_lr=0.2)
    scheduler = scheduler_on(optimizer, init_lr=0.4)
    scheduler.step(5)
    assert values(optimizer)[0][0] == pytest.approx(0.3)


@pytest.mark.parametrize("increment", [-1, math.nan, "1", None])
def test_bad_increments_change_nothing(increment) -> None:
    """A step that cannot be is refused before it counts."""
    optimizer = sgd()
    scheduler = scheduler_on(optimizer)
    scheduler.step(10)
    with pytest.raises(ScheduleError, match=r"^increment="):
        scheduler.step(increment)
    assert (scheduler.num_steps, values(optimizer)) == (10, [(1.0, pytest.approx(0.02))])
