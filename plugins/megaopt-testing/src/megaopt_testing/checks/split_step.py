"""The step in three parts: the same bits as the whole step, and parts one and three the same on any slice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from attrs import define, field, frozen

from megaopt_core.config import constructor_kwargs
from megaopt_core.optimizers import OptimizerPart
from megaopt_core.params import ParamInfo
from megaopt_core.plugin_api import OptimizerEntry
from megaopt_core.registry import get_registry
from megaopt_core.sharding import SplitStep, StatefulSplitStep
from megaopt_testing.check import DoesNotApply
from megaopt_testing.snapshot import layout, same_bits
from megaopt_testing.trial import Trial, some

__all__ = ["check_split_step", "requires_split_step"]

_STEPS = 3

type _View = Callable[[torch.Tensor], torch.Tensor]
"""Shows a slice of a whole tensor."""


def requires_split_step(entry: OptimizerEntry) -> str | None:
    """Return why the check cannot be made of an optimizer, None when it can.

    Args:
        entry: the optimizer's entry.
    """
    return "its entry offers no split step" if entry.split_step is None else None


def check_split_step(optimizer: str, **settings: Any) -> None:
    """Its three parts over whole tensors are its step, and the first and the third commute with slicing; bit for bit.

    Slices are row-major ranges and boxes, uneven ones and empty ones, several steps long, with weight decay and a
    learning rate that changes.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration.

    Raises:
        ConformanceError: parameters, state or updates differ, or `init_state` makes other state than a step.
    """
    trial = Trial(optimizer, settings)
    model = trial.model()
    built = trial.build(model)
    own = set(trial.own_names(built))
    entry = get_registry().optimizer(optimizer)
    reason = entry.split_refusal(built.config)
    if reason is not None:
        raise DoesNotApply(reason)
    (part,) = [part for part in built.parts if own & {info.name for info in _infos(part)}]
    kwargs = constructor_kwargs(entry, built.config, [model])

    def make(cut: Callable[[torch.Tensor], Sequence[_View]]) -> _Run:
        return _Run.of(entry, part, kwargs, cut)

    for what, cut in (("row-major ranges", _ranges), ("boxes", _boxes)):
        by_itself, whole, sliced = make(_all_of_it), make(_all_of_it), make(cut)
        for step in range(_STEPS):
            for run in (by_itself, whole, sliced):
                run.begin(step)
            by_itself.inner.step()
            updates = whole.local_updates(trial)
            parts = sliced.local_updates(trial)
            if not step:
                _require_equal(
                    trial,
                    make(cut).state_made(),
                    sliced.layout(),
                    f"init_state makes other state of slices ({what}) than local_updates",
                )
            _require_equal(
                trial,
                updates,
                parts,
                f"local_updates returns other updates for slices ({what}) than for wholes",
            )
            _require_equal(
                trial,
                whole.values(),
                sliced.values(),
                f"local_updates gives other results for slices ({what})",
            )
            whole.finish(updates)
            sliced.finish(parts)
            _require_equal(
                trial,
                by_itself.everything(),
                whole.everything(),
                "step() and its three parts over whole tensors differ",
            )
            _require_equal(
                trial,
                whole.everything(),
                sliced.everything(),
                f"apply gives other results for slices ({what})",
            )


def _infos(part: OptimizerPart) -> list[ParamInfo]:
    return [tensor.param_info for tensor in part.stepped]  # type: ignore[attr-defined] # build sets it


def _require_equal(trial: Trial, one: Mapping[str, Any], other: Mapping[str, Any], what: str) -> None:
    different = [key for key in {**one, **other} if not same_bits(one.get(key), other.get(key))]
    if different:
        trial.fail(f"{what}: {some(different)}")


@frozen(eq=False)
class _Cut:
    """A parameter as the slices that are stepped.

    Args:
        info: what it is.
        dtype: of its elements.
        views: where the slices are.
        slices: tensors of their own, in the order of `views`.
    """

    info: ParamInfo
    dtype: torch.dtype
    views: Sequence[_View]
    slices: list[torch.nn.Parameter]

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole tensor of its slices."""
        whole = torch.empty(self.info.shape, dtype=parts[-1].dtype)
        for view, part in zip(self.views, parts, strict=True):
            view(whole).copy_(part)
        return whole


