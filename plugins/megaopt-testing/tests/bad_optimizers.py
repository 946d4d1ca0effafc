"""Signed momentum, done well, and done wrong in one way per check of the conformance kit."""

import itertools
import math
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from attrs import field, frozen

from megaopt_core import OptimizerEntry, ParamKey, ParamPredicate
from megaopt_core.config import between, boolean

_TICKS = itertools.count(1)


class Good(torch.optim.Optimizer):
    """Moves every weight by the learning rate, against the sign of the momentum, after decoupled weight decay."""

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, group)

    def momentum(self, param: torch.Tensor) -> torch.Tensor:
        state = self.state[param]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(param)
        return state["momentum"]

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.mul_(1 - group["lr"] * group["weight_decay"])
        momentum = self.momentum(param).lerp_(param.grad, 1 - group["beta"])
        param.sub_(momentum.sign(), alpha=group["lr"])


class CountsBackwards(Good):
    """Divides by the number of backward passes, which it counts in a hook."""

    def __init__(self, params: Any, lr: float, beta: float, weight_decay: float, chunks: Any) -> None:
        super().__init__(params, lr, beta, weight_decay)
        self.passes = 0
        trained = [param for chunk in chunks for param in chunk.parameters() if param.requires_grad]
        if trained:
            self.watched = trained[-1]
            self.watched.register_hook(self._count)

    def _count(self, grad: torch.Tensor) -> None:
        self.passes = 1 if self.watched.grad is None else self.passes + 1

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        super().update(param, {**group, "lr": group["lr"] / max(self.passes, 1)})


class ForgetsOnResume(Good):
    """Keeps its momentum where no state dict sees it."""

    def __init__(self, params: Any, lr: float, beta: float, weight_decay: float) -> None:
        super().__init__(params, lr, beta, weight_decay)
        self.hidden: dict[torch.Tensor, torch.Tensor] = {}

    def momentum(self, param: torch.Tensor) -> torch.Tensor:
        return self.hidden.setdefault(param, torch.zeros_like(param))


class KeepsObjectsInState(Good):
    """Its state holds an object that only an unrestricted unpickler reads."""

    def momentum(self, param: torch.Tensor) -> torch.Tensor:
        self.state[param].setdefault("who", ForgetsOnResume)
        return super().momentum(param)


class SkipsNonFinite(Good):
    """Decides by itself that a step with an infinite gradient is not made."""

    def step(self, closure: Any = None) -> None:
        grads = [
            param.grad for group in self.param_groups for param in group["params"] if param.grad is not None
        ]
        if all(bool(grad.isfinite().all()) for grad in grads):
            super().step(closure)


class RefusesNonFinite(Good):
    """Raises on an infinite gradient."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        if not bool(param.grad.isfinite().all()):
            raise FloatingPointError("infinite gradient")
        super().update(param, group)


class RemembersNonFinite(Good):
    """Watches bf16 gradients in a hook, and goes half as fast for ever after it saw an infinite one."""

    def __init__(self, params: Any, lr: float, beta: float, weight_decay: float, chunks: Any) -> None:
        super().__init__(params, lr, beta, weight_decay)
        self.slow = False
        for param in [
            param for chunk in chunks for param in chunk.parameters() if param.dtype == torch.bfloat16
        ]:
            param.register_hook(self._watch)

    def _watch(self, grad: torch.Tensor) -> None:
        self.slow |= not bool(grad.isfinite().all())

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        super().update(param, {**group, "lr": group["lr"] / (2 if self.slow else 1)})


class StepsTiedTwice(Good):
    """Looks the model's parameters up by all of their names, and steps once for each."""

    def __init__(self, params: Any, lr: float, beta: float, weight_decay: float, chunks: Any) -> None:
        super().__init__(params, lr, beta, weight_decay)
        self.times: Counter[str] = Counter()
        for chunk in chunks:
            first: dict[torch.Tensor, str] = {}
            for name, param in chunk.named_parameters(remove_duplicate=False):
                self.times[first.setdefault(param, name)] += 1

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        for _ in range(self.times[param.param_info.name]):
            super().update(param, group)


