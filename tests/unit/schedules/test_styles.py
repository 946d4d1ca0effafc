"""Every style against its formula, written out here in plain math."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaopt_core.errors import ScheduleError
from megaopt_core.plugin_api import AfterDecay, ScheduleStyle
from megaopt_core.schedules import BUILTIN_STYLES
from megaopt_core.schedules._styles import WSD_DECAYS, LearningRatePoint, WeightDecayPoint

pytestmark = pytest.mark.any_python

LR_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WD_STYLES = ("constant", "linear", "cosine")


def lr_formula(
    style: str,
    t: float,
    *,
    init: float,
    top: float,
    low: float,
    w: int,
    d: int,
    wsd: int | None = None,
    curve: str | None = None,
) -> float:
    """The learning rate as the documentation states it."""
    if w > 0 and t <= w:
        return init + (top - init) * t / w
    if style == "constant":
        return top
    if t > d:
        return low
    if style == "inverse-square-root":
        return max(low, top * max(w, 1) ** 0.5 / max(t, 1) ** 0.5)
    if style == "WSD":
        if t <= d - wsd:
            return top
        q = (t - (d - wsd)) / wsd
        coefficient = {
            "linear": 1 - q,
            "cosine": (math.cos(math.pi * q) + 1) / 2,
            "exponential": 2 * 0.5**q - 1,
            "minus_sqrt": 1 - q**0.5,
        }[curve]
    else:
        r = (t - w) / (d - w)
        coefficient = {"linear": 1 - r, "cosine": (math.cos(r * math.pi) + 1) / 2}[style]
    return low + coefficient * (top - low)


def wd_formula(style: str, t: float, *, start: float, end: float, steps: int) -> float:
    """Weight decay as the documentation states it."""
    if t > steps or style == "constant":
        return end
    r = t / steps if steps else 1.0
    coefficient = {"linear": r, "cosine": (math.cos(math.pi * (1 - r)) + 1) / 2}[style]
    return start + coefficient * (end - start)


@st.composite
def lr_settings(draw: st.DrawFn) -> dict:
    """Valid settings of a learning rate, WSD's included."""
    top = draw(st.floats(1e-6, 10.0))
    d = draw(st.integers(1, 5000))
    w = draw(st.integers(0, d - 1))
    return {
        "init": draw(st.floats(0, top)),
        "top": top,
        "low": draw(st.floats(0, top)),
        "w": w,
        "d": d,
        "wsd": draw(st.integers(1, d - w)),
        "curve": draw(st.sampled_from(sorted(WSD_DECAYS))),
    }


def point_at(t: float, settings: dict) -> LearningRatePoint:
    """The point that these settings describe."""
    return LearningRatePoint(
        step=t,
        init_lr=settings["init"],
        max_lr=settings["top"],
        min_lr=settings["low"],
        lr_warmup_steps=settings["w"],
        lr_decay_steps=settings["d"],
        wsd_decay_steps=settings["wsd"],
        lr_wsd_decay_style=settings["curve"],
    )


@pytest.mark.parametrize("style", LR_STYLES)
@given(settings=lr_settings(), share=st.floats(0, 1.2))
def test_learning_rate_follows_its_formula(style, settings, share) -> None:
    """Anywhere in warm-up, decay and after it, the style gives the formula's value."""
    t = round(share * settings["d"])
    expected = lr_formula(style, t, **settings)
    actual = BUILTIN_STYLES[style].learning_rate_at(point_at(t, settings))
    assert actual == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("style", LR_STYLES)
@given(settings=lr_settings())
def test_learning_rate_stays_between_its_ends(style, settings) -> None:
    """No step lies outside what the settings allow."""
    lowest = min(settings["init"], settings["low"])
    for t in {0, 1, settings["w"], settings["w"] + 1, settings["d"] - 1, settings["d"], settings["d"] + 1}:
        value = BUILTIN_STYLES[style].learning_rate_at(point_at(t, settings))
        assert lowest - 1e-12 <= value <= settings["top"] * (1 + 1e-12) + 1e-15


@pytest.mark.parametrize("style", LR_STYLES)
@given(settings=lr_settings(), data=st.data())
def test_learning_rate_only_rises_in_warmup_and_only_falls_after_it(style, settings, data) -> None:
    """Two steps of one phase are in the phase's order."""
    w, d = settings["w"], settings["d"]
    at = BUILTIN_STYLES[style].learning_rate_at
    early, late = sorted(data.draw(st.tuples(st.integers(w, d + 5), st.integers(w, d + 5))))
    assert at(point_at(late, settings)) <= at(point_at(early, settings)) * (1 + 1e-12) + 1e-15
    early, late = sorted(data.draw(st.tuples(st.integers(0, w), st.integers(0, w))))
    if w:
        assert at(point_at(early, settings)) <= at(point_at(late, settings)) * (1 + 1e-12) + 1e-15


@pytest.mark.parametrize("style", ["linear", "cosine", "WSD"])
@given(settings=lr_settings())
def test_learning_rate_is_continuous_at_its_boundaries(style, settings) -> None:
    """It reaches max_lr as warm-up ends, leaves from there, and arrives at min_lr as the decay ends."""
    at = BUILTIN_STYLES[style].learning_rate_at
    tiny = 1e-9
    assert at(point_at(settings["w"], settings)) == pytest.approx(settings["top"])
    assert at(point_at(settings["w"] + tiny, settings)) == pytest.approx(settings["top"], rel=1e-3)
    assert at(point_at(settings["d"], settings)) == pytest.approx(settings["low"], abs=1e-12)
    assert at(point_at(settings["d"] + 1, settings)) == settings["low"]


