"""One inner optimizer with its precision policy and its sharded parameters: what a step pipeline runs over."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, evolve, field

from megaopt_core.config._group_values import GroupChecks, group_checks
from megaopt_core.execution._exchanged_step import ExchangedStep
from megaopt_core.execution._stages import stage
from megaopt_core.execution._step_runner import StepRunner
from megaopt_core.optimizers._between_steps.group_settings import GroupSettings
from megaopt_core.optimizers._between_steps.writes import ForeignWrites, StepWrites
from megaopt_core.optimizers._gradients.norm_deduplication import COUNTED, Counting
from megaopt_core.optimizers._gradients.statistics import is_read_freely, scale_gradients
from megaopt_core.plugin_api._entries import SCALAR_STATES
from megaopt_core.precision._batches import in_turns
from megaopt_core.precision._policy import PrecisionPolicy
from megaopt_core.reporting._changes import ChangeRecord
from megaopt_core.sharding._live_model import Piece
from megaopt_core.sharding._protocol import OverlappedParams, ShardedParams
from megaopt_core.state._notes import joins_of

if TYPE_CHECKING:
    from megaopt_core.config._optimizer_config import OptimizerConfig

__all__ = ["OptimizerPart"]

_LARGEST = torch.finfo(torch.float32).max

type _Span = tuple[Counting, slice | None]
"""How a range of a piece's elements is counted; None: all of them."""


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Compute as an optimizer says, also where a step is made inside of `torch.autocast`."""
    with ExitStack() as left:
        for kind in _autocast_kinds():
            if torch.is_autocast_enabled(kind):
                left.enter_context(torch.autocast(kind, enabled=False))
        yield


@cache
def _autocast_kinds() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    kinds = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    return tuple(kind for kind in kinds if torch.amp.is_autocast_available(kind))


@define(eq=False)
class OptimizerPart:
    """An inner optimizer, its precision policy and this rank's pieces; composition, nothing inherited.

    Args:
        inner: the torch optimizer; its groups hold the stepped tensors.
        precision: brings gradients to the stepped tensors and their values back.
        sharded: this rank's live pieces.
        stepped: the tensor that is stepped for each piece, in order.
        groups: the public group dictionaries, in the order of the inner groups.
        config: the run's configuration.
        counting: parameter name to how it is counted; absent names are counted in the main norm.
        scalar_states: state keys with one number for a parameter.
        split: drives the step in three parts, where the pieces have an exchange; None: the inner optimizer steps.
        checks: key of a group to what may stand there; by default, what the inner optimizer's defaults say.
        runner: runs the inner optimizer's step.
        honours_noop: a step of the inner optimizer changes nothing where the device says so, as its entry declares.
    """

    inner: torch.optim.Optimizer
    precision: PrecisionPolicy
    sharded: ShardedParams
    stepped: Sequence[torch.Tensor]
    groups: Sequence[dict[str, Any]]
    config: OptimizerConfig
    counting: Mapping[str, Counting] = field(factory=dict)
    scalar_states: frozenset[str] = SCALAR_STATES
    split: ExchangedStep | None = None
    checks: GroupChecks = field()
    runner: StepRunner = field(factory=StepRunner)
    honours_noop: bool = False
    changes: ChangeRecord = field(factory=ChangeRecord, init=False)
    writes: ForeignWrites = field(init=False)
    settings: GroupSettings = field(init=False)
    _devices: set[torch.device] = field(init=False)
    _spans: list[list[_Span]] = field(init=False)
    _pending: dict[str | None, float | torch.Tensor] = field(factory=dict, init=False)
    _step_writes: StepWrites = field(init=False)

    @settings.default
    def _settings_of_groups(self) -> GroupSettings:
        return GroupSettings(self.inner, self.groups, self.checks)

    @checks.default
    def _checks_of_defaults(self) -> GroupChecks:
        return group_checks(None, self.inner.defaults)

    def __attrs_post_init__(self) -> None:
        joins_of(self.inner)  # what is wrong there is said here, not in the first checkpoint
        self._spans = [self._spans_of(piece) for piece in self.pieces]
        self.writes = ForeignWrites(self.precision, self.sharded)
        self._step_writes = StepWrites(self.pieces, self.groups)
        self.settings.know_members()
        self._devices = {tensor.device for tensor in self.stepped}
        self.changes.every_step = all(map(is_read_freely, self._devices))

    def watch_again(self) -> None:
        """Take pieces that were added or replaced into what is counted and watched."""
        self.__attrs_post_init__()

    def rename(self, names: Mapping[str, str]) -> None:
        """Call parameters otherwise from now on.

        Args:
            names: name so far to new name.
        """
        for piece in self.pieces:
            members = tuple(
                (offset, evolve(shard, name=names[shard.name])) for offset, shard in piece.spec.members
            )
            piece.spec = evolve(piece.spec, members=members)
        self.counting = {names[name]: rule for name, rule in self.counting.items()}
        self.watch_again()

    def _spans_of(self, piece: Piece) -> list[_Span]:
        """Return the ranges of a piece that one rule holds for; padding between members is in none."""
        members, peers = piece.spec.members, piece.spec.peers
        rules = [self.counting.get(shard.name, COUNTED) for _, shard in members]
        if peers is not None and not peers.is_counted:
            rules = [evolve(rule, counted=False) for rule in rules]
        no_padding = sum(shard.numel for _, shard in members) == piece.param.numel()
        if no_padding and len(set(rules)) == 1:
            return [(rules[0], None)]
        return [
            (rule, slice(offset, offset + shard.numel))
            for (offset, shard), rule in zip(members, rules, strict=True)
        ]

    @property
    def pieces(self) -> Sequence[Piece]:
        """This rank's pieces."""
        return self.sharded.pieces

    def check_settings(self) -> None:
        """Raise for what somebody wrote into the groups and that no setting could have; before anything changes.

        Raises:
            ConfigurationError: a value cannot be; the message names group, key, value and what is allowed.
            UnsupportedOperationError: what is stepped was brought to the CPU, and not back, a group has other
                parameters than it was given, or somebody wrote into the groups of an optimizer that is wrapped.
        """
        self.runner.require_restored()
        self.settings.require_valid()

    def collect_grads(self) -> None:
        """Bring this step's gradients to the stepped tensors."""
        self._pending.clear()
        with stage(self.config, "optimizer-copy-to-main-grad"):
            self.sharded.collect_grads()
            self.precision.load_grads()

    def discard_grads(self) -> None:
        """Give up this step's gradients without stepping."""
        self._pending.clear()
        self.precision.discard_grads()
        self.changes.skipped()

    def all_grads(self) -> list[torch.Tensor]:
        """Return the gradient of every stepped tensor that has one."""
        grads = (self.precision.grad(index) for index in range(len(self.pieces)))
        return [grad for grad in grads if grad is not None]

    def _grad_spans(self, left_out: Collection[int] = ()) -> list[tuple[Counting, torch.Tensor]]:
        return [
            (rule, grad if span is None else grad.view(-1)[span])
            for index, spans in enumerate(self._spans)
            if index not in left_out and (grad := self.precision.grad(index)) is not None
            for rule, span in spans
        ]

    def counted_grads(self) -> list[tuple[str | None, torch.Tensor]]:
        """Return `(norm group, gradient)` of everything that this rank counts."""
        return [(rule.norm_group, grad) for rule, grad in self._grad_spans() if rule.counted]

    def uncounted_grads(self) -> list[torch.Tensor]:
        """Return every gradient that is stepped here and counted by another rank."""
        return [grad for rule, grad in self._grad_spans() if not rule.counted]

    @property
    def can_be_noop(self) -> bool:
        """Whether a step changes nothing where the device says so: inner optimizer, precision and runner see to it."""
        honoured = self.honours_noop and self.precision.honours_noop and self.runner.honours_noop
        return honoured and self._takes_flags and len(self._devices) <= 1

    @property
    def _takes_flags(self) -> bool:
        """Whether the inner step reads `grad_scale` and `found_inf`, as torch's fused ones do for `torch.amp`."""
        takes_them = self.split is None and getattr(self.inner, "_step_supports_amp_scaling", False)
        return takes_them and {bool(group.get("fused")) for group in self.inner.param_groups} == {True}

    def scale_later(self, coefficients: Mapping[str | None, float | torch.Tensor]) -> None:
        """Remember clip coefficients; the inner step takes them over where it can.

        Args:
            coefficients: norm group to coefficient, or on the device to its inverse; groups that are not clipped are
                absent.
        """
        self._pending = dict(coefficients)

    @_without_autocast()
    def step(self, *, in_units: bool = True, noop: torch.Tensor | None = None) -> None:
        """Step the inner optimizer with the collected gradients and write its result back; in no other precision.

        Args:
            in_units: begin to bring each unit to other ranks while the next is stepped, where that is asked for.
            noop: on the device, 1.0 where the step is to change nothing, else 0.0; asked of parts that
                :attr:`can_be_noop`.
        """
        self.writes.take_over()
        watched = self.precision.watched()
        before = self.changes.before(watched)
        is_stepped = self._step_writes.expect(self.precision)
        self.settings.copy_inward()
        try:
            with self._flags_given(noop):
                if self.split is not None:
                    with stage(self.config, "optimizer-inner-step"):
                        self.split.step()
                elif self.overlapped is None or not in_units:
                    self.runner.step(self, range(len(self.pieces)))
                else:
                    self._step_in_units(self.overlapped)
        finally:
            self.precision.discard_grads()
        self.settings.copy_outward()
        self.changes.after(watched, before, is_stepped=is_stepped)

    def stand_aside(self, *, in_units: bool = True) -> None:
        """Take part in what ranks exchange in a step, without stepping.

        Args:
            in_units: as for :meth:`step`.
        """
        self.discard_grads()
        if in_units and self.overlapped is not None:
            for number in range(len(self.overlapped.units)):
                self.overlapped.start_unit_sync(number)

    def record_writes(self) -> None:
        """Tell autograd what the last step has written to, and whoever watches that nobody else did."""
        self._step_writes.count()
        self.writes.record()

    def _step_in_units(self, sharded: OverlappedParams) -> None:
        """Step one unit after the other, and begin to bring each to the other ranks while the next is stepped."""
        # A rank may hold nothing of a unit; of all, and then it steps once all the same, for what groups count.
        stepped = [number for number, unit in enumerate(sharded.units) if unit] or [0]
        batches = [[self.stepped[index] for index in sharded.units[number]] for number in stepped]
        with closing(in_turns(self.inner, batches)) as turns:
            for number, unit in enumerate(sharded.units):
                if number in stepped:
                    next(turns)
                    self.runner.step(self, unit)
                sharded.start_unit_sync(number)

    @property
    def overlapped(self) -> OverlappedParams | None:
        """The pieces, where the step itself begins to bring them to other ranks, unit by unit; else None."""
        asked = self.config.overlap_param_gather_with_optimizer_step and self.split is None
        return self.sharded if asked and isinstance(self.sharded, OverlappedParams) else None

    def switch_mode(self, name: str) -> bool:
        """Call the inner optimizer's `train` or `eval`, where it has one, and write what that changes back.

        Args:
            name: `"train"` or `"eval"`.

        Returns:
            Whether it has such a method.
        """
        switch = getattr(self.inner, name, None)
        if switch is None:
            return False
        self.settings.copy_inward()
        self.runner.switch_mode(self, switch)
        self.settings.copy_outward()
        return True

    @contextmanager
    def _flags_given(self, noop: torch.Tensor | None) -> Iterator[None]:
        """Apply the clip coefficients, as a divisor that a fused step takes, else by a pass; give it `noop`, too."""
        pending, self._pending = self._pending, {}
        divisor = self._divisor(pending) if pending else None
        if divisor is None:
            for factor, grads in self._by_factor(pending):
                scale_gradients(grads, factor.reciprocal() if isinstance(factor, torch.Tensor) else factor)
        flags = {"grad_scale": divisor, "found_inf": noop}
        given = {name: flag for name, flag in flags.items() if flag is not None}
        for name, flag in given.items():
            setattr(self.inner, name, flag)
        try:
            yield
        finally:
            for name in given:
                delattr(self.inner, name)

    def _divisor(self, pending: Mapping[str | None, float | torch.Tensor]) -> torch.Tensor | None:
        if not self._takes_flags:
            return None
        unclipped = self._unclipped()
        found = [
            None if index in unclipped else pending.get(rule.norm_group)
            for index, spans in enumerate(self._spans)
            for rule, _ in spans
        ]
        factors = {_identity(factor): factor for factor in found}
        # The divisor is a number of 32 bits: it would round what has more.
        has_wide = torch.float64 in {tensor.dtype for tensor in self.stepped}
        if len(factors) != 1 or len(self._devices) != 1 or has_wide:
            return None
        (factor,), (device,) = factors.values(), self._devices
        if isinstance(factor, torch.Tensor):
            return factor.to(device, torch.float32)
        # The norm of an infinite gradient gives the factor 0, whose divisor no number is; nor is one of a huge norm's.
        if not factor or 1.0 / factor > _LARGEST:
            return None
        return torch.full((), 1.0 / factor, dtype=torch.float32, device=device)

    def _by_factor(
        self, pending: Mapping[str | None, float | torch.Tensor]
    ) -> list[tuple[float | torch.Tensor, list[torch.Tensor]]]:
        by_factor: dict[Any, tuple[float | torch.Tensor, list[torch.Tensor]]] = {}
        for rule, grad in self._grad_spans(self._unclipped()) if pending else ():
            factor = pending.get(rule.norm_group)
            if factor is not None:
                by_factor.setdefault(_identity(factor), (factor, []))[1].append(grad)
        return list(by_factor.values())

    def _unclipped(self) -> frozenset[int]:
        """Return the positions of pieces whose group says `clip_grad=False`: they count in the norm, unscaled."""
        exempt = {
            id(tensor)
            for outer, inner in zip(self.groups, self.inner.param_groups, strict=True)
            if outer.get("clip_grad") is False
            for tensor in inner["params"]
        }
        if not exempt:
            return frozenset()
        return frozenset(index for index, tensor in enumerate(self.stepped) if id(tensor) in exempt)


def _identity(factor: float | torch.Tensor | None) -> Any:
    """Return what tells clip factors apart; to compare tensors would read them."""
    return ("on the device", id(factor)) if isinstance(factor, torch.Tensor) else factor