class DecaysWithoutGradient(Good):
    """Decays every weight before it looks whether there is a gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    param.mul_(1 - group["lr"] * group["weight_decay"])
        super().step(closure)


class IgnoresSchedule(Good):
    """Uses the learning rate that each group had when it was constructed."""

    def __init__(self, params: Any, lr: float, beta: float, weight_decay: float) -> None:
        super().__init__(params, lr, beta, weight_decay)
        self.first = [group["lr"] for group in self.param_groups]

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        index = next(i for i, mine in enumerate(self.param_groups) if mine is group)
        super().update(param, {**group, "lr": self.first[index]})


class SchedulesItself(Good):
    """Lowers its learning rate by itself after every step."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 0.9


class FallsBackToSGD(Good):
    """Steps vectors with plain SGD, and says so nowhere."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        if param.ndim > 1:
            super().update(param, group)
            return
        self.momentum(param).add_(param.grad)
        param.sub_(param.grad + group["weight_decay"] * param, alpha=group["lr"])


class FallsBackToAdamW(Good):
    """Steps vectors with AdamW, and says so nowhere."""

    def momentum(self, param: torch.Tensor) -> torch.Tensor:
        if param.ndim < 2:
            self.state[param].setdefault("second", torch.zeros_like(param))
            self.state[param].setdefault("step", torch.zeros(()))
        return super().momentum(param)

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        if param.ndim > 1:
            super().update(param, group)
            return
        first, state = self.momentum(param), self.state[param]
        step = int(state["step"].add_(1))
        param.mul_(1 - group["lr"] * group["weight_decay"])
        first.lerp_(param.grad, 0.1)
        state["second"].mul_(0.999).addcmul_(param.grad, param.grad, value=0.001)
        size = state["second"].sqrt() / math.sqrt(1 - 0.999**step) + 1e-8
        param.addcdiv_(first, size, value=-group["lr"] / (1 - 0.9**step))


class StartsElsewhere(Good):
    """Begins its momentum with the first gradient, while its entry makes zeros."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        if "momentum" not in self.state[param]:
            self.state[param]["momentum"] = param.grad.clone()
        super().update(param, group)


class JittersOnPlateaus(Good):
    """Adds noise that no seed controls, once the learning rate has stood still for four steps."""

    def __init__(self, params: Any, lr: float, beta: float, weight_decay: float) -> None:
        super().__init__(params, lr, beta, weight_decay)
        self.last, self.still = 0.0, 0

    def step(self, closure: Any = None) -> None:
        lr = self.param_groups[0]["lr"]
        self.still = self.still + 1 if lr == self.last else 1
        self.last = lr
        super().step(closure)

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        jitter = 1e-3 * next(_TICKS) if self.still > 3 else 0.0
        super().update(param, {**group, "lr": group["lr"] * (1 + jitter)})


class MovesParametersAtBuild(Good):
    """See its entry: making its state moves parameters."""


class SkipsNonFiniteParameters(Good):
    """Leaves out the parameters whose gradients are not finite."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        if bool(param.grad.isfinite().all()):
            super().update(param, group)


class CountsEmptySteps(Good):
    """Its decay rate grows with every call of step, with gradients or without."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["calls"] = self.state[param].get("calls", 0) + 1
        super().step(closure)


class UsesThePreviousGradient(Good):
    """Steps with the gradient of the step before, from the second on."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        grad, param.grad = param.grad, self.state[param].get("previous", param.grad)
        self.state[param]["previous"] = grad.clone()
        super().update(param, group)
        param.grad = grad


class ZeroesGradients(Good):
    """Cleans up behind itself."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.zero_()


class DropsGradients(Good):
    """Gives the memory of gradients back."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.zero_grad(set_to_none=True)


class ClipsInPlace(Good):
    """Clips gradients where they are."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.grad.clamp_(-0.25, 0.25)
        super().update(param, group)


