"""Loading a scheduler: whose settings hold, old key names, and nothing changed when it fails."""

import copy
import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim

from megaopt_core.errors import ScheduleError
from megaopt_core.schedules import OptimizerParamScheduler

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
    "wsd_decay_steps": None,
    "lr_wsd_decay_style": None,
}
OTHER = {
    "init_lr": 0.01,
    "max_lr": 0.5,
    "min_lr": 0.05,
    "lr_warmup_steps": 20,
    "lr_decay_steps": 220,
    "lr_decay_style": "WSD",
    "start_wd": 0.1,
    "end_wd": 0.3,
    "wd_incr_steps": 50,
    "wd_incr_style": "cosine",
    "wsd_decay_steps": 100,
    "lr_wsd_decay_style": "exponential",
}
OWN, CHECKPOINT, AGREE = (
    {"override_opt_param_scheduler": True},
    {"use_checkpoint_opt_param_scheduler": True},
    {"use_checkpoint_opt_param_scheduler": False},
)
OLD_NAMES = [
    {"start_lr": "max_lr", "warmup_iter": "lr_warmup_steps", "end_iter": "lr_decay_steps"},
    {"warmup_steps": "lr_warmup_steps", "decay_steps": "lr_decay_steps", "decay_style": "lr_decay_style"},
    {"num_iters": "num_steps", "start_lr": "max_lr", "decay_style": "lr_decay_style"},
]


def scheduler_with(settings: Mapping[str, Any], **flags: bool) -> OptimizerParamScheduler:
    """A scheduler on two groups, one of which decays nothing."""
    groups = [
        {"params": [nn.Parameter(nn.init.zeros_(nn.Parameter().new_empty(1)))]} | extra
        for extra in ({}, {"wd_mult": 0.0})
    ]
    return OptimizerParamScheduler(optim.SGD(groups, lr=9.0), **settings, **flags)


def seen(scheduler: OptimizerParamScheduler) -> tuple:
    """All that a user can see of a scheduler and its groups."""
    groups = [(group["lr"], group["weight_decay"]) for group in scheduler.optimizer.param_groups]
    return scheduler.state_dict(), groups


@st.composite
def settings_and_step(draw: st.DrawFn) -> tuple[dict, int]:
    """Valid settings of any style, and a number of steps."""
    top = draw(st.floats(1e-6, 10))
    d = draw(st.integers(1, 1000))
    w = draw(st.integers(0, d - 1))
    start = draw(st.floats(0, 1))
    settings = {
        "init_lr": draw(st.floats(0, top)),
        "max_lr": top,
        "min_lr": draw(st.floats(0, top)),
        "lr_warmup_steps": w,
        "lr_decay_steps": d,
        "lr_decay_style": draw(
            st.sampled_from(["constant", "linear", "cosine", "inverse-square-root", "WSD"])
        ),
        "start_wd": start,
        "end_wd": start + draw(st.floats(0, 1)),
        "wd_incr_steps": draw(st.integers(0, 1000)),
        "wd_incr_style": draw(st.sampled_from(["linear", "cosine"])),
        "wsd_decay_steps": draw(st.integers(1, d - w)),
        "lr_wsd_decay_style": draw(st.sampled_from(["linear", "cosine", "exponential", "minus_sqrt"])),
    }
    return settings, draw(st.integers(0, 1200))


def test_state_dict_holds_settings_and_steps() -> None:
    """Everything that a schedule depends on is saved, as plain values."""
    scheduler = scheduler_with(OTHER)
    scheduler.step(7)
    assert scheduler.state_dict() == OTHER | {"num_steps": 7}


@given(case=settings_and_step())
def test_loading_restores_any_schedule(case) -> None:
    """A scheduler of other settings becomes the one that was saved, groups included."""
    settings, steps = case
    saved = scheduler_with(settings)
    saved.step(steps)
    loaded = scheduler_with(SETTINGS, **CHECKPOINT)
    loaded.step(3)
    loaded.load_state_dict(saved.state_dict())
    assert seen(loaded) == seen(saved)


@given(case=settings_and_step())
def test_loading_twice_is_loading_once(case) -> None:
    """The number of steps is set, not added."""
    settings, steps = case
    scheduler = scheduler_with(settings, **AGREE)
    scheduler.step(steps)
    state, before = scheduler.state_dict(), seen(scheduler)
    scheduler.load_state_dict(state)
    scheduler.load_state_dict(state)
    assert seen(scheduler) == before


@pytest.mark.parametrize("flags", [OWN, OWN | CHECKPOINT, OWN | AGREE])
def test_override_keeps_own_settings(flags) -> None:
    """Only the number of steps comes from the checkpoint, whatever the other flag says."""
    saved = scheduler_with(OTHER)
    saved.step(60)
    loaded = scheduler_with(SETTINGS, **flags)
    loaded.load_state_dict(saved.state_dict())
    fresh = scheduler_with(SETTINGS)
    fresh.step(60)
    assert seen(loaded) == seen(fresh)


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_disagreement_without_a_flag_is_an_error(name) -> None:
    """The message names the setting, both values and the two ways out."""
    scheduler = scheduler_with(SETTINGS, **AGREE)
    scheduler.step(5)
    before = seen(scheduler)
    with pytest.raises(ScheduleError) as error:
        scheduler.load_state_dict(SETTINGS | {name: OTHER[name], "num_steps": 50})
    assert str(error.value) == (
        f"{name} is {SETTINGS[name]!r} in this scheduler and {OTHER[name]!r} in the checkpoint: make them equal, or "
        "set use_checkpoint_opt_param_scheduler=True (the checkpoint's values hold) or "
        "override_opt_param_scheduler=True (this scheduler's values hold)"
    )
    assert (error.value.setting, error.value.value) == (name, (SETTINGS[name], OTHER[name]))
    assert seen(scheduler) == before


