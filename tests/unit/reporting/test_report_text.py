"""A report is one screen of tables in words that a user knows; `report(full=True)` has a row for every parameter."""

import json
from collections.abc import Callable

import pytest
import torch
from megaopt_testing.fake_plugins import FakePlugins
from torch import nn

from megaopt_core import build_optimizer
from megaopt_core.optimizers import MegatronOptimizer
from megaopt_core.params import MATRIX

PLUGIN = """
def matrices_only(spec, view):
    return None if view is not None else "no matrix"

@hookimpl
def megaopt_optimizer_entries():
    return {
        "plain": OptimizerEntry(torch.optim.SGD, state={}),
        "matrix": OptimizerEntry(torch.optim.SGD, state={}, accepts=matrices_only, fallback="plain"),
    }
"""


class Block(torch.nn.Module):
    """A block of GPT-2, with its parameters' names."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1 = torch.nn.LayerNorm(width)
        self.attn = torch.nn.ModuleDict(
            {"c_attn": torch.nn.Linear(width, 3 * width), "c_proj": torch.nn.Linear(width, width)}
        )
        self.ln_2 = torch.nn.LayerNorm(width)
        self.mlp = torch.nn.ModuleDict(
            {"c_fc": torch.nn.Linear(width, 4 * width), "c_proj": torch.nn.Linear(4 * width, width)}
        )


def gpt2(width: int = 8) -> torch.nn.Module:
    """Return a model with the 148 parameters of GPT-2, but narrow."""
    model = torch.nn.Module()
    model.transformer = torch.nn.ModuleDict(
        {
            "wte": torch.nn.Embedding(50, width),
            "wpe": torch.nn.Embedding(16, width),
            "h": torch.nn.ModuleList(Block(width) for _ in range(12)),
            "ln_f": torch.nn.LayerNorm(width),
        }
    )
    model.lm_head = torch.nn.Linear(width, 50, bias=False)
    model.lm_head.weight = model.transformer.wte.weight
    for table in (model.transformer.wte, model.transformer.wpe):
        table.weight.matrix_view = "embedding"
    for block in model.transformer.h:
        for layer in (*block.attn.values(), *block.mlp.values()):
            layer.weight.matrix_view = MATRIX
    return model


@pytest.fixture
def build(plugins: FakePlugins) -> Callable[[nn.Module], MegatronOptimizer]:
    """Build with an optimizer for matrices and one for the rest."""
    plugins.install("two", PLUGIN)
    plugins.registry("roles")
    return lambda model: build_optimizer(model, "matrix", lr=3e-4, weight_decay=0.1)


def test_gpt2_fits_a_screen(build) -> None:
    """At most 40 lines of 100 columns; repeated layers share a row, a reason of many rows stands once."""
    text = str(build(gpt2()).report())
    lines = text.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    header = next(line for line in lines if line.startswith("parameter"))
    assert header.split() == ["parameter", "shape", "optimizer", "lr", "weight", "decay", "why"]
    row = next(line for line in lines if line.startswith("transformer.h.*.mlp.c_fc.weight "))
    *cells, note = row.split()[1:]
    assert cells == ["12", "of", "32x8", "matrix", "3e-4", "0.1"]
    assert len([line for line in lines if line.startswith(f"{note} ")]) == 1
    assert "report(full=True) shows each parameter by itself" in text
    assert "changed in last step" not in text


def test_the_full_report_has_every_parameter(build) -> None:
    """With role and group; the records behind both are the same."""
    optimizer = build(gpt2())
    full = optimizer.report(full=True)
    lines = str(full).splitlines()
    assert {line.split()[0] for line in lines[2:150]} == {row.name for row in full.params}
    assert lines[0].split() == ["parameter", "shape", "role", "optimizer", "group", "lr", "wd", "why"]
    assert full == optimizer.report()
    assert "full" not in json.loads(full.to_json())


def test_a_model_without_repeated_layers_is_one_screen_too(build) -> None:
    """Parameters that are stepped alike for one reason share a row then."""
    sizes = range(3, 45)
    model = torch.nn.ModuleDict({f"part{size}": torch.nn.Linear(size, size) for size in sizes})
    for layer in model.values():
        layer.weight.matrix_view = MATRIX
    text = str(build(model).report())
    assert len(text.splitlines()) <= 40
    assert "part3.bias and 41 more" in text
    assert " 42 shapes " in text


def test_after_a_step_it_says_what_changed(build) -> None:
    """In a column that is not there before."""
    model = torch.nn.Linear(4, 4, bias=False)
    model.weight.matrix_view = MATRIX
    optimizer = build(model)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert "changed in last step" in str(optimizer.report(after_step=True))
    assert " 1 of 1 " in str(optimizer.report(after_step=True))
