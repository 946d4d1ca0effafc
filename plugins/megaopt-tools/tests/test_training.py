"""Training itself: the same bits again, a loss that falls, a measure that is what it says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attrs import evolve
from megaopt_tools.model import Shape, build_model
from megaopt_tools.recipe import Recipe
from megaopt_tools.text import Text
from megaopt_tools.training import PARTS, Run, RunResult, StepRecord, bits_per_byte

from megaopt_core import MegaoptError

pytestmark = pytest.mark.any_python

TEXT = Text("letters", b"the quick brown fox jumps over the lazy dog. " * 60)
SMALL = Recipe(
    "adam",
    lr=4e-3,
    steps=12,
    batch_size=4,
    context=16,
    shape=Shape(width=32, layers=1, heads=2, expansion=48),
)


def _bits(run: Run) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in run.model.state_dict().items()}


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon"])
def test_the_same_recipe_gives_the_same_bits(optimizer: str) -> None:
    """Losses, gradient norms and every parameter of two runs are equal, bit for bit."""
    recipe = evolve(SMALL, optimizer=optimizer)
    one, two = Run(recipe, TEXT), Run(recipe, TEXT)
    first, second = one.train(), two.train()
    assert [(record.loss, record.grad_norm) for record in first.records] == [
        (record.loss, record.grad_norm) for record in second.records
    ]
    assert first.val_bits_per_byte == second.val_bits_per_byte
    after = _bits(two)
    assert all(torch.equal(tensor, after[name]) for name, tensor in _bits(one).items())


def test_another_seed_gives_another_run() -> None:
    """The seed reaches weights and batches."""
    one, two = (Run(evolve(SMALL, seed=seed), TEXT).train() for seed in (0, 1))
    assert one.records[-1].loss != two.records[-1].loss


@pytest.mark.parametrize(("optimizer", "lr"), [("adam", 1e-2), ("muon", 1e-2)])
def test_the_loss_falls(optimizer: str, lr: float) -> None:
    """Sixty steps on one sentence, over and over, halve the loss, on what was held out as well."""
    result = Run(evolve(SMALL, optimizer=optimizer, lr=lr, steps=60), TEXT).train()
    assert result.records[0].loss == pytest.approx(math.log(256), abs=1e-4)
    assert result.records[-1].loss < math.log(256) / 2
    assert result.val_bits_per_byte is not None
    assert result.val_bits_per_byte < 4


def test_bits_per_byte_of_an_untrained_model_is_eight() -> None:
    """A uniform guess costs a whole byte."""
    model = build_model(SMALL.shape, 0)
    assert bits_per_byte(model, TEXT.val, context=16) == pytest.approx(8, abs=1e-5)


def test_bits_per_byte_is_the_mean_over_every_byte() -> None:
    """It equals the sum of -log2 p(byte) over all windows, whatever the batches are."""
    run = Run(SMALL, TEXT)
    measured = run.train().val_bits_per_byte
    tokens, total = TEXT.val, 0.0
    for start in range(0, len(tokens) - 1, 16):
        window = tokens[start : start + 17].long()
        probabilities = run.model(window[None, :-1])[0].double().softmax(dim=-1)
        total -= probabilities[range(len(window) - 1), window[1:]].log2().sum().item()
    assert measured == pytest.approx(total / (len(tokens) - 1), rel=1e-6)


def _learning_rates(**changes: Any) -> list[float]:
    return [record.lr for record in Run(evolve(SMALL, lr=1.0, steps=10, **changes), TEXT).train().records]


def test_learning_rate_rises_then_falls_by_the_schedule() -> None:
    """Warm-up reaches the peak, its first step moves already, and cosine falls to zero after the last step."""
    cosine = [0.5 * (math.cos(math.pi * r / 8) + 1) for r in range(8)]
    assert _learning_rates(warmup=2) == pytest.approx([1 / 3, 2 / 3, *cosine])
    assert _learning_rates(warmup=0, schedule="constant") == [1.0] * 10


def test_wsd_decays_in_the_last_fifth() -> None:
    """The one schedule that needs a further length gets one."""
    assert _learning_rates(warmup=0, schedule="WSD") == pytest.approx([1.0] * 9 + [0.5])


def test_smallest_learning_rate_is_the_configurations() -> None:
    """`min_lr` is where the schedule ends."""
    falling = _learning_rates(warmup=0, schedule="linear", settings={"min_lr": 0.5})
    assert falling == pytest.approx([1 - 0.05 * step for step in range(10)])


def test_without_a_learning_rate_the_optimizers_own_holds() -> None:
    """Torch's Adam begins with 0.001."""
    result = Run(evolve(SMALL, lr=None, warmup=0), TEXT).train()
    assert result.peak_lr == 1e-3


def test_a_run_that_diverges_ends_and_says_where() -> None:
    """No time is spent on a run that is lost, and no number is made up for it."""
    result = Run(evolve(SMALL, optimizer="sgd", lr=1e12, warmup=0), TEXT).train()
    assert result.diverged_at == len(result.records) < SMALL.steps
    assert not math.isfinite(result.records[-1].loss)
    assert result.val_bits_per_byte is None


def test_every_parameter_was_changed_by_its_optimizer() -> None:
    """The report after the last step proves who ran: Muon for the four matrices, Adam for the other five."""
    result = Run(evolve(SMALL, optimizer="muon"), TEXT).train()
    assert [(part.optimizer, part.parameters, part.changed) for part in result.report.parts] == [
        ("muon", 4, 4),
        ("adam", 5, 5),
    ]
    assert sum(part.elements for part in result.report.parts) == result.parameters


def test_times_are_medians_of_the_three_parts() -> None:
    """One slow step does not change what a step costs."""
    records = [
        StepRecord(i, 1.0, 0.1, 1.0, *seconds, 10)
        for i, seconds in enumerate([(1, 2, 3), (9, 9, 9), (2, 1, 3)])
    ]
    result = evolve(Run(SMALL, TEXT).train(), records=records)
    assert result.milliseconds == {"forward": 2000, "backward": 2000, "optimizer": 3000}
    assert tuple(result.milliseconds) == PARTS
    assert result.tokens_per_second == pytest.approx(10 / 6)


def test_without_clipping_there_is_no_gradient_norm() -> None:
    """Nothing is computed that nobody asked for."""
    result = Run(evolve(SMALL, steps=2, settings={"clip_grad": 0.0}), TEXT).train()
    assert [record.grad_norm for record in result.records] == [None, None]


class _Diary:
    def __init__(self) -> None:
        self.entries: list[str] = []

    def built(self, report: Any) -> None:
        self.entries.append(f"built {len(report.params)}")

    def resumed(self, records: Sequence[StepRecord]) -> None:
        self.entries.append(f"resumed after {len(records)}")

    def stepped(self, record: StepRecord) -> None:
        self.entries.append(f"step {record.step}")

    def finished(self, result: RunResult) -> None:
        self.entries.append(f"finished {len(result.records)}")


def test_watchers_are_told_in_order() -> None:
    """First the report, then every step, then the result."""
    diary = _Diary()
    Run(evolve(SMALL, steps=2), TEXT).train([diary])
    assert diary.entries == ["built 9", "step 1", "step 2", "finished 2"]


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "nothing"},
        {"schedule": "wobble"},
        {"warmup": 12},
        {"context": 10_000},
        {"settings": {"nothing": 1}},
    ],
)
def test_what_cannot_be_is_refused_before_the_first_step(changes: dict[str, Any]) -> None:
    """A run that exists can be trained."""
    with pytest.raises(MegaoptError):
        Run(evolve(SMALL, **changes), TEXT)
