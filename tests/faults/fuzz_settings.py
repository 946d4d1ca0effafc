"""Give wrong settings, overrides, values and arguments, and the wrong things: each must get an error that says so.

    python tests/faults/fuzz_settings.py --inputs 400

An input is made of a seed. Its error must be of our own class, name the setting, show the value that was given, and say
what is allowed or what to do. What was built before must train on as if nothing had been.
"""

import argparse
import json
import math
import random
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import wrong_habits

from megaopt_core import (
    ChainedOptimizer,
    OptimizerConfig,
    OptimizerParamScheduler,
    ParamKey,
    build_optimizer,
    get_mup_config_overrides,
    get_registry,
)
from megaopt_core.config import core_field_info
from megaopt_core.errors import MegaoptError

ALLOWED = (
    "needs at least one",
    "is a ParamKey",
    "its key says",
    "must be",
    "must not",
    "allowed are",
    "only the default",
    "at most one",
    "did you mean",
    "no optimizer",
)
ALLOWED += (
    "one of",
    "wrap them",
    "give a name",
    "matches nothing",
    "refuses",
    "takes ",
    "is a mapping",
    "a mapping",
)
ALLOWED += (
    "is not registered",
    "known",
    "cannot set",
    "means the same",
    "mean the same",
    "has no setting",
    "close",
)
ALLOWED += wrong_habits.ALLOWED
NEVER = (math.nan, -math.inf, object, [[]], {"a": 1}, b"x")
NUMBERS = (*NEVER, "x", -1, -0.5, None)
RATES = (*NUMBERS, 1.0, 1.5, True)
BOOLS = (*NEVER, "no", 2, 0.5, None)
NAMES = (*NEVER, "", 3, None)
RATE_FIELDS = ("adam_beta1", "adam_beta2", "sgd_momentum", "lion_beta1", "lion_beta2", "muon_momentum")
SCHEDULE = {
    "init_lr": 0.0,
    "max_lr": 0.1,
    "min_lr": 0.0,
    "lr_warmup_steps": 1,
    "lr_decay_steps": 10,
    "lr_decay_style": "linear",
    "start_wd": 0.0,
    "end_wd": 0.1,
    "wd_incr_steps": 10,
    "wd_incr_style": "linear",
}


def wrong_core_setting(pick: random.Random) -> tuple[str, Any, Callable[[], Any]]:
    """A field of the core with a value that it cannot have."""
    info = pick.choice([each for each in core_field_info() if each.name != "timers"])
    optional = info.type.endswith("| None")
    kinds = {"bool": BOOLS, "str": NAMES, "torch.dtype": ("fp7", 3, None, torch.int8)}
    base = info.type.removesuffix(" | None")
    values = [value for value in kinds.get(base, (*NUMBERS, True)) if not (optional and value is None)]
    if info.name == "config_logger_dir":
        values = [value for value in values if not isinstance(value, str)]
    if "Only the default" in info.help:
        values = [value for value in ("x", 7, [1]) if value != info.default]
    value = pick.choice(values)
    return info.name, value, lambda: OptimizerConfig(**{info.name: value})


def wrong_plugin_setting(pick: random.Random) -> tuple[str, Any, Callable[[], Any]]:
    """A setting of a plugin out of its range."""
    name = pick.choice([each for each in RATE_FIELDS if each in get_registry().setting_owners()])
    value = pick.choice(RATES)
    return name, value, lambda: OptimizerConfig(**{name: value})


def unknown_setting(pick: random.Random) -> tuple[str, Any, Callable[[], Any]]:
    """A name that nobody knows, one letter off."""
    name = pick.choice([each.name for each in core_field_info()])
    at = pick.randrange(len(name))
    wrong = name[:at] + "q" + name[at:]
    return wrong, None, lambda: OptimizerConfig(**{wrong: 1})


def wrong_override(pick: random.Random) -> tuple[str, Any, Callable[[], Any]]:
    """An override of a real parameter with a value that its optimizer cannot hold."""
    key, values = pick.choice(
        [
            ("betas", ((1.5, 0.9), (0.9, math.nan), (0.9,), "x", 0.9, (0.9, "y"), (-0.1, 0.9), True)),
            ("eps", (-1, math.nan, "x", True, math.inf)),
            ("weight_decay", (-1, math.nan, "x", True, None)),
            ("max_lr", (-1, math.nan, "x", True, math.inf)),
            ("lr", (-1, math.nan, "x", True, math.inf)),
            ("wd_mult", (-1, math.nan, "x", True)),
            ("clip_grad", ("no", 1.0, None, 0)),
            ("optimizer", ("", 3, None, "adm")),
            ("amsgrad", ("no", 2, None)),
            ("params", ([], "x")),
            ("beta3", (None,)),
        ]
    )
    value = pick.choice(values)
    name = "max_lr" if key == "lr" else key

    def give():
        build_optimizer(
            torch.nn.Linear(2, 2), "adam", lr=0.1, overrides={ParamKey(name="weight"): {key: value}}
        )

    return name, value, give


