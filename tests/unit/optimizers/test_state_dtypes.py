"""Which states are kept in fewer bits, and which setting says so, is the entry's."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attrs import field, frozen
from megaopt_lowbit.scaled import ScaledCode
from megaopt_testing import temporary_plugin
from torch import nn
from torch.optim.optimizer import ParamsT

from megaopt_core import OptimizerEntry, build_optimizer, hookimpl
from megaopt_core.errors import PluginError, UnsupportedSettingError
from megaopt_core.optimizers import MegatronOptimizer

pytestmark = pytest.mark.any_python

NARROW = frozenset({torch.float32, torch.bfloat16, torch.float8_e5m2})
AWARE = {"bf16": True, "use_precision_aware_optimizer": True}


@frozen
class Settings:
    sum_dtype: object = field(default=None)


class Sums(torch.optim.Optimizer):
    """Divides gradients by the root of the sum of their squares, averaged first."""

    def __init__(self, params: ParamsT, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["mean"], state["sum"] = torch.zeros_like(param), torch.zeros_like(param)
                state["mean"].lerp_(param.grad, 0.5)
                state["sum"].addcmul_(param.grad, param.grad)
                param.sub_(group["lr"] * state["mean"] / state["sum"].sqrt())


class Plugin:
    megaopt_api = "1"

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        return {
            "sums": OptimizerEntry(
                Sums,
                config_to_kwargs=lambda config, chunks, pgs: {"lr": config.lr},
                settings=Settings,
                setting_prefixes=("sums",),
                state_dtypes={"mean": NARROW, "sum": NARROW},
                state_dtype_settings={"mean": "exp_avg_dtype", "sum": "sums_sum_dtype"},
                positive_states={"sum"},
            )
        }


@pytest.fixture(autouse=True)
def plugin() -> Iterator[None]:
    """Register it for every test here."""
    with temporary_plugin(Plugin(), "sums"):
        yield


def make(**settings: Any) -> tuple[nn.Linear, MegatronOptimizer]:
    """Return a model of one parameter and its optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4, bias=False, dtype=torch.bfloat16)
    settings = {"lr": 0.1, "clip_grad": 0.0, "overrides": {}, **AWARE, **settings}
    return model, build_optimizer(model, "sums", **settings)


def test_any_state_by_any_setting() -> None:
    """A state under a core field's name, another under the plugin's own; written out, bit for bit."""
    model, optimizer = make(exp_avg_dtype="bf16", sums_sum_dtype="float8_e5m2")
    main = model.weight.detach().float().clone()
    mean, total = torch.zeros_like(main), torch.zeros_like(main)
    code = ScaledCode(torch.float8_e5m2, positive=True)
    for step in range(4):
        grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).bfloat16()
        model.weight.grad = grad.clone()
        optimizer.step()
        mean = mean.lerp(grad.float(), 0.5)
        total = total.addcmul(grad.float(), grad.float())
        main = main - 0.1 * mean / total.sqrt()
        mean = mean.bfloat16().float()
        total = code.decode(*code.encode(total))
        state = optimizer.state[model.weight]
        assert torch.equal(state["mean"].float(), mean)
        assert torch.equal(state["sum"], total)
        assert torch.equal(state["main_param"], main)
    inner = next(iter(optimizer.parts[0].inner.state.values()))
    assert (inner["mean"].dtype, inner["sum"].dtype) == (torch.bfloat16, torch.float8_e5m2)


def test_what_is_divided_by_is_never_stored_as_zero() -> None:
    """Beside an element of size 1, one of 1e-20 is the smallest number that e5m2 has."""
    model, optimizer = make(sums_sum_dtype=torch.float8_e5m2)
    model.weight.grad = torch.full((4, 6), 1e-10, dtype=torch.bfloat16)
    model.weight.grad[0, 0] = 1.0
    optimizer.step()
    assert (optimizer.state[model.weight]["sum"] > 0).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"sums_sum_dtype": torch.float16},
            "sums_sum_dtype='float16': 'sums' can keep sum in 'bfloat16', 'float32', 'float8_e5m2'",
        ),
        ({"exp_avg_dtype": "fp16"}, "exp_avg_dtype='float16': 'sums' can keep mean in "
         "'bfloat16', 'float32', 'float8_e5m2'"),
        (
            {"exp_avg_sq_dtype": "bf16"},
            "exp_avg_sq_dtype='bfloat16': no optimizer in use can keep exp_avg_sq in less than fp32 ('sums')",
        ),
        (
            {"use_precision_aware_optimizer": False, "sums_sum_dtype": "bf16"},
            "sums_sum_dtype='bf16': must be 'float32' unless use_precision_aware_optimizer=True",
        ),
        (
            {"sums_sum_dtype": "narrow"},
            "sums_sum_dtype='narrow': must be a dtype, one of 'float32', 'float16', 'bfloat16', 'float8_e4m3fn', "
            "'float8_e5m2', 'uint8'",
        ),
    ],
)  # fmt: skip
def test_errors_name_key_field_and_what_is_allowed(settings, message) -> None:
    """Whoever owns the field."""
    with pytest.raises(UnsupportedSettingError) as caught:
        make(**settings)
    assert str(caught.value) == message
    assert caught.value.setting == message.split("=")[0]


def test_a_state_that_no_setting_governs_is_refused() -> None:
    """It could never be kept in less, whatever the entry promises."""
    with pytest.raises(PluginError) as caught:
        OptimizerEntry(Sums, state_dtypes={"sum": NARROW})
    assert str(caught.value) == (
        "state_dtypes has 'sum', but state_dtype_settings names no setting for it, only for 'exp_avg', 'exp_avg_sq'"
    )