@pytest.mark.parametrize("renamed", OLD_NAMES)
def test_old_names_are_read(renamed) -> None:
    """Checkpoints of earlier generations, which also lack the later settings, load to the same schedule."""
    kept = ("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style", "num_steps")
    old_of = {new: old for old, new in renamed.items()}
    current = SETTINGS | {"max_lr": 2.0, "lr_warmup_steps": 4, "lr_decay_steps": 40, "num_steps": 9}
    old = {old_of.get(name, name): current[name] for name in kept}
    given_state = copy.deepcopy(old)
    loaded = scheduler_with(SETTINGS, **CHECKPOINT)
    loaded.load_state_dict(old)
    assert loaded.state_dict() == current
    assert loaded.get_lr({}) == pytest.approx(0.1 + 1.9 * (1 - 5 / 36))
    assert old == given_state


@pytest.mark.parametrize("renamed", OLD_NAMES)
def test_an_old_name_wins_over_the_new_one(renamed) -> None:
    """Trainers that wrote both names read the old one."""
    current = SETTINGS | {"max_lr": 2.0, "lr_warmup_steps": 4, "lr_decay_steps": 40, "num_steps": 9}
    old = {old: current[new] for old, new in renamed.items() if new in current}
    loaded = scheduler_with(SETTINGS, **CHECKPOINT)
    loaded.load_state_dict({**current, **dict.fromkeys(renamed.values(), "never read"), **old})
    assert loaded.state_dict() == current


def test_own_settings_stay_whatever_the_checkpoint_has_under_their_names() -> None:
    """With `override_opt_param_scheduler` only the number of steps is read."""
    loaded = scheduler_with(SETTINGS, **OWN)
    loaded.load_state_dict({"num_steps": 7, "max_lr": "x", "start_lr": None})
    assert loaded.state_dict() == SETTINGS | {"num_steps": 7}


def test_unknown_keys_are_ignored() -> None:
    """A checkpoint of a later version still loads."""
    scheduler = scheduler_with(SETTINGS)
    scheduler.load_state_dict(SETTINGS | {"num_steps": 3, "colour": "blue"})
    assert scheduler.num_steps == 3


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {},
            (
                "the scheduler's checkpoint lacks max_lr, min_lr, lr_warmup_steps, lr_decay_steps, "
                "lr_decay_style, num_steps; it has nothing"
            ),
        ),
        (None, "a scheduler's checkpoint is a mapping, as state_dict() returns it, got NoneType: None"),
        ([1], "a scheduler's checkpoint is a mapping, as state_dict() returns it, got list: [1]"),
        (SETTINGS | {"num_steps": -1}, "num_steps=-1: must be finite and not negative"),
        (SETTINGS | {"num_steps": 1, "max_lr": 0.05}, "min_lr=0.1: must not be above max_lr=0.05"),
        (
            SETTINGS | {"num_steps": 1, "lr_decay_steps": 9},
            "lr_warmup_steps=10: must be below lr_decay_steps=9, which counts from step 0",
        ),
        (
            SETTINGS | {"num_steps": 1, "lr_decay_style": "WSD"},
            "wsd_decay_steps=None: style 'WSD' needs the length of its final decay",
        ),
        (
            {key: value for key, value in (SETTINGS | {"num_steps": 1}).items() if key != "end_wd"},
            (
                "the scheduler's checkpoint lacks end_wd; it has init_lr, max_lr, min_lr, lr_warmup_steps, "
                "lr_decay_steps, lr_decay_style, start_wd, wd_incr_steps, wd_incr_style, wsd_decay_steps, "
                "lr_wsd_decay_style, num_steps"
            ),
        ),
    ],
)
def test_a_load_that_fails_changes_nothing(state, message) -> None:
    """Neither settings nor steps nor groups."""
    scheduler = scheduler_with(SETTINGS, **CHECKPOINT)
    scheduler.step(30)
    before = seen(scheduler)
    with pytest.raises(ScheduleError, match=f"^{re.escape(message)}$"):
        scheduler.load_state_dict(state)
    assert seen(scheduler) == before


@given(data=st.data())
def test_no_broken_checkpoint_gets_half_loaded(data) -> None:
    """Any subset of keys with any of these values either loads whole or changes nothing."""
    junk = st.sampled_from([-1, 0, 5, 0.5, 1e9, float("nan"), None, "linear", "WSD"])
    state = data.draw(st.dictionaries(st.sampled_from([*SETTINGS, "num_steps"]), junk))
    state = data.draw(st.sampled_from([{}, SETTINGS | {"num_steps": 4}])) | state
    scheduler = scheduler_with(SETTINGS, **CHECKPOINT)
    scheduler.step(30)
    before = seen(scheduler)
    try:
        scheduler.load_state_dict(state)
    except ScheduleError:
        assert seen(scheduler) == before
    else:
        assert scheduler.state_dict() == SETTINGS | state
