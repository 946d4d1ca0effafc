"""Families of models by hand: what is wrong is doubtful, and an example settles it."""

import importlib.util
import random
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from megaopt_core.params import Role
from megaopt_core.params._roles import Doubt
from megaopt_core.routing import infer_roles

pytestmark = pytest.mark.any_python

_spec = importlib.util.spec_from_file_location("role_families", Path(__file__).with_name("role_families.py"))
assert _spec is not None
assert _spec.loader is not None
families = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(families)

AXES = {
    "table": families.TABLES,
    "head": families.HEADS,
    "product": families.PRODUCTS,
    "place": families.PLACES,
    "block": families.BLOCKS,
}
PLAIN = {"table": "Embedding", "head": "layer", "product": "linear", "place": "forward", "block": "layers"}
SINGLE = [
    {**PLAIN, "head": head, axis: option}
    for axis, options in AXES.items()
    for option in options
    for head in ("layer", "bare", "tied")
]
_draw = random.Random(7)  # noqa: S311 - the same cases every time
MIXED = [{axis: _draw.choice(list(options)) for axis, options in AXES.items()} for _ in range(150)]


def made(generated_models: ModuleType, case: Mapping[str, Any]) -> tuple[nn.Module, dict[str, str]]:
    """Return a model that runs, and what its parameters are."""
    source, truth = families.source_of(**case)
    with torch.device("meta"):
        model = generated_models.module(source)()
        model(torch.zeros(2, 8, dtype=torch.long))
    return model, truth


def faults(model: nn.Module, truth: Mapping[str, str], **kwargs: Any) -> dict[str, tuple[str, str]]:
    """Return what is wrong, by name: `certain` or `doubtful`. A head that no product contracts is safe."""
    found = infer_roles(model, **kwargs)
    wrong = {
        name: (found[name].role is Role.MATRIX) is not (kind == "matrix") for name, kind in truth.items()
    }
    return {
        name: ("doubtful" if found[name].doubt is Doubt.ROLE else "certain", found[name].reason)
        for name in truth
        if wrong[name]
    }


@pytest.mark.parametrize("case", [*SINGLE, *MIXED], ids=lambda case: "-".join(case.values()))
def test_what_is_wrong_is_doubtful(generated_models, case):
    """No matrix is taken for a table or a head, nor the other way round, and marked certain."""
    model, truth = made(generated_models, case)
    assert {name: why for name, why in faults(model, truth).items() if why[0] == "certain"} == {}


@pytest.mark.parametrize("block", [name for name, (_, _, _, tables) in families.BLOCKS.items() if not tables])
def test_hidden_matrices_are_certain(generated_models, block):
    """A block of plain layers, however its weights are handed around, leaves no doubt."""
    model, truth = made(generated_models, {**PLAIN, "block": block})
    found = infer_roles(model)
    matrices = {name: found[name] for name, kind in truth.items() if kind == "matrix"}
    assert {name: one.reason for name, one in matrices.items() if one.doubt is Doubt.ROLE} == {}


@pytest.mark.parametrize("case", MIXED[:60], ids=lambda case: "-".join(case.values()))
def test_an_example_is_never_wrong_and_certain(generated_models, case):
    """What an example shows holds."""
    model, truth = made(generated_models, case)
    found = faults(model, truth, example=torch.zeros(2, 8, dtype=torch.long))
    assert {name: why for name, why in found.items() if why[0] == "certain"} == {}


# of others operators do not tell: what is expanded over the batch may be learned queries, and rows are no matrix
@pytest.mark.parametrize(
    "product", [name for name in families.PRODUCTS if name not in ("left", "bmm", "row by row")]
)
@pytest.mark.parametrize("place", [place for place in families.PLACES if place != "unused"])
def test_an_example_settles_heads(generated_models, product, place):
    """A head that a forward uses by hand is no matrix once an example was run, whatever the source says."""
    model, truth = made(generated_models, {**PLAIN, "product": product, "place": place})
    assert faults(model, truth, example=torch.zeros(2, 8, dtype=torch.long)) == {}
