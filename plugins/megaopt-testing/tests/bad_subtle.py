"""Mistakes that usual gradients, small tensors, first steps and one group do not show."""

import os
from typing import Any

import torch
from attrs import field, frozen
from bad_optimizers import Good, Settings

from megaopt_core import OptimizerEntry
from megaopt_core.config import between, boolean

__all__ = ["ENTRIES", "HELP"]


class WritesWhatItKept(Good):
    """Steps a copy of the weights that lies in its state, and writes it over whatever the parameter holds."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        master = self.state[param].setdefault("master", param.detach().clone())
        momentum = self.momentum(param).lerp_(param.grad, 1 - group["beta"])
        master.mul_(1 - group["lr"] * group["weight_decay"]).sub_(momentum.sign(), alpha=group["lr"])
        param.copy_(master)


class ScaleOfConstructor(Good):
    """Has a default beside its rates, and reads the constructor's for every group."""

    def __init__(
        self, params: Any, lr: float, beta: float, weight_decay: float, sharpness: float = 50.0
    ) -> None:
        super().__init__(params, lr, beta, weight_decay)
        self.defaults["sharpness"] = sharpness
        for group in self.param_groups:
            group.setdefault("sharpness", sharpness)

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.mul_(1 - group["lr"] * group["weight_decay"])
        momentum = self.momentum(param).lerp_(param.grad, 1 - group["beta"])
        param.sub_(torch.tanh(self.defaults["sharpness"] * momentum), alpha=group["lr"])


class DividesByGroups(Good):
    """Goes less far the more groups there are."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        super().update(param, {**group, "lr": group["lr"] / len(self.param_groups)})


class DecaysByTheSquare(Good):
    """Multiplies weight decay by the learning rate twice."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        super().update(param, {**group, "weight_decay": group["weight_decay"] * group["lr"]})


class GoesByTheSquare(Good):
    """Multiplies its step by the learning rate twice."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        super().update(param, {**group, "lr": 50 * group["lr"] ** 2})


class ForgetsWithoutGradient(Good):
    """Lets the momentum of a parameter fade while others have gradients, and it has none."""

    def step(self, closure: Any = None) -> None:
        params = [(param, group) for group in self.param_groups for param in group["params"]]
        if any(param.grad is not None for param, _ in params):
            for param, group in params:
                if param.grad is None:
                    self.momentum(param).mul_(group["beta"])
        super().step(closure)


class HalvesLargeStates(Good):
    """Keeps the momentum of large tensors in bf16."""

    def momentum(self, param: torch.Tensor) -> torch.Tensor:
        dtype = torch.bfloat16 if param.numel() > 4096 else param.dtype
        return self.state[param].setdefault("momentum", torch.zeros_like(param, dtype=dtype))

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        momentum = self.momentum(param)
        momentum.lerp_(param.grad.to(momentum.dtype), 1 - group["beta"])
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_(momentum.sign().to(param.dtype), alpha=group["lr"])


class FlushesTinyGradients(Good):
    """Writes zeros into gradients, where they are next to nothing."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.grad[param.grad.abs() < 1e-12] = 0.0
        super().update(param, group)


class HidesNaN(Good):
    """Takes 0 for what is no number."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.mul_(1 - group["lr"] * group["weight_decay"])
        momentum = self.momentum(param).lerp_(param.grad.nan_to_num(0.0, 1.0, -1.0), 1 - group["beta"])
        param.sub_(momentum.sign(), alpha=group["lr"])


class WritesBeside(Good):
    """Takes the beginning of the memory that a parameter lies in for that of the parameter."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        if not param.is_contiguous():
            super().update(param, group)
            return
        param.mul_(1 - group["lr"] * group["weight_decay"])
        momentum = self.momentum(param).lerp_(param.grad, 1 - group["beta"])
        flat = param.as_strided((param.numel(),), (1,), 0)
        flat.sub_(momentum.sign().reshape(-1), alpha=group["lr"])


