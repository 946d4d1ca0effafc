"""The checkpoint of a run: what a later process needs to go on as if nothing had happened."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from attrs import asdict

from megaopt_core.errors import PluginNotInstalledError
from megaopt_core.registry import import_distribution
from megaopt_tools.errors import CommandError, StoppedError
from megaopt_tools.interrupts import Interrupts
from megaopt_tools.training import Keeper, Run, StepRecord

__all__ = ["RunCheckpoint", "checkpoint_path", "require_checkpoint"]

_NUMBERS = ("loss", "lr", "grad_norm", "forward", "backward", "optimizer")
"""The numbers of a step beside its position and its tokens."""

_ANYWHERE = ("sharding", "use_distributed_optimizer", "use_layer_wise_distributed_optimizer")
"""Settings that a checkpoint does not depend on."""


def checkpoint_path(folder: Path) -> Path:
    """Return where a run keeps its checkpoint.

    Args:
        folder: of the run.
    """
    return folder / "checkpoint"


def require_checkpoint(folders: Sequence[Path]) -> None:
    """Raise unless one of some runs can go on.

    Args:
        folders: of the runs.

    Raises:
        CommandError: none of them has a checkpoint.
    """
    if not any(checkpoint_path(folder).exists() for folder in folders):
        listed = ", ".join(str(checkpoint_path(folder)) for folder in folders)
        raise CommandError(
            f"--resume: there is no checkpoint at {listed}; a run saves one with --save-every STEPS, and at Ctrl-C"
        )


class RunCheckpoint(Keeper):
    """Saves a run every so many steps and when it is stopped, and brings it back.

    Args:
        folder: of the run.
        interrupts: tells of Ctrl-C.
        every: save after so many steps; None: only when the run is stopped.
        before_last: save before the last step, so that a finished run can be had again for one step.

    Raises:
        PluginNotInstalledError: `every` is given, and megaopt-checkpoint is missing.
    """

    def __init__(
        self,
        folder: Path,
        interrupts: Interrupts,
        *,
        every: int | None = None,
        before_last: bool = False,
    ) -> None:
        self.path = checkpoint_path(folder)
        self.saved_steps = 0
        self._interrupts = interrupts
        self._every = every
        self._before_last = before_last or every is not None
        self._absent: PluginNotInstalledError | None = None
        try:
            self._library: ModuleType | None = _library()
        except PluginNotInstalledError as error:
            if every is not None:
                raise
            self._library, self._absent = None, error

    def load(self, run: Run) -> None:
        """Bring a run to where its checkpoint is.

        Args:
            run: a run that has not begun, of the same recipe and text.

        Raises:
            CommandError: the checkpoint is another run's.
            CheckpointError: it cannot be read.
            PluginNotInstalledError: megaopt-checkpoint is missing.
        """
        found = _library().load_checkpoint(self.path, run.model, run.optimizer, run.scheduler).extra
        self._require_same(_identity(run), found["identity"])
        run.records = _records(found["numbers"], run.recipe.batch_size * run.recipe.context)
        states = found["random_states"]
        # A copy of its own: torch reads a state from where its storage begins.
        run.random_state = states[run.ranks.index if len(states) == run.ranks.count else 0].clone()
        self.saved_steps = len(run.records)

    def wants_to_stop(self) -> bool:
        """Return whether Ctrl-C was pressed."""
        return self._interrupts.pressed

    def stepped(self, run: Run, *, stop: bool) -> None:
        """Save if it is time, and end the run if Ctrl-C was pressed.

        Args:
            run: the run.
            stop: whether Ctrl-C was pressed on any rank.

        Raises:
            StoppedError: it was.
        """
        step, steps = len(run.records), run.recipe.steps
        if step == steps:
            return
        due = self._every is not None and step % self._every == 0
        if due or stop or (self._before_last and step == steps - 1):
            self._save(run)
        if stop:
            raise StoppedError(
                f"stopped by Ctrl-C after {step} of {steps} steps of {run.recipe.optimizer}; {self.advice()}",
                steps=step,
            )

    def advice(self) -> str:
        """Return how the run can go on."""
        if self.saved_steps:
            return f"{self.path} holds {self.saved_steps} of them: the same command with --resume goes on from there"
        return "nothing was saved" if self._absent is None else f"nothing was saved: {self._absent}"

    def remove(self) -> None:
        """Remove the checkpoint of a finished run, unless it was asked for."""
        if self._every is None:
            shutil.rmtree(self.path, ignore_errors=True)

    def _save(self, run: Run) -> None:
        if self._library is None:
            return
        extra = {
            "identity": _identity(run),
            "numbers": _numbers(run.records),
            "random_states": run.ranks.gather(run.random_state),
        }
        self._library.save_checkpoint(self.path, run.model, run.optimizer, run.scheduler, extra)
        self.saved_steps = len(run.records)

    def _require_same(self, here: Mapping[str, Any], there: Mapping[str, Any]) -> None:
        names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
        if names:
            listed = ", ".join(f"{name} {there.get(name)!r} (here {here.get(name)!r})" for name in names)
            raise CommandError(
                f"--resume: the run in {self.path} has {listed}; give the options that began it"
            )


def _library() -> ModuleType:
    return import_distribution("megaopt-checkpoint", "the checkpoint of a run")


def _identity(run: Run) -> dict[str, Any]:
    """Return what a run must have in common with the one that it continues."""
    recipe = asdict(run.recipe)
    settings = {name: value for name, value in recipe.pop("settings").items() if name not in _ANYWHERE}
    shape = recipe.pop("shape")
    return {**recipe, **settings, **shape, "text": run.text.sha256}


def _numbers(records: Sequence[StepRecord]) -> torch.Tensor:
    """Return the numbers of all steps, float64, `[steps, 6]`; NaN stands for a norm that was not computed."""
    rows = [
        [math.nan if value is None else value for value in (getattr(record, name) for name in _NUMBERS)]
        for record in records
    ]
    return torch.tensor(rows, dtype=torch.float64)


def _records(numbers: torch.Tensor, tokens: int) -> list[StepRecord]:
    found = []
    for step, row in enumerate(numbers.tolist(), start=1):
        values = dict(zip(_NUMBERS, row, strict=True))
        norm = values.pop("grad_norm")
        found.append(
            StepRecord(step=step, tokens=tokens, grad_norm=None if math.isnan(norm) else norm, **values)
        )
    return found
