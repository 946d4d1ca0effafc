"""What the plugin offers to megaopt."""

import subprocess
import sys
from types import SimpleNamespace

import attrs
import pytest
import torch
from megaopt_lion.lion import Lion
from megaopt_lion.plugin import megaopt_api, megaopt_optimizer_entries
from megaopt_lion.settings import LionSettings

from megaopt_core import ParamKey, build_optimizer
from megaopt_core.errors import ConfigurationError
from megaopt_core.params import Granularity

ENTRY = megaopt_optimizer_entries()["lion"]


def test_entry():
    """The entry names the class, its granularity and what its state may be kept in."""
    assert megaopt_api == "1"
    assert ENTRY.load_class() is Lion
    assert ENTRY.granularity is Granularity.ELEMENT
    assert torch.bfloat16 in ENTRY.state_dtypes["exp_avg"]


def test_configuration_gives_its_own_betas():
    """Lion takes lion_beta1 and lion_beta2, whatever Adam's are."""
    config = SimpleNamespace(
        lr=0.1,
        weight_decay=0.2,
        decoupled_weight_decay=True,
        cautious_weight_decay=True,
        lion_beta1=0.5,
        lion_beta2=0.6,
        lion_compile=None,
        adam_beta1=0.9,
    )
    optimizer = Lion([torch.nn.Parameter(torch.ones(1))], **ENTRY.config_to_kwargs(config, [], None))
    given = {"lr": 0.1, "betas": (0.5, 0.6), "weight_decay": 0.2, "cautious_weight_decay": True}
    assert {key: optimizer.defaults[key] for key in given} == given


@pytest.mark.any_python
def test_listing_entries_imports_no_algorithm():
    """The plugin's module does not import the optimizer."""
    code = (
        "import sys, megaopt_lion.plugin as plugin; plugin.megaopt_optimizer_entries();"
        "assert 'megaopt_lion.lion' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("kwargs", [{"beta1": 1.0}, {"beta2": -0.1}, {"compile": "yes"}])
def test_settings_are_checked(kwargs):
    """A bad value is an error that names the setting."""
    with pytest.raises(ConfigurationError, match=next(iter(kwargs))):
        LionSettings(**kwargs)


def test_every_setting_has_help():
    """`megaopt describe` has a text for every field."""
    assert all(field.metadata["help"] for field in attrs.fields(LionSettings))


def test_weight_decay_that_is_not_decoupled_goes_into_the_gradient():
    """With `decoupled_weight_decay=False` the sign is taken of momentum, gradient and decay together."""
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(2.0)
    settings = {"lr": 0.25, "weight_decay": 1.0, "clip_grad": 0.0, "decoupled_weight_decay": False}
    optimizer = build_optimizer(model, "lion", **settings)
    model.weight.grad = torch.tensor([[-1.0]])
    optimizer.step()
    # g + wd * p = -1 + 2 points up, g alone down; no factor 1 - lr * wd.
    assert model.weight.item() == 2.0 - 0.25
    assert optimizer.report().unused_settings == ()


def test_complex_parameters_are_refused_before_anything_is_built() -> None:
    """A sign needs a real number; the error names the parameter, and an override gives it to another."""
    model = torch.nn.ParameterDict({"spectrum": torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.cfloat))})
    with pytest.raises(ConfigurationError, match="Lion cannot step spectrum: a complex number has no sign"):
        build_optimizer(model, "lion", lr=0.1)
    given = build_optimizer(
        model, "lion", lr=0.1, overrides={ParamKey(name="spectrum"): {"optimizer": "adam"}}
    )
    assert [row.optimizer for row in given.report().params] == ["adam"]
