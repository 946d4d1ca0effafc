"""Gradients that come late, as those of a part of a model that joins after some steps."""

from __future__ import annotations

from typing import Any

import torch

from megaopt_core.errors import MegaoptError
from megaopt_testing.snapshot import params_of, same_bits
from megaopt_testing.trial import Trial, some

__all__ = ["check_late_gradients"]

_WITHOUT = 2
_STEPS = 10


def check_late_gradients(optimizer: str, **settings: Any) -> None:
    """A parameter whose first gradient comes in the third step moves from then on, as all do from the first.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration; weight decay is switched off.

    Raises:
        ConformanceError: a step raises, or such a parameter stays where it was.
    """
    trial = Trial(optimizer, settings)
    start, usual = _stepped(trial, late=False)
    late, found = _stepped(trial, late=True)
    names = [name for name in late if not same_bits(usual[name], start[name])]
    left = [name for name in names if same_bits(found[name], late[name])]
    if left:
        trial.fail(
            f"{some(left)} get their first gradient in step {_WITHOUT + 1}, but never move. Make the state "
            "of a parameter when its first gradient comes"
        )


def _stepped(trial: Trial, *, late: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return values before and after the steps of those that are late, or of all where none is."""
    torch.manual_seed(0)
    model = trial.model()
    built = trial.build(model, weight_decay=0.0)
    waiting = set(trial.own_names(built)[1::2])
    params = dict(model.named_parameters())
    before = params_of(built)
    for step in range(_WITHOUT + _STEPS if late else _STEPS):
        built.zero_grad()
        trial.backward(model, step)
        if late and step < _WITHOUT:
            for name in waiting:
                params[name].grad = None
        try:
            built.step()
        except MegaoptError:
            raise
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything
            when = (
                f"parameters had no gradient in the first {_WITHOUT} steps" if late else "all have gradients"
            )
            trial.fail(f"where {when}, step {step + 1} raises {type(error).__name__}: {error}")
    after = params_of(built)
    return {name: before[name] for name in sorted(waiting)}, after
