"""What the plugin tells megaopt."""

import inspect
import subprocess
import sys

import attrs
import pytest
import torch
import torch.distributed.checkpoint as dcp
from megaopt_soap.plugin import megaopt_optimizer_entries
from megaopt_soap.settings import SoapSettings
from megaopt_testing import BoundCheck, parametrize_with_checks
from megaopt_testing.snapshot import differences, snapshot
from megaopt_testing.trial import Trial
from torch import nn

from megaopt_core import OptimizerConfig, ParamKey, build_optimizer
from megaopt_core.errors import ConfigurationError
from megaopt_core.params import Granularity, MatrixView, ParamSpec

ENTRY = megaopt_optimizer_entries()["soap"]


def spec(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> ParamSpec:
    """Return the description of a parameter."""
    return ParamSpec("w", shape, dtype, dtype, "soap", 0, Granularity.TENSOR, 1.0)


@pytest.mark.any_python
@parametrize_with_checks("soap", soap_precondition_frequency=3, soap_use_kl_shampoo=False)
def test_conformance_between_refreshes(check: BoundCheck) -> None:
    """The conformance kit with bases that stay for some steps; with the default settings it runs in tests/combos."""
    check()


@pytest.mark.any_python
@parametrize_with_checks(
    "soap", soap_orthogonalize=True, soap_max_precond_dim=20, soap_first_step="initialize"
)
def test_conformance_of_everything_else(check: BoundCheck) -> None:
    """The same with orthogonalized updates, matrices of one basis, and a first step that moves nothing."""
    check()


def test_every_setting_reaches_the_constructor():
    """And every argument of the constructor comes from the configuration."""
    given = {
        "shampoo_beta": 0.5,
        "precondition_frequency": 7,
        "use_kl_shampoo": False,
        "max_precond_dim": 99,
        "orthogonalize": True,
        "extra_scale_factor": 0.75,
        "first_step": "initialize",
        "fp32_matmul_prec": "highest",
        "max_update_rms": 2.0,
    }
    core = {"lr": 0.1, "weight_decay": 0.2, "cautious_weight_decay": True}
    adam = {"adam_beta1": 0.6, "adam_beta2": 0.7, "adam_eps": 1e-3}
    settings = {f"soap_{name}": value for name, value in given.items()}
    kwargs = ENTRY.config_to_kwargs(OptimizerConfig(optimizer="soap", **core, **adam, **settings), [], None)
    assert set(given) == {field.name for field in attrs.fields(SoapSettings)}
    assert kwargs == {**core, "betas": (0.6, 0.7), "eps": 1e-3, **given}
    assert set(kwargs) == set(inspect.signature(ENTRY.load_class()).parameters) - {"params"}


def test_defaults_are_the_configuration_fields_of_megatron_style_trainers():
    """`OptimizerConfig` without any of them."""
    config = OptimizerConfig(optimizer="soap", lr=0.1)
    fields = (config.soap_shampoo_beta, config.soap_precondition_frequency, config.soap_use_kl_shampoo)
    assert fields == (0.95, 1, True)


def test_matrices_go_to_soap_and_the_rest_to_adam():
    """With groups of their own learning rate and decay, which the inner optimizer steps with."""
    model = nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 6), nn.Linear(6, 6))
    override = {ParamKey(name="2.weight"): {"max_lr": 0.5}}
    optimizer = build_optimizer(model, "soap", lr=0.1, overrides=override, soap_precondition_frequency=4)
    by = {row.name: row.optimizer for row in optimizer.report().params}
    assert {name for name, owner in by.items() if owner == "soap"} >= {"0.weight", "2.weight"}
    assert by["0.bias"] == by["1.weight"] == "adam"
    inner = next(part.inner for part in optimizer.parts if type(part.inner).__name__ == "SOAP")
    assert {group["lr"] for group in inner.param_groups} == {0.1, 0.5}
    assert {group["precondition_frequency"] for group in inner.param_groups} == {4}


