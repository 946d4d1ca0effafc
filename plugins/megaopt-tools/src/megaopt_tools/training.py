"""Training: from a recipe and a text to a result."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Protocol

import torch
from attrs import evolve, field, frozen

from megaopt_core import MegatronOptimizer, OptimizerConfig, OptimizerParamScheduler, get_megatron_optimizer
from megaopt_tools.model import build_model, loss_of
from megaopt_tools.ranks import ALONE, Ranks
from megaopt_tools.recipe import Recipe
from megaopt_tools.text import Text, batches, windows

if TYPE_CHECKING:
    from megaopt_core.reporting import OptimizerReport

__all__ = ["PARTS", "Keeper", "Run", "RunResult", "StepRecord", "Watcher", "bits_per_byte"]

PARTS = ("forward", "backward", "optimizer")
"""What the time of a step is split into."""

_WSD_SHARE = 5
"""Schedule WSD decays in the last fifth of the steps."""


@frozen
class StepRecord:
    """One step.

    Args:
        step: its number, from 1.
        loss: on the batch, before the step, in nats a byte.
        lr: learning rate of the first parameter group in this step.
        grad_norm: before clipping; None when clipping is off.
        forward: seconds.
        backward: seconds.
        optimizer: seconds, with clipping and zeroing of gradients.
        tokens: in the batch.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float | None
    forward: float
    backward: float
    optimizer: float
    tokens: int

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.forward + self.backward + self.optimizer


@frozen
class RunResult:
    """What came out of a run.

    Args:
        recipe: what was asked for.
        text: what was trained on.
        config: the optimizer's configuration.
        ranks: how many processes shared the work.
        parameters: elements of the model.
        records: the steps.
        report: who stepped what, and what the last step changed.
        val_bits_per_byte: on everything that was held out; None when training diverged.
    """

    recipe: Recipe
    text: Text
    config: OptimizerConfig
    ranks: int
    parameters: int
    records: Sequence[StepRecord] = field(repr=False)
    report: OptimizerReport = field(repr=False)
    val_bits_per_byte: float | None

    @property
    def diverged_at(self) -> int | None:
        """The step whose loss was not finite; the last one where only the held-out loss is not."""
        return self.records[-1].step if self.val_bits_per_byte is None else None

    @property
    def trained_to_the_end(self) -> bool:
        """Whether the loss of every step was finite."""
        return math.isfinite(self.records[-1].loss)

    @property
    def peak_lr(self) -> float:
        """The largest learning rate of the run."""
        return max(record.lr for record in self.records)

    @property
    def milliseconds(self) -> dict[str, float]:
        """Median over the steps of forward pass, backward pass and optimizer."""
        return {part: 1000 * median(getattr(record, part) for record in self.records) for part in PARTS}

    @property
    def tokens_per_second(self) -> float:
        """Median over the steps."""
        return median(record.tokens / record.seconds for record in self.records)


class Watcher(Protocol):
    """Whoever follows a run."""

    def built(self, report: OptimizerReport) -> None:
        """The optimizer is there."""

    def resumed(self, records: Sequence[StepRecord]) -> None:
        """The run goes on after these steps of an earlier process."""

    def stepped(self, record: StepRecord) -> None:
        """A step was taken."""

    def finished(self, result: RunResult) -> None:
        """The run is over."""


class Keeper:
    """Decides after every step whether the run is saved or stopped; this one does neither."""

    def wants_to_stop(self) -> bool:
        """Return whether somebody asked this process to stop."""
        return False

    def stepped(self, run: Run, *, stop: bool) -> None:
        """Act after a step.

        Args:
            run: the run; its last record is that of the step.
            stop: whether somebody asked any rank to stop.
        """


_NO_KEEPER = Keeper()