class RebindsData(Good):
    """Puts a new tensor where the parameter was."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        momentum = self.momentum(param).lerp_(param.grad, 1 - group["beta"])
        param.data = param * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * momentum.sign()


class UsesTheFirstGroup(Good):
    """Takes the learning rate of the first group for all."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        super().update(param, {**group, "lr": self.param_groups[0]["lr"]})


class NeverDecays(Good):
    """Has a weight decay, and does not use it."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        super().update(param, {**group, "weight_decay": 0.0})


class ReadsItsConstructor(Good):
    """Takes the decay rate of the momentum from its constructor, whatever a group says."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        super().update(param, {**group, "beta": self.defaults["beta"]})


class DecaysAsConstructed(Good):
    """Takes the weight decay from its constructor, whatever a group says."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        decay = self.defaults["weight_decay"] if group["weight_decay"] else 0.0
        super().update(param, {**group, "weight_decay": decay})


class KeepsHalfPrecision(Good):
    """Keeps its momentum in bf16, and says so nowhere."""

    def momentum(self, param: torch.Tensor) -> torch.Tensor:
        return self.state[param].setdefault("momentum", torch.zeros_like(param, dtype=torch.bfloat16))

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.mul_(1 - group["lr"] * group["weight_decay"])
        momentum = self.momentum(param).lerp_(param.grad.bfloat16(), 1 - group["beta"])
        param.sub_(momentum.sign().float(), alpha=group["lr"])


class LooksAtTheModel(Good):
    """Goes twice as far in models whose parameters are bf16."""

    def __init__(self, params: Any, lr: float, beta: float, weight_decay: float, chunks: Any) -> None:
        super().__init__(params, lr, beta, weight_decay)
        self.low = any(param.dtype is torch.bfloat16 for chunk in chunks for param in chunk.parameters())

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        super().update(param, {**group, "lr": group["lr"] * (2 if self.low else 1)})


class Ascends(Good):
    """Has a sign wrong."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        super().update(param, {**group, "weight_decay": 0.0, "lr": -group["lr"]})
        param.mul_(1 - group["lr"] * group["weight_decay"])


class DoesNothing(Good):
    """Keeps momentum, and leaves parameters as they are."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        self.momentum(param).lerp_(param.grad, 1 - group["beta"])


class WritesItsLearningRate(Good):
    """Multiplies the learning rate where it is: a number is copied by that, a tensor is not."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        lr = group["lr"]
        lr *= 0.5
        super().update(param, {**group, "lr": lr})


class NeedsANumber(Good):
    """Refuses a learning rate that is no float."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        if not isinstance(group["lr"], float):
            raise TypeError("lr must be a float")
        super().update(param, group)


def _ranks() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class ScalesByRanks(Good):
    """Raises its learning rate with the number of ranks, as for a larger batch."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        super().update(param, {**group, "lr": group["lr"] * math.sqrt(_ranks()[1])})


class SeedsByRank(Good):
    """Rounds at random, with numbers of its own on each rank."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        chance = torch.Generator().manual_seed(7 + _ranks()[0])
        lr = group["lr"] * (1 + 1e-3 * torch.rand((), generator=chance).item())
        super().update(param, {**group, "lr": lr})


class GoesByWhatIsBeside(Good):
    """Divides gradients by the norm of all that it steps, and says that every element goes by itself."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        total = sum(float(param.grad.double().square().sum()) for param in params) ** 0.5
        self.much = 1.0 + 0.1 * total
        super().step(closure)

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        super().update(param, {**group, "lr": group["lr"] / self.much})


class KeepsStateBackwards(Good):
    """Its momentum is in the order of the elements, from the last to the first."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.mul_(1 - group["lr"] * group["weight_decay"])
        stored = self.momentum(param)
        momentum = stored.view(-1).flip(0).view_as(param).lerp(param.grad, 1 - group["beta"])
        stored.copy_(momentum.view(-1).flip(0).view_as(param))
        param.sub_(momentum.sign(), alpha=group["lr"])


class AveragesInGroup(Good):
    """Divides by a mean over each group that it keeps in an attribute of the group's first parameter."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        first = self.state[group["params"][0]]
        first["mean"] = 0.9 * first.get("mean", 0.0) + 0.1 * float(param.grad.abs().mean())
        super().update(param, {**group, "lr": group["lr"] / (1.0 + first["mean"])})


