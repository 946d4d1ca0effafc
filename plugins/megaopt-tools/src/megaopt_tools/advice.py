"""What is said to whoever gives a setting that does not exist: what it is called here, or where it is set."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from functools import cache

import torch

from megaopt_core.errors import MegaoptError
from megaopt_core.registry import did_you_mean, get_registry
from megaopt_tools.foreign_settings import FOREIGN_SETTINGS, PREFIXES, RESOLVER, prefix_of_setting

__all__ = ["advice_on_argument", "advice_on_override", "advice_on_setting"]

_MODEL = (
    "pass the model itself: megaopt routes each parameter, and overrides={ParamKey(name=...): {...}} changes "
    "the settings of one"
)
_SCHEDULE = "make the schedule from the built optimizer: OptimizerParamScheduler, or torch's own schedulers"
_RANKS = "pg_collection= or torch.distributed gives the ranks"
_PRECISION = "bf16=True or fp16=True sets the precision; autocast and torch's GradScaler work as usual"
_STATES = "exp_avg_dtype and exp_avg_sq_dtype choose states of fewer bits"

_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("model_parameters", "named_parameters", "param_groups", "parameters", "params"), _MODEL),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type", "schedule", "scheduler"), _SCHEDULE),
    **dict.fromkeys(("num_training_steps", "total_steps", "training_steps"), _SCHEDULE),
    **dict.fromkeys(("warmup", "warmup_iters", "warmup_ratio", "warmup_steps"), _SCHEDULE),
    "num_warmup_steps": _SCHEDULE,
    **dict.fromkeys(("process_group", "rank", "world_size"), _RANKS),
    **dict.fromkeys(("amp", "autocast", "dtype", "mixed_precision", "precision"), _PRECISION),
    **dict.fromkeys(
        ("block_wise", "is_paged", "min_8bit_size", "optim_bits", "percentile_clipping"), _STATES
    ),
    "config": "get_megatron_optimizer(config, model) takes a configuration",
    "config_overrides": "build_optimizer takes overrides=, get_megatron_optimizer(config, model, config_overrides)",
    "device": "states are on the device of their parameters",
}
"""Names of what others set on an optimizer and that is said elsewhere here, to where."""


_BY_NAME = 'ParamKey(name="*.gate.*")'
_BY_FUNCTION = 'ParamKey(with_name_predicate=ParamWithNamePredicate("mine", lambda param, name: ...))'
_REMOVED = {
    "no_weight_decay_cond": "{'wd_mult': 0.0}",
    "scale_lr_cond": "{'max_lr': 1e-4}",
    "lr_mult": "{'max_lr': 1e-4}",
}
"""Arguments that have been removed to an override that says the same."""


def advice_on_setting(name: str, known: Iterable[str], optimizer: str | None = None) -> str:
    """Return what to write instead of a setting that does not exist, as the end of a sentence; empty without a guess.

    Args:
        name: what was given.
        known: the settings that there are.
        optimizer: the run's optimizer, where it is known.

    Example:
        >>> advice_on_setting("learning_rate", ["lr"])
        '; it is called lr here'
        >>> advice_on_setting("warmup_steps", [])
        "; make the schedule from the built optimizer: OptimizerParamScheduler, or torch's own schedulers"
        >>> advice_on_setting("nonsense", [], "mine")
        ''
    """
    known = list(known)
    plain = name.lower()
    removed = advice_on_argument(name)
    if removed:
        return f"; it has been removed{removed}"
    ours = _called_here(plain, known, optimizer)
    if ours:
        return ours
    if plain in _ELSEWHERE or plain.endswith("_params"):
        return f"; {_ELSEWHERE.get(plain, _MODEL)}"
    return did_you_mean(name, known) or _torch_keyword(_without_prefix(plain), optimizer)


def advice_on_override(name: str, allowed: Iterable[str]) -> str:
    """Return what to write instead of a key that no override of this optimizer has; empty without a guess.

    Args:
        name: the key.
        allowed: the keys that there are.

    Example:
        >>> advice_on_override("weigth_decay", ["lr", "weight_decay"])
        "; did you mean 'weight_decay'?"
        >>> advice_on_override("learning_rate", ["lr", "weight_decay"])
        '; it is called lr here'
    """
    allowed = set(allowed)
    plain = name.lower()
    short = _without_prefix(plain)
    ours = FOREIGN_SETTINGS.get(plain) or FOREIGN_SETTINGS.get(short) or ""
    for own in (ours, _without_prefix(ours), short):
        if own in allowed:
            return f"; it is called {own} here"
    return did_you_mean(name, allowed)


def advice_on_argument(name: str) -> str:
    """Return what replaces an argument of other trainers that has been removed; empty for any other.

    Args:
        name: the argument.

    Example:
        >>> advice_on_argument("no_weight_decay_cond").partition(". Add")[0]
        ': an override says it'
    """
    if name not in _REMOVED:
        return ""
    return (
        f": an override says it. Add {{{_BY_NAME}: {_REMOVED[name]}}} to those of "
        f"get_standard_config_overrides(config), or with a function {{{_BY_FUNCTION}: ...}}"
    )


def _called_here(plain: str, known: Iterable[str], optimizer: str | None) -> str:
    """Return what a setting is called here: in the run's optimizer or the core, else in another; empty if nowhere.

    Args:
        plain: what was given, in lower case.
        known: the settings that there are.
        optimizer: the run's optimizer, where it is known.
    """
    short = _without_prefix(plain)
    told = [FOREIGN_SETTINGS[name] for name in (plain, short) if name in FOREIGN_SETTINGS]
    if optimizer is None:
        return f"; it is called {told[0]} here" if told else ""
    prefixes = _prefixes_of(optimizer)
    for choice in (choice for text in (short, *told) for choice in _CHOICE.split(text)):
        own = _renamed(choice, prefixes, known)
        if own:
            return f"; it is called {own} here"
    for text in told:
        choices = [choice for choice in _CHOICE.split(text) if prefix_of_setting(choice) in {None, *prefixes}]
        if choices:
            return f"; it is called {text if len(choices) > 1 else choices[0]} here"
    if not told:
        return ""
    owners = dict.fromkeys(f"{prefix_of_setting(choice)}'s" for choice in _CHOICE.split(told[0]))
    return (
        f"; it is called {told[0]} here, and is {' or '.join(owners)}"
        f"{_torch_keyword(short, optimizer, alike_only=True)}"
    )


_CHOICE = re.compile(r", or |, | or ")
"""What stands between the settings of which a foreign one may mean any."""


def _renamed(choice: str, prefixes: Iterable[str], known: Iterable[str]) -> str:
    """Return settings joined by "and" under another optimizer's prefix, the first that has them all; else empty."""
    names = [name.removeprefix(f"{prefix_of_setting(name)}_") for name in choice.split(" and ")]
    renamed = [[f"{prefix}_{name}" for name in names] for prefix in prefixes]
    return next((" and ".join(full) for full in renamed if set(full) <= set(known)), "")


