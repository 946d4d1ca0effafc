"""Models as their authors write them, from nanoGPT to graph attention: what each parameter is."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from megaopt_core.params import Role
from megaopt_core.routing import infer_roles


def _expected() -> dict[str, Any]:
    """Return the models of every file in `zoo` with what is expected of them."""
    found = {}
    for path in sorted((Path(__file__).parent / "zoo").glob("zoo_*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found.update(module.EXPECTED)
    return found


EXPECTED = _expected()

DOUBTFUL = {"capsules": ["W"]}
"""The lengths of capsules are the classes, and the decoder takes them."""


@pytest.mark.parametrize("case", EXPECTED)
def test_every_parameter_is_seen_for_what_it_is(case):
    """Every parameter of more than one dimension has the role and the view that its use gives it, and surely."""
    factory, expected = EXPECTED[case]
    with torch.device("meta"):
        model = factory()
    decisions = infer_roles(model)
    shapes = {name: param.shape for name, param in model.named_parameters()}
    found = {
        name: decision.view if decision.role is Role.MATRIX else decision.role
        for name, decision in decisions.items()
        if len(shapes[name]) > 1
    }
    assert found == expected
    assert [name for name, decision in decisions.items() if decision.uncertain] == DOUBTFUL.get(case, [])