class Crawls(Good):
    """Divides its learning rate by fifty."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        super().update(param, {**group, "lr": 0.02 * group["lr"]})


class AccumulatesInHalf(Good):
    """Keeps float32, and computes the momentum in float16."""

    def momentum(self, param: torch.Tensor) -> torch.Tensor:
        momentum = super().momentum(param)
        return momentum.copy_(momentum.half().float())

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        super().update(param, group)
        self.momentum(param)


class ReadsHalfOfGradients(Good):
    """Rounds gradients to bf16 before it uses them."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.mul_(1 - group["lr"] * group["weight_decay"])
        momentum = self.momentum(param).lerp_(param.grad.bfloat16().float(), 1 - group["beta"])
        param.sub_(momentum.sign(), alpha=group["lr"])


class RoundsParameters(Good):
    """Rounds the parameters that it has stepped to bf16."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        super().update(param, group)
        if group["lr"]:
            param.copy_(param.bfloat16())


class KeepsTheGradientItself(Good):
    """Compares a gradient with the last one, of which it keeps no copy."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        super().update(param, group)
        self.state[param]["last"] = param.grad


class SharesStateByShape(Good):
    """Has one buffer for all parameters of one shape."""

    def __init__(self, params: Any, lr: float, beta: float, weight_decay: float) -> None:
        super().__init__(params, lr, beta, weight_decay)
        self.buffers: dict[torch.Size, torch.Tensor] = {}

    def momentum(self, param: torch.Tensor) -> torch.Tensor:
        self.state[param].setdefault("scratch", self.buffers.setdefault(param.shape, torch.zeros_like(param)))
        return super().momentum(param)


class BeginsOnce(Good):
    """Steps those parameters for ever that had a gradient in its first step."""

    def __init__(self, params: Any, lr: float, beta: float, weight_decay: float) -> None:
        super().__init__(params, lr, beta, weight_decay)
        self.mine: list[torch.Tensor] = []

    def step(self, closure: Any = None) -> None:
        if not self.mine:
            self.mine = [
                param for group in self.param_groups for param in group["params"] if param.grad is not None
            ]
        super().step(closure)

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        if any(param is known for known in self.mine):
            super().update(param, group)


class SkipsNumbers(Good):
    """Leaves parameters without a dimension alone."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        if param.ndim:
            super().update(param, group)


class DividesByDeviations(Good):
    """Divides by the deviation of a gradient's elements, of which one alone has none."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        apart = param.grad - param.grad.mean()
        variance = apart.square().sum() / (param.numel() - 1)
        super().update(param, {**group, "lr": group["lr"] / (1 + 0.01 * variance.sqrt())})


class NeedsPlainOrder(Good):
    """Views parameters as vectors."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.view(-1)
        super().update(param, group)


class WritesInMemorysOrder(Good):
    """Writes the step of the plain order into memory as it lies."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.mul_(1 - group["lr"] * group["weight_decay"])
        momentum = self.momentum(param).lerp_(param.grad, 1 - group["beta"])
        param.as_strided((param.numel(),), (1,)).sub_(momentum.sign().reshape(-1), alpha=group["lr"])


class SeedsTheProcess(Good):
    """Seeds torch's generator, to be reproducible."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        torch.manual_seed(7)
        super().update(param, group)


class SetsThePrecision(Good):
    """Sets the precision of everybody's products."""

    def step(self, closure: Any = None) -> None:
        torch.set_float32_matmul_precision("medium")
        super().step(closure)


class NeverMaximizes(Good):
    """Has a switch to ascend, which only its constructor looks at."""

    def __init__(
        self, params: Any, lr: float, beta: float = 0.9, weight_decay: float = 0.0, *, maximize: bool = False
    ) -> None:
        super().__init__(params, lr, beta, weight_decay)
        self.maximize = maximize


