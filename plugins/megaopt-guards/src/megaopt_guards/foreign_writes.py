"""The observer of foreign writes: to model values of which more is kept elsewhere, by means that nothing counts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from attrs import define, field

from megaopt_core import MegatronOptimizer
from megaopt_core.errors import warn_user
from megaopt_core.plugin_api import Change, StepObserver, StepOutcome, VoteSpec
from megaopt_core.reporting import Samples, Values, any_differ, differing_owners

__all__ = ["WHOLE", "ForeignWrites"]

WHOLE = 4096
"""Values up to which all of a tensor are compared: what that costs is lost beside the kernels of its step."""

_WRITTEN, _BROUGHT = "guards.written", "guards.brought"

_TOO_LATE = (
    "the model was changed before the last step in a way that no version counter sees (`param.data`, a "
    "kernel), and the step used the old main values: nothing is read from the device before a step here. "
    "Call optimizer.reload_model_params() after such a write"
)


@define(eq=False)
class _Sampled:
    """Some values of tensors as a step has left them, compared with their present ones on the device."""

    _samples: Samples = field(factory=lambda: Samples(WHOLE), init=False)
    _tensors: list[list[torch.Tensor]] = field(factory=list, init=False)
    _before: Values = field(factory=dict, init=False)

    def record(self, tensors: list[list[torch.Tensor]]) -> None:
        """Remember the present values of tensors, and compare with them from now on."""
        self._tensors, self._before = tensors, self._samples.read(tensors)

    def look(self) -> tuple[torch.Tensor | None, Callable[[], set[int]]]:
        """Return on the device whether a value has changed, and what finds the tensors; None: nothing is compared."""
        owners, before, now = self._samples.owners, self._before, self._samples.read_again(self._tensors)
        return any_differ(before, now), lambda: differing_owners(owners, before, now)


class ForeignWrites(StepObserver):
    """Finds writes by way of `.data`, NumPy or a kernel, which no version counter of torch tells of.

    All values of tensors of up to :data:`WHOLE` values, and 16 of larger ones, are compared with the values that the
    last step left, on the device. A write to other values of a large tensor is not noticed:
    :meth:`MegatronOptimizer.reload_model_params` takes it over.

    Args:
        optimizer: keeps main values, or memory of a strategy's own.
        compare: called on all ranks together where somebody wrote on one of them.
    """

    def __init__(self, optimizer: MegatronOptimizer, compare: Callable[[], None] | None = None) -> None:
        self.optimizer, self.compare = optimizer, compare
        self._has_brought = any(part.writes.is_together for part in optimizer.parts)
        brought = [VoteSpec(_BROUGHT, "any")] if self._has_brought else []
        self.vote_specs = (VoteSpec(_WRITTEN, "any"), *brought)
        self._names: list[tuple[int, frozenset[str]]] = []
        """For each sampled piece, which part steps it, and its parameters."""
        self._tensors: list[list[torch.Tensor]] = []
        self._counted: set[int] = set()
        """Parts of which version counters tell of a write, so that their step takes values over."""
        self._own, self._brought = _Sampled(), _Sampled()
        self._find: Callable[[], list[tuple[int, frozenset[str]]]] = list
        """Returns what the last votes were about, as in `_names`; the host waits for the device."""
        self._has_stepped = False
        """The step was made before ranks decided."""
        self._know_pieces()
        self._record()

    def _know_pieces(self) -> None:
        kept = [(at, *pair) for at, part in enumerate(self.optimizer.parts) for pair in part.writes.kept]
        self._names = [
            (at, frozenset(shard.name for _, shard in piece.spec.members)) for at, piece, _ in kept
        ]
        self._tensors = [tensors for _, _, tensors in kept]

    def _record(self, *, own_only: bool = False) -> None:
        self._own.record(self._tensors)
        if self._has_brought and not own_only:
            brought = [each for part in self.optimizer.parts for each in part.writes.brought if each.numel()]
            self._brought.record([[each] for each in brought])

    def votes(self) -> Mapping[str, int | torch.Tensor]:
        """Return whether somebody wrote to this rank's values since the last step."""
        self._has_stepped = False
        parts = self.optimizer.parts
        own, brought = self._look(), self._brought.look()[0] if self._has_brought else None
        self._counted = {at for at, part in enumerate(parts) if part.writes.is_counted}
        told = self._has_brought and any(part.writes.wrote_together() for part in parts)
        counted = told or bool(self._counted)
        flags = [flag for flag in (own, brought) if flag is not None]
        written: int | torch.Tensor = int(counted)
        if flags and not counted:
            written = (
                flags[0] if len(flags) == 1 else torch.stack([flag.to(flags[0]) for flag in flags]).any()
            )
        if not self._has_brought:
            return {_WRITTEN: written}
        # The core brings values together where a version counter tells of a write to them.
        return {_WRITTEN: written, _BROUGHT: 0 if told or brought is None else brought}

    def _look(self) -> torch.Tensor | None:
        """Return on the device whether somebody wrote to values of this rank's pieces, and know how to find which."""
        flag, positions = self._own.look()
        names = self._names
        self._find = lambda: [names[at] for at in positions()]
        return flag

    def decide(self, fired: Mapping[str, bool]) -> Collection[str]:
        """Compare replicas, and take over what somebody wrote.

        Args:
            fired: the votes.

        Raises:
            RankMismatchError: somebody wrote to the model of one rank alone.
        """
        if not fired[_WRITTEN]:
            return ()
        found = self._find()
        if self._has_stepped:
            if any(at not in self._counted for at, _ in found):
                warn_user(_TOO_LATE, UserWarning)
            return ()
        if self.compare is not None:
            self.compare()
        together = fired.get(_BROUGHT, False)
        if found or together:
            self.optimizer.take_over(_all_names(found), together=together)
        return ()

    def after_step(self, outcome: StepOutcome) -> None:
        """Remember the values that a step has left; a step that was not made leaves a write unseen.

        Args:
            outcome: how the step ended.
        """
        if outcome.how in ("taken", None):
            self._has_stepped = outcome.how is None
            self._record()

    def changing(self, what: Change) -> None:
        """Take over what somebody wrote before values change.

        Args:
            what: the change.
        """
        if self._look() is not None and (found := self._find()):
            self.optimizer.take_over(_all_names(found))

    def changed(self, what: Change) -> None:
        """Remember values after a change.

        Args:
            what: the change.
        """
        if what is Change.JOINED:
            self._know_pieces()
        if what is not Change.MOVED:
            # After a load the next step still finds what was written to values that all ranks bring together.
            self._record(own_only=what is Change.LOADED)


def _all_names(found: Iterable[tuple[int, frozenset[str]]]) -> frozenset[str]:
    return frozenset[str]().union(*(names for _, names in found))