class Run:
    """A run that is ready to start: everything that can be wrong with what was asked for has been found.

    Args:
        recipe: what to train, and how.
        text: what to train on.
        ranks: the processes that share the work; every one of them makes the run.

    Attributes:
        records: the steps that were taken; a checkpoint brings those of an earlier process.
        random_state: of torch's generator before the next step.

    Raises:
        MegaoptError: the text is too short, or the optimizer or its schedule cannot be built as asked.
    """

    def __init__(self, recipe: Recipe, text: Text, ranks: Ranks = ALONE) -> None:
        text.require_context(recipe.context)
        self.recipe = recipe
        self.text = text
        self.ranks = ranks
        self.records: list[StepRecord] = []
        self.random_state = torch.Generator().manual_seed(recipe.seed).get_state()
        self.config = OptimizerConfig(optimizer=recipe.optimizer, lr=recipe.lr, **recipe.settings)
        model = build_model(recipe.shape, recipe.seed)
        self.parameters = sum(param.numel() for param in model.parameters())
        self.model = ranks.wrap(model, self.config.sharding)
        inputs, _ = next(
            iter(batches(text.train, 1, recipe.context, recipe.seed))
        )  # of a generator of its own
        self.optimizer = get_megatron_optimizer(self.config, [self.model], example=inputs)
        self.scheduler = _scheduler(recipe, self.config, self.optimizer)

    def train(self, watchers: Sequence[Watcher] = (), keeper: Keeper = _NO_KEEPER) -> RunResult:
        """Take all steps that are left, then measure on the held-out text; once.

        Args:
            watchers: told of every step.
            keeper: asked after every step whether the run is saved or stopped.

        Returns:
            The result; when a loss is not finite, training ends there.
        """
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.random_state)
            return self._train(watchers, keeper)

    def _train(self, watchers: Sequence[Watcher], keeper: Keeper) -> RunResult:
        recipe, text, records = self.recipe, self.text, self.records
        for watcher in watchers:
            watcher.built(self.optimizer.report())
            if records:
                watcher.resumed(records)
        first = len(records)
        source = batches(text.train, recipe.batch_size, recipe.context, recipe.seed, first)
        for step, (inputs, targets) in zip(range(first + 1, recipe.steps + 1), source, strict=False):
            record = self._step(step, inputs, targets)
            loss, stop = self.ranks.agree(record.loss, stop=keeper.wants_to_stop())
            records.append(evolve(record, loss=loss))
            for watcher in watchers:
                watcher.stepped(records[-1])
            if not math.isfinite(loss):
                break
            self.random_state = torch.get_rng_state()
            keeper.stepped(self, stop=stop)
        val = (
            bits_per_byte(self.model, text.val, recipe.context)
            if math.isfinite(records[-1].loss)
            else math.nan
        )
        result = RunResult(
            recipe=recipe,
            text=text,
            config=self.config,
            ranks=self.ranks.count,
            parameters=self.parameters,
            records=records,
            report=self.optimizer.report(after_step=True),
            val_bits_per_byte=val if math.isfinite(val) else None,
        )
        for watcher in watchers:
            watcher.finished(result)
        return result

    def _step(self, step: int, inputs: torch.Tensor, targets: torch.Tensor) -> StepRecord:
        lr = float(self.optimizer.param_groups[0]["lr"])
        tokens = inputs.numel()
        inputs, targets = self.ranks.share(inputs), self.ranks.share(targets)
        begin = time.perf_counter()
        loss = loss_of(self.model, inputs, targets)
        after_forward = time.perf_counter()
        loss.backward()
        after_backward = time.perf_counter()
        outcome = self.optimizer.step()
        self.optimizer.zero_grad()
        end = time.perf_counter()
        self.scheduler.step(1)
        return StepRecord(
            step=step,
            loss=loss.item(),
            lr=lr,
            grad_norm=outcome.grad_norm,
            forward=after_forward - begin,
            backward=after_backward - after_forward,
            optimizer=end - after_backward,
            tokens=tokens,
        )


def _scheduler(
    recipe: Recipe, config: OptimizerConfig, optimizer: MegatronOptimizer
) -> OptimizerParamScheduler:
    peaks = [float(group["lr"]) for group in optimizer.param_groups]
    return OptimizerParamScheduler(
        optimizer,
        # The first step moves, too.
        init_lr=min(peaks) / (recipe.warmup + 1),
        max_lr=max(peaks),
        min_lr=config.min_lr or 0.0,
        lr_warmup_steps=recipe.warmup,
        lr_decay_steps=recipe.steps,
        lr_decay_style=recipe.schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        wsd_decay_steps=max(1, recipe.steps // _WSD_SHARE) if recipe.schedule == "WSD" else None,
        lr_wsd_decay_style="linear" if recipe.schedule == "WSD" else None,
    )


@torch.no_grad()
def bits_per_byte(model: torch.nn.Module, tokens: torch.Tensor, context: int, batch_size: int = 32) -> float:
    """Return the mean cross-entropy of every byte but the first, given what precedes it in its window.

    `-mean(log2 p(byte | up to context bytes before it))`; windows do not overlap, and their order is fixed.

    Args:
        model: the model.
        tokens: whole numbers, shape `[bytes]`.
        context: length of a window.
        batch_size: windows that are computed at once.
    """
    total, count = 0.0, 0
    for inputs, targets in windows(tokens, batch_size, context):
        total += loss_of(model, inputs, targets, reduction="sum").item()
        count += targets.numel()
    return total / count / math.log(2)