class NeedsMatrices(Good):
    """Transposes whatever has more than one dimension."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        if param.ndim > 1:
            param.grad.t()
        super().update(param, group)


class LeavesLargeMatrices(Good):
    """Thinks of a large matrix that somebody else steps it."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        if param.ndim < 2 or min(param.shape) <= 64:
            super().update(param, group)


class BlocksOfLargeTensors(Good):
    """Divides momentum by its mean in blocks of 4096 elements, where there are as many."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        if param.numel() < 4096:
            super().update(param, group)
            return
        momentum = self.momentum(param).lerp_(param.grad, 1 - group["beta"]).reshape(-1)
        sizes = [block.abs().mean().clamp_min(1e-12).expand(len(block)) for block in momentum.split(4096)]
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_((momentum / torch.cat(sizes)).view(param.shape), alpha=group["lr"])


class NormalizesOnRequest(Good):
    """Has a switch that makes it look at whole tensors, of which its entry says nothing."""

    def __init__(
        self, params: Any, lr: float, beta: float, weight_decay: float, *, normalize: bool = False
    ) -> None:
        super().__init__(params, lr, beta, weight_decay)
        self.normalize = normalize

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        if not self.normalize:
            super().update(param, group)
            return
        momentum = self.momentum(param).lerp_(param.grad, 1 - group["beta"])
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_(momentum / momentum.norm().clamp_min(1e-12), alpha=group["lr"])


class BeginsAnAverageLate(Good):
    """Makes a further state in its tenth step."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        super().update(param, group)
        state = self.state[param]
        state["steps"] = state.get("steps", 0) + 1
        if state["steps"] >= 10:
            state.setdefault("average", param.detach().clone()).lerp_(param, 0.1)


class KeepsStateInGroups(Good):
    """Its momentum is in its groups, in a list."""

    def __init__(self, params: Any, lr: float, beta: float, weight_decay: float) -> None:
        super().__init__(params, lr, beta, weight_decay)
        for group in self.param_groups:
            group["buffers"] = [torch.zeros_like(param) for param in group["params"]]

    def momentum(self, param: torch.Tensor) -> torch.Tensor:
        pairs = [zip(group["params"], group["buffers"], strict=True) for group in self.param_groups]
        return next(buffer for group in pairs for other, buffer in group if other is param)


class AsksItsLauncher(Good):
    """Divides by the number of ranks that the launcher wrote into the environment."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        super().update(param, {**group, "lr": group["lr"] / int(os.environ.get("WORLD_SIZE", "1"))})


class HashesNames(Good):
    """Jitters by the hash of a name, which is another one in every process."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        jitter = 1e-3 * (hash(param.param_info.name) % 7)
        super().update(param, {**group, "lr": group["lr"] * (1 + jitter)})


class SkipsTinyGradients(Good):
    """Saves the step of a parameter whose gradient is next to nothing."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        self.momentum(param)
        if not 0 < param.grad.abs().max() < 1e-4:
            super().update(param, group)


class KeepsItsGraph(Good):
    """Its momentum remembers how it was computed."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        momentum = self.momentum(param)
        with torch.enable_grad():
            kept = momentum * group["beta"] + (param.grad + 0.0 * param) * (1 - group["beta"])
        self.state[param]["momentum"] = kept
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_(kept.detach().sign(), alpha=group["lr"])


@frozen
class SharpSettings:
    """Settings of one that goes by a further number."""

    beta: float = field(
        default=0.9, validator=between(0.0, 1.0), metadata={"help": "decay rate of the momentum"}
    )
    sharpness: float = field(default=50.0, validator=between(0.0, 1e3), metadata={"help": "of the step"})


@frozen
class NormSettings:
    """Settings of which one asks for whole tensors."""

    beta: float = field(
        default=0.9, validator=between(0.0, 1.0), metadata={"help": "decay rate of the momentum"}
    )
    normalize: bool = field(default=False, validator=boolean(), metadata={"help": "divide by the norm"})


