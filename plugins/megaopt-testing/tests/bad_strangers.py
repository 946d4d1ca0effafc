"""Mistakes that optimizers of strangers make: each is caught by a check, though most steps look right."""

import gc
import os
import random
import time
import warnings
from collections import defaultdict
from typing import Any, ClassVar

import numpy as np
import torch
from attrs import field, frozen
from bad_optimizers import Good, Settings

from megaopt_core import OptimizerEntry
from megaopt_core.config import between, boolean

__all__ = ["ENTRIES", "HELP"]


class _Adam(torch.optim.Optimizer):
    """AdamW, of which `corrections` says how moments are corrected for their beginning."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def corrections(self, step: int) -> tuple[float, float]:
        return 1 - 0.9**step, 1 - 0.999**step

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state.update(step=0, first=torch.zeros_like(param), second=torch.zeros_like(param))
                state["step"] += 1
                one, two = self.corrections(state["step"])
                param.mul_(1 - group["lr"] * group["weight_decay"])
                state["first"].lerp_(param.grad, 0.1)
                state["second"].mul_(0.999).addcmul_(param.grad, param.grad, value=0.001)
                size = (state["second"] / two).sqrt() + 1e-8
                param.addcdiv_(state["first"], size, value=-group["lr"] / one)


class CorrectsLate(_Adam):
    """From the second step on its correction is that of the step before."""

    def corrections(self, step: int) -> tuple[float, float]:
        return super().corrections(max(step - 1, 1))


class DriftsToHalf(Good):
    """Saves memory from the fifth step on: its momentum becomes bf16."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        momentum = self.momentum(param).float().lerp_(param.grad, 1 - group["beta"])
        state["steps"] = state.get("steps", 0) + 1
        state["momentum"] = momentum.bfloat16() if state["steps"] > 4 else momentum
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_(momentum.sign(), alpha=group["lr"])


class RestsInAttributes(Good):
    """Begins its momentum anew in every fiftieth step, which an attribute counts."""

    def __init__(self, params: Any, lr: float, beta: float, weight_decay: float) -> None:
        super().__init__(params, lr, beta, weight_decay)
        self.calls: dict[torch.Tensor, int] = defaultdict(int)

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        self.calls[param] += 1
        if self.calls[param] % 70 == 0:
            self.momentum(param).zero_()
        super().update(param, group)


class StopsAfterHundred(Good):
    """Thinks that it is done after a hundred steps."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        state["steps"] = state.get("steps", 0) + 1
        super().update(param, group if state["steps"] <= 100 else {**group, "lr": 0.0})


class StepsEveryOtherTime(Good):
    """Averages gradients over two steps, and leaves parameters alone in every second one."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        state["steps"] = state.get("steps", 0) + 1
        super().update(param, group if state["steps"] % 2 else {**group, "lr": 0.0})


class GoesElsewhereInOneGo(Good):
    """Its path for all tensors at once forgets the momentum."""

    def __init__(
        self, params: Any, lr: float, beta: float = 0.9, weight_decay: float = 0.0, *, foreach: bool = False
    ) -> None:
        super().__init__(params, lr, beta, weight_decay)
        self.foreach = foreach

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        super().update(param, {**group, "beta": 0.0} if self.foreach else group)


class HooksGradients(Good):
    """Scales gradients down while they are computed."""

    def __init__(self, params: Any, lr: float, beta: float, weight_decay: float) -> None:
        super().__init__(params, lr, beta, weight_decay)
        for group in self.param_groups:
            for param in group["params"]:
                if param.requires_grad:
                    param.register_hook(lambda grad: grad * 0.5)


class DecaysUpwards(Good):
    """Has the sign of its weight decay wrong."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        super().update(param, {**group, "weight_decay": -group["weight_decay"]})


class DecaysWhereItMustNot(Good):
    """Takes a weight decay of 0 for one that was not given."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        decay = group["weight_decay"] or self.defaults["weight_decay"]
        super().update(param, {**group, "weight_decay": decay})


class KeepsEveryGradient(Good):
    """Keeps a history of gradients, which nothing ends."""

    def __init__(self, params: Any, lr: float, beta: float, weight_decay: float) -> None:
        super().__init__(params, lr, beta, weight_decay)
        self.history: list[torch.Tensor] = []

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        self.history.append(param.grad.clone())
        super().update(param, group)


class LooksAtDimensions(Good):
    """Steps vectors half as far as matrices, and says that every element goes by itself."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        super().update(param, {**group, "lr": group["lr"] * (1.0 if param.ndim > 1 else 0.5)})


class GoesByPosition(Good):
    """Steps the parameters of a group ever less far, in their order."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        position = next(i for i, other in enumerate(group["params"]) if other is param)
        super().update(param, {**group, "lr": group["lr"] * 0.9**position})


