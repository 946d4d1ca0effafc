"""The scheduler on any optimizer: values of groups, stepping, and what is refused when it is built."""

import inspect
import math
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megaopt_core.errors import ScheduleError, UnusedSettingWarning
from megaopt_core.plugin_api import ScheduleStyle
from megaopt_core.schedules import BUILTIN_STYLES, OptimizerParamScheduler

pytestmark = pytest.mark.any_python

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


def test_signature_is_the_established_one() -> None:
    """Arguments by place and by name keep working; what is ours comes last, by name only."""
    parameters = inspect.signature(OptimizerParamScheduler).parameters
    assert list(parameters) == [
        "optimizer",
        "init_lr",
        "max_lr",
        "min_lr",
        "lr_warmup_steps",
        "lr_decay_steps",
        "lr_decay_style",
        "start_wd",
        "end_wd",
        "wd_incr_steps",
        "wd_incr_style",
        "use_checkpoint_opt_param_scheduler",
        "override_opt_param_scheduler",
        "wsd_decay_steps",
        "lr_wsd_decay_style",
        "lr_style_settings",
        "wd_style_settings",
        "styles",
    ]
    assert parameters["use_checkpoint_opt_param_scheduler"].default is True
    assert parameters["override_opt_param_scheduler"].default is False
    assert parameters["styles"].kind is inspect.Parameter.KEYWORD_ONLY


def test_construction_applies_step_zero() -> None:
    """The optimizer's own learning rate and weight decay are replaced at once."""
    optimizer = sgd(weight_decay=0.7)
    scheduler = scheduler_on(optimizer, init_lr=0.25, start_wd=0.05)
    assert (values(optimizer), scheduler.num_steps) == ([(0.25, 0.05)], 0)


def test_every_step_follows_the_formula() -> None:
    """A whole run on a torch optimizer: warm-up, decay, and the time after it."""
    optimizer = sgd()
    scheduler = scheduler_on(optimizer)
    for t in range(1, 131):
        scheduler.step(1)
        lr = t / 10 if t <= 10 else 0.1 + 0.9 * (1 - (t - 10) / 100) if t <= 110 else 0.1
        wd = 0.2 * min(t, 100) / 100
        assert values(optimizer) == [(pytest.approx(lr, abs=1e-15), pytest.approx(wd))]


@given(first=st.integers(0, 200), second=st.integers(0, 200))
def test_increments_add_up(first, second) -> None:
    """Two increments are one increment of their sum."""
    twice, once = sgd(), sgd()
    scheduler = scheduler_on(twice)
    scheduler.step(first)
    scheduler.step(increment=second)
    scheduler_on(once).step(first + second)
    assert (values(twice), scheduler.num_steps) == (values(once), first + second)


@pytest.mark.filterwarnings("ignore::megaopt_core.errors.UnusedSettingWarning")
def test_group_values_win() -> None:
    """Each group follows its own ends; `wd_mult` scales what comes out."""
    group = {"max_lr": 0.5, "min_lr": 0.25, "start_wd": 0.1, "end_wd": 0.3, "wd_mult": 0.5}
    optimizer = sgd(**group)
    scheduler = scheduler_on(optimizer)
    scheduler.step(60)
    assert values(optimizer) == [(pytest.approx(0.375), pytest.approx(0.5 * (0.1 + 0.6 * 0.2)))]
    assert scheduler.get_wd(optimizer.param_groups[0]) == pytest.approx(0.22)
    assert scheduler.get_wd() == pytest.approx(0.12)
    scheduler.step(60)
    assert values(optimizer) == [(0.25, pytest.approx(0.15))]


def test_what_every_group_has_otherwise_is_named() -> None:
    """A scheduler's setting that no group follows changes nothing, and says so."""
    with pytest.warns(UnusedSettingWarning, match=r"max_lr=1\.0 .*: 0\.5\)$") as said:
        scheduler_on(sgd(max_lr=0.5, min_lr=0.1))
    assert said[0].filename == __file__