def _prefixes_of(optimizer: str) -> tuple[str, ...]:
    """Return the prefixes of the settings that an optimizer reads; those of its name where it is not here."""
    try:
        return get_registry().optimizer(optimizer).setting_prefixes
    except MegaoptError:
        return tuple(prefix for prefix in PREFIXES if optimizer.startswith(prefix))


def _without_prefix(name: str) -> str:
    """Return the name of a setting without the prefix of the optimizer that it is for, where it has one we know."""
    return name.removeprefix(f"{prefix_of_setting(name)}_")


def _torch_keyword(name: str, optimizer: str | None, *, alike_only: bool = False) -> str:
    """Return how an argument of torch's own optimizers can be set; empty where it is none.

    Args:
        name: the argument.
        optimizer: the run's optimizer; torch's class of the same name goes before others.
        alike_only: say nothing of other classes.
    """
    takers = [torch_name for torch_name, taken in _torch_arguments().items() if name in taken]
    alike = [torch_name for torch_name in takers if torch_name.lower() == optimizer]
    if not alike and (alike_only or not takers):
        return ""
    one = (alike or takers)[0]
    return (
        f"; it is an argument of torch's {one}: optimizer='torch:{one}' ({RESOLVER}) takes "
        f"torch_{one.lower()}_{name}, and an override sets it where the class knows it: "
        f"overrides={{ParamKey(name=...): {{{name!r}: ...}}}}"
    )


@cache
def _torch_arguments() -> dict[str, frozenset[str]]:
    """Return what the constructors of torch's optimizers take, its most used ones first."""
    classes = [
        cls for cls in vars(torch.optim).values() if inspect.isclass(cls) and cls is not torch.optim.Optimizer
    ]
    found = {cls.__name__: frozenset(inspect.signature(cls).parameters) for cls in classes}
    return dict(sorted(found.items(), key=lambda item: len(item[1]), reverse=True))
