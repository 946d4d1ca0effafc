"""One result over any number of ranks: replicated, shared out, and saved by other ranks than it is loaded by."""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from megaopt_core.errors import MegaoptError
from megaopt_core.params import DEFAULT_ALIGNMENT, Granularity
from megaopt_core.plugin_api import OptimizerEntry
from megaopt_core.registry import get_registry
from megaopt_testing.check import DoesNotApply
from megaopt_testing.over_ranks.hops import load, save
from megaopt_testing.over_ranks.uneven import built, takes_cut, train, values_of
from megaopt_testing.processes import RankFailedError, processes_missing, run_ranks
from megaopt_testing.snapshot import same_bits
from megaopt_testing.trial import DEFAULT_SETTINGS, Trial, some

__all__ = ["check_resume_over_ranks", "check_sharded", "check_world_sizes", "requires_shards"]

_STEPS = 4
_SIZES = (2, 4)
_OWN = ("kit_rows", "kit_owners")

type _Values = dict[str, torch.Tensor]


def requires_shards(entry: OptimizerEntry) -> str | None:
    """Return why an optimizer cannot be shared out here, None when it can.

    Args:
        entry: the optimizer's entry.
    """
    missing = [name for name in _OWN if name not in get_registry().strategies()]
    if missing:
        return f"the kit's strategies {', '.join(missing)} are missing: is the plugin 'testing' blocked?"
    return processes_missing()


def _given(trial: Trial, sharding: str) -> dict[str, Any]:
    return {**DEFAULT_SETTINGS, **trial.settings, "sharding": sharding}


def _alone(trial: Trial, steps: int, **settings: Any) -> _Values:
    model, optimizer = built(trial.optimizer, {**_given(trial, "replicated"), **settings})
    train(model, optimizer, range(steps))
    return values_of(model)


def _over(trial: Trial, size: int, function: Any, *arguments: Any) -> list[Any]:
    """Run a function on ranks; what one of them raises fails the check."""
    try:
        return run_ranks(function, size, *arguments)
    except RankFailedError as error:
        trial.fail(f"over {size} ranks it raises. {error.words}")


def _require_same(trial: Trial, what: str, alone: _Values, ranks: list[_Values], why: str) -> None:
    for rank, values in enumerate(ranks):
        other = [name for name in alone if not same_bits(alone[name], values[name])]
        if other:
            trial.fail(f"{what}, rank {rank} has other values of {some(other)} than one process. {why}")


def _alike(rank: int, size: int, trial: Trial) -> _Values:
    model, optimizer = built(trial.optimizer, _given(trial, trial.settings.get("sharding", "replicated")))
    train(model, optimizer, range(_STEPS))
    return values_of(model)


def check_world_sizes(optimizer: str, **settings: Any) -> None:
    """With the same gradients 1, 2 and 4 ranks of a process group step as one process does, bit for bit.

    Gradients are averaged and learning rates chosen before an optimizer is asked.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration.

    Raises:
        ConformanceError: a parameter differs on a rank, or a rank raises.
    """
    trial = Trial(optimizer, settings)
    alone = _alone(trial, _STEPS)
    for size in (1, *_SIZES):
        ranks = _over(trial, size, _alike, trial)
        _require_same(
            trial,
            f"over {size} ranks with the same gradients",
            alone,
            ranks,
            "Use neither ranks nor process groups of your own, and random numbers from torch's default generator",
        )


def _strategies(trial: Trial, entry: OptimizerEntry) -> list[str]:
    """Return the strategy that is asked for, else the kit's that take an optimizer, and those that are installed."""
    registry = get_registry()
    if trial.settings.get("sharding") not in (None, "replicated"):
        return [trial.settings["sharding"]]
    mine = ["kit_owners"]
    if entry.granularity is Granularity.ELEMENT or entry.split_step is not None:
        mine.insert(0, "kit_rows")
    kinds: dict[type, str] = {}
    for name, strategy in sorted(registry.strategies().items()):
        if name not in (*_OWN, "replicated") and entry.granularity in strategy.granularities:
            kinds.setdefault(type(strategy), name)
    return [*mine, *kinds.values()]


