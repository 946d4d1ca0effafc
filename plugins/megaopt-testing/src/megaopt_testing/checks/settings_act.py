"""Settings act: with another value of a setting, steps end elsewhere."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from attrs import Factory, frozen

from megaopt_core.errors import MegaoptError, UnusedSettingWarning
from megaopt_core.registry import SettingInfo
from megaopt_testing.checks.settings import own_settings
from megaopt_testing.long_run import LONG, Few
from megaopt_testing.snapshot import params_of, same_bits
from megaopt_testing.trial import Trial, some

__all__ = ["WAYS", "check_settings_act", "other_values", "switched"]

_SCALES = (1.0, 1.0, 30.0, 1e-3, 1.0, 1e-2, 1e-2, 3.0, 1e-3, 1e-3, 1.0, 1.0)
"""Gradients jump up and down, so that clipping, maxima and averages show."""
_WARMUP = LONG // 2
"""Steps of a long run in which its learning rate rises; then it falls again."""

type _End = dict[str, torch.Tensor] | str
"""Parameters by name, or what a step raises."""

_SAME_PLACE = 0.1
"""Part of the way that rounding may make of twelve steps, where products are in bf16."""

WAYS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Torch's own names for ways to compute one and the same step."""


def check_settings_act(optimizer: str, **settings: Any) -> None:
    """With another value of a setting some parameter goes elsewhere in twelve steps, if need be beside another switch.

    A step that raises with it goes elsewhere, too. A model of two parameters is tried first, then a small GPT. What
    does nothing there gets 120 steps in which the learning rate rises and falls, and is looked at as `eval()` shows it.

    Tried are the other choices, the other truth value, and numbers below and above the default; a setting whose default
    is of another kind, or of which no other value is accepted, is left out. So is one that says why it does nothing
    here: `metadata={"elsewhere": "over tensor-parallel ranks"}`. Torch's own names for ways to compute (`foreach`,
    `fused`, `capturable`, `differentiable`) have to lead to the same place but for rounding, or be refused.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration.

    Raises:
        ConformanceError: every value of a setting leads to the same bits, or a way to compute leads elsewhere.
    """
    trial = _Runs(Trial(optimizer, settings))
    own = own_settings(optimizer)
    usual = {name: settings.get(name, info.default) for name, info in own.items()}
    for name, info in own.items():
        if info.field.name in WAYS:
            _require_same_place(trial, name)
        if info.field.name in WAYS or info.field.metadata.get("elsewhere"):
            continue
        tried = _silent(trial, info, usual[name], {})
        for other, beside in own.items():
            if not tried:
                break
            if other != name and beside.field.name not in WAYS:
                for value in switched(beside, usual[other]):
                    tried = tried and _silent(trial, info, usual[name], {other: value})
        if tried and not _acts_late(trial, info, usual[name]):
            trial.of.fail(
                f"{name} does nothing: {', '.join(map(repr, tried))} and its default {info.default!r} give the same "
                'bits. Read it in every step; if it acts only elsewhere, declare metadata={"elsewhere": "where"}'
            )


@frozen
class _Runs:
    """Where runs with some settings lead, each made once.

    Args:
        of: the optimizer under test.
    """

    of: Trial
    _ends: dict[tuple[bool, bool, frozenset[tuple[str, str]]], _End] = Factory(dict)

    def end(self, *, small: bool, long: bool = False, **needed: Any) -> _End:
        """Return the parameters after twelve steps, or what they raise.

        Args:
            small: step a model of two parameters, not a small GPT.
            long: take 120 steps, with a learning rate that rises and falls, and return what `eval()` shows.
            **needed: settings.

        Raises:
            MegaoptError: a setting cannot have that value, or not beside the others.
        """
        key = small, long, frozenset((name, repr(value)) for name, value in needed.items())
        if key not in self._ends:
            try:
                self._ends[key] = _stepped(self.of, small=small, long=long, **needed)
            except (MegaoptError, Warning):
                raise
            except Exception as error:  # noqa: BLE001 - a class may refuse a value in any way
                self._ends[key] = f"{type(error).__name__}: {error}"
        return self._ends[key]

    def act(self, one: Mapping[str, Any], other: Mapping[str, Any], *, long: bool = False) -> bool:
        """Return whether two runs lead to different places.

        Args:
            one: settings of one.
            other: settings of the other.
            long: take many steps, of the smaller model.
        """
        for small in (True,) if long else (True, False):
            here, there = (self.end(small=small, long=long, **each) for each in (one, other))
            if isinstance(here, str) or isinstance(there, str):
                return here != there
            if any(not same_bits(there[key], here[key]) for key in here):
                return True
        return False


