"""Checks of step observers: they are silent where they must be, write nothing, and ranks go on together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from attrs import Factory, define
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megaopt_core.errors import ConformanceError
from megaopt_core.optimizers import MegatronOptimizer
from megaopt_core.plugin_api import StepObserver, hookimpl
from megaopt_testing.check import Check, Kind
from megaopt_testing.over_ranks.uneven import Uneven, built, train, values_of
from megaopt_testing.plugins import temporary_plugin
from megaopt_testing.probes import ProbePlugin
from megaopt_testing.processes import RankFailedError, processes_missing, run_ranks
from megaopt_testing.snapshot import same_bits
from megaopt_testing.trial import DEFAULT_SETTINGS, some

__all__ = ["OBSERVER_CHECKS", "check_observers_refuse_together", "check_observers_watch_only"]

_SILENT = ("before_step", "votes", "after_step", "changing", "changed", "report_lines")
_METHODS = (*_SILENT, "decide", "before_save", "check")
_RANKS = 2
_TIMEOUT = 60.0
_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")

type _Around = Callable[[StepObserver, str, Callable[..., Any]], Callable[..., Any]]


class _Fault(BaseException):
    """A fault of an observer; no `except Exception` of the step stops it."""


class _Silence(TorchDispatchMode):
    """Raises where somebody communicates.

    Args:
        who: the method that must not, in words.
    """

    def __init__(self, who: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's own
        self.who = who

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let every operation through but those of process groups."""
        if func.namespace in _COLLECTIVES:
            raise _Fault(
                f"{self.who} communicates ({func}): another rank may not make this call, and both would "
                "wait. Return a vote, and communicate in decide()"
            )
        return func(*args, **(kwargs or {}))


def _fail(name: str, message: str) -> NoReturn:
    raise ConformanceError(message, optimizer=name)


def _over_ranks(name: str, function: Any, *arguments: Any) -> list[Any]:
    try:
        return run_ranks(function, _RANKS, name, *arguments, timeout=_TIMEOUT)
    except RankFailedError as error:
        _, marked, fault = error.words.partition(f"{_Fault.__name__}: ")
        _fail(name, fault if marked else f"over {_RANKS} ranks it raises. {error.words}")


def _tried(**more: Any) -> tuple[Uneven, MegatronOptimizer]:
    """Return a model and an optimizer of the kit's, whose gradients are given."""
    return built("kit_elements", {**DEFAULT_SETTINGS, "sharding": "replicated", **more})


def _wrap(name: str, optimizer: MegatronOptimizer, around: _Around) -> None:
    """Let a function stand around every method of the plugin's observers."""
    for plugin, observer in optimizer.observers.members:
        if plugin.goes_by(name):
            cls = type(observer)
            methods = {
                method: around(observer, method, getattr(cls, method))
                for method in _METHODS
                if getattr(cls, method) is not getattr(StepObserver, method)
            }
            watched = type(cls.__name__, (cls,), {"__slots__": (), **methods})
            object.__setattr__(observer, "__class__", watched)