def _shared_out(rank: int, size: int, trial: Trial, strategies: list[str]) -> dict[str, _Values | str]:
    """Return the values under each strategy, or why an installed one does not take this model."""
    found: dict[str, _Values | str] = {}
    for sharding in strategies:
        try:
            model, optimizer = built(trial.optimizer, _given(trial, sharding))
        except MegaoptError as error:
            if sharding in (*_OWN, trial.settings.get("sharding")):
                raise
            found[sharding] = str(error)
            continue
        train(model, optimizer, range(_STEPS))
        found[sharding] = values_of(model)
    return found


def check_sharded(optimizer: str, **settings: Any) -> None:
    """Shared out over 2 and 4 ranks it steps as one process does, bit for bit: slices of rows, and owners of wholes.

    No number of ranks divides the shapes, and some ranks have nothing of a parameter. The kit's two strategies are
    tried, and every other that is installed and takes this optimizer; or the one that `sharding` names.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration.

    Raises:
        ConformanceError: a parameter differs on a rank, or a rank raises.
    """
    trial = Trial(optimizer, settings)
    alone = _alone(trial, _STEPS)
    entry = get_registry().optimizer(optimizer)
    _, whole = built(optimizer, _given(trial, "replicated"))
    strategies = _strategies(trial, entry.configured(whole.config))
    draws = _draws(trial)
    in_blocks = entry.granularity is Granularity.ELEMENT and entry.alignment > DEFAULT_ALIGNMENT
    for size in _SIZES:
        ranks = _over(trial, size, _shared_out, trial, strategies)
        if draws:
            continue
        for sharding in strategies:
            values = [found[sharding] for found in ranks]
            if in_blocks and takes_cut(sharding):
                continue  # FSDP2 cuts rows wherever they end, and blocks with them
            if all(isinstance(each, dict) for each in values):
                _require_same(
                    trial,
                    f"under sharding={sharding!r} over {size} ranks",
                    alone,
                    values,
                    "The step of a parameter (or of a slice, if that is declared) may not depend on other "
                    "parameters of the same step",
                )
    if draws:
        raise DoesNotApply(_DRAWN)


def _draws(trial: Trial) -> bool:
    """Return whether steps draw random numbers, which depend on what else a rank steps."""
    model, optimizer = built(trial.optimizer, _given(trial, "replicated"))
    before = torch.get_rng_state()
    train(model, optimizer, range(2))
    return not torch.equal(before, torch.get_rng_state())


_DRAWN = (
    "no rank raises, but the steps draw from torch's default generator. The draws of a rank depend on its "
    "other parameters, so values cannot be compared"
)


def _hop(
    rank: int, size: int, trial: Trial, sharding: str, source: str, target: str, steps: range
) -> _Values:
    """Load, train and save; return the values afterwards."""
    model, optimizer = built(trial.optimizer, _given(trial, sharding), seed=1 if source else 0)
    if source:
        load(source, model, optimizer)
    train(model, optimizer, steps)
    if target:
        save(target, model, optimizer)
    return values_of(model)


def check_resume_over_ranks(optimizer: str, **settings: Any) -> None:
    """Saved by 2 ranks, loaded by 4 and then by 1, it goes on as if it had never stopped.

    State that has the shape of its parameter belongs to it element by element, wherever a slice of it lies.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration.

    Raises:
        ConformanceError: a parameter differs by more than rounding, or a rank raises.
    """
    trial = Trial(optimizer, settings)
    alone = _alone(trial, 3 * 2)
    entry = get_registry().optimizer(optimizer)
    _, whole = built(optimizer, _given(trial, "replicated"))
    sharding = _strategies(trial, entry.configured(whole.config))[0]
    with tempfile.TemporaryDirectory() as folder:
        first, second = f"{folder}/first", f"{folder}/second"
        _over(trial, 2, _hop, trial, sharding, "", first, range(2))
        _over(trial, 4, _hop, trial, "kit_owners", first, second, range(2, 4))
        (values,) = _over(trial, 1, _hop, trial, "replicated", second, "", range(4, 6))
    if _draws(trial):
        raise DoesNotApply(_DRAWN)
    other = [name for name in alone if not torch.allclose(values[name], alone[name], rtol=1e-5, atol=1e-7)]
    if other:
        trial.fail(
            f"saved by 2 ranks and loaded by 4 and then by 1, it gives other values of {some(other)} than without "
            "checkpoints. Its state must have the order of the parameter's elements, and must not be in attributes"
        )