@pytest.mark.parametrize("curve", sorted(WSD_DECAYS))
def test_wsd_is_flat_until_its_decay_begins(curve) -> None:
    """The stable phase ends at exactly `d - wsd_decay_steps`."""
    settings = {"init": 0.0, "top": 1.0, "low": 0.0, "w": 10, "d": 100, "wsd": 40, "curve": curve}
    at = BUILTIN_STYLES["WSD"].learning_rate_at
    assert [at(point_at(t, settings)) for t in (10, 35, 60)] == [1.0, 1.0, 1.0]
    assert at(point_at(61, settings)) < 1.0


@pytest.mark.parametrize("style", LR_STYLES)
def test_no_warmup_starts_at_the_maximum(style) -> None:
    """Without warm-up `init_lr` plays no part."""
    settings = {"init": 0.5, "top": 1.0, "low": 0.0, "w": 0, "d": 100, "wsd": 40, "curve": "linear"}
    assert BUILTIN_STYLES[style].learning_rate_at(point_at(0, settings)) == 1.0


def test_constant_goes_on_after_the_decay() -> None:
    """Every other style is at its minimum there."""
    settings = {"init": 0.0, "top": 1.0, "low": 0.1, "w": 0, "d": 10, "wsd": 4, "curve": "linear"}
    values = {name: BUILTIN_STYLES[name].learning_rate_at(point_at(11, settings)) for name in LR_STYLES}
    assert values == {"constant": 1.0, "linear": 0.1, "cosine": 0.1, "inverse-square-root": 0.1, "WSD": 0.1}


@pytest.mark.parametrize("style", WD_STYLES)
@given(
    start=st.floats(0, 1),
    more=st.floats(0, 1),
    steps=st.integers(0, 5000),
    share=st.floats(0, 1.2),
)
def test_weight_decay_follows_its_formula(style, start, more, steps, share) -> None:
    """Up to the end of the increments and after them, between the two ends."""
    end = start if style == "constant" else start + more
    t = round(share * steps)
    point = WeightDecayPoint(step=t, start_wd=start, end_wd=end, wd_incr_steps=steps)
    actual = BUILTIN_STYLES[style].weight_decay_at(point)
    assert actual == pytest.approx(
        wd_formula(style, t, start=start, end=end, steps=steps), rel=1e-12, abs=1e-15
    )
    assert start - 1e-12 <= actual <= end + 1e-12


@pytest.mark.parametrize("style", WD_STYLES)
def test_weight_decay_without_increments_is_at_its_end(style) -> None:
    """Zero increment steps mean the end value from step 0 on, not a division by zero."""
    point = WeightDecayPoint(step=0, start_wd=0.1, end_wd=0.1, wd_incr_steps=0)
    assert BUILTIN_STYLES[style].weight_decay_at(point) == 0.1


def test_wsd_curves_fall_from_one_to_zero() -> None:
    """The four decays begin and end where the schedule needs it."""
    assert {name: curve(0.0) for name, curve in WSD_DECAYS.items()} == dict.fromkeys(WSD_DECAYS, 1.0)
    assert {name: curve(1.0) for name, curve in WSD_DECAYS.items()} == dict.fromkeys(WSD_DECAYS, 0.0)


def test_builtin_names() -> None:
    """The names that users write."""
    assert tuple(name for name, style in BUILTIN_STYLES.items() if style.learning_rate) == LR_STYLES
    assert tuple(name for name, style in BUILTIN_STYLES.items() if style.weight_decay) == WD_STYLES
    assert all(style.description for style in BUILTIN_STYLES.values())


def test_a_style_needs_a_curve() -> None:
    """A style that gives neither value is refused where it is made."""
    message = "a ScheduleStyle needs learning_rate, weight_decay or both; neither is given"
    with pytest.raises(ScheduleError, match=re.escape(message)):
        ScheduleStyle(description="nothing")


def test_a_style_that_goes_on_is_asked_after_the_decay() -> None:
    """`AfterDecay.CURVE` hands every later step to the style."""
    style = ScheduleStyle(learning_rate=lambda point: float(point.step), after_decay=AfterDecay.CURVE)
    assert style.learning_rate_at(LearningRatePoint(step=12, max_lr=1.0, lr_decay_steps=10)) == 12.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_style_that_gives_no_number_is_named(bad) -> None:
    """A curve that divides by zero is noticed at the step where it happens."""
    style = ScheduleStyle(learning_rate=lambda point: bad, weight_decay=lambda point: bad)
    with pytest.raises(ScheduleError) as error:
        style.learning_rate_at(LearningRatePoint(step=3, max_lr=1.0, lr_decay_steps=10))
    assert str(error.value) == f"the style gives learning rate {bad!r} at step 3: must be finite"
    with pytest.raises(ScheduleError) as error:
        style.weight_decay_at(WeightDecayPoint(step=3, start_wd=0.0, end_wd=0.1, wd_incr_steps=9))
    assert str(error.value) == f"the style gives weight decay {bad!r} at step 3: must be finite"


def test_a_style_serves_only_what_it_has() -> None:
    """Asking a style for its missing half says so."""
    with pytest.raises(ScheduleError, match=r"^this style is not one for weight decay$"):
        BUILTIN_STYLES["WSD"].weight_decay_at(
            WeightDecayPoint(step=0, start_wd=0.0, end_wd=0.1, wd_incr_steps=9)
        )
    style = ScheduleStyle(weight_decay=lambda point: point.end_wd)
    with pytest.raises(ScheduleError, match=r"^this style is not one for the learning rate$"):
        style.learning_rate_at(LearningRatePoint(step=0, max_lr=1.0, lr_decay_steps=10))