class GoodSplit:
    """The good optimizer in three parts."""

    def __init__(self, inner: Good) -> None:
        self.inner = inner

    def _with_groups(self, params: Any) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        groups = {id(param): group for group in self.inner.param_groups for param in group["params"]}
        return [(param, groups[id(param)]) for param in params]

    def init_state(self, params: Any) -> None:
        for param in params:
            self.inner.momentum(param)

    def local_updates(self, params: Any) -> list[torch.Tensor]:
        updates = []
        for param, group in self._with_groups(params):
            param.mul_(1 - group["lr"] * group["weight_decay"])
            updates.append(self.inner.momentum(param).lerp_(param.grad, 1 - group["beta"]))
        return updates

    def transform(self, updates: Any, infos: Any) -> list[torch.Tensor]:
        return [update.sign() for update in updates]

    def apply(self, params: Any, updates: Any) -> None:
        for (param, group), update in zip(self._with_groups(params), updates, strict=True):
            param.sub_(update, alpha=group["lr"])


class TransformsOtherwise(GoodSplit):
    """Its middle part is not what the step does."""

    def transform(self, updates: Any, infos: Any) -> list[torch.Tensor]:
        return [1.5 * update.sign() for update in updates]


class PromisesOtherState(GoodSplit):
    """Makes state before the first step under another name than the step does."""

    def init_state(self, params: Any) -> None:
        for param in params:
            self.inner.state[param]["velocity"] = torch.zeros_like(param)


class Normalizes(Good):
    """Divides gradients by the norm of what it is given."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.mul_(1 - group["lr"] * group["weight_decay"])
        grad = param.grad / param.grad.norm().clamp_min(1e-6)
        param.sub_(self.momentum(param).lerp_(grad, 1 - group["beta"]).sign(), alpha=group["lr"])


class NormalizesSlices(GoodSplit):
    """Does so before slices are put together."""

    def local_updates(self, params: Any) -> list[torch.Tensor]:
        for param in params:
            param.grad.div_(param.grad.norm().clamp_min(1e-6))
        return super().local_updates(params)


class GoesByTheNorm(Good):
    """Goes as far as the norm of the parameter says."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.mul_(1 - group["lr"] * group["weight_decay"])
        momentum = self.momentum(param).lerp_(param.grad, 1 - group["beta"])
        param.sub_(momentum.sign(), alpha=group["lr"] * (1.0 + 0.1 * param.norm().item()))


class GoesByTheNormOfSlices(GoodSplit):
    """Does so after slices were taken apart."""

    def apply(self, params: Any, updates: Any) -> None:
        for (param, group), update in zip(self._with_groups(params), updates, strict=True):
            param.sub_(update, alpha=group["lr"] * (1.0 + 0.1 * param.norm().item()))


@frozen
class Settings:
    """Settings as they should be."""

    beta: float = field(
        default=0.9, validator=between(0.0, 1.0), metadata={"help": "decay rate of the momentum"}
    )


@frozen
class UncheckedSettings:
    """A setting that takes anything."""

    beta: float = field(default=0.9, metadata={"help": "decay rate of the momentum"})


@frozen
class UnboundedSettings:
    """A setting that takes any finite number."""

    beta: float = field(default=0.9, validator=between(-math.inf, math.inf), metadata={"help": "decay rate"})


@frozen
class SilentSettings:
    """A setting that nobody explains."""

    beta: float = field(default=0.9, validator=between(0.0, 1.0))


@frozen
class SwitchSettings:
    """Settings of which one does nothing."""

    beta: float = field(
        default=0.9, validator=between(0.0, 1.0), metadata={"help": "decay rate of the momentum"}
    )
    maximize: bool = field(default=False, validator=boolean(), metadata={"help": "ascend"})


def _with_model(config: Any, model_chunks: Any, pg_collection: Any) -> dict[str, Any]:
    kwargs = {"lr": config.lr, "beta": config.signum_beta, "weight_decay": config.weight_decay}
    return {**kwargs, "chunks": model_chunks}