@define(eq=False)
class _Run:
    """An inner optimizer of its own over slices of the same parameters."""

    inner: torch.optim.Optimizer
    split: SplitStep
    cuts: list[_Cut]
    lr: list[float] = field(factory=list)

    @classmethod
    def of(
        cls,
        entry: OptimizerEntry,
        part: OptimizerPart,
        kwargs: Mapping[str, Any],
        cut: Callable[[torch.Tensor], Sequence[_View]],
    ) -> _Run:
        cuts: dict[int, _Cut] = {}
        for tensor, info in zip(part.stepped, _infos(part), strict=True):
            views = cut(tensor)
            slices = [torch.nn.Parameter(view(tensor.detach()).clone()) for view in views]
            for piece in slices:
                piece.param_info = info  # type: ignore[attr-defined] # as build does
            cuts[id(tensor)] = _Cut(info, tensor.dtype, views, slices)
        groups = [
            {**group, "params": [piece for tensor in group["params"] for piece in cuts[id(tensor)].slices]}
            for group in part.inner.param_groups
        ]
        inner = entry.load_class()(groups, **kwargs)
        make = entry.load_split_step()
        assert make is not None  # the check is not made of others
        return cls(inner, make(inner), list(cuts.values()), [group["lr"] for group in inner.param_groups])

    def begin(self, step: int) -> None:
        """Give every slice its gradient, and the groups a learning rate."""
        generator = torch.Generator().manual_seed(3000 + step)
        for group, lr in zip(self.inner.param_groups, self.lr, strict=True):
            group["lr"] = lr / (step + 1)
        for cut in self.cuts:
            grad = torch.randn(cut.info.shape, generator=generator).to(cut.dtype)
            for view, piece in zip(cut.views, cut.slices, strict=True):
                piece.grad = view(grad).clone()

    @torch.no_grad()
    def state_made(self) -> dict[str, str]:
        """Return what `init_state` makes, which needs no gradient."""
        self.split.init_state([piece for cut in self.cuts for piece in cut.slices])
        return self.layout()

    def layout(self) -> dict[str, str]:
        """Return shapes and dtypes of the state of slices."""
        states = [
            (f"slice {number} of {cut.info.name}", self.inner.state.get(piece, {}))
            for cut in self.cuts
            for number, piece in enumerate(cut.slices)
        ]
        return layout({f"{key} of {what}": value for what, state in states for key, value in state.items()})

    @torch.no_grad()
    def local_updates(self, trial: Trial) -> dict[str, torch.Tensor]:
        """Return whole updates by parameter name."""
        params = [piece for cut in self.cuts for piece in cut.slices]
        updates = self.split.local_updates(params)
        shapes = [tuple(update.shape) for update in updates]
        if shapes != [tuple(param.shape) for param in params]:
            trial.fail("local_updates must return one tensor for every parameter, of its shape")
        return dict(zip(self._names(), self._joined(updates), strict=True))

    @torch.no_grad()
    def finish(self, updates: Mapping[str, torch.Tensor]) -> None:
        """Transform whole updates, and apply their slices."""
        transformed = self.split.transform(list(updates.values()), [cut.info for cut in self.cuts])
        params, parts = [], []
        for cut, update in zip(self.cuts, transformed, strict=True):
            params += cut.slices
            parts += [view(update.contiguous()).clone() for view in cut.views]
        self.split.apply(params, parts)

    def values(self) -> dict[str, torch.Tensor]:
        """Return whole parameters by name."""
        return dict(
            zip(self._names(), self._joined([p.detach() for c in self.cuts for p in c.slices]), strict=True)
        )

    def everything(self) -> dict[str, Any]:
        """Return whole parameters and whole state tensors."""
        found = self.values()
        for cut in self.cuts:
            states = [self.inner.state[piece] for piece in cut.slices if piece.numel()]
            for key, value in states[0].items() if states else ():
                found[f"{key} of {cut.info.name}"] = value
                if isinstance(value, torch.Tensor) and value.shape in {piece.shape for piece in cut.slices}:
                    of_slices = iter(state[key] for state in states)
                    found[f"{key} of {cut.info.name}"] = cut.joined(
                        [next(of_slices) if piece.numel() else piece.detach() for piece in cut.slices]
                    )
            if isinstance(self.split, StatefulSplitStep):
                kept = self.split.transform_state.get(cut.info.name, {})
                found.update((f"{key} of {cut.info.name}", value) for key, value in kept.items())
        return found

    def _names(self) -> list[str]:
        return [cut.info.name for cut in self.cuts]

    def _joined(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        rest = iter(parts)
        return [cut.joined([next(rest) for _ in cut.slices]) for cut in self.cuts]


def _all_of_it(tensor: torch.Tensor) -> Sequence[_View]:
    return [lambda whole: whole]


def _ranges(tensor: torch.Tensor) -> Sequence[_View]:
    """Cut into row-major ranges, uneven, the first empty."""
    numel = tensor.numel()
    ends = [0, 0, numel // 3 + 1, numel // 3 + 2, numel]
    return [_range(start, max(start, stop)) for start, stop in pairwise(ends)]


def _range(start: int, stop: int) -> _View:
    return lambda whole: whole.view(-1)[start:stop]


def _boxes(tensor: torch.Tensor) -> Sequence[_View]:
    """Cut into boxes, uneven, the first empty: rows, and the last rows along their last dimension."""
    if tensor.dim() < 2:
        return _ranges(tensor)
    rows, last = tensor.shape[0], tensor.shape[-1]
    top, left = rows // 3, last // 2 + 1
    corners = [(0, 0, 0, last), (0, top, 0, last), (top, rows, 0, left), (top, rows, left, last)]
    return [_box(*corner) for corner in corners]


def _box(top: int, bottom: int, left: int, right: int) -> _View:
    return lambda whole: whole[top:bottom, ..., left:right]
