"""Loss scalers: the tracker rule, its limits, and its state."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megaopt_core import ConstantGradScaler, DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megaopt_core.errors import ConfigurationError, StateDictError

pytestmark = pytest.mark.any_python

COUNT = "a whole number of at least 1"
RANGE = "above 0 and finite in fp32, as 1 over it"


class Model:
    """The rule in ten lines."""

    def __init__(
        self, scale: float, least: float, growth: float, backoff: float, window: int, hysteresis: int
    ) -> None:
        self.scale, self.least, self.growth, self.backoff = scale, least, growth, backoff
        self.window, self.hysteresis, self.good, self.left = window, hysteresis, 0, hysteresis

    def update(self, overflow: bool) -> None:
        self.good = 0 if overflow else self.good + 1
        self.left -= overflow
        if overflow and self.left <= 0:
            self.scale = max(self.scale * self.backoff, self.least)
        if self.good == self.window:
            self.scale, self.good, self.left = self.scale * self.growth, 0, self.hysteresis


@given(
    overflows=st.lists(st.booleans(), max_size=60),
    window=st.integers(1, 5),
    hysteresis=st.integers(1, 4),
    exponent=st.integers(0, 20),
    backoff=st.sampled_from([0.5, 0.25]),
    growth=st.sampled_from([2.0, 4.0]),
)
def test_dynamic_scale_follows_the_tracker_rule(
    overflows, window, hysteresis, exponent, backoff, growth
) -> None:
    """After any sequence of overflows and good steps the scale is what the rule says."""
    arguments = (2.0**exponent, 1.0, growth, backoff, window, hysteresis)
    scaler, model = DynamicGradScaler(*arguments), Model(*arguments)
    for overflow in overflows:
        scaler.update(overflow)
        model.update(overflow)
        assert scaler.scale.item() == torch.tensor(model.scale, dtype=torch.float32).item()


@given(
    outcomes=st.lists(st.sampled_from(["good", "inf", "nan"]), max_size=25),
    window=st.integers(1, 4),
    hysteresis=st.integers(1, 3),
    exponent=st.integers(0, 8),
)
def test_steps_follow_the_tracker_rule(outcomes, window, hysteresis, exponent) -> None:
    """Through `optimizer.step()`: the scale is what the rule says, and only good steps are made, unscaled."""
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    arguments = (2.0**exponent, 1.0, 2.0, 0.5, window, hysteresis)
    optimizer = MixedPrecisionOptimizer(
        torch.optim.SGD([weight], lr=1.0),
        OptimizerConfig(fp16=True, clip_grad=0.0),
        DynamicGradScaler(*arguments),
    )
    rule, made = Model(*arguments), 0
    for outcome in outcomes:
        scale = optimizer.get_loss_scale().item()
        weight.grad = torch.full((2,), 2.0**-10 * min(scale, 2.0**20), dtype=torch.float16)
        if outcome != "good":
            weight.grad[0] = float(outcome)
        result = optimizer.step()
        rule.update(outcome != "good")
        made += (outcome == "good") * 2.0**-10 * min(scale, 2.0**20) / scale
        assert result.update_successful is (outcome == "good")
        assert optimizer.get_loss_scale().item() == rule.scale
        assert optimizer.get_main_params()[0].tolist() == [-made, -made]


def test_hysteresis_stays_spent_until_the_scale_grows() -> None:
    """Good steps alone do not make the scaler patient again."""
    scaler = DynamicGradScaler(16.0, 1.0, growth_interval=3, hysteresis=2)
    for overflow in (True, False, True, False, True):
        scaler.update(overflow)
    assert scaler.scale.item() == 4.0


def test_scale_never_falls_below_the_minimum() -> None:
    """Backing off stops at `min_scale`."""
    scaler = DynamicGradScaler(4.0, 3.0, hysteresis=1)
    scaler.update(True)
    assert scaler.scale.item() == 3.0


def test_inverse_is_rounded_once() -> None:
    """`inv_scale` is the fp32 number nearest to one over the scale."""
    assert ConstantGradScaler(3.0).inv_scale.item() == torch.tensor(1.0 / 3.0, dtype=torch.float32).item()


def test_constant_scale_stays() -> None:
    """Overflows leave a constant scale alone."""
    scaler = ConstantGradScaler(128.0)
    scaler.update(True)
    scaler.load_state_dict(scaler.state_dict())
    assert scaler.scale.tolist() == [128.0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"initial_scale": 0.0}, f"initial_scale=0.0: must be {RANGE}"),
        ({"min_scale": -1.0}, f"min_scale=-1.0: must be {RANGE}"),
        ({"initial_scale": 1e39}, f"initial_scale=1e+39: must be {RANGE}"),
        ({"initial_scale": 1e-46}, f"initial_scale=1e-46: must be {RANGE}"),
        ({"initial_scale": float("nan")}, f"initial_scale=nan: must be {RANGE}"),
        ({"initial_scale": 10**400}, f"initial_scale={10**400}: must be {RANGE}"),
        ({"min_scale": 1e-39}, f"min_scale=1e-39: must be {RANGE}"),
        ({"min_scale": 8.0}, "min_scale=8.0: must not be above initial_scale=4.0"),
        ({"growth_factor": 1.0}, "growth_factor=1.0: must be a number above 1"),
        ({"growth_factor": float("inf")}, "growth_factor=inf: must be a number above 1"),
        ({"growth_factor": "2"}, "growth_factor='2': must be a number above 1"),
        ({"backoff_factor": 1.0}, "backoff_factor=1.0: must be a number between 0 and 1"),
        ({"growth_interval": 0}, f"growth_interval=0: must be {COUNT}"),
        ({"growth_interval": 2.5}, f"growth_interval=2.5: must be {COUNT}"),
        ({"growth_interval": None}, f"growth_interval=None: must be {COUNT}"),
        ({"hysteresis": 0}, f"hysteresis=0: must be {COUNT}"),
        ({"hysteresis": True}, f"hysteresis=True: must be {COUNT}"),
        ({"initial_scale": "x"}, f"initial_scale='x': must be {RANGE}"),
    ],
)
def test_bad_values_are_refused(changed, message) -> None:
    """Every value that the rule cannot work with is named."""
    with pytest.raises(ConfigurationError) as caught:
        DynamicGradScaler(**{"initial_scale": 4.0, "min_scale": 1.0, **changed})
    assert str(caught.value) == message
    assert caught.value.setting == next(iter(changed))


def test_state_round_trip_continues_alike() -> None:
    """A scaler that took over a state goes on as the one that gave it."""
    first, second = (
        DynamicGradScaler(64.0, 1.0, growth_interval=2),
        DynamicGradScaler(4.0, 1.0, growth_interval=2),
    )
    first.update(True)
    second.load_state_dict(first.state_dict())
    for overflow in (True, False, False, True):
        first.update(overflow)
        second.update(overflow)
        assert first.state_dict() == second.state_dict()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"scale": torch.tensor([2.0])}, "lacks ['growth_tracker', 'hysteresis_tracker']"),
        ({"scale": torch.tensor([2.0]), "growth_tracker": "x", "hysteresis_tracker": 1}, "cannot be read"),
        *(
            (
                {"scale": scale, "growth_tracker": 0, "hysteresis_tracker": 1},
                f"scale={scale!r}: it must be {RANGE}",
            )
            for scale in (float("nan"), float("inf"), 0.0, -4.0)
        ),
    ],
)
def test_a_bad_state_changes_nothing(state, message) -> None:
    """A state that cannot be read is refused as a whole."""
    scaler = DynamicGradScaler(64.0, 1.0)
    before = scaler.state_dict()
    with pytest.raises(StateDictError) as caught:
        scaler.load_state_dict(state)
    assert message in str(caught.value)
    assert scaler.state_dict() == before


def test_the_scale_stays_finite() -> None:
    """It grows as far as fp32 goes, comes down after an overflow, and may grow again."""
    scaler = DynamicGradScaler(2.0**120, 1.0, growth_interval=1, hysteresis=1)
    scales = []
    for overflow in (*[False] * 20, True, False, False):
        scaler.update(overflow)
        scales.append(scaler.scale.item())
    assert scales[-4:] == [2.0**127, 2.0**126, 2.0**127, 2.0**127]
    assert scaler.inv_scale.item() > 0.0


def test_a_shorter_interval_after_a_resume() -> None:
    """A counter that is past the interval by then does not wait for ever."""
    first = DynamicGradScaler(4.0, 1.0, growth_interval=10)
    for _ in range(8):
        first.update(False)
    second = DynamicGradScaler(4.0, 1.0, growth_interval=5)
    second.load_state_dict(first.state_dict())
    second.update(False)
    assert second.scale.item() == 8.0