def _bits(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return copies of all values and gradients of a model, in words."""
    found: dict[str, torch.Tensor | None] = {}
    for name, param in model.named_parameters():
        found[name] = param.detach().clone()
        found[f"the gradient of {name}"] = None if param.grad is None else param.grad.detach().clone()
    return found


@contextmanager
def _unwritten(who: str, model: nn.Module) -> Iterator[None]:
    before = _bits(model)
    yield
    after = _bits(model)
    other = [key for key in before if not same_bits(before[key], after[key])]
    if other:
        raise _Fault(
            f"{who} writes to the model: {some(other)} changed. An observer only reads; to refuse a step, "
            "raise in before_step() or decide(), or return a vote with stops=True"
        )


def _watching(name: str, model: nn.Module) -> _Around:
    def around(observer: StepObserver, method: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        who = f"{method}() of step observer {type(observer).__name__} of plugin {name!r}"

        def watched(self: StepObserver, *args: Any) -> Any:
            with _unwritten(who, model):
                if method not in _SILENT:
                    return plain(self, *args)
                with _Silence(who):
                    return plain(self, *args)

        return watched

    return around


def _require_unwritten(name: str, model: nn.Module, dtype: torch.dtype) -> None:
    start = values_of(Uneven().to(dtype))
    other = [key for key, value in values_of(model).items() if not same_bits(start[key], value)]
    if other:
        raise _Fault(
            f"a step observer of plugin {name!r} writes to the model when it is built: {some(other)}"
        )


def _watched(rank: int, size: int, name: str) -> None:
    """Go through all that an observer is told of: steps, one skipped, a load, a reload, a check, a report, a save."""
    for more in ({}, {"bf16": True}):
        model, optimizer = _tried(**more)
        _wrap(name, optimizer, _watching(name, model))
        _require_unwritten(name, model, torch.bfloat16 if more else torch.float32)
        train(model, optimizer, range(2))
        for param in optimizer.names:
            param.grad = torch.full_like(param, float("inf"))
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.reload_model_params()
        train(model, optimizer, range(2, 4))
        optimizer.check()
        optimizer.report()
        optimizer.observers.before_save()


def check_observers_watch_only(name: str) -> None:
    """Over 2 ranks observers write nothing to the model, and communicate only where all ranks call them together.

    Args:
        name: the plugin's name.

    Raises:
        ConformanceError: a method writes to a value or a gradient of the model, or communicates where it must not; or
            ranks declare different votes.
    """
    with temporary_plugin(ProbePlugin(), name="kit-probes"):
        _over_ranks(name, _watched)


class _Objector(StepObserver):
    """Raises in the next step when it is told to."""

    objects = False

    def before_step(self) -> None:
        """Raise once."""
        if self.objects:
            self.objects = False
            raise RuntimeError("the kit lets this rank refuse a step")


@define
class _ObjectorPlugin:
    """Gives every optimizer the kit's observer."""

    observer: _Objector = Factory(_Objector)
    megaopt_api = "1"

    @hookimpl
    def megaopt_step_observers(self, optimizer: torch.optim.Optimizer) -> list[StepObserver]:
        """Return it."""
        return [self.observer]


def _requires_processes(_: Any) -> str | None:
    return processes_missing()


def _said(step: Callable[[], Any]) -> str:
    try:
        step()
    except Exception as error:  # noqa: BLE001 - an observer may raise anything
        return f"{type(error).__name__}: {error}"
    return ""


def _told(step: Callable[[], Any]) -> list[str]:
    """Return what every rank says of a step."""
    said = [""] * dist.get_world_size()
    dist.all_gather_object(said, _said(step))
    return said


def _refused(rank: int, size: int, name: str) -> list[str]:
    """Step twice, let rank 0 refuse a step, and step twice again; return what ranks say of the refused step."""
    plugin = _ObjectorPlugin()
    with temporary_plugin(plugin, name="kit-objector"):
        model, optimizer = _tried()
        if said := _said(lambda: train(model, optimizer, range(2))):
            raise _Fault(
                f"a step without any fault raises on rank {rank}: {said}. Raise in before_step() or votes(), because "
                "the core tells the other ranks; or in decide(), which gets the same votes on all ranks"
            )
        plugin.observer.objects = rank == 0
        refused = _told(lambda: train(model, optimizer, range(2, 3)))
        if said := _said(lambda: train(model, optimizer, range(2, 4))):
            raise _Fault(
                f"after a step that one rank refused, the next step raises on rank {rank}: {said}. "
                "after_step() is also called for refused steps: reset the observer there"
            )
    return refused


def check_observers_refuse_together(name: str) -> None:
    """Over 2 ranks no honest step raises, a step that one rank refuses raises on both, and the next one is made.

    Args:
        name: the plugin's name.

    Raises:
        ConformanceError: an observer raises on a rank, or does not go on after a refused step.
    """
    with temporary_plugin(ProbePlugin(), name="kit-probes"):
        refused = _over_ranks(name, _refused)[0]
    if not all(refused):
        _fail(name, f"one rank refuses a step, and the ranks report {refused}: both must raise")


OBSERVER_CHECKS: tuple[Check, ...] = (
    Check(
        "observers_watch_only",
        "observers write nothing to the model, and communicate only where all ranks call them together",
        check_observers_watch_only,
        _requires_processes,
        hint="return votes, and communicate in decide(); write only to tensors of your own",
        kind=Kind.OBSERVERS,
    ),
    Check(
        "observers_refuse_together",
        "ranks refuse a step together, and make the next one",
        check_observers_refuse_together,
        _requires_processes,
        hint="raise in decide(), by votes; reset the observer in after_step(), after refused steps too",
        kind=Kind.OBSERVERS,
    ),
)
"""Every check of step observers."""
