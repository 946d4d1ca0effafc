"""Step observers that do what none may do; each is for one check of the kit."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen

from megaopt_core.plugin_api import Change, StepObserver, StepOutcome, VoteSpec, hookimpl

__all__ = ["BAD", "Offers"]


@frozen
class Offers:
    """A plugin with one observer.

    Args:
        cls: its class, called with the optimizer.
    """

    cls: Any
    megaopt_api = "1"

    @hookimpl
    def megaopt_step_observers(self, optimizer: Any) -> list[StepObserver]:
        """Return one."""
        return [self.cls(optimizer)]


class Watches(StepObserver):
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.refused = False


class CommunicatesBefore(Watches):
    def before_step(self) -> None:
        dist.all_reduce(torch.zeros(1))


class CommunicatesInVotes(Watches):
    vote_specs = (VoteSpec("bad.vote", "any"),)

    def votes(self) -> Mapping[str, int]:
        dist.barrier()
        return {"bad.vote": 0}


class CommunicatesAfter(Watches):
    def after_step(self, outcome: StepOutcome) -> None:
        dist.all_gather_object([None] * dist.get_world_size(), outcome.how)


class CommunicatesOnOneRank(Watches):
    def changed(self, what: Change) -> None:
        if dist.get_rank() == 1:
            dist.broadcast(torch.zeros(1), src=1)


class OtherVotes(Watches):
    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.vote_specs = (VoteSpec(f"bad.rank_{dist.get_rank()}", "any"),)


class WritesAValue(Watches):
    def after_step(self, outcome: StepOutcome) -> None:
        next(iter(self.optimizer.names)).data.mul_(0.5)


class WritesAGradient(Watches):
    def decide(self, fired: Mapping[str, bool]) -> Collection[str]:
        next(param for param in self.optimizer.names if param.grad is not None).grad.zero_()
        return ()


class DropsGradients(Watches):
    def check(self) -> list[str]:
        for param in self.optimizer.names:
            param.grad = None
        return []


class WritesAtTheBuild(Watches):
    def built(self) -> None:
        with torch.no_grad():
            next(iter(self.optimizer.names)).add_(1.0)


class RaisesOnOneRank(Watches):
    def decide(self, fired: Mapping[str, bool]) -> Collection[str]:
        if dist.get_rank() == 1:
            raise ValueError("this rank is not content")
        return ()


class RemembersARefusal(Watches):
    def before_step(self) -> None:
        if self.refused:
            raise ValueError("the last step was refused")

    def after_step(self, outcome: StepOutcome) -> None:
        self.refused |= outcome.how == "refused"


BAD = {
    "CommunicatesBefore": (
        "watch_only",
        "before_step() of step observer CommunicatesBefore of plugin 'bad' communicates",
    ),
    "CommunicatesInVotes": (
        "watch_only",
        "votes() of step observer CommunicatesInVotes of plugin 'bad' communicates",
    ),
    "CommunicatesAfter": (
        "watch_only",
        "after_step() of step observer CommunicatesAfter of plugin 'bad' communicates",
    ),
    "CommunicatesOnOneRank": (
        "watch_only",
        "changed() of step observer CommunicatesOnOneRank of plugin 'bad' communicates",
    ),
    "OtherVotes": ("watch_only", "RankMismatchError"),
    "WritesAValue": (
        "watch_only",
        "after_step() of step observer WritesAValue of plugin 'bad' writes to the model: tall",
    ),
    "WritesAGradient": (
        "watch_only",
        "WritesAGradient of plugin 'bad' writes to the model: the gradient of tall",
    ),
    "DropsGradients": (
        "watch_only",
        "check() of step observer DropsGradients of plugin 'bad' writes to the model",
    ),
    "WritesAtTheBuild": ("watch_only", "plugin 'bad' writes to the model when it is built: tall"),
    "RaisesOnOneRank": (
        "refuse_together",
        "raises on rank 1: PluginError: step observer RaisesOnOneRank of plugin",
    ),
    "RemembersARefusal": (
        "refuse_together",
        "PluginError: step observer RemembersARefusal of",
    ),
}
"""Class to the check that it fails, and what the message says."""
