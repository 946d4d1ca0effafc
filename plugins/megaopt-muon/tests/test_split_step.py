"""Muon's steps in three parts: the same bits as whole steps."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import (
    MOP,
    AdaptiveMuon,
    Muon,
    MuonHyperball,
    PolarGrad,
    Scion,
    SinkhornMuon,
    Spel,
)
from megaopt_muon.captured_step import OrthogonalizedSplit
from megaopt_testing import TinyGPT, check_split_step, temporary_plugin
from megaopt_testing.exchange import SelfExchangeStrategy
from torch import nn

from megaopt_core import MatrixView, OptimizerEntry, build_optimizer, hookimpl
from megaopt_core.errors import PluginError, ShardingError
from megaopt_core.optimizers import MegatronOptimizer

pytestmark = pytest.mark.any_python

OTHERS = {
    "ee_muon": (Muon, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    "ee_muon_l2": (
        Muon,
        {"momentum": 0.9, "weight_decay": 0.1, "nesterov": False, "weight_decay_method": "l2"},
    ),
    "ee_polargrad": (PolarGrad, {}),
    "ee_scion": (Scion, {}),
    "ee_mop": (MOP, {}),
}


def _accepts(spec: Any, view: Any) -> str | None:
    return None if view is not None else "no matrix"


def _entry(optimizer_cls: type, arguments: dict[str, Any]) -> OptimizerEntry:
    return OptimizerEntry(
        optimizer_cls,
        config_to_kwargs=lambda config, chunks, pgs: {"lr": config.lr, **arguments},
        granularity="tensor",
        accepts=_accepts,
        fallback="adam",
        split_step=OrthogonalizedSplit,
    )


class Plugin:
    megaopt_api = "1"

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        return {name: _entry(*given) for name, given in OTHERS.items()}

    @hookimpl
    def megaopt_sharding_strategies(self) -> dict[str, Any]:
        names = {"muon", "adaptive_muon", *OTHERS}
        return {"self_exchange": SelfExchangeStrategy(optimizers=names)}


@pytest.fixture(autouse=True)
def _plugin() -> Iterator[None]:
    with temporary_plugin(Plugin(), "splitting"):
        yield


class Fused(nn.Module):
    """Fused matrices of several scales: grouped queries, experts, gate and up, a transposed one, a plain one."""

    def __init__(self) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(0)

        def weight(*shape: int, view: MatrixView | None = None) -> nn.Parameter:
            made = nn.Parameter(torch.randn(shape, generator=chance))
            made.matrix_view = MatrixView() if view is None else view
            return made

        self.qkv = weight(16, 10, view=MatrixView(split_sizes=(4, 2, 2), label="qkv"))
        self.gate_up = weight(3, 6, 18, view=MatrixView(batch_dims=1, transposed=True, split_sizes=(12, 6)))
        self.transposed = weight(7, 5, view=MatrixView(transposed=True))
        self.plain = weight(6, 9)


MUONS = {
    "muon": {},
    "nesterov": {"muon_nesterov": True},
    "l2": {"muon_use_decoupled_weight_decay": False},
    "unit_rms_norm": {"muon_scale_mode": "unit_rms_norm", "muon_extra_scale_factor": 0.2},
    "gram": {"muon_ns_method": "gram"},
    "cautious": {"cautious_weight_decay": True},
}
ADAPTIVE = {
    "adamuon": {"adaptive_muon_moment2_method": "adamuon"},
    "normuon": {"adaptive_muon_moment2_method": "normuon", "muon_nesterov": True},
}
POLICIES = {
    "fp32": (torch.float32, {}),
    "bf16 in place": (torch.bfloat16, {}),
    "main": (torch.bfloat16, {"bf16": True}),
    "remainders": (torch.bfloat16, {"bf16": True, "use_precision_aware_optimizer": True}),
}


def _pair(name: str, policy: str = "fp32", **settings: Any) -> list[tuple[nn.Module, MegatronOptimizer]]:
    dtype, precision = POLICIES[policy]
    made = []
    for sharding in ("replicated", "self_exchange"):
        model = Fused().to(dtype)
        given = {"lr": 0.1, "weight_decay": 0.1, "clip_grad": 1.0, "sharding": sharding}
        made.append((model, build_optimizer(model, name, **{**given, **precision, **settings})))
    assert any(part.split is not None for part in made[1][1].parts)
    return made


def _train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        chance = torch.Generator().manual_seed(step)
        for name, param in model.named_parameters():
            grad = torch.randn(param.shape, generator=chance).to(param.dtype)
            param.grad = None if step % 2 and name == "transposed" else grad
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)
        optimizer.step()


def _everything(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    found = {name: param.detach() for name, param in model.named_parameters()}
    for param, name in optimizer.names.items():
        found.update((f"{name}.{key}", value) for key, value in optimizer.state[param].items())
    return found


def _require_same(one: tuple[nn.Module, Any], other: tuple[nn.Module, Any]) -> None:
    left, right = _everything(*one), _everything(*other)
    assert left.keys() == right.keys()
    assert [key for key in left if not torch.equal(left[key], right[key])] == []


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", [*MUONS, *ADAPTIVE])
def test_split_steps_are_whole_steps(case: str, policy: str) -> None:
    """Fused, batched and transposed matrices, clipped, with missing gradients: bit for bit."""
    name = "adaptive_muon" if case in ADAPTIVE else "muon"
    pair = _pair(name, policy, **{**MUONS, **ADAPTIVE}[case])
    for one in pair:
        _train(*one, range(4))
    _require_same(*pair)


@pytest.mark.parametrize("name", OTHERS)
def test_classes_of_emerging_optimizers_split_where_they_orthogonalize(name: str) -> None:
    """Bit for bit over wholes and slices, by the conformance kit."""
    check_split_step(name)


@pytest.mark.parametrize("case", [*MUONS, *ADAPTIVE])
def test_the_kit_proves_the_parts(case: str) -> None:
    """Over slices of every kind."""
    check_split_step("adaptive_muon" if case in ADAPTIVE else "muon", **{**MUONS, **ADAPTIVE}[case])


@pytest.mark.parametrize(
    ("optimizer_cls", "reason"),
    [
        (MuonHyperball, "it has its own pre_weight_update_fn_inplace, post_weight_update_fn_inplace"),
        (SinkhornMuon, "it has its own post_weight_update_fn_inplace"),
        (Spel, "it has its own post_weight_update_fn_inplace"),
        (AdaptiveMuon, "it has its own step"),
        (torch.optim.SGD, "it is no OrthogonalizedOptimizer"),
    ],
)
def test_classes_that_do_more_with_whole_tensors_are_refused(optimizer_cls: type, reason: str) -> None:
    """With the reason, so that a strategy steps them whole."""
    assert OrthogonalizedSplit.refusal(optimizer_cls).startswith(reason)
    made = object.__new__(optimizer_cls)
    with pytest.raises(PluginError, match=f"the step of {optimizer_cls.__name__} cannot be split: {reason}"):
        OrthogonalizedSplit(made)


def test_namo_is_refused() -> None:
    """Its second moment needs whole gradients."""
    with pytest.raises(ShardingError, match="'namo' measures whole gradients, which do not travel"):
        _pair("adaptive_muon", adaptive_muon_moment2_method="namo")


@pytest.mark.parametrize("case", ADAPTIVE)
@pytest.mark.parametrize("steps", [0, 2])
def test_second_moments_go_through_checkpoints(tmp_path, case: str, steps: int) -> None:
    """From split to whole and from whole to split, before the first step too."""
    files = pytest.importorskip("megaopt_checkpoint")
    first, second = (_pair("adaptive_muon", **ADAPTIVE[case]) for _ in range(2))
    for number, (one, two) in enumerate(zip(first, reversed(second), strict=True)):
        _train(*one, range(steps))
        files.save_checkpoint(tmp_path / str(number), *one)
        files.load_checkpoint(tmp_path / str(number), *two)
        for other in (one, two):
            _train(*other, range(steps, 4))
        _require_same(one, two)


def test_a_gpt_steps_split_and_chained() -> None:
    """Matrices are exchanged, everything else is stepped by Adam where it is; the report says which."""
    model = TinyGPT()
    optimizer = build_optimizer(model, "muon", lr=0.1, sharding="self_exchange")
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert {row.optimizer: row.travels for row in optimizer.report().params} == {"muon": "split", "adam": ""}
