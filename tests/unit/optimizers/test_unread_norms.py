"""Where no rule can skip a step, the host reads nothing before it: norm, clip factor and zeros stay on the device.

On a CPU results are read without waiting, so that they are; here a CPU is taken for a device that is waited for.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from megaopt_core import FP32Optimizer, MixedPrecisionOptimizer, OptimizerConfig, StepResult
from megaopt_core.errors import ConfigurationError
from megaopt_core.optimizers import MegatronOptimizer
from megaopt_core.optimizers._gradients import statistics
from megaopt_core.optimizers._gradients.statistics import scale_gradients

pytestmark = pytest.mark.any_python

READS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "numpy")


@contextlib.contextmanager
def host_reads() -> Iterator[list[str]]:
    """Yield a list of what reads a tensor's value on the host meanwhile."""
    found, originals = [], {name: getattr(torch.Tensor, name) for name in READS}
    for name, original in originals.items():

        def counted(self, *args, _name=name, _original=original, **kwargs):
            found.append(_name)
            return _original(self, *args, **kwargs)

        setattr(torch.Tensor, name, counted)
    try:
        yield found
    finally:
        for name, original in originals.items():
            setattr(torch.Tensor, name, original)


@pytest.fixture
def waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat a CPU as a device that the host waits for."""
    monkeypatch.setattr(statistics, "_READ_FREELY", frozenset())


def make(
    cls: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, *, fused: bool = True, **settings: Any
) -> tuple[nn.Module, MegatronOptimizer]:
    """Return a model with bf16 or fp32 parameters, and its optimizer."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if settings.get("bf16") else torch.float32
    model = nn.Sequential(nn.Linear(24, 40), nn.LayerNorm(40), nn.Linear(40, 8)).to(dtype)
    config = OptimizerConfig(lr=0.01, **settings)
    inner = cls(model.parameters(), lr=0.01, **({"fused": True} if fused else {}))
    kind = MixedPrecisionOptimizer if config.bf16 else FP32Optimizer
    return model, kind(inner, config)


def give_grads(model: nn.Module, step: int, factor: float = 1.0) -> None:
    """Give gradients that depend on the step alone."""
    chance = torch.Generator().manual_seed(step)
    for param in model.parameters():
        param.grad = (torch.randn(param.shape, generator=chance) * factor).to(param.dtype)


def train(made: tuple[nn.Module, MegatronOptimizer], steps: int = 5, factor: float = 1.0) -> list[StepResult]:
    """Step, and return the results."""
    model, optimizer = made
    results = []
    for step in range(steps):
        give_grads(model, step, factor)
        results.append(optimizer.step())
    return results


NO_SKIP = {"bf16": True, "skip_nonfinite_steps": False}
KINDS = [{}, NO_SKIP, {**NO_SKIP, "use_precision_aware_optimizer": True}]


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("clip", [0.0, 0.5, 1e9])
@pytest.mark.parametrize("settings", KINDS)
@pytest.mark.parametrize("fused", [True, False])
def test_nothing_is_read_before_a_step(waited_for, settings, clip, zeros, fused):
    """Nor in it; the first one looks at everything, once."""
    model, optimizer = made = make(
        fused=fused,
        cls=torch.optim.AdamW if fused else torch.optim.SGD,
        clip_grad=clip,
        log_num_zeros_in_grad=zeros,
        **settings,
    )
    train(made, 2)
    give_grads(model, 2)
    optimizer.pipeline.decide_pending()  # what the step before left is on the host long since
    optimizer.grad_norms  # noqa: B018 - reads
    with host_reads() as found:
        result = optimizer.step()
        assert result.update_successful
    assert found == []
    with host_reads() as found:
        result.grad_norm, result.num_zeros_in_grad  # noqa: B018 - they read
    assert found == (["tolist"] if clip or zeros else [])


def test_a_rule_that_skips_reads_once(waited_for):
    """Found-inf, or a limit of the norm."""
    for settings in ({"bf16": True}, {"grad_norm_skip_threshold": 1e6}):
        model, optimizer = made = make(**settings)
        train(made, 2)
        give_grads(model, 2)
        with host_reads() as found:
            optimizer.step()
        assert found == ["tolist"]


