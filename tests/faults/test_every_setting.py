"""Every setting, one after the other: changed alone it acts in training, is refused, or is named; none is silent."""

import ast
import contextlib
import copy
import functools
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from attrs import define
from long_runs import sometimes
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megaopt_core import OptimizerConfig, OptimizerParamScheduler, build_optimizer, get_registry
from megaopt_core.config import core_field_info
from megaopt_core.errors import ConfigurationError, MegaoptError, UnusedSettingWarning

pytestmark = pytest.mark.any_python

BRIDGED = ("torch:RMSprop", "torch:NAdam", "torch:Adafactor")
"""Optimizers whose settings are made from their constructors."""

STEPS = 3

LR = {"lr": 0.01, "min_lr": 0.001}
COMPANIONS = {
    "initial_loss_scale": {"fp16": True},
    "min_loss_scale": {"fp16": True},
    "loss_scale_window": {"fp16": True},
    "hysteresis": {"fp16": True},
    "store_param_remainders": {"bf16": True, "use_precision_aware_optimizer": True},
    "main_grads_dtype": {"bf16": True, "use_precision_aware_optimizer": True},
    "muon_split_qkv": {"muon_split": "per_head"},
    "main_params_dtype": {"bf16": True, "use_precision_aware_optimizer": True},
    "exp_avg_dtype": {"bf16": True, "use_precision_aware_optimizer": True},
    "exp_avg_sq_dtype": {"bf16": True, "use_precision_aware_optimizer": True},
    "use_precision_aware_optimizer": {"bf16": True},
    "muon_momentum_dtype": {"bf16": True, "use_precision_aware_optimizer": True},
    "sgd_momentum_dtype": {"bf16": True, "use_precision_aware_optimizer": True},
    "decoupled_min_lr": {"decoupled_lr": 0.02},
    "barrier_with_L1_time": {"timers": True},
    "optimizer_cpu_offload": {"optimizer_offload_fraction": 1.0},
    "optimizer_offload_fraction": {"optimizer_cpu_offload": True},
    "muon_coefficients": {"muon_coefficient_type": "custom"},
    "soap_extra_scale_factor": {"soap_orthogonalize": True},
    "cautious_weight_decay": {"weight_decay": 0.1},
    "decoupled_weight_decay": {"weight_decay": 0.1},
}
"""What else has to be set for a setting to be read; it is tried without, too."""

VALUES = {
    "optimizer": "sgd",
    "sharding": "distributed",
    "timers": True,
    "muon_scalar_optimizer": "lion",
    "muon_scalar_lr": 0.02,
    "muon_scalar_weight_decay": 0.3,
    "muon_coefficients": ((3.0, -3.2, 1.2),),
    "clip_grad": 0.01,
    "grad_norm_skip_threshold": 1e-6,
    "soap_max_precond_dim": 3,
    "muon_eps": 1e3,
}
"""Values that no type tells."""

CORE = {info.name: info for info in core_field_info()}


@define
class _Timer:
    calls: list

    def start(self, barrier: Any) -> None:
        self.calls.append(("start", barrier))

    def stop(self, **how: str) -> None:
        self.calls.append("stop")


