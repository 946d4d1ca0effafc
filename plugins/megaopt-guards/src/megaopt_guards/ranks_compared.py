"""The observer that compares replicas: what they hold before the first step, and how they are about to step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from megaopt_core import MegatronOptimizer
from megaopt_core.optimizers import is_read_freely
from megaopt_core.parallel import fingerprint, size_of
from megaopt_core.plugin_api import ReportLine, StepObserver, StepOutcome, VoteSpec
from megaopt_core.sharding import has_gradient
from megaopt_guards.fingerprints import WRITTEN, is_of_experts
from megaopt_guards.gradients import Compared, compared_params, gradients_that_were, present_gradients
from megaopt_guards.replicas import differences, require_equal, require_equal_steps

__all__ = ["RanksCompared"]

_FIRST, _UNLIKE = "guards.first_step", "guards.unlike_steps"


class RanksCompared(StepObserver):
    """Compares all values of replicas before the first step, and before each step a number of every rank.

    The number says how a rank is about to step. It is made of what can change after the build: which parameters are
    stepped, how many of them joined or were replaced, which are frozen, which have no gradient, whether gradients were
    cleared, and the settings that a schedule or a user writes into groups. Where numbers differ, ranks exchange what
    they are made of.

    Args:
        optimizer: what is stepped, on several ranks.
    """

    vote_specs = (VoteSpec(_FIRST, "any", stops=True), VoteSpec(_UNLIKE, "equal", stops=True))

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        self.optimizer = optimizer
        self.has_just_compared = False
        """All values were compared in this step already."""
        self._has_compared = False
        self._clears_alike = True
        self._joined = 0
        self._names: object = None
        self._names_digest = b""
        self._compared: Compared = []
        self._settings: list[dict[str, Any]] = []
        self._without: list[str] = []
        """Parameters without a gradient when this rank voted."""
        self._is_over = False
        """The step was made before ranks decided."""

    def votes(self) -> Mapping[str, int | torch.Tensor]:
        """Return whether this rank has yet to compare values, and the number that says how it is about to step."""
        self.has_just_compared = self._is_over = False
        return {_FIRST: int(not self._has_compared), _UNLIKE: self._number()}

    def decide(self, fired: Mapping[str, bool]) -> Collection[str]:
        """Compare values before the first step, and everything where ranks are about to step unlike each other.

        Args:
            fired: the votes.

        Raises:
            RankMismatchError: replicas have other values, or would step unlike each other.
        """
        if fired[_FIRST]:
            require_equal(self.optimizer, "before the first step", first=True)
            self._has_compared = self.has_just_compared = True
        if fired[_UNLIKE]:
            compared = self._compared
            # One step later gradients are others, or gone.
            gradients = (
                gradients_that_were(compared, self._without) if self._is_over else present_gradients(compared)
            )
            require_equal_steps(self.optimizer, self._settings, gradients)
            # Ranks differ in nothing that matters: some clear gradients in another way, which is no fault.
            self._clears_alike = False
            self._joined = self._joined_so_far
        return (_FIRST, _UNLIKE)

    def after_step(self, outcome: StepOutcome) -> None:
        """Take note of a step that ranks decide on later.

        Args:
            outcome: how the step ended.
        """
        self._is_over = outcome.how is None

    def compare_written(self) -> None:
        """Compare values since somebody wrote to the model of some rank; a collective.

        Raises:
            RankMismatchError: replicas have other values.
        """
        if not self.has_just_compared:
            require_equal(self.optimizer, "after a write to the model")

    def check(self) -> Sequence[str]:
        """Return everything that differs between replicas."""
        return differences(self.optimizer, everything=True)

    def report_lines(self) -> Sequence[ReportLine]:
        """Return which ranks are compared."""
        replicas = size_of(self.optimizer.process_groups.dense_dp)
        return [ReportLine("ranks", f"{replicas} replicas are compared before every step (megaopt-guards)")]

    @property
    def _joined_so_far(self) -> int:
        return 0 if self.optimizer.late is None else self.optimizer.late.joined

    def _number(self) -> int:
        """Return the number that says how this rank is about to step."""
        optimizer = self.optimizer
        if optimizer.names is not self._names:
            self._names = optimizer.names
            dense = [
                name for param, name in optimizer.names.items() if not is_of_experts(optimizer, param, name)
            ]
            self._names_digest = fingerprint(dense)
            self._compared = compared_params(optimizer)
        frozen = [optimizer.names[param] for param in _frozen(optimizer)]
        # They may be others when ranks decide, which is one step later on an accelerator.
        self._settings = [
            {key: value for key, value in group.items() if key in WRITTEN} for group in optimizer.param_groups
        ]
        settings = [
            [(key, _comparable(value)) for key, value in sorted(group.items())] for group in self._settings
        ]
        lacks = frozen or True in [param.grad is None for param, _, _ in self._compared]
        self._without = (
            [name for param, name, _ in self._compared if not has_gradient(param)] if lacks else []
        )
        cleared = self._clears_alike and bool(self._compared) and optimizer.has_cleared
        joined = self._joined_so_far - self._joined
        said = (self._names_digest, joined, frozen, self._without, cleared, settings)
        return int.from_bytes(fingerprint(said)[:7])


def _frozen(optimizer: MegatronOptimizer) -> list[torch.nn.Parameter]:
    """Return the stepped parameters that do not train: as the look before the step has found them, if there was one."""
    if optimizer.late is not None:
        return optimizer.late.frozen
    return [param for param in optimizer.names if not param.requires_grad]


def _comparable(value: Any) -> Any:
    """Return a setting as plain data; what lies on a device is not read."""
    if isinstance(value, torch.Tensor):
        return value.tolist() if is_read_freely(value.device) else None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, (tuple, list)):
        return [_comparable(each) for each in value]
    return value if isinstance(value, (str, bool, type(None))) else None