def wrong_group(pick: random.Random) -> tuple[str, Any, Callable[[], Any]]:
    """A value that is written into a group of a built optimizer, or into one that is loaded."""
    key = pick.choice(["lr", "max_lr", "weight_decay", "betas", "eps", "wd_mult", "amsgrad"])
    values = {"betas": ((1.5, 0.9), "x", (0.9,)), "amsgrad": ("no", 3)}.get(key, (-1.0, math.nan, "x", True))
    value = pick.choice(values)
    model = torch.nn.Linear(2, 2)
    optimizer = build_optimizer(model, "adam", lr=0.1)
    model.weight.grad, model.bias.grad = torch.ones(2, 2), torch.ones(2)

    def write():
        group = optimizer.param_groups[0]
        before, weights = group[key], model.weight.detach().clone()
        group[key] = value
        try:
            optimizer.step()
        finally:
            group[key] = before
            assert torch.equal(model.weight, weights), "a refused step moved the weights"
            assert optimizer.step().update_successful

    def load():
        state = optimizer.state_dict()
        state["param_groups"][0][key] = value
        optimizer.load_state_dict(state)

    return key, value, write if key in ("max_lr", "wd_mult") or pick.random() < 0.5 else load


def wrong_schedule(pick: random.Random) -> tuple[str, Any, Callable[[], Any]]:
    """A schedule with a value that it cannot have."""
    key = pick.choice(list(SCHEDULE))
    value = pick.choice(
        (-1, math.nan, "x", None, True, [1]) if not key.endswith("style") else ("x", "", 3, None)
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    return key, value, lambda: OptimizerParamScheduler(optimizer, **{**SCHEDULE, key: value})


def wrong_argument(pick: random.Random) -> tuple[str, Any, Callable[[], Any]]:
    """An argument of a function that is none."""
    model = torch.nn.Linear(2, 2)
    plain = torch.optim.Adam(model.parameters())
    optimizer = build_optimizer(torch.nn.Linear(2, 2), "adam", lr=0.1)
    optimizer.prepare_grads()
    limit, width = pick.choice((math.nan, -1.0, "x", None, True)), pick.choice((0, -1, math.nan, "x", True))
    key = pick.choice(({}, {"name": ()}, {"name": 3}, {"attr": [1]}, {"predicate": "x"}))
    return pick.choice(
        [
            ("clip_grad", limit, lambda: optimizer.clip_grad_norm(limit)),
            ("mup_width_mult", width, lambda: get_mup_config_overrides(OptimizerConfig(), width)),
            ("ParamKey", None, lambda: ParamKey(**key)),
            ("ChainedOptimizer", None, lambda: ChainedOptimizer([plain])),
            ("ChainedOptimizer", None, lambda: ChainedOptimizer([])),
            ("state_dict", None, lambda: optimizer.reload_model_params([])),
            ("override", None, lambda: build_optimizer(model, "adam", overrides={"weight": {"lr": 1.0}})),
            ("overrides", None, lambda: build_optimizer(model, "adam", overrides=[1])),
            (
                "weigt",
                None,
                lambda: build_optimizer(model, "adam", overrides={ParamKey(name="weigt"): {"lr": 1.0}}),
            ),
        ]
    )


KINDS = [
    wrong_core_setting,
    wrong_plugin_setting,
    unknown_setting,
    wrong_override,
    wrong_group,
    wrong_schedule,
]
KINDS += [wrong_argument, *wrong_habits.KINDS]


def judge(seed: str) -> tuple[str, str | None]:
    """Return `(kind, complaint)`; a complaint of None is a clear error."""
    pick = random.Random(seed)  # noqa: S311 - chooses inputs, hides nothing
    kind = pick.choice(KINDS)
    name, value, give = kind(pick)
    shown = "" if value is None else repr(value).removeprefix("torch.")
    what = f"{kind.__name__}: {name}={value!r}"
    try:
        give()
    except MegaoptError as error:
        text = str(error)
        if name not in text:
            return kind.__name__, f"{what}: the error does not name it: {text}"
        if shown and shown not in text and shown.strip("'") not in text:
            return kind.__name__, f"{what}: the error does not show what was given: {text}"
        if not any(word in text for word in ALLOWED):
            return kind.__name__, f"{what}: the error does not say what is allowed: {text}"
        return kind.__name__, None
    except Exception:  # noqa: BLE001 - whatever is no error of ours is what we look for
        return kind.__name__, f"{what}: no error of ours\n{traceback.format_exc()}"
    return kind.__name__, f"{what}: accepted"


def main() -> int:
    """Print how many errors of which kind there were; end with 1 where an input had no clear one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=400)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    args = parser.parse_args()
    print(f"seed {args.seed}", file=sys.stderr)
    warnings.simplefilter("ignore")
    clear, wrong = Counter(), 0
    for number in range(args.inputs):
        kind, complaint = judge(f"{args.seed} {number}")
        if complaint is None:
            clear[kind] += 1
        else:
            wrong += 1
            print(f"input {number}: {complaint}", file=sys.stderr)
    print(json.dumps({"inputs": args.inputs, "clear": dict(clear), "wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