class Block(nn.Module):
    """A table, a fused projection, norms of queries, a head: something for every standard override."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 8)
        self.qkv = nn.Linear(8, 24)
        self.q_layernorm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 6, bias=False)
        self.table.weight.is_embedding_or_output_parameter = True
        self.qkv.weight.is_qkv, self.qkv.weight.qkv_split_shapes = True, [4, 2, 2]
        self.out.weight.is_embedding_or_output_parameter = True

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.out(self.q_layernorm(self.qkv(self.table(tokens))[..., :8]))


def _model(context: dict[str, Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = Block()
    dtype = torch.bfloat16 if context.get("bf16") else torch.float16 if context.get("fp16") else torch.float32
    for param in model.parameters():
        param.data = param.data.to(dtype)
    return model


def _seen(value: Any) -> Any:
    """Return something that compares by value."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.detach().double().flatten().tolist()
    if isinstance(value, dict):
        return {str(key): _seen(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_seen(each) for each in value]
    return (
        value if isinstance(value, (int, float, str, bool, type(None), torch.dtype)) else type(value).__name__
    )


class _Operators(TorchDispatchMode):
    """Counts the operators that run, and in which precision: which of torch's implementations a setting chose."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[f"{func} {torch.get_float32_matmul_precision()}"] += 1
        return func(*args, **(kwargs or {}))


COMPILED: list[str] = []
"""What ran that torch would have compiled."""


def _not_compiled(function: Any = None, **options: Any) -> Any:
    """Stand in for `torch.compile`, which takes seconds: note each call of what it was given."""
    if function is None:
        return functools.partial(_not_compiled, **options)

    @functools.wraps(function)
    def noted(*args, **kwargs):
        COMPILED.append(function.__qualname__)
        return function(*args, **kwargs)

    return noted


def _scales(scaler: Any) -> Any:
    """Return what a loss scaler's scale becomes when gradients overflow, and when for long they do not."""
    if scaler is None:
        return None
    scaler, scales = copy.deepcopy(scaler), []
    for overflow in [*[True] * 40, *[False] * 1010, True, True, False]:
        scaler.update(overflow)
        scales.append(float(scaler.scale))
    return scales


def _steps(built: Any, model: Any, count: int) -> Any:
    """Step with given gradients; return what steps say, which operators ran, and dtypes of what was stepped with."""
    results, ran, dtypes = [], _Operators(), []

    def look(part: Any) -> None:
        kept = [part.precision.grad(index) for index in range(len(part.pieces))]
        dtypes.append([str(grad.dtype) for grad in kept if grad is not None])

    hooks = [part.inner.register_step_pre_hook(lambda *_, part=part: look(part)) for part in built.parts]
    for step in range(count):
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        with ran:
            results.append(_seen(tuple(built.step())))
    for hook in hooks:
        hook.remove()
    return results, dict(ran.counts), dtypes


def _scheduled(built: Any, model: Any) -> Any:
    """Return the model after a step at the end of a schedule, where groups have their smallest learning rate."""
    config = built.config
    scheduler = OptimizerParamScheduler(
        built,
        0.0,
        config.lr,
        config.min_lr,
        0,
        1,
        "linear",
        config.weight_decay,
        config.weight_decay,
        1,
        "constant",
    )
    scheduler.step(5)
    _steps(built, model, 1)
    return _seen(list(model.parameters()))


def _outcome(optimizer: Any, settings: dict[str, Any], context: dict[str, Any], folder: Path) -> Any:
    """Return how a configuration behaves, whatever it was built with: what steps did and ran; and what is unused."""
    calls: list = []
    given = dict(settings)
    if given.pop("timers", None):
        given["timers"] = lambda name, log_level: calls.append(name) or _Timer(calls)
    model = _model(context)
    COMPILED.clear()
    with warnings.catch_warnings(record=True) as caught, patch.object(torch, "compile", _not_compiled):
        warnings.simplefilter("always")
        built = build_optimizer(model, optimizer, **{**LR, **given})
        stepped = _steps(built, model, STEPS)
        values = _seen(list(model.parameters()))
        parts = [
            (
                type(part.sharded).__name__,
                [_seen(state) for state in part.inner.state.values()],
                [_seen(part.precision.extra_state(index)) for index in range(len(part.pieces))],
            )
            for part in built.parts
        ]
        scales = _scales(built.grad_scaler)
        told = list(calls)
        report = built.report()
        later = _scheduled(built, model)
    warned = [str(each.message) for each in caught if issubclass(each.category, UnusedSettingWarning)]
    assert [f"settings that change nothing here: {'; '.join(report.unused_settings)}"] * bool(
        report.unused_settings
    ) == warned
    files = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    notes = [row.note for row in report.params]
    named = [sentence.partition("=")[0] for sentence in report.unused_settings]
    return [stepped, values, parts, scales, told, notes, later, list(COMPILED), files], named


def _choices(name: str, default: Any) -> Any:
    """Return the other values that the error about a wrong one lists."""
    try:
        OptimizerConfig(**{name: "no such value"})
    except ConfigurationError as error:
        listed = re.search(r"must be one of (.*)", str(error))
        found = [] if listed is None else [ast.literal_eval(each) for each in listed[1].split(", ")]
        return [value for value in found if value != default]
    return []


def _candidates(name: str, default: Any, folder: Path) -> Any:
    """Return values that differ from the default, by its type."""
    if name in VALUES:
        return [VALUES[name]]
    if name.endswith("_dir"):
        return [str(folder)]
    if isinstance(default, torch.dtype):
        return [torch.bfloat16]
    if isinstance(default, bool):
        return [not default]
    if isinstance(default, int):
        return [default + 1, default - 1]
    if isinstance(default, float):
        return [value for value in (default * 0.5, default * 2.0, 0.5) if value != default]
    return [*_choices(name, default), 0.02, True, "other"]


def _settings() -> Any:
    """Return `(optimizer, setting, default)`: the core's under two optimizers, a plugin's under its own and another."""
    registry = get_registry()
    brought = {name: registry.optimizer(name) for name in BRIDGED}
    own = {entry.setting_prefixes[0]: name for name, entry in brought.items()}
    core = [
        (optimizer, info.name, info.default) for info in core_field_info() for optimizer in ("adam", "muon")
    ]
    plugins = [
        (optimizer, info.name, info.default)
        for info in registry.setting_owners().values()
        for optimizer in (own.get(info.prefix, info.entry), "lion" if info.prefix == "sgd" else "sgd")
    ]
    return core + plugins


BY_PROCESSOR = {"muon_ns_method", "muon_fp32_matmul_prec"}
"""Settings of which the default is another choice, by processor: `auto` takes one of the ways, and where no bfloat16 is
multiplied float32 stands in for it. That choice leads to the same bits; another acts."""


def _refused(settings: dict[str, Any], error: Any) -> Any:
    """Check that the error names what was set, in full."""
    if isinstance(error, MegaoptError):
        assert any(name in str(error) for name in settings), error
    else:
        assert any(f"{name.rpartition('_')[2]}={value}" in str(error) for name, value in settings.items()), (
            error
        )
    return "refused"


def _tried(optimizer: Any, name: str, value: Any, context: dict[str, Any], folder: Path) -> Any:
    """Return `acts`, `named`, `refused` or `silent`."""
    changed = {**context, name: value}
    before = None
    with contextlib.suppress(
        MegaoptError
    ):  # a companion that the optimizer does not take, or not without this setting
        before, _ = _outcome(context.get("optimizer", optimizer), context, context, folder)
    try:
        after, named = _outcome(changed.pop("optimizer", optimizer), changed, context, folder)
    except (MegaoptError, AssertionError) as error:  # torch asserts that the device can capture
        return _refused({**context, name: value}, error)
    if before != after:
        return "acts"
    return "named" if name in named else "silent"


SETTINGS = list(_settings())
SHORT = [
    case
    for case in SETTINGS
    if case[0] not in BRIDGED[1:] and (case[0] != "muon" or case[1].startswith("muon_"))
]
"""Plain `tox` tries the core's settings with one optimizer, and of the classes of other packages one."""


@pytest.mark.parametrize(
    ("optimizer", "name", "default"),
    sometimes(SETTINGS, SHORT),
    ids=lambda value: str(value)[:40],
)
def test_no_setting_is_silent(optimizer, name, default, tmp_path) -> None:
    """Alone, and with what it needs; where it can act with some companion it does."""
    folder = tmp_path / "written"
    for context in ({}, COMPANIONS[name]) if name in COMPANIONS else ({},):
        found = [
            _tried(optimizer, name, value, context, folder) for value in _candidates(name, default, folder)
        ]
        assert found
        silent = "silent" in found and not (name in BY_PROCESSOR and "acts" in found)
        assert not silent, (context, found)
    if context:
        assert "acts" in found or optimizer != "adam"
