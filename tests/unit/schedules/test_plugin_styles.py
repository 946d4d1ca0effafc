"""Schedules that a plugin brings through its hook, against torch's schedulers of the same kind."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from megaopt_core.errors import DuplicateNameError, ScheduleError
from megaopt_core.registry import PluginRegistry, reset_registry
from megaopt_core.schedules import OptimizerParamScheduler

PLUGINS = Path(__file__).parents[2] / "plugins"


def entry_point(name: str = "restarts") -> EntryPoint:
    """What an installed distribution would declare."""
    return EntryPoint(name=name, value="megaopt_restarts", group="megaopt")


@pytest.fixture
def _plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(PLUGINS)
    reset_registry(PluginRegistry(entry_points=[entry_point()], environ={}))
    yield
    reset_registry()


def sgd() -> torch.optim.SGD:
    """A plain torch optimizer."""
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def scheduler_on(optimizer: torch.optim.Optimizer, style: str, **changes: Any) -> OptimizerParamScheduler:
    """A scheduler without warm-up that decays to zero over 20 steps."""
    settings = {"init_lr": 0.0, "max_lr": 1.0, "min_lr": 0.0, "lr_warmup_steps": 0, "lr_decay_steps": 20}
    settings |= {"start_wd": 0.0, "end_wd": 0.4, "wd_incr_steps": 10, "wd_incr_style": "linear"}
    return OptimizerParamScheduler(optimizer, **(settings | {"lr_decay_style": style} | changes))


@pytest.mark.usefixtures("_plugin")
def test_warm_restarts_equal_torchs() -> None:
    """The style is asked after `lr_decay_steps` too, as it declares: three cycles, step for step."""
    ours, theirs = sgd(), sgd()
    scheduler = scheduler_on(ours, "warm-restarts")
    reference = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(theirs, T_0=20)
    for _ in range(60):
        theirs.step()
        reference.step()
        scheduler.step(1)
        assert ours.param_groups[0]["lr"] == pytest.approx(theirs.param_groups[0]["lr"], abs=1e-12)


@pytest.mark.usefixtures("_plugin")
def test_quadratic_equals_torchs_and_serves_weight_decay() -> None:
    """One name may serve both settings; after its decay the minimum holds."""
    ours, theirs = sgd(), sgd()
    scheduler = scheduler_on(ours, "quadratic", wd_incr_style="quadratic")
    reference = torch.optim.lr_scheduler.PolynomialLR(theirs, total_iters=20, power=2.0)
    for t in range(1, 30):
        theirs.step()
        reference.step()
        scheduler.step(1)
        (group,) = ours.param_groups
        assert group["lr"] == pytest.approx(theirs.param_groups[0]["lr"], abs=1e-12)
        assert group["weight_decay"] == pytest.approx(0.4 * min(t / 10, 1) ** 2)


@pytest.mark.usefixtures("_plugin")
def test_a_checkpoint_brings_the_plugins_style_back() -> None:
    """Only the name is saved; the registry finds the style again."""
    saved = scheduler_on(sgd(), "warm-restarts")
    saved.step(27)
    optimizer = sgd()
    loaded = scheduler_on(optimizer, "linear")
    loaded.load_state_dict(saved.state_dict())
    assert loaded.lr_decay_style == "warm-restarts"
    assert optimizer.param_groups[0]["lr"] == saved.get_lr({})


def test_a_checkpoint_whose_style_is_not_installed_changes_nothing() -> None:
    """The style's name is in the message, and what there is."""
    optimizer = sgd()
    loaded = scheduler_on(optimizer, "linear")
    state = loaded.state_dict() | {"lr_decay_style": "warm-restarts", "num_steps": 5}
    with pytest.raises(ScheduleError) as error:
        loaded.load_state_dict(state)
    assert str(error.value) == (
        "lr_decay_style='warm-restarts': no plugin offers this style; "
        "known are constant, cosine, inverse-square-root, linear, WSD"
    )
    assert (loaded.num_steps, loaded.lr_decay_style, optimizer.param_groups[0]["lr"]) == (0, "linear", 1.0)


@pytest.mark.usefixtures("_plugin")
def test_the_plugins_check_runs_at_construction() -> None:
    """What the plugin refuses is refused before the first step."""
    with pytest.raises(ScheduleError) as error:
        scheduler_on(sgd(), "warm-restarts", min_lr=1.0)
    assert str(error.value) == "min_lr=1.0: style 'warm-restarts' needs it below max_lr=1.0"


@pytest.mark.usefixtures("_plugin")
def test_messages_list_the_plugins_styles() -> None:
    """Installed styles are offered to whoever mistypes one, if they serve the setting."""
    with pytest.raises(ScheduleError) as error:
        scheduler_on(sgd(), "warm_restarts")
    assert str(error.value) == (
        "lr_decay_style='warm_restarts': no plugin offers this style (did you mean 'warm-restarts'?); "
        "known are constant, cosine, inverse-square-root, linear, quadratic, warm-restarts, WSD"
    )
    with pytest.raises(ScheduleError) as error:
        scheduler_on(sgd(), "linear", wd_incr_style="warm-restarts")
    assert str(error.value) == (
        "wd_incr_style='warm-restarts': this style serves lr_decay_style only; "
        "known are constant, cosine, linear, quadratic"
    )


def test_two_plugins_cannot_give_one_name(monkeypatch, tmp_path) -> None:
    """The registry refuses, so that a style never depends on who was loaded first."""
    monkeypatch.syspath_prepend(PLUGINS)
    (tmp_path / "megaopt_copied.py").write_text((PLUGINS / "megaopt_restarts.py").read_text())
    monkeypatch.syspath_prepend(tmp_path)
    copied = EntryPoint(name="two", value="megaopt_copied", group="megaopt")
    reset_registry(PluginRegistry(entry_points=[entry_point("one"), copied], environ={}))
    with pytest.raises(DuplicateNameError, match="schedule 'warm-restarts'"):
        scheduler_on(sgd(), "warm-restarts")