class StopsCollecting(Good):
    """Switches garbage collection off for speed, and not on again."""

    def step(self, closure: Any = None) -> None:
        gc.disable()
        super().step(closure)


class Freezes(Good):
    """Switches gradients of the parameters off while it writes, and not on again for matrices."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        super().update(param, group)
        self.state[param]["steps"] = self.state[param].get("steps", 0) + 1
        if self.state[param]["steps"] > 1 and param.ndim > 1:
            param.requires_grad_(False)


class DrawsFromPython(Good):
    """Jitters its step by Python's random numbers."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        super().update(param, {**group, "lr": group["lr"] * (1 + 0.1 * random.random())})  # noqa: S311


class LooksAtTheClock(Good):
    """Goes less far the longer a run takes."""

    def __init__(self, params: Any, lr: float, beta: float, weight_decay: float) -> None:
        super().__init__(params, lr, beta, weight_decay)
        self.begin = time.perf_counter()

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        passed = time.perf_counter() - self.begin
        super().update(param, {**group, "lr": group["lr"] / (1 + passed)})


class StaysNearItsBeginning(Good):
    """Pulls towards the values that it was constructed with, which it keeps in an attribute."""

    def __init__(self, params: Any, lr: float, beta: float, weight_decay: float) -> None:
        super().__init__(params, lr, beta, weight_decay)
        self.first = {
            param: param.detach().clone() for group in self.param_groups for param in group["params"]
        }

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        super().update(param, group)
        param.lerp_(self.first[param], 0.1 * group["lr"])


class CountsForAll(Good):
    """Counts steps in its class: a second optimizer goes on where the first one was."""

    steps: ClassVar[int] = 0

    def step(self, closure: Any = None) -> None:
        type(self).steps += 1
        super().step(closure)

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        super().update(param, {**group, "lr": group["lr"] * (1 + 1.0 / type(self).steps)})


class ForgetsGroupsOnLoad(Good):
    """Warms up by a number that each group has, which loading begins anew."""

    def __init__(self, params: Any, lr: float, beta: float, weight_decay: float) -> None:
        super().__init__(params, lr, beta, weight_decay)
        self.warmth = [0.1 for _ in self.param_groups]

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.warmth = [min(1.0, 1.5 * warmth) for warmth in self.warmth]

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        index = next(i for i, mine in enumerate(self.param_groups) if mine is group)
        super().update(param, {**group, "lr": group["lr"] * self.warmth[index]})


class ShareAMomentum(Good):
    """Parameters of one shape have one momentum, in an attribute."""

    def __init__(self, params: Any, lr: float, beta: float, weight_decay: float) -> None:
        super().__init__(params, lr, beta, weight_decay)
        self.buffers: dict[torch.Size, torch.Tensor] = {}

    def momentum(self, param: torch.Tensor) -> torch.Tensor:
        return self.buffers.setdefault(param.shape, torch.zeros_like(param))


class KeepsItsFirstRate(Good):
    """Reads the learning rate in its first step, and keeps it."""

    def __init__(self, params: Any, lr: float, beta: float, weight_decay: float) -> None:
        super().__init__(params, lr, beta, weight_decay)
        self.rates: dict[torch.Tensor, float] = {}

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        super().update(param, {**group, "lr": self.rates.setdefault(param, float(group["lr"]))})


class DecaysAtRateZero(Good):
    """Its weight decay does not go by the learning rate."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.mul_(1 - 0.01 * group["weight_decay"])
        super().update(param, {**group, "weight_decay": 0.0})


class SeedsNumpy(Good):
    """Seeds the generator that data loaders often shuffle by."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        np.random.seed(7)  # noqa: NPY002 - the one of the process
        super().update(param, group)


class ChoosesKernels(Good):
    """Has the library choose its fastest kernels, for everybody."""

    def step(self, closure: Any = None) -> None:
        torch.backends.cudnn.benchmark = True
        super().step(closure)


class SetsTheEnvironment(Good):
    """Sets a variable that others read."""

    def step(self, closure: Any = None) -> None:
        os.environ["A_BAD_OPTIMIZER"] = "1"
        super().step(closure)


class KeepsWarningsQuiet(Good):
    """Hides the warnings of everybody."""

    def step(self, closure: Any = None) -> None:
        warnings.filterwarnings("ignore", message="of a bad optimizer")
        super().step(closure)


class PrintsLess(Good):
    """Sets how tensors are shown."""

    def step(self, closure: Any = None) -> None:
        torch.set_printoptions(precision=2)
        super().step(closure)


@frozen
class WaySettings:
    """Settings of which one is a way to compute."""

    beta: float = field(
        default=0.9, validator=between(0.0, 1.0), metadata={"help": "decay rate of the momentum"}
    )
    foreach: bool = field(default=False, validator=boolean(), metadata={"help": "step all tensors in one go"})