@pytest.mark.parametrize("factor", [1e-4, 1.0, 1e25])
@pytest.mark.parametrize("settings", KINDS)
@pytest.mark.parametrize("fused", [True, False])
def test_the_step_is_that_of_a_norm_that_was_read(monkeypatch, settings, fused, factor):
    """Clipped, not clipped, and of gradients whose squares overflow: the same to what float64 sums change."""
    made = {
        "cls": torch.optim.AdamW if fused else torch.optim.SGD,
        "fused": fused,
        "clip_grad": 0.7,
        **settings,
    }
    read = make(**{**made, "skip_nonfinite_steps": True})
    expected = train(read, factor=factor)
    monkeypatch.setattr(statistics, "_READ_FREELY", frozenset())
    unread = make(**made)
    found = train(unread, factor=factor)
    for one, other in zip(expected, found, strict=True):
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-6)
        assert tuple(other)[::2] == tuple(one)[::2]
    for one, other in zip(read[0].parameters(), unread[0].parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-6)


def test_a_clip_that_does_nothing_changes_no_bit(waited_for):
    """A factor of one."""
    for settings in KINDS:
        models = []
        for clip in (0.0, 1e9):
            made = make(clip_grad=clip, **settings)
            train(made)
            models.append(made[0])
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.complex64])
def test_gradients_are_scaled_as_by_a_number(dtype):
    """Not by a factor that was rounded to their dtype."""
    grads = [torch.randn(50, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in range(3)]
    wide = torch.promote_types(dtype, torch.float32)
    expected = [(grad.to(wide) * 0.3).to(dtype) for grad in grads]
    scale_gradients(grads, torch.tensor(0.3, dtype=torch.float64))
    assert all(map(torch.equal, grads, expected))


def test_the_result_is_the_tuple_that_it_stands_for(waited_for):
    """Unpacked, compared, indexed, printed, pickled and hashed."""
    import pickle

    made = make(clip_grad=1.0, log_num_zeros_in_grad=True)
    give_grads(made[0], 0)
    expected = math.sqrt(sum(param.grad.double().square().sum().item() for param in made[0].parameters()))
    (result,) = train(made, 1)
    successful, norm, zeros = result
    assert (successful, norm, zeros) == (True, pytest.approx(expected, rel=1e-6), 0)
    assert result == (True, norm, 0) == tuple(result)
    assert result != (True, norm, 1)
    assert (result[0], result[1], result[-1], result[1:]) == (True, norm, 0, (norm, 0))
    assert repr(result) == f"StepResult(update_successful=True, grad_norm={norm!r}, num_zeros_in_grad=0)"
    assert pickle.loads(pickle.dumps(result)) == result  # noqa: S301 - our own
    assert hash(result) == hash((True, norm, 0))
    assert made[1].grad_norms == {None: norm}
    assert (result._replace(grad_norm=1.0), result._asdict()["grad_norm"]) == ((True, 1.0, 0), norm)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_without_the_rule_bf16_steps_as_fp32_does(waited_for, value):
    """What is not finite goes into the parameters."""
    model, optimizer = make(clip_grad=1.0, **NO_SKIP)
    give_grads(model, 0)
    model[0].bias.grad[0] = value
    assert optimizer.step().update_successful
    assert model[0].bias.isnan().any()


@pytest.mark.parametrize("settings", [{"fp16": True}, {"bf16": True, "loss_scale": 8.0}])
def test_a_scaled_loss_needs_the_rule(settings):
    """At construction."""
    with pytest.raises(ConfigurationError, match="skip_nonfinite_steps=False: gradients of a scaled loss"):
        OptimizerConfig(skip_nonfinite_steps=False, **settings)


def test_writes_that_no_counter_sees_are_told_a_step_later(waited_for):
    """Counted ones are taken over, as everywhere."""
    model, _ = made = make(clip_grad=1.0, **NO_SKIP)
    train(made, 2)
    with torch.no_grad():
        model[0].weight.fill_(0.25)
    train(made, 1)
    assert (model[0].weight - 0.25).abs().max() < 0.05
    model[0].weight.data = torch.zeros_like(model[0].weight)
    model[2].weight.data.fill_(3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(made, 1)
    with pytest.warns(UserWarning, match=r"the model was changed before the last step.*reload_model_params"):
        train(made, 1)