def _require_same_place(trial: _Runs, name: str) -> None:
    """Switch a way to compute on and off, as far as it can be here, and compare where steps lead."""
    try:
        off, on = (trial.end(small=False, **{name: value}) for value in (False, True))
    except MegaoptError:
        return
    if isinstance(off, str) or isinstance(on, str):
        return  # there is no such way on this device, which a class may say in any way
    begin = dict(trial.of.model().named_parameters())
    other = [
        key
        for key in off
        if not (on[key] - off[key]).norm() <= _SAME_PLACE * (off[key] - begin[key].detach()).norm()
    ]
    if other:
        trial.of.fail(
            f"{name}=True gives other values of {some(other)} than False, but it is only another way to "
            "compute the same step"
        )


def _silent(trial: _Runs, info: SettingInfo, usual: Any, beside: dict[str, Any]) -> list[Any]:
    """Return the values of a setting that were tried; none when one of them led elsewhere."""
    tried = []
    try:
        trial.end(small=True, **beside)
    except MegaoptError:
        return [usual]
    for value in other_values(usual, info.choices):
        try:
            acts = trial.act(beside, {**beside, info.name: value})
        except MegaoptError:
            continue  # out of range, or not beside the other settings
        if acts:
            return []
        tried.append(value)
    return tried


def _acts_late(trial: _Runs, info: SettingInfo, usual: Any) -> bool:
    """Whether a setting acts after many steps, while the learning rate changes, or on what is evaluated."""
    for value in other_values(usual, info.choices):
        with contextlib.suppress(MegaoptError):  # out of range
            if trial.act({}, {info.name: value}, long=True):
                return True
    return False


def switched(info: SettingInfo, value: Any) -> Iterator[Any]:
    """Yield what a setting may be switched to, for others that act only then.

    Args:
        info: the setting.
        value: what it has.
    """
    if info.choices or isinstance(value, bool):
        yield from other_values(value, info.choices)
    elif isinstance(value, (int, float)) and value == 0:
        yield from (0.5, 1)  # it may switch others off, as no momentum does dampening


def _stepped(trial: Trial, *, small: bool, long: bool, **needed: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Few() if small else trial.model()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UnusedSettingWarning
        )  # it may act in the other model, or beside another switch
        built = trial.build(model, **needed)
    rates = [group["lr"] for group in built.param_groups]
    for step in range(LONG if long else len(_SCALES)):
        built.zero_grad()
        scale = _SCALES[step % len(_SCALES)]
        trial.backward(model, step)
        for param in model.parameters():
            if param.grad is not None:
                param.grad.mul_(scale)
        if long:
            for group, rate in zip(built.param_groups, rates, strict=True):
                group["lr"] = rate * (1 - abs(step + 1 - _WARMUP) / (_WARMUP + 1))
        built.step()
    if long:
        built.eval()
    return params_of(built)


def other_values(value: Any, choices: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Yield other values that a setting may have; none where nothing is known of them.

    Args:
        value: what it has.
        choices: what can be chosen, where that is known.
    """
    if choices:
        yield from (choice for choice in choices if choice != value)
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from _differing(value, (value // 2, value + 1, 2 * value + 1, 10 * value + 10, 1, 0))
    elif isinstance(value, float):
        yield from _differing(value, (value / 2, 2 * value, value / 10, 10 * value, 0.0, 0.5, 0.95, 1.0))
    elif isinstance(value, tuple) and value and all(isinstance(each, float) for each in value):
        yield tuple(each / 2 for each in value)


def _differing[Number: (int, float)](value: Number, others: tuple[Number, ...]) -> Iterator[Number]:
    yield from dict.fromkeys(other for other in others if other != value)