def _entry(optimizer_cls: type[torch.optim.Optimizer], **fields: Any) -> OptimizerEntry:
    return OptimizerEntry(optimizer_cls, **{"settings": Settings, "setting_prefixes": ("signum",), **fields})


ENTRIES: dict[str, tuple[str, OptimizerEntry]] = {
    "says_adamw": ("no_silent_fallback", _entry(Good, same_as="torch.optim:AdamW")),
    "corrects_late": ("no_silent_fallback", OptimizerEntry(CorrectsLate, same_as="torch.optim:AdamW")),
    "drifts_to_half": ("state_dtypes", _entry(DriftsToHalf)),
    "rests_in_attributes": ("bit_exact_resume", _entry(RestsInAttributes)),
    "stops_after_hundred": ("report", _entry(StopsAfterHundred)),
    "steps_every_other_time": ("report", _entry(StepsEveryOtherTime)),
    "goes_elsewhere_in_one_go": (
        "settings_act",
        _entry(GoesElsewhereInOneGo, settings=WaySettings, setting_prefixes=("ways",)),
    ),
    "hooks_gradients": ("gradients_untouched", _entry(HooksGradients)),
    "decays_upwards": ("group_settings", _entry(DecaysUpwards)),
    "decays_where_it_must_not": ("group_settings", _entry(DecaysWhereItMustNot)),
    "keeps_every_gradient": ("own_memory", _entry(KeepsEveryGradient)),
    "looks_at_dimensions": ("granularity", _entry(LooksAtDimensions)),
    "goes_by_position": ("sharded", _entry(GoesByPosition)),
    "stops_collecting": ("process_untouched", _entry(StopsCollecting)),
    "seeds_numpy": ("process_untouched", _entry(SeedsNumpy)),
    "chooses_kernels": ("process_untouched", _entry(ChoosesKernels)),
    "sets_the_environment": ("process_untouched", _entry(SetsTheEnvironment)),
    "keeps_warnings_quiet": ("process_untouched", _entry(KeepsWarningsQuiet)),
    "prints_less": ("process_untouched", _entry(PrintsLess)),
    "freezes": ("written_in_place", _entry(Freezes)),
    "draws_from_python": ("deterministic", _entry(DrawsFromPython)),
    "looks_at_the_clock": ("deterministic", _entry(LooksAtTheClock)),
    "stays_near_its_beginning": ("bit_exact_resume", _entry(StaysNearItsBeginning)),
    "counts_for_all": ("deterministic", _entry(CountsForAll)),
    "forgets_groups_on_load": ("bit_exact_resume", _entry(ForgetsGroupsOnLoad)),
    "share_a_momentum": ("bit_exact_resume", _entry(ShareAMomentum)),
    "keeps_its_first_rate": ("one_schedule", _entry(KeepsItsFirstRate)),
    "decays_at_rate_zero": ("one_schedule", _entry(DecaysAtRateZero)),
}
"""Optimizer name to the check that it fails, and its entry."""

HELP = {
    "says_adamw": "move no parameter as AdamW does",
    "corrects_late": "move no parameter as AdamW does",
    "drifts_to_half": "'momentum' (bfloat16)",
    "rests_in_attributes": "60 + 60 steps with a checkpoint between them do not equal 120",
    "stops_after_hundred": "does the optimizer stop",
    "steps_every_other_time": "does not change",
    "goes_elsewhere_in_one_go": "only another way to compute the same step",
    "hooks_gradients": "register no hooks",
    "decays_upwards": "further from zero",
    "decays_where_it_must_not": "weight_decay of 0",
    "keeps_every_gradient": "another tensor in its attributes with every step",
    "looks_at_dimensions": "whole tensors or their shape",
    "goes_by_position": "may not depend on other parameters of the same step",
    "stops_collecting": "gc.enable",
    "seeds_numpy": "(numpy)",
    "chooses_kernels": "torch.backends.cudnn.benchmark",
    "sets_the_environment": "os.environ",
    "keeps_warnings_quiet": "warnings.filterwarnings",
    "prints_less": "torch.set_printoptions",
    "freezes": "requires_grad",
    "draws_from_python": "Draw random numbers from torch's default generator",
    "looks_at_the_clock": "Draw random numbers from torch's default generator",
    "stays_near_its_beginning": "in `optimizer.state` or in the group, not in attributes",
    "counts_for_all": "Draw random numbers from torch's default generator",
    "forgets_groups_on_load": "in `optimizer.state` or in the group, not in attributes",
    "share_a_momentum": "in `optimizer.state` or in the group, not in attributes",
    "keeps_its_first_rate": "learning rate 0",
    "decays_at_rate_zero": "learning rate 0",
}
"""Optimizer name to what the message tells its author."""
