"""On an accelerator the device alone stops a step, where inner optimizers honour it; the host reads one step later.

Here a CPU is taken for a device that is waited for; torch's fused steps take the flag `found_inf` there, too.
"""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from megaopt_testing.plugins import temporary_plugin
from torch import nn

from megaopt_core import ChainedOptimizer, DynamicGradScaler, StepResult, hookimpl
from megaopt_core.errors import ConfigurationError
from megaopt_core.optimizers import MegatronOptimizer
from megaopt_core.optimizers._gradients import statistics
from megaopt_core.optimizers._step.stats import ToHost
from megaopt_core.params import Granularity
from megaopt_core.plugin_api import StepObserver, VoteSpec

pytestmark = [
    pytest.mark.any_python,
    # A build names settings without effect by the type of the device, which is a CPU's here.
    pytest.mark.filterwarnings("ignore:settings that change nothing here. read_before_step"),
]

FUSED = ("t_fused", "t_fused_momentum")
MAIN = {"bf16": True}


@pytest.fixture(autouse=True)
def waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat a CPU as a device that the host waits for."""
    monkeypatch.setattr(statistics, "_READ_FREELY", frozenset())


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[ToHost]:
    """The numbers of steps that the host has read."""
    found: list[ToHost] = []
    plain = ToHost.numbers.func  # type: ignore[attr-defined]

    def numbers(self: ToHost) -> list[Any]:
        if self not in found:
            found.append(self)
        return plain(self)

    monkeypatch.setattr(ToHost, "numbers", property(numbers))
    return found


def everything(model: nn.Module, optimizer: MegatronOptimizer) -> list[torch.Tensor]:
    """Return copies of all values, main values and states."""
    states = [
        value
        for part in optimizer.parts
        for tensor in part.stepped
        for value in (tensor, *part.inner.state[tensor].values())
    ]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *states)]


def train(
    model: nn.Module, optimizer: MegatronOptimizer, give: Callable[..., None], bad: Mapping[int, float]
) -> list[StepResult]:
    """Step six times; some gradients are what `bad` says."""
    results = []
    for step in range(6):
        give(model, step)
        if step in bad:
            model[0].weight.grad[0, 0] = bad[step]
        results.append(optimizer.step())
    return results


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_not_read(
    mlp, build, give, reads, name, clip
) -> None:
    """Neither values nor states, nor the count of steps; who looks at the result hears of it."""
    model = mlp(torch.bfloat16)
    optimizer = build(model, name, clip_grad=clip, **MAIN)
    for step in range(2):
        give(model, step)
        optimizer.step()
    before = everything(model, optimizer)
    give(model, 2)
    model[0].weight.grad[0, 0] = math.nan
    result = optimizer.step()
    sent = optimizer.pipeline.last._copied
    assert sent not in reads
    assert all(map(torch.equal, before, everything(model, optimizer)))
    assert tuple(result) == (False, None, None)
    assert sent in reads
    give(model, 3)
    assert optimizer.step().update_successful
    assert not all(map(torch.equal, before, everything(model, optimizer)))


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize(
    ("settings", "bad"),
    [
        (MAIN, {2: math.inf, 3: math.nan}),
        ({**MAIN, "loss_scale": 8.0}, {3: math.inf}),
        ({"grad_norm_skip_threshold": 1e3}, {2: 1e6, 4: math.nan}),
        ({**MAIN, "grad_norm_skip_threshold": 1e3}, {2: 1e6, 3: math.inf}),
    ],
)
def test_the_steps_are_those_that_the_host_decides(mlp, build, give, name, settings, bad) -> None:
    """To the bit, and so are the results."""
    dtype = torch.bfloat16 if "bf16" in settings else torch.float32
    made = []
    for strict in (False, True):
        model = mlp(dtype)
        optimizer = build(model, name, read_before_step=strict, log_num_zeros_in_grad=True, **settings)
        results = [tuple(result) for result in train(model, optimizer, give, bad)]
        made.append((everything(model, optimizer), results))
    (found, results), (expected, strict_results) = made
    assert all(map(torch.equal, found, expected))
    assert repr(results) == repr(strict_results)  # NaN is not itself
    assert [step for step, (taken, *_) in enumerate(results) if not taken] == list(bad)


@pytest.mark.parametrize("settings", [MAIN, {"grad_norm_skip_threshold": 1e6}])
def test_the_host_reads_before_the_first_step_and_where_it_is_asked_to(
    mlp, build, give, reads, settings
) -> None:
    """Or where an entry does not declare that its step honours the flag, or nothing but all ranks can decide."""

    def read_by(name: str, **more: Any) -> list[int]:
        model = mlp(torch.bfloat16 if "bf16" in settings else torch.float32)
        optimizer = build(model, name, **settings, **more)
        counts = []
        for step in range(3):
            optimizer.pipeline.decide_pending()
            reads.clear()
            give(model, step)
            optimizer.step()
            counts.append(len(reads))
        return counts

    assert read_by("t_fused") == [1, 0, 0]
    assert read_by("t_fused", read_before_step=True) == [1, 1, 1]
    assert read_by("t_adam") == [1, 1, 1]


def test_a_loss_scale_that_changes_is_decided_before_the_next_loss(mlp, build, give, reads) -> None:
    """The host reads, since the next loss is scaled by it."""
    model = mlp(torch.float16)
    optimizer = build(model, "t_fused", fp16=True, initial_loss_scale=4.0, hysteresis=1)
    assert isinstance(optimizer.grad_scaler, DynamicGradScaler)
    results = train(model, optimizer, give, {3: math.inf})
    assert [result.update_successful for result in results] == [True, True, True, False, True, True]
    assert float(optimizer.grad_scaler.scale) == 2.0
    assert len(reads) == 6


def test_a_part_that_does_not_honour_it_decides_for_all(mlp, build, give, reads) -> None:
    """A step is made as a whole."""
    body, head = mlp(torch.bfloat16), nn.Linear(2, 2).bfloat16()
    chain = ChainedOptimizer([build(body, "t_fused", **MAIN), build(head, "t_adam", **MAIN)])
    for _ in range(3):
        reads.clear()
        for model in (body, head):
            give(model)
        chain.step()
        assert len(reads) == 1


def test_the_next_step_says_why_the_last_one_was_skipped(mlp, build, give, caplog) -> None:
    """At level INFO, as where the host reads first."""
    model = mlp(torch.bfloat16)
    optimizer = build(model, "t_fused", **MAIN)
    with caplog.at_level(logging.INFO):
        train(model, optimizer, give, {4: math.inf})
        said = "step skipped: a gradient is not finite on some rank"
        assert [record.message for record in caplog.records] == [said]


class Objecting(StepObserver):
    """Stops steps by a number on the device."""

    vote_specs = (VoteSpec("test.object", "any", stops=True),)

    def __init__(self) -> None:
        self.objects, self.heard = False, []

    def votes(self) -> Mapping[str, torch.Tensor]:
        """Object, or not."""
        return {"test.object": torch.tensor(self.objects)}

    def decide(self, fired: Mapping[str, bool]) -> tuple[str, ...]:
        """Settle it, too late on a device."""
        self.heard.append(fired["test.object"])
        return ("test.object",)


class Doubled:
    """A transform that doubles all values."""

    granularity = Granularity.ELEMENT

    def __call__(self, pieces: Any) -> None:
        """Double them."""
        for piece in pieces:
            piece.scale_(2.0)


class Plugin:
    """Brings both."""

    megaopt_api = "1"

    def __init__(self) -> None:
        self.observer = Objecting()

    @hookimpl
    def megaopt_step_observers(self, optimizer: Any) -> list[StepObserver]:
        """The one observer."""
        return [self.observer]

    @hookimpl
    def megaopt_after_step(self, optimizer: Any) -> list[Any]:
        """A transform."""
        return [Doubled()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_votes_of_observers_stop_steps_and_transforms(mlp, build, give, dtype) -> None:
    """Observers hear of them at the beginning of the next step."""
    plugin = Plugin()
    with temporary_plugin(plugin, "objecting"):
        model = mlp(dtype)
        optimizer = build(model, "t_fused", bf16=dtype is torch.bfloat16)
        give(model)
        optimizer.step()
        before = everything(model, optimizer)
        plugin.observer.objects = True
        give(model)
        result = optimizer.step()
        assert all(map(torch.equal, before, everything(model, optimizer)))
        assert plugin.observer.heard == [False]
        assert not result.update_successful
        plugin.observer.objects = False
        give(model)
        assert optimizer.step().update_successful
        assert plugin.observer.heard == [False, True]
        assert not any(map(torch.equal, before, everything(model, optimizer)))


def test_children_of_a_chain_agree_on_when_votes_are_read(mlp, build) -> None:
    """As they agree on every rule of a step."""
    made = [build(mlp(), "t_fused", read_before_step=strict) for strict in (False, True)]
    with pytest.raises(ConfigurationError, match="read_before_step"):
        ChainedOptimizer(made)
