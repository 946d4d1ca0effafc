"""The scheduler that sets learning rate and weight decay of every parameter group."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol

import attrs
import torch

from megaopt_core.errors import ScheduleError
from megaopt_core.plugin_api._schedule_points import LearningRatePoint, WeightDecayPoint
from megaopt_core.plugin_api._schedule_style import ScheduleStyle
from megaopt_core.schedules._lookup import find_style, settings_of_style
from megaopt_core.schedules._scheduler_state import OWN_TO_STYLES, SETTINGS, read_state
from megaopt_core.schedules._validation import (
    check_learning_rates,
    check_number,
    check_weight_decays,
    warn_of_unused,
)

__all__ = ["OptimizerParamScheduler"]

logger = logging.getLogger(__name__)

_GROUPS_MAY_HAVE = ("max_lr", "min_lr", "start_wd", "end_wd")
_OWN_SETTINGS = (*_GROUPS_MAY_HAVE, "wd_mult")


class HasParamGroups(Protocol):
    """All that a scheduler uses of an optimizer."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups; the scheduler writes into them."""


class OptimizerParamScheduler:
    """Anneals learning rate and weight decay of every parameter group.

    With `t` steps taken, `w = lr_warmup_steps` and `d = lr_decay_steps`, the learning rate of a group is

    - `init_lr + (max_lr - init_lr) * t / w` during warm-up (`0 < w` and `t <= w`),
    - what the decay style says after it,
    - `min_lr` once `t > d`; style `constant` stays at `max_lr`.

    Weight decay is what the increment style says up to `wd_incr_steps` and `end_wd` after them, times the
    group's `wd_mult`. A group's own `max_lr`, `min_lr`, `start_wd`, `end_wd` and `wd_mult` win over the
    scheduler's, unless they are None. Groups without parameters are stepped like all others. Building a
    scheduler applies step 0, and warns (:class:`~megaopt_core.errors.UnusedSettingWarning`) of what every group
    has otherwise.

    Args:
        optimizer: megaopt's or any `torch.optim.Optimizer`; only its `param_groups` are used.
        init_lr: learning rate at the beginning of warm-up.
        max_lr: learning rate at the end of warm-up.
        min_lr: learning rate at the end of the decay.
        lr_warmup_steps: length of warm-up; 0 for none.
        lr_decay_steps: the step at which the decay ends, counted from step 0.
        lr_decay_style: `constant`, `linear`, `cosine`, `inverse-square-root`, `WSD` or a plugin's style.
        start_wd: weight decay at step 0.
        end_wd: weight decay at `wd_incr_steps`.
        wd_incr_steps: length of the way from `start_wd` to `end_wd`.
        wd_incr_style: `constant`, `linear`, `cosine` or a plugin's style.
        use_checkpoint_opt_param_scheduler: on loading, the checkpoint's settings replace these.
        override_opt_param_scheduler: on loading, these settings stay, whatever the other flag says. If
            neither flag is set, settings and checkpoint must agree.
        wsd_decay_steps: for style `WSD`, length of the final decay.
        lr_wsd_decay_style: for style `WSD`, its curve: `linear`, `cosine`, `exponential` or `minus_sqrt`.
        lr_style_settings: settings that the learning-rate style has of its own, by name; what is left out has its
            default.
        wd_style_settings: the same for the style of weight decay.
        styles: styles that are looked up before all others, by name.

    Raises:
        ScheduleError: a value cannot be, two values contradict each other, or nobody knows the style.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        >>> scheduler = OptimizerParamScheduler(
        ...     optimizer, init_lr=0.0, max_lr=0.1, min_lr=0.01, lr_warmup_steps=10, lr_decay_steps=110,
        ...     lr_decay_style="cosine", start_wd=0.1, end_wd=0.1, wd_incr_steps=0, wd_incr_style="constant")
        >>> for _ in range(3):
        ...     scheduler.step(increment=5)
        ...     print(round(optimizer.param_groups[0]["lr"], 4))
        0.05
        0.1
        0.0994
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        init_lr: float,
        max_lr: float,
        min_lr: float,
        lr_warmup_steps: int,
        lr_decay_steps: int,
        lr_decay_style: str,
        start_wd: float,
        end_wd: float,
        wd_incr_steps: int,
        wd_incr_style: str,
        use_checkpoint_opt_param_scheduler: bool | None = True,
        override_opt_param_scheduler: bool | None = False,
        wsd_decay_steps: int | None = None,
        lr_wsd_decay_style: str | None = None,
        *,
        lr_style_settings: Mapping[str, Any] | None = None,
        wd_style_settings: Mapping[str, Any] | None = None,
        styles: Mapping[str, ScheduleStyle] | None = None,
    ) -> None:
        if not hasattr(optimizer, "param_groups"):
            raise ScheduleError.got(
                "optimizer", optimizer, "the built optimizer comes first, then init_lr, max_lr ..."
            )
        self.optimizer = optimizer
        self.init_lr = init_lr
        self.max_lr = max_lr
        self.min_lr = min_lr
        self.lr_warmup_steps = lr_warmup_steps
        self.lr_decay_steps = lr_decay_steps
        self.lr_decay_style = lr_decay_style
        self.wsd_decay_steps = wsd_decay_steps
        self.lr_wsd_decay_style = lr_wsd_decay_style
        self.start_wd = start_wd
        self.end_wd = end_wd
        self.wd_incr_steps = wd_incr_steps
        self.wd_incr_style = wd_incr_style
        self.use_checkpoint_opt_param_scheduler = use_checkpoint_opt_param_scheduler
        self.override_opt_param_scheduler = override_opt_param_scheduler
        self.lr_style_settings = lr_style_settings
        self.wd_style_settings = wd_style_settings
        self.num_steps = 0
        self._styles = dict(styles or {})
        self._said: list[tuple[Any, ...]] = []
        before: list[dict[str, Any]] | None = getattr(optimizer, "bounds_before_load", None)
        if override_opt_param_scheduler and before is not None:
            for group, bounds in zip(optimizer.param_groups, before, strict=False):
                group.update(bounds)
        self._check()
        self.step(increment=0)
        self._warn_of_unused()
        known: object = getattr(optimizer, "schedules", None)
        if isinstance(known, list):  # ours: its ranks compare schedules
            known.append(weakref.ref(self))

    def get_lr(self, param_group: Mapping[str, Any]) -> float:
        """Return the group's learning rate at the present step.

        Args:
            param_group: the group; its `max_lr` and `min_lr` win over the scheduler's.

        Raises:
            ScheduleError: a plugin's style gave no finite number.
        """
        return self._lr_style().learning_rate_at(self._lr_point(param_group, self.num_steps))

    def get_wd(self, param_group: Mapping[str, Any] | None = None) -> float:
        """Return weight decay at the present step, without the group's `wd_mult`.

        Args:
            param_group: the group; its `start_wd` and `end_wd` win over the scheduler's. None: the
                scheduler's.

        Raises:
            ScheduleError: a plugin's style gave no finite number.
        """
        return self._wd_style().weight_decay_at(self._wd_point(param_group or {}, self.num_steps))

    def step(self, increment: int) -> None:
        """Count `increment` further steps and set learning rate and weight decay of every group.

        Args:
            increment: steps to add, in the unit of `lr_decay_steps`; 0 sets the values of the present step
                again.

        Raises:
            ScheduleError: the increment is no number of at least 0, a group holds a value that cannot be, or a
                plugin's style gave no finite number; nothing has changed then.
        """
        check_number("increment", increment)
        before = self.num_steps
        self.num_steps = before + increment
        try:
            self.apply_to(self.optimizer.param_groups)
        except BaseException:
            self.num_steps = before
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return the settings and the number of steps taken; those of styles where they have any."""
        values = {name: getattr(self, name) for name in (*SETTINGS, "num_steps")}
        own = {name: attrs.asdict(found) for name, found in self._style_settings.items() if found is not None}
        return values | own

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, now or in an older version, and set every group accordingly.

        The number of steps always comes from the checkpoint and is set, not added: loading twice is the
        same as loading once. Where the settings come from, the two flags of the constructor say; under
        `override_opt_param_scheduler` the checkpoint's are not read.

        Args:
            state_dict: the saved scheduler; old key names are understood.

        Raises:
            ScheduleError: it is no mapping, a key is missing, a setting differs and neither flag is set, or the
                settings that would come out contradict each other. Neither scheduler nor groups have changed then.
        """
        saved = read_state(state_dict, only_steps=bool(self.override_opt_param_scheduler))
        before, groups = dict(vars(self)), self.optimizer.param_groups
        bounds = [{name: group[name] for name in _GROUPS_MAY_HAVE if name in group} for group in groups]
        try:
            for name in SETTINGS:
                if name in saved:
                    setattr(self, name, self._check_and_set(getattr(self, name), saved[name], name))
            for group, own in zip(groups, bounds, strict=True):
                # What was configured for all of them is the checkpoint's now; a group's own comes with the optimizer.
                group.update({name: getattr(self, name) for name in own if own[name] == before[name]})
            self._load_style_settings(saved, before)
            self._check()
            check_number("num_steps", saved["num_steps"])
            self.num_steps = saved["num_steps"]
            self.apply_to(self.optimizer.param_groups)
        except BaseException:
            vars(self).update(before)
            for group, own in zip(groups, bounds, strict=True):
                group.update(own)
            raise
        self._warn_of_unused()

    def _warn_of_unused(self) -> None:
        own = {name: getattr(self, name) for name in _GROUPS_MAY_HAVE}
        warn_of_unused(own, self.optimizer.param_groups)

    def _load_style_settings(self, saved: Mapping[str, Any], before: Mapping[str, Any]) -> None:
        """Take the settings of styles; those of a style that is no longer used are forgotten."""
        for name, style in OWN_TO_STYLES.items():
            own = self._style_settings[name]
            if getattr(self, style) != before[style]:
                setattr(self, name, saved.get(name))
            elif name in saved and own is not None:
                setattr(self, name, self._check_and_set(attrs.asdict(own), saved[name], name))

    def _check_and_set[Value](self, cls_value: Value, sd_value: Value, name: str) -> Value:
        """Return the checkpoint's value, unless it has to be the scheduler's own and is another."""
        if not self.use_checkpoint_opt_param_scheduler and cls_value != sd_value:
            self.require_same(name, cls_value, sd_value)
        logger.info("scheduler: %s=%r comes from the checkpoint", name, sd_value)
        return sd_value

    def require_same(self, name: str, here: Any, there: Any) -> NoReturn:
        """Raise for a setting of which neither the one here nor the checkpoint's is to win.

        Args:
            name: of the setting.
            here: its value here.
            there: another one in the checkpoint.

        Raises:
            ScheduleError: always.
        """
        raise ScheduleError(
            f"{name} is {here!r} in this scheduler and {there!r} in the checkpoint: make them "
            "equal, or set use_checkpoint_opt_param_scheduler=True (the checkpoint's values hold) or "
            "override_opt_param_scheduler=True (this scheduler's values hold)",
            setting=name,
            value=(here, there),
        )

    def _lr_style(self) -> ScheduleStyle:
        return find_style("lr_decay_style", self.lr_decay_style, self._styles)

    def _wd_style(self) -> ScheduleStyle:
        return find_style("wd_incr_style", self.wd_incr_style, self._styles)

    def _lr_point(self, group: Mapping[str, Any], step: float) -> LearningRatePoint:
        return LearningRatePoint(
            step=step,
            init_lr=self.init_lr,
            max_lr=_own(group, "max_lr", self.max_lr),
            min_lr=_own(group, "min_lr", self.min_lr),
            lr_warmup_steps=self.lr_warmup_steps,
            lr_decay_steps=self.lr_decay_steps,
            wsd_decay_steps=self.wsd_decay_steps,
            lr_wsd_decay_style=self.lr_wsd_decay_style,
            settings=self._style_settings["lr_style_settings"],
        )

    def _wd_point(self, group: Mapping[str, Any], step: float) -> WeightDecayPoint:
        return WeightDecayPoint(
            step=step,
            start_wd=_own(group, "start_wd", self.start_wd),
            end_wd=_own(group, "end_wd", self.end_wd),
            wd_incr_steps=self.wd_incr_steps,
            settings=self._style_settings["wd_style_settings"],
        )

    def _check(self) -> None:
        styles = self._lr_style(), self._wd_style()
        self._style_settings = {
            name: settings_of_style(name, getattr(self, style_name), style, getattr(self, name))
            for (name, style_name), style in zip(OWN_TO_STYLES.items(), styles, strict=True)
        }
        self._check_values({}, "")
        for index, group in enumerate(self.optimizer.param_groups):
            where = f"param group {index}: "
            check_number("wd_mult", _own(group, "wd_mult", 1.0), where)
            self._check_values(group, where)

    def _check_values(self, group: Mapping[str, Any], where: str) -> None:
        lr_style, wd_style = self._lr_style(), self._wd_style()
        lr_point, wd_point = self._lr_point(group, 0), self._wd_point(group, 0)
        check_learning_rates(lr_point, where)
        check_weight_decays(wd_point, where)
        wrong_lr = lr_style.check_learning_rate and lr_style.check_learning_rate(lr_point)
        if wrong_lr:
            raise ScheduleError(where + wrong_lr, setting="lr_decay_style", value=self.lr_decay_style)
        wrong_wd = wd_style.check_weight_decay and wd_style.check_weight_decay(wd_point)
        if wrong_wd:
            raise ScheduleError(where + wrong_wd, setting="wd_incr_style", value=self.wd_incr_style)

    def _check_written(self) -> None:
        """Check again what groups say for themselves, where somebody has written into them."""
        said = [tuple(group.get(name) for name in _OWN_SETTINGS) for group in self.optimizer.param_groups]
        if said != self._said:
            self._check()
            self._said = said

    def apply_to(self, groups: Sequence[dict[str, Any]]) -> None:
        """Set learning rate and weight decay of some groups to what they are at the present step.

        Args:
            groups: parameter groups; those that joined the optimizer since it was stepped last.

        Raises:
            ScheduleError: a group holds a value that cannot be, or a plugin's style gave no finite number.
        """
        self._check_written()
        # All values first: a style that fails leaves every group as it was.
        values = [(self.get_lr(group), self.get_wd(group) * _own(group, "wd_mult", 1.0)) for group in groups]
        for group, (lr, wd) in zip(groups, values, strict=True):
            _write(group, "lr", lr)
            _write(group, "weight_decay", wd)


def _own[Value](group: Mapping[str, Any], name: str, default: Value) -> Value:
    value: Value | None = group.get(name)
    return default if value is None else value


def _write(group: dict[str, Any], name: str, value: float) -> None:
    present = group.get(name)
    if isinstance(present, torch.Tensor):
        present.fill_(value)  # a captured or compiled step holds on to this very tensor
    else:
        group[name] = value
