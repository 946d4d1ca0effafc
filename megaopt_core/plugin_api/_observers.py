"""Step observers: plugins that watch the steps of an optimizer and can stop them."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from attrs import field, frozen
from attrs.validators import in_, instance_of

if TYPE_CHECKING:
    import torch

__all__ = ["Change", "ReportLine", "StepNumbers", "StepObserver", "StepOutcome", "VoteSpec"]


@frozen
class VoteSpec:
    """A question that every rank answers in each step, and that all of them decide together.

    Args:
        name: `"plugin.question"`, the same on all ranks.
        rule: `"any"`: the vote fires where one rank says 1. `"equal"`: it fires where replicas say different integers
            (of 63 bits).
        stops: a step in which it fires changes nothing, unless :meth:`StepObserver.decide` settles it.

    Example:
        >>> VoteSpec("experts.unused", "any")
        VoteSpec(name='experts.unused', rule='any', stops=False)
    """

    name: str = field(validator=instance_of(str))
    rule: Literal["any", "equal"] = field(validator=in_(("any", "equal")))
    stops: bool = field(default=False, validator=instance_of(bool))


class Change(enum.Enum):
    """A change of an optimizer between its steps."""

    LOADED = "loaded"
    """A state dict or a checkpoint was loaded into the optimizer."""

    RELOADED = "reloaded"
    """Main parameters were taken from the model's present values."""

    MODE = "mode"
    """`train()` or `eval()` has switched the optimizer, and the model's values with it."""

    JOINED = "joined"
    """Parameters began to train, or took the place of others."""

    MOVED = "moved"
    """States went to CPU memory, or came back."""


class StepNumbers(Protocol):
    """Numbers that a step has measured over all ranks; a device is read when one of them is asked for."""

    @property
    def norms(self) -> Mapping[str | None, float]:
        """Norm group to L2 norm before clipping, the main one under None; empty where nobody asked for norms."""

    @property
    def clip_grad(self) -> float:
        """The largest norm that clipping left as it was; 0 where nothing was clipped."""


class StepOutcome(NamedTuple):
    """The end of one step.

    Args:
        how: `"taken"`; `"skipped"` by found-inf, a norm threshold or a vote; `"refused"`, with an error on all ranks;
            `"failed"` in the middle; None: the step was made, and the host has not read its votes yet.
        numbers: norms of the step; None where ranks did not meet.
    """

    how: Literal["taken", "skipped", "refused", "failed"] | None
    numbers: StepNumbers | None


@frozen
class ReportLine:
    """A line of a report.

    Args:
        name: a few words.
        text: a sentence.
    """

    name: str
    text: str


class StepObserver:
    """Watches the steps of one optimizer; every method does nothing, and an observer defines those that it needs.

    A step calls them in this order: :meth:`before_step`, gradients are collected, :meth:`votes`, ranks meet,
    :meth:`decide`, the inner optimizers step, :meth:`after_step`. An observer writes nothing to the model. Only
    :meth:`built`, :meth:`decide`, :meth:`before_save` and :meth:`check` may communicate: all ranks call them together.

    Attributes:
        vote_specs: its votes, the same on all ranks.

    Example:
        >>> class CountSteps(StepObserver):
        ...     taken = 0
        ...
        ...     def after_step(self, outcome: StepOutcome) -> None:
        ...         self.taken += outcome.how in ("taken", None)
    """

    vote_specs: tuple[VoteSpec, ...] = ()

    def built(self) -> None:
        """Prepare; the optimizer is complete. It may communicate."""

    def before_step(self) -> None:
        """Look at groups and model; parameters that began to train have joined. Raise to refuse the step on all ranks.

        It must not communicate.
        """

    def votes(self) -> Mapping[str, int | torch.Tensor]:
        """Return this rank's votes by name: integers, or tensors of one element that the host need not read.

        Gradients are collected and unscaled. A vote that is missing is neutral. It must not communicate.
        """
        return {}

    def decide(self, fired: Mapping[str, bool]) -> Collection[str]:
        """Act on votes, alike on all ranks: raise together, or compare and go on. It may communicate.

        On an accelerator the host reads votes one step later, where no other rule of the step makes it wait. Votes
        with `stops` have stopped that step then, if its optimizers honour what the device says.

        Args:
            fired: each of the observer's votes, the same on all ranks.

        Returns:
            The votes with `stops` that are settled: the step goes on, if it has not been stopped yet.
        """
        return ()

    def after_step(self, outcome: StepOutcome) -> None:
        """Take note of a step; called once for every :meth:`before_step`. It must not communicate.

        Args:
            outcome: how it ended.
        """

    def changing(self, what: Change) -> None:
        """Look a last time at values that are about to change between steps. It must not communicate.

        Args:
            what: the change: a load, a switch of mode, parameters that join.
        """

    def changed(self, what: Change) -> None:
        """Take note of a change between steps. It must not communicate.

        Args:
            what: the change.
        """

    def before_save(self) -> None:
        """Look at the state that is about to be saved; all ranks call it. Raise to refuse the save."""

    def check(self) -> Sequence[str]:
        """Return problems for `optimizer.check()`, one sentence each; all ranks call it."""
        return ()

    def report_lines(self) -> Sequence[ReportLine]:
        """Return lines for `optimizer.report()`; it must not communicate."""
        return ()
