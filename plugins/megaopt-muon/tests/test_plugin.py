"""What the plugin offers to megaopt."""

import inspect
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from megaopt_muon.adaptive import TensorParallelAdaptiveMuon
from megaopt_muon.muon import TensorParallelMuon
from megaopt_muon.plugin import megaopt_api, megaopt_optimizer_entries
from megaopt_muon.settings import AdaptiveMuonSettings, MuonSettings

from megaopt_core.errors import ConfigurationError
from megaopt_core.params import Granularity, MatrixView, ParamSpec

ENTRIES = megaopt_optimizer_entries()


def spec(shape: tuple[int, ...]) -> ParamSpec:
    """Return a parameter of this shape as pure data."""
    return ParamSpec("w", shape, torch.float32, torch.float32, "muon", 0, Granularity.TENSOR, 1.0)


def config(**changes: Any) -> SimpleNamespace:
    """Return what an OptimizerConfig with the default settings reads as."""
    values = {"lr": 0.1, "weight_decay": 0.2, "cautious_weight_decay": False}
    values |= {f"muon_{name}": value for name, value in attrs.asdict(MuonSettings()).items()}
    values |= {f"adaptive_muon_{name}": value for name, value in attrs.asdict(AdaptiveMuonSettings()).items()}
    return SimpleNamespace(**(values | changes))


def test_entries_name_their_classes():
    """Both entries load the classes with the reference's signatures."""
    assert megaopt_api == "1"
    assert ENTRIES["muon"].load_class() is TensorParallelMuon
    assert ENTRIES["adaptive_muon"].load_class() is TensorParallelAdaptiveMuon


@pytest.mark.parametrize("name", ["muon", "adaptive_muon"])
def test_every_constructor_argument_comes_from_the_configuration(name):
    """config_to_kwargs fills the constructor, but for what describes parameters, and for the plan, which is state."""
    kwargs = ENTRIES[name].config_to_kwargs(config(muon_momentum=0.7), [], None)
    arguments = set(inspect.signature(ENTRIES[name].load_class().__init__).parameters)
    described = {"self", "params", "is_qkv_fn", "qkv_split_shapes", "ns_plan"}
    assert set(kwargs) == arguments - described
    optimizer = ENTRIES[name].load_class()([torch.nn.Parameter(torch.ones(2, 2))], **kwargs)
    assert optimizer.defaults["momentum"] == 0.7
    assert (optimizer.defaults["lr"], optimizer.defaults["weight_decay"]) == (0.1, 0.2)


def test_accepts_hidden_matrices_only():
    """A parameter without a matrix view is refused in words."""
    accepts = ENTRIES["muon"].accepts
    assert accepts(spec((4,)), None) == "not a hidden matrix"
    assert accepts(spec((4, 8)), MatrixView()) is None
    assert accepts(spec((2, 4, 8)), MatrixView(batch_dims=1)) is None


def test_the_rest_falls_back_to_the_scalar_optimizer():
    """What is refused goes to muon_scalar_optimizer."""
    assert ENTRIES["muon"].fallback(config(muon_scalar_optimizer="lion")) == "lion"


def test_step_cost_follows_the_iteration():
    """Two products with the matrix and one of its Gram matrix; experts, pieces and kernels are matrices."""

    def cost(shape, view):
        return ENTRIES["muon"].step_cost(spec(shape), view)

    assert cost((8, 16), MatrixView()) == cost((16, 8), MatrixView()) == 5 * (4 * 16 * 8**2 + 2 * 8**3)
    assert cost((3, 8, 16), MatrixView(batch_dims=1)) == 3 * cost((8, 16), MatrixView())
    assert cost((48, 16), MatrixView(split_sizes=(16, 16, 16))) == 3 * cost((16, 16), MatrixView())
    assert cost((64, 64, 3, 3), MatrixView()) == 5 * (4 * 576 * 64**2 + 2 * 64**3)


@pytest.mark.any_python
def test_listing_entries_imports_no_algorithm():
    """The plugin's module imports neither emerging-optimizers nor an optimizer of ours."""
    code = (
        "import sys, megaopt_muon.plugin as p; p.megaopt_optimizer_entries();"
        "assert not [m for m in sys.modules if m.startswith('emerging') or m == 'megaopt_muon.muon']"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("settings", "kwargs", "message"),
    [
        (MuonSettings, {"momentum": 1.0}, "momentum=1.0"),
        (MuonSettings, {"nesterov": "yes"}, "nesterov='yes'"),
        (MuonSettings, {"coefficient_type": "septic"}, "septic.*quintic"),
        (MuonSettings, {"coefficients": ((1, 2, 3),)}, "coefficients"),
        (MuonSettings, {"coefficient_type": "custom"}, "coefficients=None"),
        (MuonSettings, {"num_ns_steps": 0}, "num_ns_steps=0"),
        (MuonSettings, {"num_ns_steps": 10**9}, "num_ns_steps=1000000000: must be an integer from 1 to 100"),
        (MuonSettings, {"eps": 0.0}, "eps=0.0"),
        (MuonSettings, {"scale_mode": "x"}, "scale_mode='x'.*spectral"),
        (MuonSettings, {"scalar_optimizer": ""}, "adam"),
        (AdaptiveMuonSettings, {"moment2_method": "x"}, "moment2_method='x'.*normuon"),
        (AdaptiveMuonSettings, {"eps": 0}, "eps=0"),
    ],
)
def test_settings_are_checked(settings, kwargs, message):
    """A bad value is an error that names the setting, the value and what is allowed."""
    with pytest.raises(ConfigurationError, match=message):
        settings(**kwargs)


def test_every_setting_has_help():
    """`megaopt describe` has a text for every field."""
    for settings in (MuonSettings, AdaptiveMuonSettings):
        assert all(field.metadata["help"] for field in attrs.fields(settings))