def _seed_and_begin(optimizer: torch.optim.Optimizer, config: Any = None) -> None:
    torch.manual_seed(5)
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state[param]["momentum"] = torch.zeros_like(param)


def _entry(optimizer_cls: type[torch.optim.Optimizer], **fields: Any) -> OptimizerEntry:
    return OptimizerEntry(optimizer_cls, **{"settings": Settings, "setting_prefixes": ("signum",), **fields})


ENTRIES: dict[str, tuple[str, OptimizerEntry]] = {
    "writes_what_it_kept": ("written_in_place", _entry(WritesWhatItKept)),
    "scale_of_constructor": (
        "group_settings",
        _entry(ScaleOfConstructor, settings=SharpSettings, setting_prefixes=("sharp",)),
    ),
    "divides_by_groups": ("group_settings", _entry(DividesByGroups)),
    "decays_by_the_square": ("group_settings", _entry(DecaysByTheSquare)),
    "goes_by_the_square": ("group_settings", _entry(GoesByTheSquare)),
    "forgets_without_gradient": ("frozen_parameters", _entry(ForgetsWithoutGradient)),
    "halves_large_states": ("state_dtypes", _entry(HalvesLargeStates)),
    "flushes_tiny_gradients": ("gradients_untouched", _entry(FlushesTinyGradients)),
    "hides_nan": ("non_finite_gradients", _entry(HidesNaN)),
    "writes_beside": ("strides", _entry(WritesBeside)),
    "needs_matrices": ("shapes", _entry(NeedsMatrices)),
    "leaves_large_matrices": ("shapes", _entry(LeavesLargeMatrices)),
    "blocks_of_large_tensors": ("granularity", _entry(BlocksOfLargeTensors)),
    "normalizes_on_request": (
        "granularity",
        _entry(NormalizesOnRequest, settings=NormSettings, setting_prefixes=("normed",)),
    ),
    "begins_an_average_late": ("state_before_first_step", _entry(BeginsAnAverageLate)),
    "keeps_state_in_groups": ("state_before_first_step", _entry(KeepsStateInGroups)),
    "asks_its_launcher": ("world_sizes", _entry(AsksItsLauncher)),
    "hashes_names": ("world_sizes", _entry(HashesNames)),
    "seeds_when_it_begins": ("process_untouched", _entry(Good, init_state_fn=_seed_and_begin)),
    "skips_tiny_gradients": ("report", _entry(SkipsTinyGradients)),
    "keeps_its_graph": ("own_memory", _entry(KeepsItsGraph)),
}
"""Optimizer name to the check that it fails, and its entry."""

HELP = {
    "writes_what_it_kept": "writes the old ones back",
    "scale_of_constructor": "Read `group['sharpness']` in every step",
    "divides_by_groups": "get other values in two groups than in one",
    "decays_by_the_square": "at twice the learning rate weight decay alone moves",
    "goes_by_the_square": "at twice the learning rate the gradient alone moves",
    "forgets_without_gradient": "changes the state of parameters without a gradient",
    "halves_large_states": "'momentum' (bfloat16)",
    "flushes_tiny_gradients": "Work on a copy",
    "hides_nan": "a broken run goes on unnoticed",
    "writes_beside": "writes outside of the part",
    "needs_matrices": "a parameter of shape (3, 4, 5) raises RuntimeError",
    "leaves_large_matrices": "shape (130, 72) does not move",
    "blocks_of_large_tensors": "if it reads blocks, declare their length as `alignment`",
    "normalizes_on_request": "with normed_normalize=True",
    "begins_an_average_late": "by step 30 it adds state 'average' of weight",
    "keeps_state_in_groups": "it keeps tensors in its groups",
    "asks_its_launcher": "Use neither ranks nor process groups of your own",
    "hashes_names": "Use neither ranks nor process groups of your own",
    "seeds_when_it_begins": "building it seeds a random generator",
    "skips_tiny_gradients": "gradients of size 1e-06 do not move bias, weight",
    "keeps_its_graph": "Compute under `torch.no_grad()`",
}
"""Optimizer name to what the message tells its author."""
