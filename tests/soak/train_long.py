"""Train for long with everything that happens to a run: it must end bit for bit where an undisturbed one ends.

    python tests/soak/train_long.py --runs 400 --steps 60

A run is made of a seed: an optimizer, a precision, a schedule, gradients. Two models begin alike and get the same
gradients, some of them infinite. One trains on undisturbed. The other is saved and loaded into a new model and
optimizer, has its state dict taken out and put back, its weights swapped for an evaluation, a layer frozen and
unfrozen, a report made. After every step both hold the same bits: parameters, state, learning rates, loss scale.
"""

import argparse
import copy
import json
import random
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from torch import nn

from megaopt_core import OptimizerParamScheduler, build_optimizer

OPTIMIZERS = {
    "adam": {"adam_beta2": 0.95},
    "adamw": {},
    "sgd": {"sgd_momentum": 0.9},
    "lion": {},
    "muon": {"muon_num_ns_steps": 2},
}
PRECISIONS = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {"bf16": True}),
    "remainders": (
        torch.bfloat16,
        {"bf16": True, "use_precision_aware_optimizer": True, "store_param_remainders": True},
    ),
    "fp16": (torch.float16, {"fp16": True, "initial_loss_scale": 2.0**10, "loss_scale_window": 5}),
}
STYLES = ("constant", "linear", "cosine", "inverse-square-root")


class Run:
    """A model, its optimizer and its scheduler, all of a plan that two runs share."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self.plan = plan
        dtype, settings = PRECISIONS[plan["precision"]]
        torch.manual_seed(plan["init"])
        self.model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)).to(dtype)
        self.optimizer = build_optimizer(
            self.model,
            plan["optimizer"],
            lr=0.01,
            clip_grad=plan["clip"],
            **OPTIMIZERS[plan["optimizer"]],
            **settings,
        )
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=0.01,
            min_lr=0.001,
            lr_warmup_steps=5,
            lr_decay_steps=1000,
            lr_decay_style=plan["style"],
            start_wd=0.0,
            end_wd=0.1,
            wd_incr_steps=1000,
            wd_incr_style="linear",
        )

    def step(self, gradients: Iterable[torch.Tensor]) -> bool:
        """Step with given gradients, times the loss scale; return whether it was made."""
        scale = float(self.optimizer.get_loss_scale())
        for param, gradient in zip(self.model.parameters(), gradients, strict=True):
            param.grad = (gradient * scale).to(param.dtype)
        made = self.optimizer.step().update_successful
        self.optimizer.zero_grad()
        self.scheduler.step(1)
        return made

    def bits(self) -> dict[str, Any]:
        """Return everything that must be equal, by name."""
        found = {f"param {name}": param.detach() for name, param in self.model.named_parameters()}
        for param, name in self.optimizer.names.items():
            found.update({f"{name} {key}": value for key, value in self.optimizer.state[param].items()})
        for index, group in enumerate(self.optimizer.param_groups):
            found.update({f"group {index} {key}": group[key] for key in ("lr", "weight_decay")})
        found["scale"] = float(self.optimizer.get_loss_scale())
        return found


def saved_and_loaded(run: Run, folder: Path) -> Run:
    """Go on in a new model with a new optimizer, from a checkpoint."""
    save_checkpoint(folder / "last", run.model, run.optimizer, scheduler=run.scheduler)
    other = Run({**run.plan, "init": run.plan["init"] + 1})
    load_checkpoint(folder / "last", other.model, other.optimizer, scheduler=other.scheduler)
    return other


def state_put_back(run: Run, folder: Path) -> Run:
    """Take the optimizer's state dict out, and put it back."""
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    return run


def swapped(run: Run, folder: Path) -> Run:
    """Swap other weights in for an evaluation, and the own ones back."""
    own = copy.deepcopy(run.model.state_dict())
    with torch.no_grad():
        for param in run.model.parameters():
            param.mul_(0.5)
    run.model.load_state_dict(own)
    return run


def frozen(run: Run, folder: Path) -> Run:
    """Freeze a layer and unfreeze it before the next gradient comes."""
    run.model[0].requires_grad_(False)
    run.model[0].requires_grad_(True)
    return run


def reported(run: Run, folder: Path) -> Run:
    """Ask for a report, and compare the model with the optimizer."""
    run.optimizer.report()
    if run.optimizer.check():
        raise AssertionError(f"check() found {run.optimizer.check()}")
    return run


EVENTS = (saved_and_loaded, state_put_back, swapped, frozen, reported)


def planned(pick: random.Random) -> dict[str, Any]:
    """Return what both runs have in common."""
    optimizer = pick.choice(list(OPTIMIZERS))
    return {
        "optimizer": optimizer,
        "precision": pick.choice([kind for kind in PRECISIONS if (optimizer, kind) != ("muon", "fp16")]),
        "style": pick.choice(STYLES),
        "clip": pick.choice([0.0, 1.0]),
        "init": pick.randrange(1000),
    }


def gradients_of(model: nn.Module, pick: random.Random, *, may_overflow: bool) -> list[torch.Tensor]:
    """Return random gradients; in mixed precision one in eight steps has one that is not finite."""
    generator = torch.Generator().manual_seed(pick.randrange(2**31))
    gradients = [torch.randn(param.shape, generator=generator) for param in model.parameters()]
    if may_overflow and pick.random() < 1 / 8:
        gradients[pick.randrange(len(gradients))].view(-1)[0] = pick.choice([float("inf"), float("nan")])
    return gradients


def different(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of what is not equal bit for bit."""
    if one.keys() != other.keys():
        return sorted(one.keys() ^ other.keys())
    return [name for name, value in one.items() if not _equal(value, other[name])]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one == other


def train(seed: str, steps: int, folder: Path) -> tuple[dict[str, Any], Counter[str], str | None]:
    """Train one pair of runs; return the plan, the events, and what went apart (None: nothing)."""
    pick = random.Random(seed)  # noqa: S311 - chooses what happens, hides nothing
    plan, happened = planned(pick), Counter()
    calm, disturbed = Run(plan), Run(plan)
    for step in range(steps):
        if pick.random() < 1 / 4:
            event = pick.choice(EVENTS)
            disturbed = event(disturbed, folder)
            happened[event.__name__] += 1
        gradients = gradients_of(calm.model, pick, may_overflow=plan["precision"] != "fp32")
        made = calm.step(gradients)
        happened["skipped steps"] += not made
        if disturbed.step(gradients) != made:
            return plan, happened, f"step {step}: one was made, the other not"
        wrong = different(calm.bits(), disturbed.bits())
        if wrong:
            return plan, happened, f"step {step}: {len(wrong)} differ, such as {wrong[:3]}"
    return plan, happened, None


def main() -> int:
    """Print how many runs of which kind there were; end with 1 where one went apart."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    args = parser.parse_args()
    print(f"seed {args.seed}", file=sys.stderr)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    kinds, events, wrong = Counter(), Counter(), 0
    for number in range(args.runs):
        with tempfile.TemporaryDirectory() as folder:
            try:
                plan, happened, fault = train(f"{args.seed} {number}", args.steps, Path(folder))
                kinds[f"{plan['optimizer']} {plan['precision']}"] += 1
                events += happened
            except Exception:  # noqa: BLE001 - whatever it is, it is what we look for
                plan, fault = planned(random.Random(f"{args.seed} {number}")), traceback.format_exc()  # noqa: S311
        if fault is not None:
            wrong += 1
            print(f"run {number}, {plan}: {fault}", file=sys.stderr)
    print(json.dumps({"runs": args.runs, "kinds": dict(kinds), "events": dict(events), "wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