def test_accepts_hidden_matrices_only():
    """A parameter without a matrix view is refused in words."""
    assert ENTRY.accepts(spec((4,)), None) == "not a hidden matrix"
    assert ENTRY.accepts(spec((4, 8)), MatrixView()) is None
    assert ENTRY.accepts(spec((2, 4, 8)), MatrixView(batch_dims=1)) is None
    assert "complex" in ENTRY.accepts(spec((4, 8), torch.complex64), MatrixView())
    assert ENTRY.accepts(spec((0, 8)), MatrixView()) == "a matrix without elements"


def test_step_cost_follows_products_and_decompositions():
    """The cost grows with the cube of a square; experts and pieces add up."""

    def cost(shape, view):
        return ENTRY.step_cost(spec(shape), view)

    plain = MatrixView()
    assert cost((16, 16), plain) == 8 * cost((8, 8), plain)
    assert cost((8, 16), plain) == cost((16, 8), plain) > cost((8, 8), plain)
    assert cost((3, 8, 16), MatrixView(batch_dims=1)) == 3 * cost((8, 16), plain)
    assert cost((24, 8), MatrixView(split_sizes=(8, 8, 8))) == 3 * cost((8, 8), plain)


@pytest.mark.any_python
def test_listing_entries_imports_no_algorithm():
    """The plugin's module imports neither emerging-optimizers nor the optimizer."""
    code = (
        "import sys, megaopt_soap.plugin as p; p.megaopt_optimizer_entries();"
        "assert not [m for m in sys.modules if m.startswith('emerging') or m == 'megaopt_soap.soap']"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.any_python
def test_only_orthogonalized_updates_import_emerging_optimizers():
    """A step of plain SOAP needs nothing of it."""
    code = (
        "import sys, torch; from megaopt_soap.soap import SOAP\n"
        "p = torch.nn.Parameter(torch.ones(4, 4)); p.grad = torch.eye(4)\n"
        "SOAP([p]).step(); assert not [m for m in sys.modules if m.startswith('emerging')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"shampoo_beta": 1.0}, "shampoo_beta=1.0"),
        ({"precondition_frequency": 0}, "precondition_frequency=0"),
        ({"use_kl_shampoo": "yes"}, "use_kl_shampoo='yes'"),
        ({"max_precond_dim": -1}, "max_precond_dim=-1"),
        ({"orthogonalize": 2}, "orthogonalize=2"),
        ({"extra_scale_factor": 0}, "extra_scale_factor=0"),
        ({"first_step": "skip"}, "first_step='skip'.*initialize"),
        ({"fp32_matmul_prec": "low"}, "fp32_matmul_prec='low'.*highest"),
        ({"max_update_rms": 0.0}, "max_update_rms=0.0.*above 0"),
        ({"max_update_rms": "1"}, "max_update_rms='1'.*a number above 0"),
    ],
)
def test_settings_are_checked(kwargs, message):
    """A bad value is an error that names the setting, the value and what is allowed."""
    with pytest.raises(ConfigurationError, match=message):
        SoapSettings(**kwargs)


@pytest.mark.filterwarnings("ignore:torch.distributed is")  # torch says that there is one process
def test_a_run_goes_on_from_a_distributed_checkpoint(tmp_path):
    """Factors and bases come back by name, between two refreshes, and no bit of the run differs."""
    trial = Trial("soap", {"soap_precondition_frequency": 3})
    through, again = trial.model(), trial.model(seed=1)
    first, second = trial.build(through), trial.build(again)
    for step in range(5):
        trial.step_given(through, first, step)
    dcp.save({"optim": first.checkpoint_state()}, checkpoint_id=tmp_path)
    again.load_state_dict(through.state_dict())
    dcp.load({"optim": second.checkpoint_state()}, checkpoint_id=tmp_path)
    for step in range(5, 9):
        trial.step_given(through, first, step)
        trial.step_given(again, second, step)
    assert differences(snapshot(first), snapshot(second)) == []
