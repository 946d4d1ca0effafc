"""Settings that a style declares for itself: filled, refused, saved and loaded, described, drawn."""

import pytest
import torch
from attrs import field, frozen

from megaopt_core.config import between
from megaopt_core.errors import BrokenPluginWarning, ScheduleError
from megaopt_core.plugin_api import LearningRatePoint, ScheduleStyle, WeightDecayPoint
from megaopt_core.schedules import OptimizerParamScheduler


@frozen
class Power:
    """Of a polynomial."""

    power: float = field(default=2.0, validator=between(0.1, 10.0), metadata={"help": "of the polynomial"})


def _falls(point: LearningRatePoint) -> float:
    return point.between((1 - point.progress) ** point.settings.power)


def _grows(point: WeightDecayPoint) -> float:
    return point.between(point.progress**point.settings.power)


POLYNOMIAL = ScheduleStyle(learning_rate=_falls, weight_decay=_grows, settings=Power)


def _scheduler(
    style: str = "polynomial", wd_style: str = "constant", **more: object
) -> OptimizerParamScheduler:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    styles = {"polynomial": POLYNOMIAL}
    wd = (0.1, 0.1) if wd_style == "constant" else (0.0, 1.0)
    return OptimizerParamScheduler(
        optimizer, 0.0, 1.0, 0.0, 0, 100, style, *wd, 100, wd_style, styles=styles, **more
    )


def _lr(scheduler: OptimizerParamScheduler) -> float:
    return scheduler.optimizer.param_groups[0]["lr"]


def test_what_is_left_out_has_its_default() -> None:
    """Half way (1/2)^2 is left, and (1/2)^3 where that is set."""
    usual, cubic = _scheduler(), _scheduler(lr_style_settings={"power": 3.0})
    for scheduler in (usual, cubic):
        scheduler.step(50)
    assert (_lr(usual), _lr(cubic)) == (0.25, 0.125)


def test_a_style_of_weight_decay_has_its_own() -> None:
    """One style may serve both, with different values."""
    scheduler = _scheduler(
        wd_style="polynomial", lr_style_settings={"power": 1.0}, wd_style_settings={"power": 3.0}
    )
    scheduler.step(50)
    assert (_lr(scheduler), scheduler.optimizer.param_groups[0]["weight_decay"]) == (0.5, 0.125)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"powr": 1.0}, "has no setting 'powr'; it has power; did you mean 'power'?"),
        ({"power": -1.0}, "refuses it: power=-1.0: must be a number in"),
        ({"power": "much"}, "refuses it: power='much'"),
        (3, "must map names of settings to values"),
    ],
)
def test_what_cannot_be_is_refused(given: object, told: str) -> None:
    """When the scheduler is built."""
    with pytest.raises(ScheduleError, match=r"^lr_style_settings") as caught:
        _scheduler(lr_style_settings=given)
    assert told in str(caught.value)


def test_a_style_without_settings_takes_none() -> None:
    """A setting that nobody hears is an error."""
    with pytest.raises(ScheduleError, match="style 'linear' has no setting 'power'; it has none"):
        _scheduler("linear", lr_style_settings={"power": 1.0})


def test_they_are_saved_and_loaded() -> None:
    """The checkpoint's, or an error, or this scheduler's, as all settings; also over a change of style."""
    saved = _scheduler(lr_style_settings={"power": 3.0})
    saved.step(50)
    assert saved.state_dict()["lr_style_settings"] == {"power": 3.0}
    assert "wd_style_settings" not in saved.state_dict()
    for other in (_scheduler(), _scheduler("linear")):
        other.load_state_dict(saved.state_dict())
        assert _lr(other) == 0.125
    strict = _scheduler(use_checkpoint_opt_param_scheduler=False)
    with pytest.raises(ScheduleError, match="lr_style_settings is"):
        strict.load_state_dict(saved.state_dict())
    assert _lr(strict) == 1.0
    own = _scheduler(override_opt_param_scheduler=True)
    own.load_state_dict(saved.state_dict())
    assert _lr(own) == 0.25
    line = _scheduler("linear")
    line.step(50)
    saved.load_state_dict(line.state_dict())
    assert _lr(saved) == 0.5
    assert "lr_style_settings" not in saved.state_dict()


PLUGIN = """
from megaopt_core.config import between, not_negative

@frozen
class Settings:
    power: float = field(default=2.0, validator=VALIDATOR, metadata={"help": "of the polynomial"})

@hookimpl
def megaopt_schedules():
    return {"polynomial": ScheduleStyle(
        learning_rate=lambda point: point.between((1 - point.progress) ** point.settings.power),
        settings=Settings, description="a power of what is left")}
"""


def test_a_wrong_declaration_breaks_its_plugin_in_one_line(plugins) -> None:
    """A validator that was not called is named."""
    plugins.install("poly", PLUGIN.replace("VALIDATOR", "not_negative"))
    registry = plugins.registry()
    with pytest.warns(BrokenPluginWarning, match="poly"):
        registry.load()
    (info,) = [info for info in registry.plugins() if info.name == "poly"]
    assert "schedule 'polynomial': Settings cannot be made of its defaults: TypeError: not_nega" in info.error
