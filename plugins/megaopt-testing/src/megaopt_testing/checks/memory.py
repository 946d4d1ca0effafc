"""What a step leaves around it: memory that is the optimizer's alone, and a process whose settings are as they were."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megaopt_core.optimizers import MegatronOptimizer
from megaopt_testing.process_state import process_settings, random_states, seed_all
from megaopt_testing.trial import Trial, some

__all__ = ["check_own_memory", "check_process_untouched"]

_APART = 4
"""Steps between two counts of what is kept beside the state."""

type _Region = tuple[int, int, str]


def check_own_memory(optimizer: str, **settings: Any) -> None:
    """State lies in memory of its own: not in that of a gradient, a parameter, or other state.

    Gradients are overwritten by the next backward pass, and what shares memory in a run is apart in one that is
    resumed. What an optimizer keeps beside its state does not grow from step to step.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration.

    Raises:
        ConformanceError: two of them share memory, state needs a gradient, or every step keeps another tensor.
    """
    trial = Trial(optimizer, settings)
    torch.manual_seed(0)
    model = trial.model()
    built = trial.build(model)
    own = set(trial.own_names(built))
    given: list[torch.Tensor] = []  # held, so that their memory is given to nothing else

    def look(inner: torch.optim.Optimizer, *_: Any) -> None:
        given.extend(param.grad for param in _params(inner, own) if param.grad is not None)

    handles = [part.inner.register_step_pre_hook(look) for part in built.parts]
    for step in range(2):
        trial.step_given(model, built, step)
    for handle in handles:
        handle.remove()
    regions = [*_regions("a gradient", given), *_own_regions(built, own)]
    shared = sorted(_overlaps(regions))
    if shared:
        trial.fail(
            f"they share memory: {some(shared)}. Keep copies (`grad.clone()`, `torch.zeros_like(param)`), one for each "
            "parameter"
        )
    _require_no_graph(trial, built, own)
    _require_bounded(trial, model, built)


def _require_no_graph(trial: Trial, built: MegatronOptimizer, own: set[str]) -> None:
    """Look for state that needs gradients: its graph holds all steps before."""
    found = [
        f"state {key!r} of {_name(param)}"
        for part in built.parts
        for param in _params(part.inner, own)
        for key, value in part.inner.state.get(param, {}).items()
        if any(tensor.requires_grad for tensor in _tensors(value))
    ]
    if found:
        trial.fail(
            f"{some(found)} needs a gradient, so it keeps the graphs of all earlier steps in memory. Compute "
            "under `torch.no_grad()`"
        )


def _require_bounded(trial: Trial, model: torch.nn.Module, built: MegatronOptimizer) -> None:
    """Count tensors in attributes of the inner optimizers, some steps apart."""
    counts = []
    for last in range(2, 2 + 3 * _APART, _APART):
        for step in range(last, last + _APART):
            trial.step_given(model, built, step)
        counts.append([sum(1 for _ in _tensors(_beside_state(part.inner))) for part in built.parts])
    growing = [
        type(part.inner).__name__
        for part, *found in zip(built.parts, *counts, strict=True)
        if found == sorted(set(found)) and found[-1] - found[0] >= 2 * _APART
    ]
    if growing:
        trial.fail(
            f"{some(growing)} keeps another tensor in its attributes with every step, so memory grows "
            "without end. Keep averages, or the last few tensors"
        )


def _beside_state(inner: torch.optim.Optimizer) -> list[Any]:
    return [value for name, value in vars(inner).items() if name not in ("state", "param_groups")]


def _params(inner: torch.optim.Optimizer, names: set[str]) -> Iterator[torch.Tensor]:
    for group in inner.param_groups:
        yield from (param for param in group["params"] if _name(param) in names)


def _name(param: torch.Tensor) -> str:
    name: str = param.param_info.name  # type: ignore[attr-defined] # build sets it
    return name


def _own_regions(built: MegatronOptimizer, own: set[str]) -> Iterator[_Region]:
    for part in built.parts:
        for param in _params(part.inner, own):
            yield from _regions(f"parameter {_name(param)}", [param])
            for key, value in part.inner.state.get(param, {}).items():
                yield from _regions(f"state {key!r} of {_name(param)}", _tensors(value))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inside in value.values():
            yield from _tensors(inside)
    elif isinstance(value, (list, tuple, deque)):
        for inside in value:
            yield from _tensors(inside)


def _regions(what: str, tensors: Any) -> Iterator[_Region]:
    """Yield begin, end and name of memory; single numbers and tensors without memory of their own have none."""
    for tensor in tensors:
        if tensor.numel() < 2 or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            continue
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        begin = tensor.data_ptr()
        yield begin, begin + (last + 1) * tensor.element_size(), what


def _overlaps(regions: list[_Region]) -> Iterator[str]:
    end, holder = 0, ""
    for begin, until, what in sorted(regions):
        if begin < end and not what == holder == "a gradient":
            yield f"{what} and {holder}"
        if until > end:
            end, holder = until, what


def check_process_untouched(optimizer: str, **settings: Any) -> None:
    """A step changes no setting of the process, and seeds no random generator.

    Whoever shuffles data or drops activations by the default generators would get the same numbers in every step.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration.

    Raises:
        ConformanceError: a setting is changed, or a generator is in one state afterwards whatever it was before.
    """
    trial = Trial(optimizer, settings)
    model, before = trial.model(), process_settings()
    after: list[dict[str, Any]] = []
    for seed in (1, 2):
        seed_all(seed)
        built = trial.build(trial.model())
        _require_kept(trial, before, "building it")
        after.append(random_states())
    _require_unseeded(trial, after, "building it")
    after.clear()
    built = trial.build(model)
    for seed in (1, 2):
        built.zero_grad()
        trial.backward(model, seed)
        seed_all(seed)
        built.step()
        _require_kept(trial, before, "a step")
        after.append(random_states())
    _require_unseeded(trial, after, "a step")


def _require_unseeded(trial: Trial, after: Sequence[Mapping[str, Any]], what: str) -> None:
    """Compare the states of generators that were seeded otherwise before; one may have been imported meanwhile."""
    first, second = after
    seeded = [name for name in first.keys() & second.keys() if first[name] == second[name]]
    if seeded:
        trial.fail(
            f"{what} seeds a random generator of the process ({some(sorted(seeded))}), so every later draw is the same "
            "each time. Use a torch.Generator of your own, made in the step from numbers in `optimizer.state`"
        )


def _require_kept(trial: Trial, before: Mapping[str, Any], what: str) -> None:
    changed = [name for name, value in process_settings().items() if value != before[name]]
    if changed:
        trial.fail(
            f"{what} changes a setting of the whole process: {some(changed)}. Restore it before the step returns"
        )
