"""A step of each optimizer in each precision launches, reads and moves no more on a GPU than its budget allows.

`budgets.json` holds the numbers of today. A change that makes a number smaller lowers its budget: `python
tests/gpu_budgets/test_step_budgets.py` writes what is counted where it is less, and names what is more.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_gpu import StepCount, fake_gpu
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from megaopt_core import OptimizerConfig, get_megatron_optimizer
from megaopt_core.registry import get_registry

pytestmark = [
    pytest.mark.any_python,
    # Tensors without memory have no address.
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning"),
]

BUDGETS = Path(__file__).with_name("budgets.json")

SHAPES = [(768, 768), (3072, 768), (768, 3072)] * 2
"""Matrices of GPT-2."""

IN_EIGHT_BITS = {
    "adamw": {"exp_avg_dtype": "uint8", "exp_avg_sq_dtype": "uint8"},
    "sgd": {"sgd_momentum_dtype": "uint8"},
    "lion": {"exp_avg_dtype": "uint8"},
    "soap": {"exp_avg_dtype": "uint8", "exp_avg_sq_dtype": "uint8"},
    "muon": {"muon_momentum_dtype": "uint8", "exp_avg_dtype": "uint8", "exp_avg_sq_dtype": "uint8"},
    "adaptive_muon": {"muon_momentum_dtype": "uint8", "exp_avg_dtype": "uint8", "exp_avg_sq_dtype": "uint8"},
}
AWARE = {"bf16": True, "use_precision_aware_optimizer": True}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "main": {"bf16": True},
    "remainders": AWARE,
    "8 bits": AWARE,
}
NAMES = [
    f"{optimizer} {precision}"
    for optimizer in IN_EIGHT_BITS
    for precision in ("fp32", "fp32 clipped", "main", "main clipped", "remainders", "8 bits")
]


def configured(name: str, **more: Any) -> OptimizerConfig:
    """Return the configuration of an optimizer and a precision."""
    optimizer, _, rest = name.partition(" ")
    precision = rest.removesuffix(" clipped")
    settings = {**PRECISIONS[precision], "clip_grad": 1e-3 if rest != precision else 0.0}
    settings |= IN_EIGHT_BITS[optimizer] if precision == "8 bits" else {}
    return OptimizerConfig(optimizer=optimizer, lr=1e-3, **settings, **more)


def model_for(config: OptimizerConfig) -> nn.Module:
    """Return a model of matrices and vectors, with gradients."""
    at = {"device": "cuda", "dtype": torch.bfloat16 if config.bf16 else torch.float32}
    layers = [nn.Linear(columns, rows, bias=False, **at) for rows, columns in SHAPES]
    for layer in layers:
        layer.weight.use_muon = True
    model = nn.Sequential(*layers, nn.LayerNorm(768, **at))
    for param in model.parameters():
        param.grad = torch.empty_like(param)
    return model


def counted_step(config: OptimizerConfig, before: int = 2) -> StepCount:
    """Return what the step after some others does on a GPU.

    Args:
        config: optimizer, precision and whether it clips.
        before: so many steps come first.
    """
    count = StepCount()
    with fake_gpu(count):
        model = model_for(config)
        optimizer = get_megatron_optimizer(config, [model])
        for _ in range(before):
            optimizer.step()
        with count.counting():
            optimizer.step()
    return count


def numbers(count: StepCount) -> dict[str, float]:
    """Return what has a budget."""
    return {
        "launches": count.launches.total(),
        "reads": count.reads.total(),
        "reads, late ones too": count.reads.total() + count.late_reads.total(),
        "megabytes": round(count.moved / 1e6, 1),
    }


@pytest.fixture(scope="module")
def budgets() -> dict[str, dict[str, float]]:
    """The most of everything."""
    return json.loads(BUDGETS.read_text())


def test_every_step_has_a_budget(budgets) -> None:
    """And nothing else has."""
    assert list(budgets) == NAMES


def test_guards_watch_the_steps_that_are_counted() -> None:
    """As they do where megaopt is installed as a whole."""
    assert "guards" in {plugin.name for plugin in get_registry().plugins()}


@pytest.mark.parametrize("name", NAMES)
def test_a_step_keeps_to_its_budget(name, budgets) -> None:
    """The failure tells which lines launch and read."""
    count = counted_step(configured(name))
    found = numbers(count)
    more = {what: (found[what], most) for what, most in budgets[name].items() if found[what] > most}
    assert not more, f"{name}: more than its budget (counted, budget): {more}\n{count}"


@pytest.fixture
def four_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is one of four ranks, of which the others are not there."""
    # Tensors that stand for a GPU's are flat; the strategy knows no such class.
    monkeypatch.setattr(type(get_registry().strategy("distributed")), "refuse", lambda *_: None)
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


ADAMW = ["adamw fp32", "adamw fp32 clipped", "adamw main", "adamw main clipped"]


@pytest.mark.parametrize("name", ADAMW)
@pytest.mark.parametrize("before", [1, 2, 3])
def test_adamw_waits_for_nothing(name, before) -> None:
    """In the second step and later ones: what the last step has sent is all that the host looks at."""
    count = counted_step(configured(name), before)
    assert not count.reads, str(count)


# Votes that arrive have not fired here, also that a parameter has a gradient.
@pytest.mark.filterwarnings("ignore:no parameter has a gradient:UserWarning")
@pytest.mark.parametrize("name", ADAMW)
def test_adamw_waits_for_nothing_where_ranks_share_its_parameters(four_ranks, name) -> None:
    """Although a rank may refuse to step: that is a vote like the others."""
    count = counted_step(configured(name, sharding="distributed"))
    assert not count.reads, str(count)
    launched = {operation for operation, _ in count.launches}
    assert {"_fused_adamw_", "allreduce_", "_allgather_base_"} <= launched


@pytest.mark.parametrize("name", ADAMW)
def test_strict_steps_are_counted_as_reading(name) -> None:
    """The host reads once where it is asked to and there is something to read."""
    count = counted_step(configured(name, read_before_step=True))
    assert count.reads.total() == (name != "adamw fp32"), str(count)


def lower() -> None:
    """Write what is counted where that is less than the budget, and name what is more."""
    old = json.loads(BUDGETS.read_text()) if BUDGETS.exists() else {}
    new = {}
    for name in NAMES:
        count = counted_step(configured(name))
        found = numbers(count)
        budget = old.get(name, found)
        new[name] = {what: min(number, budget[what]) for what, number in found.items()}
        if new[name] != found:
            sys.stdout.write(f"{name}: {found}, more than {budget}\n{count}\n")
    rows = [f"  {json.dumps(name)}: {json.dumps(budget)}" for name, budget in new.items()]
    BUDGETS.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    lower()
