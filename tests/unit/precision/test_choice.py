"""A precision policy is chosen by its name, which any plugin may give."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from megaopt_testing import temporary_plugin

from megaopt_core import OptimizerConfig, PrecisionPolicy, build_optimizer, get_registry, hookimpl
from megaopt_core.errors import ConfigurationError, PluginError, PluginNotInstalledError, UnknownNameError
from megaopt_core.plugin_api import OptimizerEntry
from megaopt_core.precision import Fp32, MainParams
from megaopt_core.registry import reset_registry

pytestmark = pytest.mark.any_python


class InPlace(PrecisionPolicy):
    """Steps 16-bit parameters where they are."""

    is_mixed = True


class Plugin:
    """Offers an optimizer, a policy, and something else under the name of one."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        return {"descent": OptimizerEntry(torch.optim.SGD, supports_fp16=True)}

    @hookimpl
    def megaopt_precision_policies(self) -> dict[str, type]:
        return {"in-place": InPlace, "no-policy": dict}


@pytest.fixture(autouse=True)
def offered() -> Iterator[None]:
    """Install the plugin."""
    with temporary_plugin(Plugin(), name="in-place"):
        yield


def policy(dtype: torch.dtype = torch.bfloat16, **settings: object) -> PrecisionPolicy:
    """Return the policy that a build has chosen, after a step that changed what the model holds."""
    model = torch.nn.Linear(4, 4).to(dtype)
    optimizer = build_optimizer(model, "descent", lr=0.5, **settings)
    before = model.weight.detach().clone()
    model(torch.ones(1, 4, dtype=dtype)).sum().backward()
    assert optimizer.step().update_successful
    assert not torch.equal(model.weight, before)
    return optimizer.parts[0].precision


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, Fp32),
        ({"bf16": True}, MainParams),
        ({"precision": "fp32", "bf16": True}, Fp32),
        ({"precision": "main_params"}, MainParams),
        ({"precision": "in-place", "bf16": True}, InPlace),
    ],
)
def test_a_name_wins_over_what_other_settings_mean(settings, expected) -> None:
    """Without one they choose."""
    assert type(policy(**settings)) is expected


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"precision": "in-plase"}, UnknownNameError, "unknown precision policy 'in-plase'.*in-place"),
        (
            {"precision": "no-policy"},
            PluginError,
            "'no-policy' of plugin 'in-place'.*dict is no PrecisionPolicy",
        ),
        ({"precision": 3}, ConfigurationError, "precision=3: must be a name"),
        (
            {"precision": "in-place", "use_precision_aware_optimizer": True},
            ConfigurationError,
            "precision='in-place': use_precision_aware_optimizer=True asks for a policy too",
        ),
    ],
)
def test_a_name_that_cannot_be_had_is_an_error(settings, error, words) -> None:
    """The message says what was given and what there is."""
    with pytest.raises(error, match=words):
        policy(**settings)


def test_without_its_plugin_the_setting_names_the_distribution(monkeypatch) -> None:
    """The configuration keeps it; the build says what to install."""
    monkeypatch.setenv("MEGAOPT_DISABLE_PLUGINS", "lowbit")
    reset_registry()
    try:
        with temporary_plugin(SimpleNamespace(megaopt_api="1"), name="beside"):
            settings = {"lr": 0.1, "bf16": True, "use_precision_aware_optimizer": True}
            config = OptimizerConfig(optimizer="descent", **settings)
            assert config.use_precision_aware_optimizer
            with pytest.raises(
                PluginNotInstalledError, match=r"'precision_aware' comes with .*megaopt-lowbit"
            ):
                build_optimizer(torch.nn.Linear(2, 2).bfloat16(), "descent", **settings)
            assert "precision_aware" not in get_registry().precision_policies()
    finally:
        monkeypatch.undo()
        reset_registry()
