"""Refusals: the first error of a rank before ranks meet, kept until all have heard of it and raise together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from attrs import define

from megaopt_core.errors import (
    CommunicationError,
    GradientError,
    MegaoptError,
    OwnershipError,
    UnsupportedOperationError,
)
from megaopt_core.optimizers._part import OptimizerPart
from megaopt_core.optimizers._step.ballot import REFUSED, Ballot
from megaopt_core.optimizers._step.stats import StepStats
from megaopt_core.parallel._meeting import gather_over_ranks
from megaopt_core.sharding._live_model import gradient_misfit

__all__ = ["Refusal", "collect", "noting_who_stepped", "raise_refusal"]

_WHAT = "the comparison of ranks before a step"

_REFUSED_ELSEWHERE = "another rank cannot step what trains now, or as its settings are; no rank has stepped."


@define(eq=False)
class Refusal:
    """The first error of a rank before ranks meet, kept until all have heard of it."""

    error: Exception | None = None

    def of[T](self, action: Callable[..., T], *args: Any) -> T | None:
        """Return what an action returns; None where it raises."""
        try:
            return action(*args)
        except CommunicationError:
            raise  # ranks cannot meet any more
        except Exception as error:  # noqa: BLE001 - errors of plugins, too
            self.error = self.error or error
            return None


def raise_refusal(stats: StepStats, ballot: Ballot) -> NoReturn:
    """Raise this rank's refusal, or tell of another rank's; a collective of the ranks that heard of one.

    Args:
        stats: the votes of a step, in which a rank has refused.
        ballot: knows the ranks that have heard them.

    Raises:
        OwnershipError: another rank has refused; the message quotes it.
        Exception: this rank has refused.
    """
    told = {}
    if REFUSED in stats.heard.flags:
        mine = None if stats.refusal is None else str(stats.refusal)
        told = gather_over_ranks(mine, ballot.hearers, _WHAT)
    if stats.refusal is not None:
        raise stats.refusal
    messages = [f" Rank {rank}: {message}" for rank, message in told.items() if message is not None]
    raise OwnershipError(_REFUSED_ELSEWHERE + "".join(messages[:1]))


@contextmanager
def noting_who_stepped(parts: Sequence[OptimizerPart], stepping: OptimizerPart) -> Iterator[None]:
    """Note in an error of a part's step which parts have taken it; one of ours about the first part needs no note.

    Args:
        parts: of one optimizer, in the order in which they are stepped.
        stepping: the part that is stepped inside of the block.
    """
    try:
        yield
    except BaseException as error:
        *before, name = [type(part.inner).__name__ for part in parts[: parts.index(stepping) + 1]]
        if before or not isinstance(error, MegaoptError):
            finished = f"{', '.join(before)} had finished it, and " if before else ""
            error.add_note(
                f"The step stopped in {name}: {finished}{name} may have finished it for some of its parameters. The "
                "next step continues from these values; load a checkpoint to undo the partial step."
            )
        raise


def collect(part: OptimizerPart) -> None:
    """Collect a part's gradients.

    Args:
        part: the part.

    Raises:
        GradientError: gradients have other shapes than their parameters; it names them.
    """
    try:
        part.collect_grads()
    except RuntimeError as error:
        misfit = None if isinstance(error, UnsupportedOperationError) else _misfit(part)
        if misfit is None:
            raise
        raise misfit from error


def _misfit(part: OptimizerPart) -> GradientError | None:
    """Return the error about gradients of other shapes than their parameters, with names; None where all fit."""
    found = {
        shard.name: misfit
        for piece in part.pieces
        for param, (_, shard) in zip(piece.model_params, piece.spec.members, strict=True)
        if (misfit := gradient_misfit(param)) is not None
    }
    if not found:
        return None
    name, misfit = next(iter(found.items()))
    others = f" (and {len(found) - 1} more do not fit)" if len(found) > 1 else ""
    return GradientError(
        f"{name!r} has a {misfit}{others}: it must have one element for each of the parameter's", names=found
    )
