"""Checks of sharding strategies: layouts as pure data, and steps in one process and over ranks."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from megaopt_core.errors import ConformanceError, MegaoptError
from megaopt_core.params import DEFAULT_ALIGNMENT, Granularity, ParamSpec
from megaopt_core.sharding import LayoutOptions, ShardingStrategy, World
from megaopt_testing.check import Check, DoesNotApply, Kind, subject
from megaopt_testing.over_ranks.hops import load, save
from megaopt_testing.over_ranks.uneven import built, train, values_of
from megaopt_testing.partition import require_partition
from megaopt_testing.plugins import temporary_plugin
from megaopt_testing.probes import PROBES, ProbePlugin
from megaopt_testing.processes import RankFailedError, processes_missing, run_ranks
from megaopt_testing.snapshot import same_bits
from megaopt_testing.trial import DEFAULT_SETTINGS, some

__all__ = [
    "STRATEGY_CHECKS",
    "check_checkpoints_of_strategy",
    "check_layout",
    "check_model_values",
    "check_norms",
    "check_ranks_agree",
]

_WORLDS = (1, 2, 3, 4, 8, 64)
_SHAPES = ((13, 8), (3, 8), (64, 32), (), (1,), (11,), (5, 3, 2), (257,))
_STEPS = 4

type Wrap = Callable[[nn.Module], nn.Module]
type _Values = dict[str, torch.Tensor]
type _Run = tuple[str, Mapping[str, Any]]
"""A probe and further settings."""


def _fail(name: str, message: str) -> NoReturn:
    raise ConformanceError(message, optimizer=name)


def _specs(
    strategy: ShardingStrategy, granularity: Granularity, alignment: int, splits: bool
) -> list[ParamSpec]:
    """Return what a strategy does not refuse of parameters of many shapes."""
    specs = [
        ParamSpec(
            f"weights.{index}",
            shape,
            torch.float32,
            torch.float32,
            "mine",
            index % 2,
            granularity,
            alignment=alignment,
            cost=float(torch.Size(shape).numel()),
            splits=splits,
        )
        for index, shape in enumerate(_SHAPES)
    ]
    params = [nn.Parameter(torch.empty(spec.shape, device="meta")) for spec in specs]
    return [spec for param, spec in zip(params, specs, strict=True) if strategy.refuse(param, spec) is None]


def check_layout(name: str) -> None:
    """Its layouts are pure data in which every element has one owner, in worlds of 1 to 64 ranks.

    Shapes do not divide, there are a number and tensors with fewer elements than ranks, and cuts keep alignment. Two
    ranks that run say the same of each other.

    Args:
        name: the strategy's name.

    Raises:
        ConformanceError: an element has no owner or two, a cut is not where it may be, or two calls, or
            two ranks, give two layouts.
    """
    strategy: ShardingStrategy = subject(Kind.STRATEGY, name)
    tried = 0
    for granularity in sorted(strategy.granularities):
        for alignment, splits in itertools.product((DEFAULT_ALIGNMENT, 32), (False, True)):
            specs = _specs(strategy, granularity, alignment, splits)
            tried += len(specs)
            for ranks in _WORLDS if specs else ():
                _require_one_layout(name, strategy, specs, ranks)
    if not tried:
        _fail(name, "it refuses every parameter that the kit tries, of any shape, whole or cut")
    if processes_missing() is None:
        first, second = _over(name, 2, _said, name)
        if first != second:
            _fail(
                name,
                "two ranks get different layouts for the same parameters, so each would wait for the other. "
                "Use only specs and coordinates, never the rank that calls",
            )


def _said(rank: int, size: int, name: str) -> list[str]:
    """Return what a running rank says of the pieces of all ranks, in words that can be compared."""
    strategy: ShardingStrategy = subject(Kind.STRATEGY, name)
    told = []
    for granularity in sorted(strategy.granularities):
        for splits in (False, True):
            specs = _specs(strategy, granularity, DEFAULT_ALIGNMENT, splits)
            if specs:
                layout = strategy.layout(specs, World({"dp": size}), LayoutOptions())
                told += [repr([*layout.pieces({"dp": place})]) for place in range(size)]
    return told


def _require_one_layout(name: str, strategy: ShardingStrategy, specs: list[ParamSpec], ranks: int) -> None:
    world = World({"dp": ranks})
    what = f"for {ranks} ranks and granularity {specs[0].granularity.value}"
    try:
        layouts = [strategy.layout(specs, world, LayoutOptions()) for _ in range(2)]
        require_partition(name, layouts[0], specs, world)
        for place in range(ranks):
            first, second = ([*layout.pieces({"dp": place})] for layout in layouts)
            if first != second or first != [*layouts[0].pieces({"dp": place})]:
                _fail(name, f"its layout {what} gives rank {place} other pieces in a second call")
    except ConformanceError:
        raise
    except MegaoptError as error:
        _fail(name, f"its layout {what} is not valid: {error}")
    except Exception as error:  # noqa: BLE001 - a strategy may raise anything
        _fail(name, f"its layout {what} raises {type(error).__name__}: {error}")


def _probes(name: str) -> list[str]:
    """Return the probes that a strategy takes, in one process."""
    strategy: ShardingStrategy = subject(Kind.STRATEGY, name)
    known = [probe for probe, granularity in PROBES.items() if granularity in strategy.granularities]
    refused = {}
    for probe in known:
        try:
            built(probe, _settings(name))
        except MegaoptError as error:
            refused[probe] = str(error)
    if known and len(refused) == len(known):
        raise DoesNotApply(f"it refuses a plain model in one process: {refused[known[0]]}")
    return [probe for probe in known if probe not in refused]


def _settings(sharding: str, **more: Any) -> dict[str, Any]:
    return {**DEFAULT_SETTINGS, "sharding": sharding, **more}


def _stepped(sharding: str, probe: str, **more: Any) -> tuple[_Values, list[Any]]:
    model, optimizer = built(probe, _settings(sharding, **more))
    norms = train(model, optimizer, range(_STEPS))
    return values_of(model), norms


def _on_rank(rank: int, size: int, sharding: str, runs: Sequence[_Run]) -> Any:
    return [_stepped(sharding, probe, **more) for probe, more in runs]


def _over(name: str, size: int, function: Any, *arguments: Any) -> list[Any]:
    try:
        return run_ranks(function, size, *arguments)
    except RankFailedError as error:
        _fail(name, f"over {size} ranks it raises. {error.words}")


def _sizes(name: str) -> Iterator[int]:
    """Yield the numbers of ranks that can be tried; one is without processes."""
    yield 1
    if processes_missing() is None:
        yield from (2, 4)


def _results(name: str, size: int, runs: Sequence[_Run]) -> list[Any]:
    """Return what each rank makes of the model in every run."""
    return _over(name, size, _on_rank, name, runs) if size > 1 else [_on_rank(0, 1, name, runs)]


def _runs(name: str) -> list[_Run]:
    """Return a run with every probe that a strategy takes, and one of a model in bf16 where it takes that."""
    probes = _probes(name)
    runs: list[_Run] = [(probe, {}) for probe in probes]
    try:
        built(probes[0], _settings(name, bf16=True))
    except MegaoptError:
        return runs
    return [*runs, (probes[0], {"bf16": True})]


def check_ranks_agree(name: str) -> None:
    """In one process and over 2 and 4 ranks parameters are those of replicated optimizers, bit for bit, on every rank.

    Shapes do not divide, a parameter is frozen, one gets no gradient and one every other time. Probes of the kit step
    single elements, and whole tensors by their norm; a model in bf16 is stepped too.

    Args:
        name: the strategy's name.

    Raises:
        ConformanceError: a parameter differs, or a rank raises.
    """
    with temporary_plugin(ProbePlugin(), name="kit-probes"):
        runs = _runs(name)
        alone = [_stepped("replicated", probe, **more)[0] for probe, more in runs]
        for size in _sizes(name):
            for rank, found in enumerate(_results(name, size, runs)):
                for (probe, more), (values, _), wanted in zip(runs, found, alone, strict=True):
                    other = [key for key in values if not same_bits(values[key], wanted[key])]
                    if other:
                        low = " in bf16" if more else ""
                        _fail(
                            name,
                            f"over {size} ranks with {probe!r}{low}, rank {rank} has other values of "
                            f"{some(other)} than a replicated optimizer. Does every rank send the values "
                            "that it stepped, and use gradients unchanged?",
                        )


def check_norms(name: str) -> None:
    """Gradient norms over 2 and 4 ranks are those of one process, and clip as they do there.

    Args:
        name: the strategy's name.

    Raises:
        ConformanceError: a norm, or a clipped step, differs by more than rounding.
    """
    with temporary_plugin(ProbePlugin(), name="kit-probes"):
        probes = _probes(name)[:1]
        values, norms = _stepped("replicated", probes[0], clip_grad=0.5)
        for size in _sizes(name):
            for rank, ((theirs, measured),) in enumerate(
                _results(name, size, [(probes[0], {"clip_grad": 0.5})])
            ):
                if any(abs(one - other) > 1e-5 * one for one, other in zip(norms, measured, strict=True)):
                    _fail(
                        name,
                        f"over {size} ranks rank {rank} measures gradient norms {measured}, but one process {norms}. "
                        "Is stats_group the group over which pieces add up, and is each gradient collected once?",
                    )
                far = [
                    key
                    for key in values
                    if not torch.allclose(values[key], theirs[key], rtol=1e-5, atol=1e-6)
                ]
                if far:
                    _fail(name, f"over {size} ranks a clipped step leads to other values of {some(far)}")


def _loaded(rank: int, size: int, sharding: str, probe: str) -> tuple[_Values, _Values]:
    model, optimizer = built(probe, _settings(sharding, weight_decay=0.0))
    train(model, optimizer, range(1))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    others = [built(probe, _settings("replicated"), seed=seed)[0] for seed in (7, 8)]
    for other in others:  # one who takes values once has taken the first
        model.load_state_dict(other.state_dict())
        optimizer.reload_model_params()
        train(model, optimizer, range(1, 2))
    return values_of(others[-1]), values_of(model)


def check_model_values(name: str) -> None:
    """Values that are loaded into the model, and taken over by `reload_model_params()`, are not overwritten by a step.

    Args:
        name: the strategy's name.

    Raises:
        ConformanceError: a step at learning rate 0 changes what was loaded.
    """
    with temporary_plugin(ProbePlugin(), name="kit-probes"):
        probe = _probes(name)[0]
        for size in _sizes(name):
            alone = size == 1
            found = [_loaded(0, 1, name, probe)] if alone else _over(name, size, _loaded, name, probe)
            for rank, (wanted, values) in enumerate(found):
                other = [key for key in wanted if not same_bits(wanted[key], values[key])]
                if other:
                    _fail(
                        name,
                        f"over {size} ranks, rank {rank}: a step at learning rate 0 undoes the load of "
                        f"{some(other)}. take_model_values() must fill every piece from the model",
                    )


def _hop(rank: int, size: int, sharding: str, probe: str, source: str, target: str, steps: range) -> _Values:
    model, optimizer = built(probe, _settings(sharding), seed=1 if source else 0)
    if source:
        load(source, model, optimizer)
    train(model, optimizer, steps)
    if target:
        save(target, model, optimizer)
    return values_of(model)


def check_checkpoints_of_strategy(name: str) -> None:
    """What 2 ranks save under it one process loads under `replicated`, and the other way round.

    Args:
        name: the strategy's name.

    Raises:
        ConformanceError: training goes on elsewhere than without, or a rank raises.
    """
    with temporary_plugin(ProbePlugin(), name="kit-probes"):
        probe = _probes(name)[0]
        model, optimizer = built(probe, _settings("replicated"))
        train(model, optimizer, range(6))
        alone = values_of(model)
        with tempfile.TemporaryDirectory() as folder:
            first, second = f"{folder}/first", f"{folder}/second"
            _over(name, 2, _hop, name, probe, "", first, range(2))
            _over(name, 1, _hop, "replicated", probe, first, second, range(2, 4))
            ranks = _over(name, 2, _hop, name, probe, second, "", range(4, 6))
    for values in ranks:
        other = [key for key in alone if not torch.allclose(values[key], alone[key], rtol=1e-5, atol=1e-7)]
        if other:
            _fail(
                name,
                f"after checkpoints between 2 ranks and one process, {some(other)} get other values. Does "
                "each piece hold the elements that its spec names, in their order?",
            )


def requires_processes(_: Any) -> str | None:
    """Return why nothing can be tried over ranks, None when it can.

    Args:
        _: the strategy.
    """
    return processes_missing()


STRATEGY_CHECKS: tuple[Check, ...] = (
    Check(
        "layout",
        "layouts are pure data and give every element one owner",
        check_layout,
        hint="use only specs and coordinates; require_partition() shows the fault",
        kind=Kind.STRATEGY,
    ),
    Check(
        "ranks_agree",
        "1, 2 and 4 ranks give the result of replicated optimizers",
        check_ranks_agree,
        hint="collect_grads takes gradients unchanged; finish_param_sync leaves every value on every rank",
        kind=Kind.STRATEGY,
    ),
    Check(
        "norms",
        "gradient norms and clipping are those of one process",
        check_norms,
        hint="stats_group: pgs.sharded_stats_group() where ranks have different pieces, else pgs.stats_group()",
        kind=Kind.STRATEGY,
    ),
    Check(
        "model_values",
        "values that are loaded into the model stay",
        check_model_values,
        hint="take_model_values: `for piece in self.pieces: self.model.fill(piece)`",
        kind=Kind.STRATEGY,
    ),
    Check(
        "checkpoints",
        "other strategies load its checkpoints, and it loads theirs",
        check_checkpoints_of_strategy,
        requires_processes,
        hint="a piece holds the elements that its spec names, in their order",
        kind=Kind.STRATEGY,
    ),
)
"""Every check of sharding strategies."""