def test_a_setting_that_some_group_follows_is_not_named() -> None:
    """One group that has none of its own, or the scheduler's, is enough."""
    optimizer = torch.optim.SGD(
        [{"params": [torch.nn.Parameter(torch.zeros(2))], "max_lr": lr} for lr in (0.5, 1.0)], lr=9.0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler_on(optimizer)
        optimizer.param_groups[1]["max_lr"] = None
        scheduler_on(optimizer)


def test_group_values_of_none_count_as_missing() -> None:
    """A group that says nothing follows the scheduler."""
    group = dict.fromkeys(("max_lr", "min_lr", "start_wd", "end_wd", "wd_mult"))
    optimizer, plain = sgd(**group), sgd()
    scheduler_on(optimizer).step(40)
    scheduler_on(plain).step(40)
    assert values(optimizer) == values(plain)


@pytest.mark.filterwarnings("ignore::megaopt_core.errors.UnusedSettingWarning")
@given(
    top=st.floats(1e-3, 10),
    low=st.floats(0, 1),
    wd_mult=st.floats(0, 4),
    t=st.integers(11, 110),
)
def test_a_group_is_a_scheduler_of_its_own(top, low, wd_mult, t) -> None:
    """A group with values gives what a scheduler with those values gives."""
    own = {"max_lr": top, "min_lr": low * top}
    grouped, plain = sgd(**own, wd_mult=wd_mult), sgd()
    scheduler_on(grouped, lr_decay_style="cosine").step(t)
    scheduler_on(plain, lr_decay_style="cosine", **own).step(t)
    ((lr, wd),) = values(plain)
    assert values(grouped) == [(lr, wd * wd_mult)]


def test_empty_groups_are_stepped_too() -> None:
    """A rank whose group holds no parameter sees the same settings as the others."""
    optimizer = SimpleNamespace(param_groups=[{"params": []}, {"params": [], "wd_mult": 0.0}])
    scheduler_on(optimizer).step(110)
    assert values(optimizer) == [(pytest.approx(0.1), 0.2), (pytest.approx(0.1), 0.0)]


def test_tensor_learning_rate_is_filled_in_place() -> None:
    """A compiled or captured step sees the change through the tensor that it holds."""
    lr = torch.tensor(9.0)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=lr, capturable=False, foreach=False)
    held = optimizer.param_groups[0]["lr"]
    scheduler_on(optimizer).step(5)
    assert optimizer.param_groups[0]["lr"] is held
    assert held.item() == 0.5


def test_group_added_later_is_scheduled() -> None:
    """Groups are looked up at every step."""
    optimizer = sgd()
    scheduler = scheduler_on(optimizer)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "max_lr": 0.5})
    scheduler.step(10)
    assert [lr for lr, _ in values(optimizer)] == [1.0, 0.5]


def test_settings_may_change_between_steps() -> None:
    """Attributes are read at every step, so that a run can lengthen its decay."""
    optimizer = sgd()
    scheduler = scheduler_on(optimizer)
    scheduler.step(60)
    scheduler.lr_decay_steps = 210
    scheduler.step(0)
    assert values(optimizer)[0][0] == pytest.approx(0.1 + 0.9 * 0.75)


def test_torch_schedulers_work_on_the_same_optimizer() -> None:
    """Torch's schedulers take over where ours leaves off, and the other way round."""
    optimizer = sgd()
    scheduler = scheduler_on(optimizer)
    scheduler.step(10)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    optimizer.step()
    decay.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    optimizer.step()
    cosine.step()
    scheduler.step(0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1.0)


def test_cosine_without_warmup_equals_torchs() -> None:
    """Our cosine is torch's CosineAnnealingLR, step for step."""
    ours, theirs = sgd(), sgd()
    settings = {"lr_warmup_steps": 0, "lr_decay_steps": 50, "lr_decay_style": "cosine", "max_lr": 9.0}
    scheduler = scheduler_on(ours, **settings)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(theirs, T_max=50, eta_min=0.1)
    for _ in range(50):
        theirs.step()
        reference.step()
        scheduler.step(1)
        assert ours.param_groups[0]["lr"] == pytest.approx(theirs.param_groups[0]["lr"], rel=1e-9)


def test_given_styles_are_found_first() -> None:
    """A style can be handed to the scheduler without a plugin."""
    power = ScheduleStyle(learning_rate=lambda point: point.between((1 - point.progress) ** 2))
    optimizer = sgd()
    scheduler = scheduler_on(optimizer, lr_decay_style="power", styles={"power": power})
    scheduler.step(60)
    assert values(optimizer)[0][0] == pytest.approx(0.1 + 0.9 * 0.25)


def test_a_style_that_fails_leaves_everything_as_it_was() -> None:
    """The step is not counted and no group is half-written."""
    steep = ScheduleStyle(learning_rate=lambda point: math.inf if point.max_lr < 1 else point.max_lr)
    optimizer = sgd()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "max_lr": 0.5})
    scheduler = scheduler_on(optimizer, lr_decay_style="steep", styles={"steep": steep})
    before = values(optimizer)
    with pytest.raises(
        ScheduleError, match=r"^the style gives learning rate inf at step 20: must be finite$"
    ):
        scheduler.step(20)
    assert (scheduler.num_steps, values(optimizer)) == (0, before)


def test_subclasses_may_replace_the_curves() -> None:
    """`step` asks `get_lr` and `get_wd`, as code that overrides them expects."""

    class Halved(OptimizerParamScheduler):
        def get_lr(self, param_group) -> float:
            return super().get_lr(param_group) / 2

    optimizer = sgd()
    Halved(optimizer, **SETTINGS).step(10)
    assert values(optimizer)[0][0] == 0.5


@pytest.mark.parametrize("style", sorted(BUILTIN_STYLES))
def test_every_builtin_style_is_found_by_name(style) -> None:
    """The scheduler takes each of them, with WSD's settings present or not needed."""
    scheduler = scheduler_on(lr_decay_style=style, wsd_decay_steps=50, lr_wsd_decay_style="linear")
    scheduler.step(10)
    assert scheduler.get_lr({}) == 1.0


def test_fractional_steps_are_taken() -> None:
    """A warm-up that is a share of the run needs no rounding."""
    optimizer = sgd()
    scheduler_on(optimizer, lr_warmup_steps=2.5).step(1)
    assert values(optimizer)[0][0] == pytest.approx(0.4)