def _without_beta(config: Any, model_chunks: Any, pg_collection: Any) -> dict[str, Any]:
    return {"lr": config.lr, "weight_decay": config.weight_decay}


def _move(optimizer: torch.optim.Optimizer, config: Any = None) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state[param]["momentum"] = torch.zeros_like(param)
            param.data.mul_(0.999)


def _no_state(optimizer: torch.optim.Optimizer, config: Any = None) -> None:
    """Leave the state to the first step."""


def _zeros(optimizer: torch.optim.Optimizer, config: Any = None) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state[param]["momentum"] = torch.zeros_like(param)


def _entry(optimizer_cls: type[torch.optim.Optimizer], **fields: Any) -> OptimizerEntry:
    return OptimizerEntry(optimizer_cls, **{"settings": Settings, "setting_prefixes": ("signum",), **fields})


def _with(settings: type, prefix: str) -> OptimizerEntry:
    return _entry(Good, settings=settings, setting_prefixes=(prefix,))


def _where(says: Any) -> dict[ParamKey, dict[str, Any]]:
    return {ParamKey(predicate=ParamPredicate("chosen", says)): {"beta": 0.8}}


ENTRIES: dict[str, tuple[str, OptimizerEntry]] = {
    "counts_backwards": ("gradient_accumulation", _entry(CountsBackwards, config_to_kwargs=_with_model)),
    "forgets_on_resume": ("bit_exact_resume", _entry(ForgetsOnResume)),
    "keeps_objects_in_state": ("bit_exact_resume", _entry(KeepsObjectsInState)),
    "skips_non_finite": ("non_finite_gradients", _entry(SkipsNonFinite)),
    "refuses_non_finite": ("non_finite_gradients", _entry(RefusesNonFinite)),
    "remembers_non_finite": (
        "non_finite_gradients",
        _entry(RemembersNonFinite, config_to_kwargs=_with_model),
    ),
    "steps_tied_twice": ("tied_parameters", _entry(StepsTiedTwice, config_to_kwargs=_with_model)),
    "decays_without_gradient": ("frozen_parameters", _entry(DecaysWithoutGradient)),
    "ignores_schedule": ("one_schedule", _entry(IgnoresSchedule)),
    "schedules_itself": ("one_schedule", _entry(SchedulesItself)),
    "unchecked_settings": ("settings_validated", _with(UncheckedSettings, "unchecked")),
    "unbounded_settings": ("settings_validated", _with(UnboundedSettings, "unbounded")),
    "silent_settings": ("settings_documented", _with(SilentSettings, "silent")),
    "ignored_settings": ("settings_used", _entry(Good, config_to_kwargs=_without_beta)),
    "falls_back_to_sgd": ("no_silent_fallback", _entry(FallsBackToSGD)),
    # Says that it is somebody else than it is.
    "shares_steps_with_another": ("no_silent_fallback", _entry(FallsBackToAdamW, same_as="torch.optim:SGD")),
    "falls_back_to_adamw": ("no_silent_fallback", _entry(FallsBackToAdamW)),
    "makes_state_late": ("state_before_first_step", _entry(Good, init_state_fn=_no_state)),
    "declares_other_state": ("state_before_first_step", _entry(Good, state={"velocity": "param"})),
    "starts_elsewhere": ("state_before_first_step", _entry(StartsElsewhere, init_state_fn=_zeros)),
    "moves_parameters_at_build": (
        "state_before_first_step",
        _entry(MovesParametersAtBuild, init_state_fn=_move),
    ),
    "jitters_on_plateaus": ("deterministic", _entry(JittersOnPlateaus)),
    "transforms_otherwise": ("split_step", _entry(Good, split_step=TransformsOtherwise)),
    "promises_other_state": ("split_step", _entry(Good, split_step=PromisesOtherState)),
    "normalizes_slices": (
        "split_step",
        _entry(Normalizes, granularity="tensor", split_step=NormalizesSlices),
    ),
    "goes_by_slices": (
        "split_step",
        _entry(GoesByTheNorm, granularity="tensor", split_step=GoesByTheNormOfSlices),
    ),
    "does_nothing": ("report", _entry(DoesNothing)),
    "skips_non_finite_parameters": ("non_finite_gradients", _entry(SkipsNonFiniteParameters)),
    "counts_empty_steps": ("no_gradients", _entry(CountsEmptySteps)),
    "uses_the_previous_gradient": ("this_gradient", _entry(UsesThePreviousGradient)),
    "zeroes_gradients": ("gradients_untouched", _entry(ZeroesGradients)),
    "drops_gradients": ("gradients_untouched", _entry(DropsGradients)),
    "clips_in_place": ("gradients_untouched", _entry(ClipsInPlace)),
    "rebinds_data": ("written_in_place", _entry(RebindsData)),
    "uses_the_first_group": ("group_settings", _entry(UsesTheFirstGroup)),
    "never_decays": ("group_settings", _entry(NeverDecays)),
    "reads_its_constructor": ("group_settings", _entry(ReadsItsConstructor)),
    "decays_as_constructed": ("group_settings", _entry(DecaysAsConstructed)),
    "keeps_half_precision": ("state_dtypes", _entry(KeepsHalfPrecision)),
    "normalizes_what_it_is_given": ("granularity", _entry(Normalizes)),
    "looks_at_the_model": ("precision", _entry(LooksAtTheModel, config_to_kwargs=_with_model)),
    "ascends": ("learns", _entry(Ascends)),
    "crawls": ("learns", _entry(Crawls)),
    "writes_its_learning_rate": ("tensor_lr", _entry(WritesItsLearningRate)),
    "needs_a_number": ("tensor_lr", _entry(NeedsANumber)),
    "routes_by_values": (
        "meta_routing",
        _entry(Good, default_param_overrides=_where(lambda param: bool(param.abs().sum() > 0))),
    ),
    "routes_by_device": (
        "meta_routing",
        _entry(Good, default_param_overrides=_where(lambda param: param.device.type == "cpu")),
    ),
    "scales_by_ranks": ("world_sizes", _entry(ScalesByRanks)),
    "seeds_by_rank": ("world_sizes", _entry(SeedsByRank)),
    "goes_by_what_is_beside": ("sharded", _entry(GoesByWhatIsBeside)),
    "averages_in_group": ("sharded", _entry(AveragesInGroup, granularity="tensor")),
    "accumulates_in_half": ("full_precision", _entry(AccumulatesInHalf)),
    "reads_half_of_gradients": ("full_precision", _entry(ReadsHalfOfGradients)),
    "rounds_parameters": ("full_precision", _entry(RoundsParameters)),
    "keeps_the_gradient_itself": ("own_memory", _entry(KeepsTheGradientItself)),
    "shares_state_by_shape": ("own_memory", _entry(SharesStateByShape)),
    "begins_once": ("late_gradients", _entry(BeginsOnce)),
    "skips_numbers": ("shapes", _entry(SkipsNumbers)),
    "divides_by_deviations": ("shapes", _entry(DividesByDeviations, granularity="tensor")),
    "needs_plain_order": ("strides", _entry(NeedsPlainOrder)),
    "writes_in_memorys_order": ("strides", _entry(WritesInMemorysOrder)),
    "seeds_the_process": ("process_untouched", _entry(SeedsTheProcess)),
    "sets_the_precision": ("process_untouched", _entry(SetsThePrecision)),
    "never_maximizes": (
        "settings_act",
        _entry(NeverMaximizes, settings=SwitchSettings, setting_prefixes=("switched",)),
    ),
    "keeps_state_backwards": ("resume_over_ranks", _entry(KeepsStateBackwards)),
}
"""Optimizer name to the check that it fails, and its entry."""

GOOD: dict[str, Any] = {
    "optimizer_cls": Good,
    "settings": Settings,
    "setting_prefixes": ("signum",),
    "split_step": GoodSplit,
}
"""What an entry of the good optimizer is made with."""
